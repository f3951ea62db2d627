"""Owners of shards that hang, in a real cluster over a real etcd."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

import pytest

from dflockd import client as async_client
from dflockd import errors, sync_client
from dflockd.client.pending import PendingAcquires
from tests.dflockd.client.silence import TOO_LONG, Waiter
from tests.dflockd.cluster.stage import ClusterStage, settled
from tests.dflockd.raw_server import PATIENCE
from tests.pace import Pace
from tests.stopping import stopped

pytestmark = pytest.mark.usefixtures("no_idle_connections")


# A real cluster over a real etcd.


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("cluster")
    with settled(directory, "--default-lease-ttl", "2", lease=2, number=2) as stage:
        yield stage


Use = Callable[[str, float], Awaitable[bool]]


async def test_the_owner_of_a_shard_hangs(stage: ClusterStage, acquires: PendingAcquires) -> None:
    """Who has no time hears that nobody answered, who has it gets the lock from the next owner.

    So does who waits in a process that waits for many.
    """
    owner, other = stage.servers
    keys = [await asyncio.to_thread(stage.key_at, owner) for _ in range(6)]
    seeds = stage.address

    async def blocking(key: str, timeout: float) -> bool:
        lock = sync_client.DistributedLock(key, acquire_timeout_s=timeout, servers=seeds)
        granted = await asyncio.to_thread(lock.acquire)
        await asyncio.to_thread(lock.release)
        return granted

    async def on_the_loop(key: str, timeout: float) -> bool:
        lock = async_client.DistributedLock(key, acquire_timeout_s=timeout, servers=seeds)
        granted = await lock.acquire()
        await lock.release()
        return granted

    for use in (blocking, on_the_loop):
        assert await use(keys[5], 1) is True
    busy = await asyncio.to_thread(stage.key_at, owner)
    holder = sync_client.DistributedLock(busy, servers=seeds, lease_ttl_s=1)
    assert await asyncio.to_thread(holder.acquire)
    waiter = Waiter(acquires, sync_client.DistributedLock(busy, servers=seeds), 120)
    assert await asyncio.to_thread(waiter.queued.wait, PATIENCE)
    with stopped(owner):
        patient = [
            asyncio.ensure_future(use(key, timeout))
            for use, key, timeout in (
                (blocking, keys[0], 60),
                (blocking, keys[1], 60.5),
                (on_the_loop, keys[2], 60),
                (on_the_loop, keys[3], 60.5),
            )
        ]

        async def is_not_answered(use: Use, timeout: float) -> None:
            unknown = pytest.raises((errors.UnreachableError, errors.RecoveringError))
            with Pace() as pace, unknown:
                await use(keys[4], timeout)
            assert pace.seconds < timeout + TOO_LONG

        cases = itertools.product((blocking, on_the_loop), (0, 0.5))
        await asyncio.gather(*itertools.starmap(is_not_answered, cases))
        assert await asyncio.gather(*patient) == [True] * 4
        # Nobody can renew before there is another owner: the holder has lost its lock by then.
        assert await asyncio.to_thread(waiter.told.wait, 60)
        assert waiter.lock.server == other.address
        assert not holder.held
    waiter.pending.leave()
    await asyncio.to_thread(holder.release)
