"""The server says no, says nothing, or is none."""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import Any

import pytest

from dflockd import errors
from tests.dflockd.client_support import Client, soon, until, waiters
from tests.dflockd.raw_server import StartServer

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
