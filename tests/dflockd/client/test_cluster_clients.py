"""The lock clients in a cluster: they ask the server in charge, and follow when that changes.

The servers at the other end are scripted, so that every refusal comes when a test wants it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflockd import errors, sync_client
from dflockd.shards import get_shard_id
from dflockd.wire import (
    Acquire,
    Confirm,
    Detach,
    Enqueue,
    Evict,
    Granted,
    Inspect,
    Moved,
    Recovering,
    Release,
    Renew,
    Renewed,
    Report,
    Resume,
    Shards,
    Status,
    Wait,
)
from tests.dflockd.client_support import Calls, Client, client_named, soon, until
from tests.dflockd.cluster.stage import ClusterStage
from tests.dflockd.raw_server import PATIENCE, eventually
from tests.dflockd.scripted_server import (
    End,
    ScriptedCluster,
    ScriptedServer,
    Silence,
    grant,
    renewed,
)
from tests.dflockd.shards.etcd_process import Etcd
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")

KEY = "account:7"


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[ScriptedCluster]:
    """Two servers; the first has all shards. The parameter says which of them are old."""
    cluster = ScriptedCluster(old=getattr(request, "param", ()))
    yield cluster
    cluster.stop()


during_a_roll_out = pytest.mark.parametrize(
    "cluster", [(), (0,), (1,), (0, 1)], indirect=True, ids=["new", "old-new", "new-old", "old"]
)


@pytest.fixture
def make(client: Client, cluster: ScriptedCluster) -> Callable[..., Any]:
    def make(key: str = KEY, **options: Any) -> Any:
        return client.lock(key, servers=cluster.seeds, **{"acquire_timeout_s": 5, **options})

    return make


def grant_of(lease: int) -> Callable[[Any], Granted]:
    return lambda request: grant(Acquire(request.space, request.key, 1, 0, lease))


async def is_granted(lock: Any) -> bool:
    """Acquire a lock, and give it back at once."""
    granted: bool = await lock.acquire()
    if granted:
        assert await lock.release() is True
    return granted


# Where a lock is asked for.


async def test_the_server_in_charge_is_asked(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    cluster.is_at(1)
    lock = make()
    assert lock.server == cluster.seeds
    async with lock:
        assert lock.held
        assert lock.server == str(cluster.servers[1])
        assert str(cluster.servers[1]) in repr(lock)
    assert cluster.servers[0].asked(Acquire, Release) == []
    assert [type(r) for r in cluster.servers[1].asked(Acquire, Release)] == [Acquire, Release]


@during_a_roll_out
async def test_the_map_is_loaded_once(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    for number in range(5):
        async with make(f"{KEY}-{number}"):
            pass
    assert cluster.loads() == 1
    assert make(KEY).server == str(cluster.servers[0])


async def test_semaphores_as_well(client: Client, cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, cluster.moved(KEY, 1))
    semaphore = client.module.DistributedSemaphore(KEY, 3, servers=cluster.seeds)
    semaphore = client._shaped(semaphore)
    async with semaphore:
        [request] = cluster.servers[1].asked(Acquire)
        assert (request.limit, request.key) == (3, KEY.encode())


async def test_a_seed_that_is_down(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    cluster.is_at(1)
    cluster.servers[0].stop()
    assert await is_granted(make(acquire_timeout_s=0))


async def test_nobody_is_there(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    cluster.stop()
    with pytest.raises(errors.UnreachableError, match="can be reached") as caught:
        await soon(make(acquire_timeout_s=600).acquire())
    assert (caught.value.key, caught.value.server) == (KEY, cluster.seeds)


async def test_the_cluster_goes_down(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    async with make("other"):
        pass
    cluster.stop()
    with pytest.raises(errors.UnreachableError, match="no server of cluster://"):
        await soon(make(acquire_timeout_s=600).acquire())


async def test_a_server_that_is_in_no_cluster(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    for server in cluster.servers:
        server.script(Shards, Status.ERROR)
    with pytest.raises(errors.RefusedError, match="is in no cluster: start it with --cluster"):
        await make().acquire()


@pytest.mark.parametrize(
    "text",
    [
        b'{"servers": []}',
        b'{"servers": ["a:1"], "shards": [1], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [0, 0], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": ["0"], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [0.0], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [0], "epochs": [null]}',
        b'{"servers": ["a:1"], "shards": [0], "epochs": {"0": 1}}',
        b'{"version": "0af3", "zlib": "AAAA"}',
        b'{"servers": ["a:x"], "shards": [0], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [], "epochs": []}',
        b"{",
    ],
)
async def test_a_map_that_cannot_be_read(
    make: Callable[..., Any], cluster: ScriptedCluster, text: bytes
) -> None:
    for server in cluster.servers:
        server.script(Shards, Report(text))
    with pytest.raises(errors.BadReplyError, match="its list of shards cannot be read"):
        await make().acquire()


async def test_a_server_that_says_the_same_of_nothing(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    for server in cluster.servers:
        server.script(Shards, Status.OK)
    with pytest.raises(errors.RefusedError, match="unexpected answer"):
        await make().acquire()


@during_a_roll_out
async def test_the_map_is_asked_for_by_its_version(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    """It is loaded twice more: once it is the same, once it is not."""
    first, second = cluster.servers
    async with make("other"):
        pass
    for owner, epoch in ((0, 7), (1, 8)):
        first.script(Acquire, Status.DRAINING, Status.DRAINING, grant)
        cluster.is_at(owner, epoch)
        loads = cluster.loads()
        assert await is_granted(make())
        assert cluster.loads() > loads
    assert make().server == str(second)
    versions = [request.version for server in cluster.servers for request in server.asked(Shards)]
    if len(cluster.old) == 0:
        # Who is shutting down is asked last.
        assert len(set(versions) - {b""}) == 1, versions
        assert versions.count(b"") == 1, versions
    elif len(cluster.old) == 2:
        assert set(versions) == {b""}


# Moved.


async def test_moved_is_followed_and_learned(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Acquire, cluster.moved(KEY, 1, epoch=8))
    for _ in range(3):
        async with make(acquire_timeout_s=0) as lock:
            assert lock.server == str(second)
    assert len(first.asked(Acquire)) == 1
    assert len(second.asked(Acquire)) == 3
    assert cluster.loads() == 1
    async with make(acquire_timeout_s=1):
        pass
    assert first.accepted <= 2, "a connection that was sent on is as good as before"


async def test_moved_of_an_older_epoch_is_not_followed(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Acquire, cluster.moved(KEY, 1, epoch=6), grant)
    async with make() as lock:
        assert lock.server == str(first)
    assert second.asked(Acquire) == []


async def test_what_is_left_of_the_time_is_asked_for(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers

    def later(_: object) -> Moved:
        time.sleep(1.2)
        return cluster.moved(KEY, 1)

    first.script(Acquire, later)
    second.script(Acquire, Status.TIMEOUT)
    assert await make(acquire_timeout_s=5).acquire() is False
    assert [request.timeout for request in first.asked(Acquire)] == [5]
    # First whether it is free: who waits for less than whole seconds cuts that off himself.
    at_once, left = (request.timeout for request in second.asked(Acquire))
    assert at_once == 0
    assert 0 < left <= 4


async def test_a_place_is_taken_along(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, cluster.moved(KEY, 1, place="p1"))
    cluster.servers[1].script(Acquire, Recovering(10), cluster.moved(KEY, 0, place="p2"))

    def moved_back(_: object) -> Any:
        cluster.servers[0].script(Acquire, grant)
        return cluster.moved(KEY, 0, place="p2")

    cluster.servers[1].script(Acquire, Recovering(10), moved_back)
    async with make(label="me") as lock:
        assert lock.server == str(cluster.servers[0])
    kinds = (Resume, Acquire)
    first, second = (server.asked(*kinds) for server in cluster.servers)
    assert [type(r) for r in second] == [Resume, Acquire, Resume, Acquire]
    assert {r.ticket for r in second if isinstance(r, Resume)} == {b"p1"}
    assert [r.ticket if isinstance(r, Resume) else "l" for r in first] == ["l", b"p2", "l"]


async def test_a_blocked_waiter_moves(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    go = threading.Event()

    def once(_: object) -> Moved:
        assert go.wait(PATIENCE)
        return cluster.moved(KEY, 1, place="p1")

    first.script(Acquire, once)
    waiting = asyncio.ensure_future(is_granted(make(acquire_timeout_s=None)))
    await until(lambda: len(first.asked(Acquire)) == 1)
    go.set()
    assert await soon(waiting) is True
    assert [type(r) for r in second.asked()] == [Resume, Acquire, Release]


async def test_wait_goes_on_where_the_place_is(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, cluster.moved(KEY, 1, place="p1"))
    lock = make()
    assert await lock.enqueue() == "queued"
    assert await lock.wait(7) is True
    assert lock.server == str(second)
    assert [type(r) for r in second.asked()] == [Resume, Acquire]
    assert second.asked(Acquire)[0].timeout == 7
    assert await lock.release() is True


async def test_wait_on_a_connection_that_broke(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    lock = make()
    assert await lock.enqueue() == "queued"
    cluster.is_at(1, epoch=8)
    first.stop()
    assert await lock.wait() is True
    assert await lock.release() is True
    assert second.asked(Wait) == []
    assert len(second.asked(Acquire)) == 1


async def test_wait_again_while_the_shard_is_frozen(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    """The place is still this connection's, or the grant that nobody has told it of."""
    first, _ = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, Recovering(20), Recovering(20), grant_of(7))
    lock = make(lease_ttl_s=7)
    assert await lock.enqueue() == "queued"
    assert await lock.wait() is True
    assert [type(r) for r in first.asked()] == [Enqueue, Wait, Wait, Wait]
    assert await lock.release() is True


