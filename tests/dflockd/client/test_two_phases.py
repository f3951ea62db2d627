"""A position in the queue first, the lock later: `enqueue` and `wait`."""

from __future__ import annotations

import asyncio

import pytest

from dflockd import errors
from tests.dflockd.client_support import Client, is_free, soon, until, waiters
from tests.dflockd.raw_server import ServerProcess
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_enqueue_and_wait(client: Client, server: ServerProcess, key: str) -> None:
    first, second, third = (client.lock(key, server) for _ in range(3))
    assert await first.enqueue() == "acquired"
    assert first.held
    assert await first.wait() is True, "nothing to wait for"
    assert await second.enqueue() == "queued"
    assert not second.held
    assert await third.enqueue() == "queued"
    for again in (second.acquire, second.enqueue, second.__aenter__):
        with pytest.raises(errors.AlreadyHeldError):
            await again()
    assert waiters(server, key) == 2, "the attempts must not cost the place"
    await first.release()
    assert await second.wait() is True
    assert second.held
    waiting = asyncio.create_task(third.wait())
    await second.release()
    assert await soon(waiting) is True
    await third.release()
    assert is_free(server, key)


@pytest.mark.parametrize("wait", [0, 0.3])
async def test_wait_in_vain(client: Client, server: ServerProcess, key: str, wait: float) -> None:
    async with client.lock(key, server):
        lock = client.lock(key, server)
        assert await lock.enqueue() == "queued"
        with Pace() as pace:
            assert await lock.wait(wait) is False
        assert wait <= pace.wall
        assert pace.seconds < wait + 0.6, "not a whole number of seconds"
        await until(lambda: waiters(server, key) == 0)
        with pytest.raises(errors.NotEnqueuedError, match=key):
            await lock.wait()
        assert await lock.enqueue() == "queued"
        assert await lock.release() is False
        await until(lambda: waiters(server, key) == 0)
    assert is_free(server, key)


async def test_wait_takes_its_default_from_the_lock(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(key, server):
        lock = client.lock(key, server, acquire_timeout_s=0.2)
        await lock.enqueue()
        assert await soon(lock.wait()) is False


async def test_wait_for_a_time_that_is_none(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(key, server):
        lock = client.lock(key, server)
        await lock.enqueue()
        for bad in (-1, float("nan"), "soon"):
            with pytest.raises(errors.InvalidArgumentError, match="timeout_s"):
                await lock.wait(bad)
        assert waiters(server, key) == 1, "the place is still there"
        await lock.release()


async def test_a_grant_that_nobody_took_up(client: Client, server: ServerProcess, key: str) -> None:
    first = client.lock(key, server)
    await first.acquire()
    lock = client.lock(key, server, lease_ttl_s=1)
    assert await lock.enqueue() == "queued"
    await first.release()
    await until(lambda: is_free(server, key))
    with pytest.raises(errors.LeaseExpiredError, match=key):
        await lock.wait()
    assert not lock.held
    assert await lock.acquire() is True
    await lock.release()
