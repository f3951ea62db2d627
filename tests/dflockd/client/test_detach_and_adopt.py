"""A lock that goes from one owner to another by its token: `detach` and `adopt`, both clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dflockd import errors
from dflockd.client.process import close_idle_connections
from tests.dflockd.client_support import Client, is_free, renewed, soon, stats, until, waiters
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess, StartServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that only this test uses, and gives back."""
    return str(request.node.originalname)


async def test_detached_lock_outlives_its_connection(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock = client.lock(key, server, label="the owner")
    await lock.acquire()
    token = await lock.detach()
    assert (lock.held, lock.token) == (False, None)
    [held] = [held for held in stats(server)["locks"] if held["key"] == key]
    assert (held["label"], held["owner_conn_id"]) == ("the owner", 0)
    close_idle_connections()
    assert not is_free(server, key)
    assert await _adopt_and_release(client.lock(key, server), token)


async def test_detached_lock_ends_with_its_lease(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock = client.lock(key, server, lease_ttl_s=600)
    await lock.acquire()
    assert await lock.detach(1)
    assert not is_free(server, key)
    await soon(_acquired(client.lock(key, server)))


async def test_adopted_lock_is_the_adopters(
    client: Client, server: ServerProcess, key: str
) -> None:
    first = client.lock(key, server, label="publisher")
    await first.acquire()
    fence = first.fence
    token = await first.detach(600)

    second = client.lock(key, server, lease_ttl_s=5, label="worker")
    assert await second.adopt(token)
    assert (second.held, second.fence, second.lease, second.token) == (True, fence, 5, token)
    [holder] = (await _inspect(second))["holders"]
    assert holder["label"] == "worker"
    assert await second.release()
    assert is_free(server, key)


async def test_adopted_lock_ends_with_its_new_connection(
    client: Client, start: StartServer, key: str
) -> None:
    server = start()
    first, second = client.lock(key, server), client.lock(key, server)
    await first.acquire()
    await second.adopt(await first.detach())
    waiting = asyncio.create_task(_acquired(client.lock(key, server)))
    await until(lambda: waiters(server, key) == 1)
    _forget(second)
    await soon(waiting)


async def test_adopted_lock_is_renewed_and_can_be_detached_again(
    client: Client, server: ServerProcess, key: str
) -> None:
    often = {"lease_ttl_s": 600, "renew_ratio": 0.001}
    first, second = client.lock(key, server), client.lock(key, server, **often)
    await first.acquire()
    token = await first.detach()
    assert await second.adopt(token)
    await renewed(server, key)
    assert second.held
    assert await second.detach(600) == token
    assert not is_free(server, key)
    assert await _adopt_and_release(client.lock(key, server), token)


async def test_detached_on_a_connection_that_is_half_open(
    client: Client, server: ServerProcess, key: str
) -> None:
    """To the server the hold belongs to it, and nothing comes through: the detaching goes elsewhere."""
    proxy = Proxy(server.port)
    try:
        lock = client.lock(key, proxy, lease_ttl_s=600)
        await lock.acquire()
        token = lock.token
        proxy.swallow()
        assert await soon(lock.detach(600)) == token
        assert lock.state == "free"
        proxy.cut(reset=True)  # of the first connection; its end ends nothing
        assert not is_free(server, key)
        assert await _adopt_and_release(client.lock(key, server), token)
    finally:
        proxy.close()
    assert is_free(server, key)


async def test_token_of_a_lock_that_is_gone(
    client: Client, server: ServerProcess, key: str
) -> None:
    first, second = client.lock(key, server), client.lock(key, server)
    await first.acquire()
    token = first.token
    await first.release()
    assert not await second.adopt(token)
    assert not second.held
    async with client.lock(key, server):
        assert not await second.adopt(token)


async def test_detaching_what_is_not_held(client: Client, server: ServerProcess, key: str) -> None:
    lock = client.lock(key, server)
    assert await lock.detach() is None
    async with lock:
        raw = server.connect()
        assert raw.ask("evict", key, lock.fence) == "ok"
        raw.close()
        assert await lock.detach(600) is None
        assert not lock.held


async def test_detaching_what_somebody_has_adopted(
    client: Client, start: StartServer, key: str
) -> None:
    server = start()
    first, second = client.lock(key, server), client.lock(key, server)
    await first.acquire()
    assert await second.adopt(first.token)
    assert await first.detach() is None
    assert second.held
    waiting = asyncio.create_task(_acquired(client.lock(key, server)))
    await until(lambda: waiters(server, key) == 1)
    _forget(second)
    await soon(waiting)


async def test_adopting_twice(client: Client, server: ServerProcess, key: str) -> None:
    first, second = client.lock(key, server), client.lock(key, server)
    await first.acquire()
    token = await first.detach()
    await second.adopt(token)
    with pytest.raises(errors.AlreadyHeldError):
        await second.adopt(token)
    assert second.held
    await second.release()


async def test_semaphore_slot_is_handed_over(
    client: Client, server: ServerProcess, key: str
) -> None:
    first, second = (client.semaphore(key, 2, server) for _ in range(2))
    await first.acquire()
    assert await second.adopt(await first.detach())
    assert await second.release()


@pytest.mark.parametrize("token", ["", "two words", "\n", "ü", "x" * 300, None, b"bytes"])
async def test_what_is_no_token(
    client: Client, server: ServerProcess, key: str, token: Any
) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        await client.lock(key, server).adopt(token)
    assert key in str(caught.value)


@pytest.mark.parametrize("lease", [0, -1, 1.5, True])
async def test_lease_that_is_none(
    client: Client, server: ServerProcess, key: str, lease: Any
) -> None:
    async with client.lock(key, server) as lock:
        with pytest.raises(errors.InvalidArgumentError):
            await lock.detach(lease)
        assert lock.held


async def test_lease_that_the_server_refuses(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock = client.lock(key, server)
    await lock.acquire()
    with pytest.raises(errors.RefusedError, match="is the lease too long"):
        await lock.detach(1_000_000)
    assert not lock.held
    await soon(_acquired(client.lock(key, server)))


async def test_server_gone(client: Client, start: StartServer, key: str) -> None:
    server = start()
    lock = client.lock(key, server)
    await lock.acquire()
    server.end()
    with pytest.raises(errors.UnreachableError):
        await lock.detach()
    assert not lock.held
    with pytest.raises(errors.UnreachableError):
        await lock.adopt("0" * 32)


async def _acquired(lock: Any) -> None:
    assert await lock.acquire()
    await lock.release()


async def _adopt_and_release(lock: Any, token: str) -> bool:
    adopted: bool = await lock.adopt(token)
    await lock.release()
    return adopted


async def _inspect(lock: Any) -> dict[str, Any]:
    report = lock.inspect()
    result: dict[str, Any] = report if isinstance(report, dict) else await report
    return result


def _forget(lock: Any) -> None:
    """Break the connection of a lock without a word to the lock."""
    lock._session.lease.abandon()
