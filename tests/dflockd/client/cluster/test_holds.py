"""What clients hold in a cluster, when its server dies, moves the shard away or falls silent."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from dflockd.wire import (
    Acquire,
    Evict,
    How,
    Inspect,
    Pause,
    Recovering,
    Release,
    Renew,
    Renewed,
    Report,
    Resume,
    Shards,
    Status,
)
from tests.dflockd.client.cluster.support import KEY, Make
from tests.dflockd.client_support import Calls, Client, soon, until
from tests.dflockd.scripted_server import ScriptedCluster, ScriptedServer, Silence, renewed

pytestmark = pytest.mark.usefixtures("no_idle_connections")


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


RENEWED = {"lease_ttl_s": 600, "renew_ratio": 0.2 / 600}
"""A lease that does not end meanwhile, renewed five times a second."""


@pytest.mark.parametrize("how", ["answer", "end"])
async def test_a_held_lock_moves(make: Make, cluster: ScriptedCluster, how: str) -> None:
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


async def test_a_held_lock_whose_server_dies(make: Make, cluster: ScriptedCluster) -> None:
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


async def test_a_held_lock_while_all_servers_are_away(make: Make, cluster: ScriptedCluster) -> None:
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


async def test_a_held_lock_whose_server_falls_silent(make: Make, cluster: ScriptedCluster) -> None:
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
async def test_a_slow_server_is_waited_for(make: Make, cluster: ScriptedCluster) -> None:
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
    make: Make, cluster: ScriptedCluster
) -> None:
    first, _ = cluster.servers
    first.script(Renew, Recovering(50), Recovering(50), renewed)
    lock = make(**RENEWED)
    await lock.acquire()
    await until(lambda: len(first.asked(Renew)) == 3)
    await held(lock, 0.3)
    numbers = {n for n, r in first.requests if isinstance(r, Renew | Acquire)}
    assert len(numbers) == 1, "the hold stands on the connection that it was granted on"
    assert await lock.release() is True


@pytest.mark.parametrize("how", ["by itself", "renew"])
async def test_a_server_keeps_its_connection_until_another_has_the_lock(
    make: Make, cluster: ScriptedCluster, how: str
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
    make: Make, cluster: ScriptedCluster
) -> None:
    first, _ = cluster.servers
    first.script(Renew, Recovering(300), renewed)
    lock = make(lease_ttl_s=120, renew_ratio=0.01)
    await lock.acquire()
    await until(lambda: len(first.asked(Renew)) == 1)
    await asyncio.sleep(0.05)  # it has its answer by now, and is about to ask again
    assert await lock.renew() is True
    assert len(first.asked(Renew)) == 2, "the one that it was about to send does for both"
    numbers = {n for n, r in first.requests if isinstance(r, Renew | Acquire)}
    assert len(numbers) == 1, "the hold stands on the connection that it was granted on"
    assert await lock.release() is True


async def test_a_lock_that_the_new_server_does_not_know(
    make: Make, cluster: ScriptedCluster
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


async def test_no_renewal_past_the_lease(make: Make, cluster: ScriptedCluster) -> None:
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


async def test_renew_follows(make: Make, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    lock = make(**RENEWED)
    await lock.acquire()
    first.script(Renew, Recovering(20), cluster.moved(KEY, 1, epoch=8))
    assert await lock.renew() is True
    assert len(second.asked(Renew)) == 1
    await until(lambda: len(second.asked(Renew)) == 2)
    assert lock.held
    assert await lock.release() is True
    assert second.asked(Release)


async def test_release_follows(make: Make, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Release, Recovering(20), cluster.moved(KEY, 1, epoch=8))
    lock = make()
    await lock.acquire()
    assert await lock.release() is True
    assert len(second.asked(Release)) == 1


async def test_release_after_the_server_has_died(make: Make, cluster: ScriptedCluster) -> None:
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


async def test_detach_and_adopt_follow(make: Make, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(How.DETACH, Recovering(20), cluster.moved(KEY, 1, epoch=8))
    second.script(How.DETACH, Renewed(60))
    second.script(How.CONFIRM, cluster.moved(KEY, 0, epoch=9))
    lock = make(acquire_timeout_s=0)
    await lock.acquire()
    token = lock.token
    assert await lock.detach(60) == token
    assert not lock.held
    other = make(acquire_timeout_s=0)
    first.script(How.CONFIRM, Recovering(20), Renewed(33))
    assert await other.adopt(token) is True
    assert other.held
    assert await other.release() is True
    assert len(first.asked(Release)) == 1


async def test_a_pause_follows_its_key(
    make: Make, client: Client, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Pause, cluster.moved(KEY, 1, epoch=8))
    second.script(Pause, Recovering(20), Status.OK)
    second.script(Resume, cluster.moved(KEY, 0, epoch=9))
    first.script(Resume, Status.ERROR)
    lock = make(acquire_timeout_s=0)
    if client.name == "sync":
        lock.pause(1.5, "it is down", "me")
        assert lock.resume() is False
    else:
        await lock.pause(1.5, "it is down", "me")
        assert await lock.resume() is False
    assert second.asked(Pause)[-1] == Pause(KEY.encode(), 1500, b"me", b"it is down")
    assert first.asked(Resume)[-1] == Resume(KEY.encode())


async def test_inspect_and_evict_follow(
    make: Make, client: Client, cluster: ScriptedCluster
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
