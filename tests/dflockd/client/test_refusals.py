"""The server says no, says nothing, or is none."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import operations
from tests.dflockd.client_support import Client, soon, until, waiters
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")

SECRET = "open-sesame-0123456789"


async def test_max_locks(client: Client, start: StartServer) -> None:
    server = start("--max-locks", "1")
    async with client.lock("one", server):
        with pytest.raises(errors.MaxLocksError, match=r"'two' on 127\.0\.0\.1") as caught:
            await client.lock("two", server).acquire()
        assert (caught.value.key, caught.value.server) == ("two", f"127.0.0.1:{server.port}")
    async with client.lock("two", server):
        pass


async def test_max_waiters(client: Client, start: StartServer) -> None:
    server = start("--max-waiters", "1")
    async with client.lock("key", server):
        waiting = client.lock("key", server)
        await waiting.enqueue()
        with pytest.raises(errors.MaxWaitersError, match="max-waiters"):
            await client.lock("key", server).acquire()
        await waiting.release()


async def test_auth(client: Client, start: StartServer) -> None:
    server = start("--auth-token", SECRET)
    lock = client.lock("key", server, auth_token=SECRET)
    async with lock:
        assert lock.held
        assert SECRET not in repr(lock)
        assert SECRET not in repr(getattr(lock, "lock", lock)._session.route)
    for token in ("wrong-" + SECRET, None):
        with pytest.raises(errors.AuthRefusedError, match="auth") as caught:
            await client.lock("key", server, auth_token=token).acquire()
        assert isinstance(caught.value, PermissionError)
        assert SECRET not in str(caught.value)
        assert caught.value.server == f"127.0.0.1:{server.port}"


async def test_auth_where_none_is_wanted(client: Client, server: ServerProcess, key: str) -> None:
    with pytest.raises(
        errors.AuthRefusedError, match="takes no auth token: remove yours"
    ) as caught:
        await client.lock(key, server, auth_token=SECRET).acquire()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "token", ["", "two\nlines", SECRET * 4000, SECRET + "\udc80", SECRET.encode()]
)
def test_an_auth_token_that_cannot_be_sent(client: Client, token: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="auth_token") as caught:
        client.module.DistributedLock("key", auth_token=token)
    assert SECRET not in str(caught.value)


async def test_no_server(client: Client) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, but not listening: refused
        port = sock.getsockname()[1]
        lock = client.lock("key", servers=[("127.0.0.1", port)])
        with pytest.raises(errors.UnreachableError, match=f"127.0.0.1:{port}.*refused") as caught:
            await soon(lock.acquire())
    assert isinstance(caught.value, ConnectionError)
    assert "\n" not in str(caught.value)
    assert caught.value.server == f"127.0.0.1:{port}"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
    assert copy.server == caught.value.server
    assert not lock.held


@pytest.mark.parametrize("host", ["host.invalid", "x" * 64, "a..b"])
async def test_no_such_host(client: Client, host: str) -> None:
    lock = client.lock("key", servers=[(host, 6388)])
    with pytest.raises(errors.UnreachableError, match=f"{host}:6388"):
        await soon(lock.acquire())


@pytest.fixture
def impostor() -> Iterator[Callable[[bytes], int]]:
    """Listen and answer the first thing that is said with the same bytes, whatever it is."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def serve(answer: bytes) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(65536)
                if answer:
                    sock.sendall(answer)
                if answer != b"hang up":
                    ended.wait(PATIENCE)

    def begin(answer: bytes) -> int:
        threads.append(threading.Thread(target=serve, args=(answer,), daemon=True))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield begin
    ended.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join(PATIENCE)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"ok\n",
        b"ok token\n",
        b"ok token 0\n",
        b"ok token -5\n",
        b"ok token 33 more\n",
        b"\xff\xfe\n",
        b"-ERR unknown command\r\n",
        b"queued\n",
        b"timeout\ntimeout\n",
    ],
)
async def test_an_answer_that_is_none(
    client: Client, impostor: Callable[[bytes], int], answer: bytes
) -> None:
    port = impostor(answer)
    lock = client.lock("key", servers=[("127.0.0.1", port)])
    with pytest.raises(errors.BadReplyError, match=f"127.0.0.1:{port}") as caught:
        await soon(lock.acquire())
    assert "\n" not in str(caught.value)
    assert not lock.held


async def test_a_server_that_hangs_up(client: Client, impostor: Callable[[bytes], int]) -> None:
    port = impostor(b"hang up")
    with pytest.raises((errors.UnreachableError, errors.BadReplyError), match=f":{port}"):
        await soon(client.lock("key", servers=[("127.0.0.1", port)]).acquire())


async def test_a_server_that_never_answers(
    client: Client, impostor: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "GRACE", 0.3)
    port = impostor(b"")
    lock = client.lock("key", servers=[("127.0.0.1", port)], acquire_timeout_s=0)
    with (
        Pace() as pace,
        pytest.raises(errors.UnreachableError, match=f"127.0.0.1:{port}.*no answer in time"),
    ):
        await soon(lock.acquire())
    assert pace.wall >= 0.3
    assert pace.seconds < 1, "nor the usual time for an answer"
    assert not lock.held


async def test_a_draining_server(client: Client, start: StartServer) -> None:
    server = start()
    holder, waiter = client.lock("key", server), client.lock("key", server)
    await holder.acquire()
    waiting = asyncio.create_task(waiter.acquire())
    await until(lambda: waiters(server, "key") == 1)
    server.process.terminate()
    with pytest.raises(errors.DrainingError, match="shutting down"):
        await soon(waiting)
    assert holder.held
    assert await holder.renew() is True
    assert await holder.release() is True
    assert server.wait() == 0
