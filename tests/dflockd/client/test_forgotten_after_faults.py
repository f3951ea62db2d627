"""A lock object whose server failed it dies with its last reference, whatever it has been through.

An error refers to the frames that it came through. One that such a frame keeps, as the reply that it
got instead, would leave the object to the garbage collector, and with it the lock.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from dflockd import client as async_client
from dflockd import errors, sync_client
from dflockd.address import Address
from dflockd.client import aio, blocking
from dflockd.client.connection import Connection, Route
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess

pytestmark = [
    pytest.mark.usefixtures("_refcounts_only"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

MOST = 5
"""Lines that a server says while one of the flows below goes on, and some more."""


class Saboteur(Proxy):
    """A proxy that says something else once, in place of one of the server's lines, or hangs up."""

    def __init__(self, port: int) -> None:
        self._left: float = float("inf")
        self._instead = b""
        super().__init__(port)

    def spoil(self, line: int, instead: bytes) -> None:
        self._left, self._instead = line, instead

    @property
    def has_spoilt(self) -> bool:
        return self._left <= 0

    def _pump(self, pair: Any, source: Any, sink: Any, may_pass: Any) -> None:
        class Spoilt:
            def sendall(_, data: bytes) -> None:
                for line in data.splitlines(keepends=True):
                    self._left -= 1
                    if self._left:
                        sink.sendall(line)
                    elif self._instead:
                        sink.sendall(self._instead)
                    else:
                        raise ConnectionError("spoilt")

            def shutdown(_, how: int) -> None:
                sink.shutdown(how)

        replies = source is pair.far
        super()._pump(pair, source, Spoilt() if replies else sink, may_pass)


@pytest.fixture(scope="module")
def proxy(server: ServerProcess) -> Iterator[Saboteur]:
    proxy = Saboteur(server.port)
    yield proxy
    proxy.close()


async def _acquire(lock: Any) -> None:
    await lock.acquire()


async def _again(lock: Any) -> None:
    await lock.acquire()
    await lock.release()
    await lock.acquire()


async def _enqueue(lock: Any) -> None:
    if await lock.enqueue() == "queued":
        await lock.wait(0)


async def _block(lock: Any) -> None:
    async with lock:
        pass


FLOWS: list[Callable[[Any], Coroutine[Any, Any, None]]] = [_acquire, _again, _enqueue, _block]


class Blocking:
    """A blocking lock with the face of the other, so that one flow tries both."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lock = sync_client.DistributedLock(*args, **options)

    async def __aenter__(self) -> None:
        self._lock.__enter__()

    async def __aexit__(self, *args: Any) -> None:
        self._lock.__exit__(*args)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._lock, name)

        async def call(*args: Any) -> Any:
            return method(*args)

        return call

    @property
    def inner(self) -> Any:
        return self._lock


def made(face: str, key: str, host: str, port: int) -> tuple[Any, weakref.ref[Any]]:
    options: dict[str, Any] = {
        "servers": [(host, port)],
        "lease_ttl_s": 600,
        "acquire_timeout_s": 5,
    }
    if face == "sync":
        blocking = Blocking(key, **options)
        return blocking, weakref.ref(blocking.inner)
    lock = async_client.DistributedLock(key, **options)
    return lock, weakref.ref(lock)


@pytest.mark.parametrize(
    "instead", [b"", b"nonsense\n", b"error\n"], ids=["cut", "nonsense", "error"]
)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("face", ["sync", "asyncio"])
async def test_at_each_line(
    proxy: Saboteur, key: str, face: str, flow: Callable[[Any], Any], instead: bytes
) -> None:
    seen = 0
    for number in range(1, MOST + 1):
        lock, reference = made(face, f"{key}-{number}", "127.0.0.1", proxy.port)
        proxy.spoil(number, instead)
        with contextlib.suppress(errors.DflockdError):
            await flow(lock)
        seen += proxy.has_spoilt
        del lock
        assert reference() is None, f"line {number}"
    assert seen, "nothing was spoilt"


@pytest.mark.parametrize("face", ["sync", "asyncio"])
async def test_of_a_name_whose_first_address_refuses(
    server: ServerProcess, key: str, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()

    def look_up(*_: object, flags: int = 0, **__: object) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror("it is a name")
        addresses = nobody, ("127.0.0.1", server.port)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    lock, reference = made(face, key, "two.example", server.port)
    assert await lock.acquire()
    del lock
    assert reference() is None


@pytest.mark.parametrize("face", ["sync", "asyncio"])
async def test_what_comes_in_place_of_a_reply_has_no_frames(
    server: ServerProcess, face: str
) -> None:
    """A flow that has lost its lock meanwhile does not go on with it, and the caller still has it."""
    (where,) = socket.getaddrinfo("127.0.0.1", server.port, type=socket.SOCK_STREAM)
    link = Connection(Route(Address("127.0.0.1", server.port)), *where[:3])
    link.close()
    error = blocking._hear(link, 1) if face == "sync" else await aio._reply(link, 1)
    assert isinstance(error, OSError)
    assert error.__traceback__ is None
