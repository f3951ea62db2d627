"""Servers that hang: they accept connections, say nothing, and do not end.

Nobody is told that a lock is somebody else's unless a server has said so. Times are judged generously:
what they must stay below is what a client took that waited for such a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dflockd import aio, errors, operations, sync_client
from dflockd import client as async_client
from dflockd import lock as lock_module
from dflockd.address import Address
from dflockd.aio import AsyncConnection
from dflockd.connection import Connection, run
from dflockd.places import Places
from dflockd.pool import Route
from dflockd.shards import get_shard_id
from dflockd.wire import Acquire, Enqueue, Ping, Recovering, Release, Shards, Status, Wait
from tests.dflockd.client_support import Client, soon, until
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually
from tests.dflockd.scripted_server import NUM_SHARDS, ScriptedCluster, Silence
from tests.dflockd.shards.etcd_process import Etcd

pytestmark = pytest.mark.usefixtures("no_idle_connections")

KEY = "account:7"

TOO_LONG = 8.0
"""Seconds beyond those that were given; it was ten, and is two."""


async def is_not_answered(acquiring: Any, timeout: float) -> None:
    """Check that an attempt ends in time, as one of which nobody has said anything."""
    started = time.monotonic()
    with pytest.raises(errors.UnreachableError, match="no answer in time"):
        await soon(acquiring)
    assert timeout <= time.monotonic() - started < timeout + TOO_LONG


def keep_busy(seconds: float) -> None:
    """Have the event loop do nothing else."""
    time.sleep(seconds)


# One server, or a list of them.


@pytest.fixture
def hung(start: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    """A server that is about to hang, and goes on with the end of the test."""
    server = start()
    assert server.port
    yield server
    server.signal(signal.SIGCONT)


@pytest.mark.parametrize("timeout", [0, 1, 0.3, 1.3])
@pytest.mark.parametrize("is_idle", [False, True], ids=["new", "pooled"])
async def test_nobody_says_that_the_lock_is_held(
    client: Client, hung: ServerProcess, timeout: float, is_idle: bool
) -> None:
    if is_idle:
        async with client.lock("another", hung):
            pass
    hung.suspend()
    lock = client.lock(KEY, hung, acquire_timeout_s=timeout)
    await is_not_answered(lock.acquire(), timeout)
    semaphore = client.semaphore(KEY, 2, hung, acquire_timeout_s=timeout)
    await is_not_answered(semaphore.acquire(), timeout)
    hung.signal(signal.SIGCONT)
    # What it comes across when it goes on, it grants to connections that have ended.
    anew = client.lock(KEY, hung)
    assert await anew.acquire() is True
    assert await anew.release() is True


@pytest.mark.parametrize("timeout", [0, 1, 0.3, 1.3])
async def test_a_place_in_the_queue(client: Client, hung: ServerProcess, timeout: float) -> None:
    async with client.lock(KEY, hung):
        waiter = client.lock(KEY, hung, acquire_timeout_s=timeout)
        assert await waiter.enqueue() == "queued"
        other = client.lock("another", hung, acquire_timeout_s=1)
        hung.suspend()
        await is_not_answered(waiter.wait(), timeout)
        await is_not_answered(other.enqueue(), 1)
        hung.signal(signal.SIGCONT)


async def test_a_release_is_left_to_the_background(client: Client, hung: ServerProcess) -> None:
    lock = client.lock(KEY, hung)
    assert await lock.acquire() is True
    hung.suspend()
    started = time.monotonic()
    assert await lock.release() is False
    assert time.monotonic() - started < TOO_LONG
    hung.signal(signal.SIGCONT)
    async with client.lock(KEY, hung) as another:
        assert another.held


async def test_a_renewal_that_is_asked_for_ends_with_the_lease(
    client: Client, hung: ServerProcess
) -> None:
    lock = client.lock(KEY, hung, lease_ttl_s=2)
    assert await lock.acquire() is True
    hung.suspend()
    started = time.monotonic()
    with pytest.raises(errors.UnreachableError, match="no answer in time"):
        await soon(lock.renew())
    assert time.monotonic() - started < TOO_LONG
    assert not lock.held


async def test_a_server_that_goes_on_within_the_time(client: Client, hung: ServerProcess) -> None:
    hung.suspend()
    lock = client.lock(KEY, hung, acquire_timeout_s=PATIENCE)
    acquiring = asyncio.ensure_future(lock.acquire())
    await asyncio.sleep(
        2.5
    )  # longer than a server may take that is asked for nothing but an answer
    assert not acquiring.done()
    hung.signal(signal.SIGCONT)
    assert await soon(acquiring) is True
    assert await lock.release() is True


async def test_an_answer_is_given_a_moment_also_when_the_time_is_over(
    start: Callable[..., ServerProcess],
) -> None:
    """The process was stopped: what it asks when it goes on is still answered."""
    route, is_over = Route(Address("127.0.0.1", start().port)), time.monotonic() - 60
    connection = Connection.open(*route, is_over)
    run(operations.ping(""), connection, is_over)
    connection.close()
    on_the_loop = await AsyncConnection.open(route, is_over)
    await aio.run(operations.ping(""), on_the_loop, "", is_over)
    on_the_loop.close()


@pytest.mark.parametrize("name", ["asyncio", "uvloop"])
def test_a_reply_that_came_while_the_loop_was_busy(
    start: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It has come in time: it is this process that was late."""
    for module in (operations, lock_module):
        monkeypatch.setattr(module, "GRACE", 0.2)
    servers = [("127.0.0.1", start().port)]

    async def main() -> None:
        async with async_client.DistributedLock("another", servers=servers):
            pass
        lock = async_client.DistributedLock(KEY, acquire_timeout_s=0, servers=servers)
        acquiring = asyncio.ensure_future(lock.acquire())
        await asyncio.sleep(0)  # the request leaves
        keep_busy(0.5)
        assert await acquiring is True
        assert await lock.release() is True

    with asyncio.Runner(loop_factory=pytest.importorskip(name).new_event_loop) as runner:
        runner.run(main())


