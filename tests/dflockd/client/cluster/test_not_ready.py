"""Clients of a cluster that is not ready ask again, for as long as they may wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dflockd import errors
from dflockd.wire import Acquire, Recovering, Shards, Status
from tests.dflockd.client.cluster.support import KEY, Make, is_granted
from tests.dflockd.client_support import soon, until
from tests.dflockd.scripted_server import End, ScriptedCluster, grant
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_recovering_is_asked_again(make: Make, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Acquire, Recovering(100), Recovering(100), grant)
    with Pace() as pace:
        async with make():
            assert pace.wall >= 0.2
            assert pace.seconds < 2
    assert len(first.asked(Acquire)) == 3
    assert first.accepted <= 2, "the connection was kept meanwhile"
    assert second.asked(Acquire) == []


async def test_recovering_until_the_time_is_over(make: Make, cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, Recovering(20_000))
    with Pace() as pace, pytest.raises(errors.RecoveringError) as caught:
        await make(acquire_timeout_s=1).acquire()
    assert pace.wall >= 1
    assert pace.seconds < 2
    assert caught.value.retry_s == 20
    assert caught.value.server == str(cluster.servers[0])
    assert 2 <= len(cluster.servers[0].asked(Acquire)) <= 4


async def test_somebody_else_holds_it_in_the_end(make: Make, cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, Recovering(100), Status.TIMEOUT)
    assert await make(acquire_timeout_s=1).acquire() is False


@pytest.mark.parametrize("refusal", [Recovering(1), Status.DRAINING])
async def test_without_time_nothing_is_waited_for(
    make: Make, cluster: ScriptedCluster, refusal: Any
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


async def test_without_time_the_map_is_loaded_again(make: Make, cluster: ScriptedCluster) -> None:
    async with make("other"):
        pass
    cluster.is_at(1, epoch=8)
    cluster.servers[0].script(Acquire, Status.DRAINING)
    assert await is_granted(make(acquire_timeout_s=0))
    assert len(cluster.servers[1].asked(Shards)) >= 1, "another one is asked for the map"


@pytest.mark.parametrize("refusal", [Status.DRAINING, End])
async def test_a_server_that_ends(make: Make, cluster: ScriptedCluster, refusal: Any) -> None:
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


async def test_a_shard_that_nobody_has(make: Make, cluster: ScriptedCluster) -> None:
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
    make: Make, cluster: ScriptedCluster
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