async def test_wait_once_the_place_has_moved_and_the_next_is_not_ready(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, Recovering(20), cluster.moved(KEY, 1, place="p1"))
    second.script(Acquire, Recovering(20), grant)
    lock = make()
    assert await lock.enqueue() == "queued"
    assert await lock.wait() is True
    assert [type(r) for r in second.asked()] == [Resume, Acquire, Resume, Acquire]
    assert await lock.release() is True


async def test_enqueue_is_sent_on(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Enqueue, cluster.moved(KEY, 1))
    second.script(Enqueue, Status.QUEUED)
    second.script(Wait, Status.TIMEOUT)
    lock = make()
    assert await lock.enqueue() == "queued"
    assert await lock.wait(1) is False
    assert len(second.asked(Wait)) == 1


async def test_two_servers_that_are_not_of_one_mind(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Acquire, cluster.moved(KEY, 1))
    second.script(Acquire, cluster.moved(KEY, 0))
    with pytest.raises(errors.MovedError) as caught:
        await make(acquire_timeout_s=0).acquire()
    assert len(first.asked(Acquire)) + len(second.asked(Acquire)) == 6
    assert caught.value.server != caught.value.to
    with pytest.raises(errors.MovedError):
        await make(acquire_timeout_s=0.5).acquire()
    assert len(first.asked(Acquire)) + len(second.asked(Acquire)) < 6 + 6 + 8