@pytest.fixture
def blackholes() -> Iterator[list[tuple[str, int]]]:
    """Addresses where nobody ever accepts a connection, nor refuses it."""
    with contextlib.ExitStack() as stack:
        found: list[tuple[str, int]] = []
        for number in range(6):
            listener = stack.enter_context(socket.socket())
            listener.bind((f"127.0.0.{number + 2}", 0))
            listener.listen(0)
            found.append(listener.getsockname())
            for _ in range(3):  # more than its queue takes
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(found[-1])
        yield found


async def test_a_name_with_many_addresses(
    client: Client,
    blackholes: list[tuple[str, int]],
    start: Callable[..., ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes no longer than one, and the last is reached as well."""
    addresses = blackholes.copy()
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in addresses],
    )
    lock = client.lock(KEY, servers=["many.example:6388"], acquire_timeout_s=0)
    await is_not_answered(lock.acquire(), 0)
    if client.name == "sync":  # asyncio gives all of the time to the first
        addresses.append(("127.0.0.1", start().port))
        assert await soon(lock.acquire()) is True
        assert await lock.release() is True


# A cluster whose servers are scripted.


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    """Two servers; the first has all shards, and says nothing about locks."""
    cluster = ScriptedCluster()
    for kind in (Acquire, Enqueue, Ping):
        cluster.servers[0].script(kind, Silence)
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("timeout", [0, 0.3, 1, 1.3])
async def test_the_server_in_charge_says_nothing(
    client: Client, cluster: ScriptedCluster, timeout: float
) -> None:
    lock = client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=timeout)
    await is_not_answered(lock.acquire(), timeout)
    assert cluster.servers[1].asked() == [], "it is not in charge"
    await is_not_answered(lock.enqueue(), timeout)


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


@pytest.mark.parametrize("timeout", [0, 0.3, 10, 10.3, None])
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
    started = time.monotonic()
    await soon(locks[1].release())
    await until(lambda: len(second.asked(Release)) == 2)
    assert time.monotonic() - started < TOO_LONG


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
    lock = client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=PATIENCE)
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
    locks = [
        sync_client.DistributedLock(f"key-{n}", servers=cluster.seeds, acquire_timeout_s=3)
        for n in range(10)
    ]

    def acquire(lock: sync_client.DistributedLock) -> None:
        with pytest.raises(errors.UnreachableError):
            lock.acquire()

    threads = [threading.Thread(target=acquire, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert 1 <= len(cluster.servers[0].asked(Ping)) <= 5


class Waiter:
    """Somebody who waits at `Places`, and what came of it."""

    def __init__(self, places: Places, lock: sync_client.DistributedLock, timeout: float) -> None:
        self.lock = lock
        self.error: errors.RemoteError | None = None
        self.queued, self.ended = threading.Event(), threading.Event()
        self.place = places.join(lock, timeout, queued=self.queued.set, ended=self._end)

    def _end(self, error: errors.RemoteError | None) -> None:
        self.error = error
        self.ended.set()


@pytest.fixture
def places() -> Iterator[Places]:
    places = Places()
    yield places
    places.close()


def test_places_go_to_the_one_that_has_replaced_it(
    places: Places, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, Silence)
    second.script(Enqueue, Status.QUEUED)
    second.script(Wait, Silence)
    waiter = Waiter(places, sync_client.DistributedLock(KEY, servers=cluster.seeds), PATIENCE)
    first.wait_asked(Wait)
    second.script(Shards, cluster.report(1, 8, [second]))
    second.wait_asked(Wait)
    assert not waiter.ended.is_set()
    waiter.place.leave()


def test_a_server_that_hangs_does_not_keep_places_from_another(
    places: Places, cluster: ScriptedCluster
) -> None:
    """Each attempt there takes the thread of all of them its time."""
    second = cluster.servers[1]
    second.script(Enqueue, Status.QUEUED)
    second.script(Wait, Silence)
    shards = [get_shard_id(key, NUM_SHARDS) for key in ("a", "b", "c", KEY)]
    owners = [int(shard == shards[-1]) for shard in range(NUM_SHARDS)]
    assert [owners[shard] for shard in shards] == [0, 0, 0, 1]
    for server in cluster.servers:
        server.script(Shards, cluster.shared(owners))
    waiters = [
        Waiter(places, sync_client.DistributedLock(key, servers=cluster.seeds), 60)
        for key in ("a", "b", "c", KEY)
    ]
    assert waiters[-1].queued.wait(PATIENCE)
    for waiter in waiters:
        waiter.place.leave()


@pytest.mark.parametrize("trouble", ["recovers", "is down", "hangs"])
def test_many_places_where_nobody_can_queue_keep_none_from_another_server(
    places: Places, cluster: ScriptedCluster, trouble: str
) -> None:
    """They are ended at their time, too, and not one after the other."""
    first, second = cluster.servers
    second.script(Enqueue, Status.QUEUED)
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
        Waiter(places, sync_client.DistributedLock(key, servers=cluster.seeds), 3)
        for key in keys[0][:30]
    ]
    started = time.monotonic()
    other = Waiter(places, sync_client.DistributedLock(keys[1][0], servers=cluster.seeds), 60)
    assert other.queued.wait(PATIENCE)
    assert time.monotonic() - started < 8, "30 attempts of a second each would take longer"
    for waiter in late:
        assert waiter.ended.wait(PATIENCE)
        assert isinstance(waiter.error, (errors.RecoveringError, errors.UnreachableError))
        assert str(first) in str(waiter.error)
    assert time.monotonic() - started < 3 + 8
    other.place.leave()


def test_places_at_a_server_that_hangs_end_in_time(places: Places, hung: ServerProcess) -> None:
    servers = [("127.0.0.1", hung.port)]
    with sync_client.DistributedLock(KEY, servers=servers):
        waiter = Waiter(places, sync_client.DistributedLock(KEY, servers=servers), 1)
        assert waiter.queued.wait(PATIENCE)
        hung.suspend()
        started = time.monotonic()
        assert waiter.ended.wait(PATIENCE)
        assert time.monotonic() - started < 1 + TOO_LONG
        assert isinstance(waiter.error, errors.UnreachableError)
        late = Waiter(places, sync_client.DistributedLock("another", servers=servers), 1)
        assert late.ended.wait(PATIENCE)
        assert isinstance(late.error, errors.UnreachableError)
        hung.signal(signal.SIGCONT)


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
                started = time.monotonic()
                with pytest.raises((errors.UnreachableError, errors.RecoveringError)):
                    await use(keys[4], timeout)
                assert time.monotonic() - started < timeout + TOO_LONG
        assert await asyncio.gather(*patient) == [True] * 4


def test_who_waits_in_a_process_of_many_goes_to_the_next_owner(
    stage: ClusterStage, servers: Sequence[ClusterServer], places: Places
) -> None:
    owner, other = servers
    key, seeds = stage.key_at(owner), stage.address
    holder = sync_client.DistributedLock(key, servers=seeds, lease_ttl_s=1)
    assert holder.acquire()
    waiter = Waiter(places, sync_client.DistributedLock(key, servers=seeds), 120)
    assert waiter.queued.wait(PATIENCE)
    with hanging(owner):
        # Nobody can renew before there is another owner: the holder has lost its lock by then.
        assert waiter.ended.wait(60)
        assert waiter.error is None
        assert waiter.lock.held
        assert waiter.lock.server == other.address
        assert not holder.held
    waiter.place.leave()
    holder.release()
