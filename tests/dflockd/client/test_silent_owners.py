"""Owners of shards that hang, in a cluster whose servers are scripted."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from dflockd import errors, sync_client
from dflockd.client import operations
from dflockd.client.pending import PendingAcquires
from dflockd.shards import get_shard_id
from dflockd.wire import Acquire, Enqueue, Ping, Queued, Recovering, Release, Shards, Status, Wait
from tests.dflockd.client.silence import KEY, TOO_LONG, Waiter, is_not_answered
from tests.dflockd.client_support import Client, soon, until
from tests.dflockd.raw_server import PATIENCE, ServerProcess
from tests.dflockd.scripted_server import NUM_SHARDS, ScriptedCluster, Silence
from tests.effort import more
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


# A cluster whose servers are scripted.


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    """Two servers; the first has all shards, and says nothing about locks."""
    cluster = ScriptedCluster()
    for kind in (Acquire, Enqueue, Ping):
        cluster.servers[0].script(kind, Silence)
    yield cluster
    cluster.stop()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("timeout", [0, 0.3, more(1)])
async def test_the_server_in_charge_says_nothing(
    client: Client, cluster: ScriptedCluster, timeout: float
) -> None:
    acquiring, enqueuing = (
        client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=timeout) for _ in range(2)
    )
    await asyncio.gather(
        is_not_answered(acquiring.acquire(), timeout), is_not_answered(enqueuing.enqueue(), timeout)
    )
    assert cluster.servers[1].asked() == [], "it is not in charge"


@pytest.mark.usefixtures("hasty")
async def test_after_a_redirection(client: Client, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Acquire, cluster.moved(KEY, 1, epoch=8))
    second.script(Acquire, Silence)
    lock = client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=1)
    await is_not_answered(lock.acquire(), 1)
    assert len(second.asked(Acquire)) >= 1


async def test_held_by_somebody_when_the_time_is_over(
    client: Client, cluster: ScriptedCluster
) -> None:
    cluster.servers[0].script(Acquire, Status.TIMEOUT, Silence)
    cluster.servers[0].script(Ping, Status.OK)
    lock = client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=1.3)
    assert await soon(lock.acquire()) is False
    assert [r.timeout for r in cluster.servers[0].asked(Acquire)] == [0, 2]


@pytest.mark.parametrize("timeout", [0, 10.3, more(0.3), more(10), more(None)])
async def test_who_has_replaced_it_is_asked(
    client: Client, cluster: ScriptedCluster, timeout: float | None
) -> None:
    first, second = cluster.servers
    lock = client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=timeout)
    acquiring = asyncio.ensure_future(lock.acquire())
    await asyncio.to_thread(first.wait_asked, Acquire)
    first.script(Shards, Silence)
    second.script(Shards, cluster.report(1, 8, [second]))
    assert await soon(acquiring) is True
    assert lock.server == str(second)
    assert await lock.release() is True


async def test_a_release_and_a_renewal_find_the_one_that_has_replaced_it(
    client: Client, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Acquire)
    locks = [client.lock(key, servers=cluster.seeds, lease_ttl_s=30) for key in ("a", "b")]
    for lock in locks:
        assert await lock.acquire() is True
    first.script(Release, Silence)
    first.script(operations.Renew, Silence)
    first.script(Shards, Silence)
    second.script(Shards, cluster.report(1, 8, [second]))
    assert await soon(locks[0].renew()) is True
    assert len(second.asked(operations.Renew)) == 1
    assert await soon(locks[0].release()) is True
    with Pace() as pace:
        await soon(locks[1].release())
        await until(lambda: len(second.asked(Release)) == 2)
    assert pace.seconds < TOO_LONG


async def test_a_place_goes_to_the_one_that_has_replaced_it(
    client: Client, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, Silence)
    lock = client.lock(KEY, servers=cluster.seeds)
    assert await lock.enqueue() == "queued"
    waiting = asyncio.ensure_future(lock.wait(PATIENCE))
    await asyncio.to_thread(first.wait_asked, Wait)
    second.script(Shards, cluster.report(1, 8, [second]))
    assert await soon(waiting) is True
    assert lock.server == str(second)
    assert await lock.release() is True


async def test_a_server_that_is_alive_is_waited_for(
    client: Client, cluster: ScriptedCluster
) -> None:
    """Even if the others say otherwise: it sends waiters on by itself once it knows."""
    first, second = cluster.servers
    first.script(Ping, Status.OK)
    lock = client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=None)
    acquiring = asyncio.ensure_future(lock.acquire())
    await asyncio.to_thread(first.wait_asked, Acquire)
    second.script(Shards, cluster.report(1, 8, [second]))
    await asyncio.to_thread(first.wait_asked, Ping)
    await asyncio.sleep(0.2)
    assert second.asked() == []
    acquiring.cancel() if client.name == "asyncio" else lock.lock.cancel()
    with pytest.raises((asyncio.CancelledError, errors.AcquireCancelledError)):
        await soon(acquiring)


def test_many_waiters_look_together(cluster: ScriptedCluster) -> None:
    """A process asks for a sign of life once, however many of its threads wait there."""
    cluster.servers[0].script(Ping, Status.OK)
    # Without an end: of one in between whole seconds each would ask at first without waiting.
    locks = [
        sync_client.DistributedLock(f"key-{n}", servers=cluster.seeds, acquire_timeout_s=None)
        for n in range(10)
    ]

    def acquire(lock: sync_client.DistributedLock) -> None:
        with pytest.raises(errors.AcquireCancelledError):
            lock.acquire()

    threads = [threading.Thread(target=acquire, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    cluster.servers[0].wait_asked(Ping)
    time.sleep(0.2)
    for lock in locks:
        lock.cancel()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(cluster.servers[0].asked(Ping)) <= 5


def test_places_go_to_the_one_that_has_replaced_it(
    acquires: PendingAcquires, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Queued(b"1ticket1"))
    first.script(Wait, Silence)
    second.script(Enqueue, Queued(b"2ticket2"))
    second.script(Wait, Silence)
    waiter = Waiter(acquires, sync_client.DistributedLock(KEY, servers=cluster.seeds), PATIENCE)
    first.wait_asked(Wait)
    second.script(Shards, cluster.report(1, 8, [second]))
    second.wait_asked(Wait)
    assert not waiter.ended.is_set()
    waiter.pending.leave()


def test_a_server_that_hangs_does_not_keep_places_from_another(
    acquires: PendingAcquires, cluster: ScriptedCluster
) -> None:
    """Each attempt there takes the thread of all of them its time."""
    second = cluster.servers[1]
    second.script(Enqueue, Queued(b"2ticket2"))
    second.script(Wait, Silence)
    shards = [get_shard_id(key, NUM_SHARDS) for key in ("a", "b", "c", KEY)]
    owners = [int(shard == shards[-1]) for shard in range(NUM_SHARDS)]
    assert [owners[shard] for shard in shards] == [0, 0, 0, 1]
    for server in cluster.servers:
        server.script(Shards, cluster.shared(owners))
    waiters = [
        Waiter(acquires, sync_client.DistributedLock(key, servers=cluster.seeds), 60)
        for key in ("a", "b", "c", KEY)
    ]
    assert waiters[-1].queued.wait(PATIENCE)
    for waiter in waiters:
        waiter.pending.leave()


@pytest.mark.parametrize("trouble", ["recovers", "is down", "hangs"])
def test_many_places_where_nobody_can_queue_keep_none_from_another_server(
    acquires: PendingAcquires, cluster: ScriptedCluster, trouble: str
) -> None:
    """They are ended at their time, too, and not one after the other."""
    first, second = cluster.servers
    second.script(Enqueue, Queued(b"2ticket2"))
    second.script(Wait, Silence)
    owners = [shard % 2 for shard in range(NUM_SHARDS)]
    for server in cluster.servers:
        server.script(Shards, cluster.shared(owners))
    keys: dict[int, list[str]] = {0: [], 1: []}
    for number in range(100):
        key = f"key-{number}"
        keys[get_shard_id(key, NUM_SHARDS) % 2].append(key)
    if trouble == "recovers":
        first.script(Enqueue, Recovering(60_000))
    elif trouble == "is down":
        first.stop()
    late = [
        Waiter(acquires, sync_client.DistributedLock(key, servers=cluster.seeds), 1)
        for key in keys[0][:30]
    ]
    with Pace() as pace:
        other = Waiter(
            acquires, sync_client.DistributedLock(keys[1][0], servers=cluster.seeds), 600
        )
        assert other.queued.wait(PATIENCE)
        assert pace.seconds < 8, "30 attempts of a second each would take longer"
        for waiter in late:
            assert waiter.ended.wait(PATIENCE)
            assert isinstance(waiter.error, (errors.RecoveringError, errors.UnreachableError))
            assert str(first) in str(waiter.error)
    assert pace.seconds < 1 + 8
    other.pending.leave()


def test_places_at_a_server_that_hangs_end_in_time(
    acquires: PendingAcquires, hung: ServerProcess
) -> None:
    servers = [("127.0.0.1", hung.port)]
    with sync_client.DistributedLock(KEY, servers=servers):
        waiter = Waiter(acquires, sync_client.DistributedLock(KEY, servers=servers), 1)
        assert waiter.queued.wait(PATIENCE)
        hung.suspend()
        with Pace() as pace:
            late = Waiter(acquires, sync_client.DistributedLock("another", servers=servers), 1)
            for each in (waiter, late):
                assert each.ended.wait(PATIENCE)
                assert isinstance(each.error, errors.UnreachableError)
        assert pace.seconds < 1 + TOO_LONG
        hung.signal(signal.SIGCONT)
