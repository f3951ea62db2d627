"""Clients of a cluster follow where a shard has gone, and take their position along."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dflockd import errors
from dflockd.wire import (
    Acquire,
    Enqueue,
    Granted,
    How,
    Moved,
    Recovering,
    Release,
    Shards,
    Status,
    Wait,
)
from tests.dflockd.client.cluster.support import KEY, Make, is_granted
from tests.dflockd.client_support import soon, until
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.scripted_server import ScriptedCluster, grant

pytestmark = pytest.mark.usefixtures("no_idle_connections")


def grant_of(lease: int) -> Callable[[Any], Granted]:
    return lambda request: grant(Acquire(request.space, request.key, 1, 0, lease))


async def test_moved_is_followed_and_learned(make: Make, cluster: ScriptedCluster) -> None:
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


async def test_what_is_left_of_the_time_is_asked_for(make: Make, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers

    def later(_: object) -> Moved:
        time.sleep(1.2)
        return cluster.moved(KEY, 1)

    first.script(Acquire, later)
    second.script(Acquire, Status.TIMEOUT)
    assert await make(acquire_timeout_s=5).acquire() is False
    # First whether it is free: who waits for less than whole seconds cuts that off himself. On a slow
    # machine the first server is asked so too.
    assert [request.timeout for request in first.asked(Acquire)] in ([5], [0])
    at_once, left = (request.timeout for request in second.asked(Acquire))
    assert at_once == 0
    assert 0 < left <= 4


async def test_a_place_is_taken_along(make: Make, cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, cluster.moved(KEY, 1, place="p1"))
    cluster.servers[1].script(Acquire, Recovering(10), cluster.moved(KEY, 0, place="p2"))

    def moved_back(_: object) -> Any:
        cluster.servers[0].script(Acquire, grant)
        return cluster.moved(KEY, 0, place="p2")

    cluster.servers[1].script(Acquire, Recovering(10), moved_back)
    async with make(label="me") as lock:
        assert lock.server == str(cluster.servers[0])
    first, second = (server.asked(Acquire) for server in cluster.servers)
    assert [request.ticket for request in second] == [b"p1", b"p1"]
    assert [request.ticket for request in first] == [b"", b"p2"]


async def test_a_blocked_waiter_moves(make: Make, cluster: ScriptedCluster) -> None:
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
    assert [type(r) for r in second.asked()] == [Acquire, Release]
    assert second.asked(Acquire)[0].ticket == b"p1"


async def test_wait_goes_on_where_the_place_is(make: Make, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, cluster.moved(KEY, 1, place="p1"))
    lock = make()
    assert await lock.enqueue() == "queued"
    assert await lock.wait(7) is True
    assert lock.server == str(second)
    [request] = second.asked()
    assert (type(request), request.ticket, request.timeout) == (Acquire, b"p1", 7)
    assert await lock.release() is True


async def test_wait_on_a_connection_that_broke(make: Make, cluster: ScriptedCluster) -> None:
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


async def test_wait_again_while_the_shard_is_frozen(make: Make, cluster: ScriptedCluster) -> None:
    """The place is still this connection's, or the grant that nobody has told it of."""
    first, _ = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, Recovering(20), Recovering(20), grant_of(7))
    lock = make(lease_ttl_s=7)
    assert await lock.enqueue() == "queued"
    assert await lock.wait() is True
    assert [type(r) for r in first.asked()] == [Enqueue, Wait, Wait, Wait]
    assert await lock.release() is True


async def test_wait_elsewhere_while_the_shard_is_frozen(
    make: Make, cluster: ScriptedCluster
) -> None:
    """The place would be served on a connection that waits for nothing, and nobody would know."""
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, Recovering(100))
    lock = make()
    assert await lock.enqueue() == "queued"
    cluster.is_at(1, epoch=8)
    first.script(Shards, cluster.report(0, 7))
    assert await lock.wait() is True
    assert len(second.asked(Acquire)) == 1
    [number] = [number for number, request in first.requests if isinstance(request, Enqueue)]
    await until(lambda: number in first.ended)
    assert await lock.release() is True


async def test_wait_once_the_place_has_moved_and_the_next_is_not_ready(
    make: Make, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, Recovering(20), cluster.moved(KEY, 1, place="p1"))
    second.script(Acquire, Recovering(20), grant)
    lock = make()
    assert await lock.enqueue() == "queued"
    assert await lock.wait() is True
    assert [(type(r), r.ticket) for r in second.asked()] == [(Acquire, b"p1")] * 2
    assert await lock.release() is True


async def test_enqueue_is_sent_on(make: Make, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Enqueue, cluster.moved(KEY, 1))
    second.script(Enqueue, Status.QUEUED)
    second.script(Wait, Status.TIMEOUT)
    lock = make()
    assert await lock.enqueue() == "queued"
    assert await lock.wait(1) is False
    assert len(second.asked(Wait)) == 1


async def test_two_servers_that_are_not_of_one_mind(make: Make, cluster: ScriptedCluster) -> None:
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
    make: Make, cluster: ScriptedCluster
) -> None:
    first, second = cluster.servers

    def late(request: Any) -> Granted:
        time.sleep(1.5)
        return grant(request)

    first.script(Acquire, late)
    first.script(How.CONFIRM, cluster.moved(KEY, 1))
    lock = make(lease_ttl_s=3)
    assert await lock.acquire() is True
    assert lock.server == str(second)
    assert (
        first.asked(How.CONFIRM)[0].token
        == second.asked(How.CONFIRM)[0].token
        == lock.token.encode()
    )
    assert second.asked(Acquire) == []
    assert await lock.release() is True
