"""Taking a lock and giving it back, with both clients."""

from __future__ import annotations

import asyncio

import pytest

from dflockd import errors
from tests.dflockd.client_support import Client, is_free, soon, until, waiters
from tests.dflockd.raw_server import ServerProcess
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_with(client: Client, server: ServerProcess, key: str) -> None:
    async with client.lock(key, server) as lock:
        assert lock.held
        assert len(lock.token) == 32
        assert lock.lease == 33
        assert lock.fence == int(lock.token[:16], 16)
        assert not is_free(server, key)
        shown = repr(lock)
        assert lock.token not in shown
        assert f"{key!r} on 127.0.0.1:{server.port}, held" in shown
    assert (lock.held, lock.token, lock.lease, lock.fence) == (False, None, 0, None)
    assert f"{key!r} on 127.0.0.1:{server.port}, free" in repr(lock)
    assert is_free(server, key)


async def test_the_timeout_is_that_of_the_moment(
    client: Client, server: ServerProcess, key: str
) -> None:
    """Whoever sets it anew, on a lock like others that have been made, means that one."""
    async with client.lock(key, server, acquire_timeout_s=600):
        pass
    holder = client.lock(key, server, lease_ttl_s=600)
    lock = client.lock(key, server, acquire_timeout_s=600)
    assert await soon(holder.acquire()) is True
    itself = getattr(lock, "lock", lock)  # of one in threads
    itself.acquire_timeout_s = 0
    assert await soon(lock.acquire()) is False
    itself.acquire_timeout_s = None
    waiting = asyncio.ensure_future(lock.acquire())
    await until(lambda: waiters(server, key) == 1)
    assert await soon(holder.release()) is True
    assert await soon(waiting) is True
    assert await soon(lock.release()) is True


async def test_with_gives_back_when_the_body_fails(
    client: Client, server: ServerProcess, key: str
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.lock(key, server):
            raise ZeroDivisionError
    assert is_free(server, key)


async def test_acquire_and_release(client: Client, server: ServerProcess, key: str) -> None:
    lock = client.lock(key, server)
    assert await lock.release() is False
    assert await lock.acquire() is True
    assert not is_free(server, key)
    assert await lock.release() is True
    assert is_free(server, key)
    assert await lock.release() is False
    assert await lock.acquire() is True, "the object can be used again"
    assert await lock.release() is True


async def test_not_reentrant(client: Client, server: ServerProcess, key: str) -> None:
    async with client.lock(key, server) as lock:
        token, fence = lock.token, lock.fence
        for again in (lock.acquire, lock.enqueue, lock.__aenter__):
            with pytest.raises(errors.AlreadyHeldError, match=key) as caught:
                await again()
            assert caught.value.key == key
            assert (lock.held, lock.token, lock.fence) == (True, token, fence)
            assert not is_free(server, key), "the attempt must not end the first hold"
    assert is_free(server, key)


async def test_fences_grow(client: Client, server: ServerProcess, key: str) -> None:
    fences = []
    lock = client.lock(key, server)
    for _ in range(5):
        async with lock:
            fences.append(lock.fence)
    assert fences == sorted(set(fences))


async def test_locks_of_different_keys_do_not_meet(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(f"{key}-1", server), client.lock(f"{key}-2", server):
        pass


@pytest.mark.parametrize("wait", [0, 0.3, 1])
async def test_false_when_not_granted_in_time(
    client: Client, server: ServerProcess, key: str, wait: float
) -> None:
    async with client.lock(key, server):
        other = client.lock(key, server, acquire_timeout_s=wait)
        with Pace() as pace:
            assert await other.acquire() is False
        assert wait <= pace.wall
        assert pace.seconds < wait + 0.6, "not a whole number of seconds"
        assert not other.held
        await until(lambda: waiters(server, key) == 0)
    assert await other.acquire() is True
    await other.release()


async def test_with_raises_when_not_granted_in_time(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(key, server):
        with pytest.raises(errors.LockTimeoutError, match=rf"{key}.*0\.2 s") as caught:
            async with client.lock(key, server, acquire_timeout_s=0.2):
                pytest.fail("two holders")
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.key == key
        assert caught.value.server == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("timeout", [None, 90 * 86400])
async def test_a_long_timeout_waits(
    client: Client, server: ServerProcess, key: str, timeout: float | None
) -> None:
    raw = server.connect()
    token = raw.lock(key)
    lock = client.lock(key, server, acquire_timeout_s=timeout)
    acquiring = asyncio.ensure_future(lock.acquire())
    await until(lambda: waiters(server, key) == 1)
    assert not acquiring.done()
    raw.ask("r", key, token)
    assert await soon(acquiring) is True
    await lock.release()


async def test_first_come_first_served(client: Client, server: ServerProcess, key: str) -> None:
    order: list[int] = []
    first = client.lock(key, server)
    await first.acquire()

    async def work(number: int) -> None:
        async with client.lock(key, server, acquire_timeout_s=30):
            order.append(number)

    tasks = []
    for number in range(30):
        tasks.append(asyncio.create_task(work(number)))
        await until(lambda n=number: waiters(server, key) == n + 1)  # type: ignore[misc]
    await first.release()
    await soon(asyncio.gather(*tasks))
    assert order == list(range(30))


async def test_timeout_0_never_jumps_the_queue(
    client: Client, server: ServerProcess, key: str
) -> None:
    """While the lock goes from hand to hand, one that only tries must not get in between."""
    holders = [client.lock(key, server, acquire_timeout_s=30) for _ in range(10)]
    await holders[0].acquire()
    waiting = []
    for number, lock in enumerate(holders[1:]):
        waiting.append(asyncio.create_task(lock.acquire()))
        await until(lambda n=number: waiters(server, key) == n + 1)  # type: ignore[misc]
    trying = client.lock(key, server, acquire_timeout_s=0)
    for lock, next_one in zip(holders, waiting, strict=False):
        await lock.release()
        assert await trying.acquire() is False
        assert await soon(next_one) is True
    await holders[-1].release()
    assert await trying.acquire() is True
    await trying.release()


async def test_a_place_given_up_is_skipped(client: Client, server: ServerProcess, key: str) -> None:
    first = client.lock(key, server)
    await first.acquire()
    impatient = asyncio.create_task(client.lock(key, server, acquire_timeout_s=0.2).acquire())
    await until(lambda: waiters(server, key) == 1)
    patient = client.lock(key, server)
    waiting = asyncio.create_task(patient.acquire())
    await until(lambda: waiters(server, key) == 2)
    assert await soon(impatient) is False
    await first.release()
    assert await soon(waiting) is True
    await patient.release()