async def test_a_grant_that_moves_before_it_is_confirmed(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers

    def late(request: Any) -> Granted:
        time.sleep(1.5)
        return grant(request)

    first.script(Acquire, late)
    first.script(Confirm, cluster.moved(KEY, 1))
    lock = make(lease_ttl_s=3)
    assert await lock.acquire() is True
    assert lock.server == str(second)
    assert first.asked(Confirm)[0].token == second.asked(Confirm)[0].token == lock.token.encode()
    assert second.asked(Acquire) == []
    assert await lock.release() is True


# Not now.


async def test_recovering_is_asked_again(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Acquire, Recovering(100), Recovering(100), grant)
    with Pace() as pace:
        async with make():
            assert pace.wall >= 0.2
            assert pace.seconds < 2
    assert len(first.asked(Acquire)) == 3
    assert first.accepted <= 2, "the connection was kept meanwhile"
    assert second.asked(Acquire) == []


async def test_recovering_until_the_time_is_over(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    cluster.servers[0].script(Acquire, Recovering(20_000))
    with Pace() as pace, pytest.raises(errors.RecoveringError) as caught:
        await make(acquire_timeout_s=1).acquire()
    assert pace.wall >= 1
    assert pace.seconds < 2
    assert caught.value.retry_s == 20
    assert caught.value.server == str(cluster.servers[0])
    assert 2 <= len(cluster.servers[0].asked(Acquire)) <= 4


async def test_somebody_else_holds_it_in_the_end(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    cluster.servers[0].script(Acquire, Recovering(100), Status.TIMEOUT)
    assert await make(acquire_timeout_s=1).acquire() is False


@pytest.mark.parametrize("refusal", [Recovering(1), Status.DRAINING])
async def test_without_time_nothing_is_waited_for(
    make: Callable[..., Any], cluster: ScriptedCluster, refusal: Any
) -> None:
    async with make("other"):  # the map is there
        pass
    first = cluster.servers[0]
    first.script(Acquire, refusal)
    before = len(first.asked(Acquire))
    with pytest.raises((errors.RecoveringError, errors.DrainingError)):
        await make(acquire_timeout_s=0).acquire()
    assert len(first.asked(Acquire)) == before + 1
    assert cluster.loads() <= 2


async def test_without_time_the_map_is_loaded_again(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    async with make("other"):
        pass
    cluster.is_at(1, epoch=8)
    cluster.servers[0].script(Acquire, Status.DRAINING)
    assert await is_granted(make(acquire_timeout_s=0))
    assert len(cluster.servers[1].asked(Shards)) >= 1, "another one is asked for the map"


@pytest.mark.parametrize("refusal", [Status.DRAINING, End])
async def test_a_server_that_ends(
    make: Callable[..., Any], cluster: ScriptedCluster, refusal: Any
) -> None:
    """The others do not know yet that it does; then its shards get another server."""
    first, second = cluster.servers
    async with make("other"):
        pass
    first.script(Acquire, refusal)
    waiting = asyncio.ensure_future(is_granted(make(acquire_timeout_s=10)))
    await until(lambda: len(first.asked(Acquire)) >= 3)
    cluster.is_at(1, epoch=8)
    assert await soon(waiting) is True
    assert len(second.asked(Acquire)) == 1
    assert second.asked(Shards), "another one is asked for the map"


async def test_a_shard_that_nobody_has(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    """Who told so is asked, for it will know."""
    cluster.is_at(None)
    lock = make()
    asked = asyncio.ensure_future(lock.acquire())
    for server in cluster.servers:
        server.script(Acquire, Recovering(50))
    await until(lambda: sum(len(server.asked(Acquire)) for server in cluster.servers) >= 2)
    cluster.servers[1].script(Acquire, grant)
    cluster.servers[0].script(Acquire, cluster.moved(KEY, 1, epoch=8))
    assert await soon(asked) is True
    assert lock.server == str(cluster.servers[1])
    assert await lock.release() is True


async def test_a_server_that_is_cut_off_from_the_others(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    """It does not know that its shards are elsewhere, and says for ever that it is not ready."""
    first, second = cluster.servers
    async with make("other"):
        pass
    first.script(Acquire, Recovering(50))
    cluster.is_at(1, epoch=8)
    first.script(Shards, cluster.report(0, 7))
    assert await is_granted(make(acquire_timeout_s=10))
    assert len(second.asked(Acquire)) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.ERROR, errors.RefusedError),
        (Status.MAX_LOCKS, errors.MaxLocksError),
        (Status.AUTH, errors.AuthRefusedError),
    ],
)
async def test_other_refusals_are_raised_at_once(
    make: Callable[..., Any], cluster: ScriptedCluster, status: Status, error: type[Exception]
) -> None:
    cluster.servers[0].script(Acquire, status)
    with pytest.raises(error):
        await make().acquire()
    # An old server says `error` to who was idle for long, and hangs up: such a one is asked anew.
    most = 2 if status is Status.ERROR else 1
    assert 1 <= len(cluster.servers[0].asked(Acquire)) <= most


# What is held.


async def held(lock: Any, seconds: float, *states: str) -> None:
    """Wait so long, and see that the lock is held all the time, or in one of these states."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert lock.state in (states or ("held",))
        assert lock.held == (lock.state == "held")
        await asyncio.sleep(0.01)


async def doubted(lock: Any, seconds: float) -> None:
    """Wait so long, and see that the lock is in doubt, and was soon."""
    await until(lambda: lock.state == "doubtful")
    await held(lock, seconds, "doubtful")
    assert lock.token is not None


RENEWED = {"lease_ttl_s": 600, "renew_ratio": 0.5 / 600}
"""A lease that does not end meanwhile, renewed twice a second."""


@pytest.mark.parametrize("how", ["answer", "end"])
async def test_a_held_lock_moves(
    make: Callable[..., Any], cluster: ScriptedCluster, how: str
) -> None:
    first, second = cluster.servers
    first.script(Renew, cluster.moved(KEY, 1, epoch=8))
    lost = Calls()
    lock = make(on_lost=lost, label="the task", **RENEWED)
    await lock.acquire()
    if how == "end":
        await asyncio.sleep(0.15)  # it is watched by now
        cluster.is_at(1, epoch=8)
        first.cut()
        await until(lambda: len(second.asked(Renew)) == 1)
        await soon(lock.check())
    while len(second.asked(Renew)) < 2:
        await held(lock, 0.1)
    assert lock.server == str(second)
    assert {r.token for r in second.asked(Renew)} == {lock.token.encode()}
    assert await lock.release() is True
    assert first.asked(Release) == []
    assert len(second.asked(Release)) == 1
    assert lost.times == []


async def test_a_held_lock_whose_server_dies(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    lost = Calls()
    lock = make(lease_ttl_s=600, on_lost=lost)
    await lock.acquire()
    first.stop()
    await doubted(lock, 0.5)
    # The others have noticed, and one begins to collect what holders say.
    cluster.is_at(1, epoch=8)
    await until(lambda: len(second.asked(Renew)) == 1)
    await soon(lock.check())
    assert lock.held
    assert lost.times == []
    assert await lock.release() is True


async def test_a_held_lock_while_all_servers_are_away(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, _ = cluster.servers
    lost = Calls()
    lock = make(lease_ttl_s=600, on_lost=lost)
    await lock.acquire()
    await asyncio.sleep(0.15)  # it is watched by now
    cluster.stop()
    await doubted(lock, 0.4)
    cluster.servers[0] = ScriptedServer(first.port)
    cluster.is_at(0, epoch=8)
    await until(lambda: len(cluster.servers[0].asked(Renew)) == 1)
    assert await lock.release() is True
    assert lost.times == []


async def test_a_held_lock_whose_server_falls_silent(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    """Its machine is gone, so nothing ends the connection; the others have given its shards away."""
    first, second = cluster.servers
    first.script(Renew, Silence)
    lost = Calls()
    lock = make(on_lost=lost, **RENEWED)
    await lock.acquire()
    first.script(Shards, Silence)
    second.script(Shards, cluster.report(1, 8, [second]))
    await until(lambda: len(second.asked(Renew)) == 1)
    assert lock.held
    assert lock.server == str(second)
    assert lost.times == []
    assert await lock.release() is True


@pytest.mark.soak
async def test_a_slow_server_is_waited_for(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers

    def slow(request: Any) -> Renewed:
        time.sleep(1.1)
        return Renewed(request.lease)

    first.script(Renew, slow)
    lock = make(lease_ttl_s=3)
    await lock.acquire()
    loads = cluster.loads()
    await until(lambda: cluster.loads() > loads)  # the others are asked about it
    await held(lock, 4)
    assert second.asked() == []
    numbers = {n for n, r in first.requests if isinstance(r, Renew | Acquire)}
    assert len(numbers) == 2, "another connection is tried, and no third"
    assert await lock.release() is True


async def test_a_renewal_that_comes_while_the_shard_is_frozen(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, _ = cluster.servers
    first.script(Renew, Recovering(50), Recovering(50), Renewed(2))
    lock = make(lease_ttl_s=2)
    await lock.acquire()
    await until(lambda: len(first.asked(Renew)) == 3)
    await held(lock, 0.3)
    numbers = {n for n, r in first.requests if isinstance(r, Renew | Acquire)}
    assert len(numbers) == 1, "the hold stands on the connection that it was granted on"
    assert await lock.release() is True


@pytest.mark.parametrize("how", ["by itself", "renew"])
async def test_a_server_keeps_its_connection_until_another_has_the_lock(
    make: Callable[..., Any], cluster: ScriptedCluster, how: str
) -> None:
    """One that the others take for dead may still have it, and would free it with the connection."""
    first, second = cluster.servers
    lost = Calls()
    lock = make(on_lost=lost, **RENEWED)
    await lock.acquire()
    for server in cluster.servers:
        server.script(Renew, Recovering(50))
    await asyncio.sleep(1)  # what the map says is not quite new any more
    cluster.is_at(1, epoch=8)
    renewing = asyncio.ensure_future(lock.renew()) if how == "renew" else None
    await until(lambda: bool(second.asked(Renew)))
    assert first.ended == []
    second.script(Renew, renewed)
    await until(lambda: len(first.ended) == 1)
    if renewing is not None:
        assert await renewing
    assert lock.held
    assert lost.times == []
    assert await lock.release() is True


async def test_renew_while_the_shard_is_frozen_already(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, _ = cluster.servers
    first.script(Renew, Recovering(300), Renewed(2))
    lock = make(lease_ttl_s=2)
    await lock.acquire()
    await until(lambda: len(first.asked(Renew)) == 1)
    await asyncio.sleep(0.05)  # it has its answer by now, and is about to ask again
    assert await lock.renew() is True
    assert len(first.asked(Renew)) == 3
    numbers = {n for n, r in first.requests if isinstance(r, Renew | Acquire)}
    assert len(numbers) == 1, "the hold stands on the connection that it was granted on"
    assert await lock.release() is True


async def test_a_lock_that_the_new_server_does_not_know(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Renew, cluster.moved(KEY, 1, epoch=8))
    second.script(Renew, Status.ERROR)
    lost = Calls()
    lock = make(on_lost=lost, **RENEWED)
    await lock.acquire()
    await lost.first()
    assert not lock.held
    assert len(second.asked(Renew)) == 1


async def test_no_renewal_past_the_lease(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, _ = cluster.servers
    first.script(Renew, Recovering(10))
    lost = Calls()
    lock = make(lease_ttl_s=1, on_lost=lost)
    started = time.monotonic()
    await lock.acquire()
    await lost.first()
    assert lost.times[0] - started >= 1
    assert not lock.held
    number = len(first.asked(Renew))
    await asyncio.sleep(0.4)
    assert len(first.asked(Renew)) <= number + 1  # one may have been on its way
    assert await lock.release() is False


async def test_renew_follows(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    lock = make(lease_ttl_s=2)
    await lock.acquire()
    first.script(Renew, Recovering(20), cluster.moved(KEY, 1, epoch=8))
    assert await lock.renew() is True
    assert len(second.asked(Renew)) == 1
    await until(lambda: len(second.asked(Renew)) == 2)
    assert lock.held
    assert await lock.release() is True
    assert second.asked(Release)


async def test_release_follows(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Release, Recovering(20), cluster.moved(KEY, 1, epoch=8))
    lock = make()
    await lock.acquire()
    assert await lock.release() is True
    assert len(second.asked(Release)) == 1


async def test_release_after_the_server_has_died(
    make: Callable[..., Any], cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    lock = make()
    await lock.acquire()
    token = lock.token
    first.stop()
    # Nobody has its shards for a while; who takes them must be told.
    assert await lock.release() is False
    cluster.is_at(1, epoch=8)
    await until(lambda: len(second.asked(Release)) == 1)
    assert second.asked(Release)[0].token == token.encode()


async def test_detach_and_adopt_follow(make: Callable[..., Any], cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Detach, Recovering(20), cluster.moved(KEY, 1, epoch=8))
    second.script(Detach, Renewed(60))
    second.script(Confirm, cluster.moved(KEY, 0, epoch=9))
    lock = make(acquire_timeout_s=0)
    await lock.acquire()
    token = lock.token
    assert await lock.detach(60) == token
    assert not lock.held
    other = make(acquire_timeout_s=0)
    first.script(Confirm, Recovering(20), Renewed(33))
    assert await other.adopt(token) is True
    assert other.held
    assert await other.release() is True
    assert len(first.asked(Release)) == 1


async def test_inspect_and_evict_follow(
    make: Callable[..., Any], client: Client, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    report = Report(b'{"holders": [], "waiters": []}')
    first.script(Inspect, cluster.moved(KEY, 1, epoch=8))
    second.script(Inspect, Recovering(20), report)
    second.script(Evict, cluster.moved(KEY, 0, epoch=9))
    first.script(Evict, Status.ERROR)
    lock = make(acquire_timeout_s=0)
    if client.name == "sync":
        assert lock.inspect() == {"holders": [], "waiters": []}
        assert lock.evict(5) is False
    else:
        assert await lock.inspect() == {"holders": [], "waiters": []}
        assert await lock.evict(5) is False
    assert first.asked(Evict)[0].fence == 5


# What belongs to the blocking client alone.


def test_cancel_while_it_pauses(cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, Recovering(500))
    lock = sync_client.DistributedLock(KEY, None, servers=cluster.seeds)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            lock.acquire()
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    cluster.servers[0].wait_asked(Acquire, 2)
    time.sleep(0.1)  # it has its answer by now, and half a second to wait
    with Pace() as pace:
        lock.cancel()
        thread.join(PATIENCE)
    assert pace.seconds < 0.3
    assert isinstance(caught[0], errors.AcquireCancelledError)


def test_a_fork_keeps_the_map(cluster: ScriptedCluster) -> None:
    with sync_client.DistributedLock(KEY, servers=cluster.seeds):
        pass
    pid = os.fork()
    if pid == 0:
        try:
            with sync_client.DistributedLock(KEY, servers=cluster.seeds):
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cluster.loads() == 1
    assert len(cluster.servers[0].asked(Acquire)) == 2


# What is written.


def moved_error() -> errors.MovedError:
    return errors.MovedError(
        "it moved", shard=5, epoch=8, to="b:6388", place="p1", key=KEY, server="a:6388"
    )


def test_errors_survive_pickling() -> None:
    moved = pickle.loads(pickle.dumps(moved_error()))
    assert (str(moved), moved.shard, moved.epoch, moved.to) == ("it moved", 5, 8, "b:6388")
    assert (moved.place, moved.key, moved.server) == ("p1", KEY, "a:6388")
    recovering = errors.RecoveringError("not yet", retry_s=0.5, key=KEY)
    recovering = pickle.loads(pickle.dumps(recovering))
    assert (recovering.retry_s, recovering.key, recovering.server) == (0.5, KEY, None)


async def test_static_servers_follow_nothing(client: Client, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Acquire, cluster.moved(KEY, 1, epoch=8), Recovering(1500))
    servers = [str(first)]
    with pytest.raises(errors.MovedError, match=f"its shard .* is at {second} now") as caught:
        await client.lock(KEY, servers=servers).acquire()
    assert caught.value.to == str(second)
    with pytest.raises(errors.RecoveringError, match=r"try again in 1\.5 s") as not_yet:
        await client.lock(KEY, servers=servers).acquire()
    assert not_yet.value.retry_s == 1.5
    assert second.asked() == []


@pytest.mark.parametrize(
    ("servers", "text"),
    [
        ("cluster://", "name one or more servers"),
        ("cluster://a:1,,b:2", "name one or more servers"),
        ("cluster://a:1,a:1", "names one server twice"),
        ("cluster://a:x", "server 'a:x' is none"),
        ("cluster://a:1/", "server 'a:1/' is none"),
        (["cluster://a:1"], "is a cluster: give it alone"),
        ("a:6388", "give a list"),
    ],
)
def test_bad_seeds(client: Client, servers: Any, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text) as caught:
        client.lock(KEY, servers=servers)
    assert "\n" not in str(caught.value)


def test_a_sharding_strategy_is_refused(client: Client) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="leave it out, a cluster has its own"):
        client.lock(KEY, servers="cluster://a:1", sharding_strategy=lambda key, number: 0)
    shown = client.lock(KEY, servers="cluster://a:1, b", auth_token="secret-word")
    assert shown.server == "cluster://a:1,b:6388"
    assert "secret-word" not in repr(shown)


# Three real servers over a real etcd.

LEASE = 8
"""Long enough for a shard whose server has crashed to get another one meanwhile."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("cluster")
    times = ("--default-lease-ttl", str(LEASE), "--shutdown-timeout", "3")
    with (
        Etcd(directory) as etcd,
        ClusterStage(directory, etcd, *times, serving_lease=2, max_lease=LEASE) as stage,
    ):
        stage.wait_settled()
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
        await asyncio.to_thread(stage.move, [get_shard_id(key)], server)
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
