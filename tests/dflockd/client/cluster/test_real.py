"""Both clients with three real servers over a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from dflockd import errors, sync_client
from tests.dflockd.client_support import Calls, Client, client_named, soon, until
from tests.dflockd.cluster.stage import ClusterStage, settled
from tests.dflockd.raw_server import eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")

LEASE = 8
"""Long enough for a shard whose server has crashed to get another one meanwhile."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("cluster")
    times = ("--default-lease-ttl", str(LEASE), "--shutdown-timeout", "3")
    with settled(directory, *times, lease=LEASE) as stage:
        yield stage


def seeds(stage: ClusterStage) -> str:
    return "cluster://" + ",".join(server.address for server in stage.servers[:2])


async def test_a_lock_and_its_queue_move(client: Client, stage: ClusterStage) -> None:
    key = await asyncio.to_thread(stage.key_at, stage.servers[0])
    lost = Calls()
    options = {"servers": seeds(stage), "lease_ttl_s": LEASE, "on_lost": lost}
    lock = client.lock(key, **options)
    await lock.acquire()
    asking = sync_client.DistributedLock(key, servers=seeds(stage))
    order: list[int] = []

    async def wait(number: int) -> None:
        async with client.lock(key, acquire_timeout_s=600, **options) as waiter:
            assert waiter.held
            order.append(number)

    def wait_for_waiters(number: int) -> None:
        def there() -> int:
            # Not the places that are kept for those who are still on their way.
            return sum(not waiter["away"] for waiter in asking.inspect()["waiters"])

        eventually(lambda: there() == number)

    tasks = []
    for number in range(4):
        tasks.append(asyncio.ensure_future(wait(number)))
        await asyncio.to_thread(wait_for_waiters, number + 1)
    for server in (*stage.servers[1:], stage.servers[0]):
        await asyncio.to_thread(stage.move, [stage.shard_of(key)], server)
        await until(lambda server=server: lock.server == server.address)
        await asyncio.to_thread(wait_for_waiters, 4)
    await soon(lock.check())  # it may have just heard of the last move
    assert lock.held
    assert await lock.release() is True
    await soon(asyncio.gather(*tasks))
    assert order == [0, 1, 2, 3]
    assert lost.times == []


@pytest.mark.soak
async def test_a_server_is_stopped_then_another_killed(stage: ClusterStage) -> None:
    """Locks of both clients outlive both, and who waits meanwhile is not told that all is well."""
    stopped, _, killed = stage.servers
    lost = Calls()
    with client_named("sync") as blocking, client_named("asyncio") as on_a_loop:
        locks = []
        for server in (stopped, killed):
            for each in (blocking, on_a_loop):
                key = await asyncio.to_thread(stage.key_at, server)
                options = {"servers": seeds(stage), "lease_ttl_s": LEASE, "on_lost": lost}
                locks.append(each.lock(key, **options))
                await locks[-1].acquire()
        await asyncio.to_thread(stopped.stop)
        for lock in locks[:2]:
            await until(lambda lock=lock: lock.server not in (stopped.address, seeds(stage)))
            rival = on_a_loop.lock(lock.key, servers=seeds(stage), acquire_timeout_s=0)
            assert await rival.acquire() is False
        for lock in locks[2:]:
            assert await lock.renew() is True
        await asyncio.to_thread(killed.kill)
        for each in (blocking, on_a_loop):
            rival = each.lock(locks[2].key, servers=seeds(stage), acquire_timeout_s=1)
            with pytest.raises((errors.RecoveringError, errors.UnreachableError)):
                await rival.acquire()
        began = [lock._session.lease.deadline for lock in locks]
        await until(
            lambda: all(
                lock._session.lease.deadline > deadline
                for lock, deadline in zip(locks, began, strict=True)
            )
        )
        assert all(lock.held for lock in locks)
        assert lost.times == []
        assert [await lock.release() for lock in locks] == [True] * 4
