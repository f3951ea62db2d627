"""Accepting when the system has nothing left, and the end of a listener."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from dflockd.server import Admission, Guest, Listener, listen


class Greeter(asyncio.Protocol):
    """Says hello to whoever gets in."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        assert self._guest.admit()
        transport.write(b"hello\n")


class Exhausted(socket.socket):
    """A listening socket of a process without descriptors, for a few times."""

    times = 3

    def accept(self) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def make_admission() -> Admission:
    return Admission(asyncio.get_running_loop(), "connection", limit=5, pending=5, timeout=60)


async def greeting(port: int, host: str = "127.0.0.1") -> bytes:
    async with asyncio.timeout(15):
        reader, writer = await asyncio.open_connection(host, port)
        line = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return line


async def test_it_accepts_again_when_there_are_descriptors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sock = Exhausted()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    admission = make_admission()
    listener = Listener(asyncio.get_running_loop(), [sock], admission, Greeter)
    assert await greeting(sock.getsockname()[1]) == b"hello\n"
    listener.close()
    assert sock.times == 0
    assert [record.message for record in caplog.records] == [
        "cannot accept connections: Too many open files"
    ]


async def test_all_addresses_are_those_of_both_kinds() -> None:
    loop = asyncio.get_running_loop()
    (sock,) = await listen(loop, "::", 0)
    listener = Listener(loop, [sock], make_admission(), Greeter)
    for host in ("127.0.0.1", "::1"):
        assert await greeting(sock.getsockname()[1], host) == b"hello\n"
    listener.close()


async def test_every_connection_is_counted_until_it_is_closed() -> None:
    admission = make_admission()
    loop = asyncio.get_running_loop()
    listener = Listener(loop, await listen(loop, "127.0.0.1", 0), admission, Greeter)
    port = listener.sockets[0].getsockname()[1]
    for _ in range(20):
        assert await greeting(port) == b"hello\n"
    async with asyncio.timeout(15):
        while admission.total:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (admission.inside, admission.pending, admission.refused) == (0, 0, 0)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await greeting(port)


async def test_its_end_is_that_of_handshakes(certificates: Any) -> None:
    admission = make_admission()
    loop = asyncio.get_running_loop()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    listener = Listener(loop, await listen(loop, "127.0.0.1", 0), admission, Greeter, tls=context)
    port = listener.sockets[0].getsockname()[1]
    async with asyncio.timeout(15):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not admission.pending:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        listener.close()
        assert await reader.read() == b""
        writer.close()
        while admission.total:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert admission.pending == 0


class Closing(asyncio.Protocol):
    """Has its listener closed in the very moment in which it is connected."""

    def __init__(self, close: Callable[[], None], lost: asyncio.Event) -> None:
        self._close = close
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_connection_that_is_made_at_its_end_is_told_of_its_own(kind: str) -> None:
    """A server that ends waits for it: it would wait for ever."""

    async def main() -> None:
        loop, lost = asyncio.get_running_loop(), asyncio.Event()

        def new(guest: Guest) -> Closing:
            assert guest.admit()
            return Closing(listener.close, lost)

        listener = Listener(loop, await listen(loop, "127.0.0.1", 0), make_admission(), new)
        port = listener.sockets[0].getsockname()[1]
        async with asyncio.timeout(15):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await lost.wait()

    new_loop = pytest.importorskip("uvloop").new_event_loop if kind == "uvloop" else None
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
