"""Owners of shards that hang, in a real cluster over a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from dflockd import client as async_client
from dflockd import errors, sync_client
from dflockd.client.pending import PendingAcquires
from tests.dflockd.client.silence import TOO_LONG, Waiter
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.raw_server import PATIENCE, eventually
from tests.dflockd.shards.etcd_process import Etcd
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


# A real cluster over a real etcd.


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("cluster")
    with (
        Etcd(directory) as etcd,
        ClusterStage(
            directory, etcd, "--default-lease-ttl", "4", number=2, serving_lease=2, max_lease=4
        ) as stage,
    ):
        stage.wait_settled()
        yield stage


@contextlib.contextmanager
def hanging(server: ClusterServer) -> Iterator[None]:
    """Stop a server, and let it go on."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def servers(stage: ClusterStage) -> Sequence[ClusterServer]:
    """All that are in the cluster; one that hung before has joined again."""
    for server in stage.servers:
        eventually(lambda server=server: server.address in stage.mapping.nodes())
    stage.wait_settled()
    return stage.servers


async def test_the_owner_of_a_shard_hangs(
    stage: ClusterStage, servers: Sequence[ClusterServer]
) -> None:
    """Who has no time hears that nobody answered, who has it gets the lock from the next owner."""
    owner = servers[0]
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
    with hanging(owner):
        patient = [
            asyncio.ensure_future(use(key, timeout))
            for use, key, timeout in (
                (blocking, keys[0], 60),
                (blocking, keys[1], 60.5),
                (on_the_loop, keys[2], 60),
                (on_the_loop, keys[3], 60.5),
            )
        ]
        for use in (blocking, on_the_loop):
            for timeout in (0, 0.5):
                unknown = pytest.raises((errors.UnreachableError, errors.RecoveringError))
                with Pace() as pace, unknown:
                    await use(keys[4], timeout)
                assert pace.seconds < timeout + TOO_LONG
        assert await asyncio.gather(*patient) == [True] * 4


def test_who_waits_in_a_process_of_many_goes_to_the_next_owner(
    stage: ClusterStage, servers: Sequence[ClusterServer], acquires: PendingAcquires
) -> None:
    owner, other = servers
    key, seeds = stage.key_at(owner), stage.address
    holder = sync_client.DistributedLock(key, servers=seeds, lease_ttl_s=1)
    assert holder.acquire()
    waiter = Waiter(acquires, sync_client.DistributedLock(key, servers=seeds), 120)
    assert waiter.queued.wait(PATIENCE)
    with hanging(owner):
        # Nobody can renew before there is another owner: the holder has lost its lock by then.
        assert waiter.told.wait(60)
        assert waiter.lock.server == other.address
        assert not holder.held
    waiter.pending.leave()
    holder.release()
