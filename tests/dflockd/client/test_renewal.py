"""Leases are renewed, and what comes of it where they are not."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

import pytest

from dflockd import clock, errors
from dflockd.client import renewal
from dflockd.client.connection import Route
from dflockd.client.lease import RENEWAL_JITTER, TOGETHER, Lease
from dflockd.client.operations import Grant, Target
from dflockd.client.process import close_idle_connections
from dflockd.wire import Space
from tests.dflockd.client.homes import Home
from tests.dflockd.client.stage import Stage
from tests.dflockd.client.wires import FakeLink, Wire
from tests.dflockd.client_support import (
    Calls,
    Client,
    client_named,
    is_free,
    left_of_lease,
    renewed,
    soon,
    until,
)
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_the_lease_is_renewed(server: ServerProcess, key: str) -> None:
    """Both clients at once, with short leases and long ones, and a share of each before a renewal."""

    async def hold(client: Client, lease: int, ratio: float) -> None:
        lost, times = Calls(), 3
        name = f"{key}-{client.name}-{lease}-{ratio}"
        options = {"lease_ttl_s": lease, "renew_ratio": ratio, "on_lost": lost}
        began = time.monotonic()
        async with client.lock(name, server, **options) as lock:
            assert lock.lease == lease
            token = lock.token
            await renewed(server, name, times)
            assert lock.held
            assert lock.token == token
            # A share of the lease passes before each renewal, less up to a tenth of that share.
            assert time.monotonic() - began > 0.9 * times * ratio * lease
        assert not lost.locks
        assert is_free(server, name)

    with client_named("sync") as blocking, client_named("asyncio") as not_blocking:
        await asyncio.gather(
            *(
                hold(client, *case)
                for client in (blocking, not_blocking)
                for case in ((600, 0.001), (60, 0.005), (60, 0.02), (8, 0.1))
            )
        )


def test_an_older_answer_makes_a_shorter_lease_no_longer() -> None:
    """The server has read the shorter one since, on another connection."""
    target, began = Target(Space.LOCK, b"key", 1, None, "server"), clock.now()
    lease = Lease(target, (b"token", 60, began + 60), Mock(), 0.5)
    asked = began + 0.5
    lease.shorten(5, asked)
    assert lease.renewed(Grant(b"token", 60, began + 60))
    assert lease.deadline == asked + 5
    assert lease.renewed(Grant(b"token", 5, asked + 5))
    assert lease.renewed(Grant(b"token", 60, asked + 1 + 60))
    assert lease.deadline == asked + 1 + 60


@pytest.mark.parametrize("owes", [True, False])
def test_what_another_server_may_still_read_stays_open(owes: bool) -> None:
    """Back in charge it would find the renewal and the end of that connection, and free the lock."""
    stage = Stage(1, servers=2)
    with stage.set_up():
        home, links = Home(stage), []
        for number, address in enumerate(stage.addresses):
            links.append(FakeLink(Wire(stage, home, number), Route(address)))
        before, now = links
        target = Target(Space.LOCK, b"key", 1, None, "server")
        lease = Lease(target, (b"token", 60, stage.now + 60), before, 0.5)
        keeper = renewal._Keeper(lease, home.pool)
        if owes:
            keeper.sent[before] = stage.now
        renewal._Rescue(keeper, before, TimeoutError())._end(now)
        assert before.closed is not owes
        assert lease.spares == ((before,) if owes else ())
        assert not now.closed


@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.5, 0.9])
@pytest.mark.parametrize("seconds", [1, 30])
def test_a_process_wakes_once_for_many_renewals(seconds: int, ratio: float) -> None:
    """As early as the jitter allows, and no earlier: then most are due at the same few instants."""
    target, wait, number = Target(Space.LOCK, b"key", 1, None, "server"), seconds * ratio, 2000
    due = set()
    for granted in range(number):
        began = clock.now() + granted * seconds / number
        lease = Lease(target, (b"token", seconds, began + seconds), Mock(), ratio)
        lease.spread()
        assert 0.9 * wait - 1e-6 < lease.renew_at - began < wait + 1e-6
        due.add(lease.renew_at)
    instants = seconds * (1 + ratio) / TOGETHER
    room = wait * RENEWAL_JITTER / TOGETHER
    if room > 1:
        assert len(due) < instants + number / room


async def test_renew(client: Client, server: ServerProcess, key: str) -> None:
    lock = client.lock(key, server, lease_ttl_s=10)
    assert await lock.renew() is False
    async with lock:
        assert await lock.renew(100) is True
        assert lock.lease == 100
        assert 95 < left_of_lease(server, key) <= 100
        assert await lock.renew() is True, "as granted first"
        assert lock.lease == 10
        for bad in (0, -1, 1.5, True, "5"):
            with pytest.raises(errors.InvalidArgumentError):
                await lock.renew(bad)
        assert lock.held
        assert lock.token
    assert await lock.renew() is False
    assert is_free(server, key)


async def test_release_and_renew_while_a_renewal_is_under_way(
    client: Client, server: ServerProcess, key: str
) -> None:
    """Its answer comes first, and is not taken for theirs."""
    for call in ("release", "renew"):
        proxy = Proxy(server.port)
        try:
            lock = client.lock(key, proxy, lease_ttl_s=20, renew_ratio=0.02)
            await lock.acquire()
            proxy.withhold_replies()
            seen = [left_of_lease(server, key)]

            def is_renewed(seen: list[float] = seen) -> bool:
                seen.append(left_of_lease(server, key))
                return seen[-1] > seen[-2]

            await until(is_renewed)
            calling = asyncio.ensure_future(getattr(lock, call)())
            await asyncio.sleep(0.05)
            assert not calling.done()
            proxy.pass_on()
            assert await soon(calling) is True
            assert await lock.release() is (call == "renew")
            assert is_free(server, key)
        finally:
            close_idle_connections()
            proxy.close()


async def test_a_lease_that_is_refused(client: Client, server: ServerProcess, key: str) -> None:
    with pytest.raises(errors.RefusedError, match="lease"):
        await client.lock(key, server, lease_ttl_s=10_000).acquire()
    assert is_free(server, key)


async def test_renewing_a_lock_that_is_gone(
    client: Client, server: ServerProcess, key: str
) -> None:
    lost = Calls()
    lock = client.lock(key, server, on_lost=lost)
    await lock.acquire()
    fence = lock.fence
    assert server.connect().ask("r", key, lock.token) == "ok"
    assert await lock.renew() is False
    assert not lock.held
    assert lock.fence == fence, "what a resource will refuse from now on"
    await lost.first()
    assert lock.state == "lost"
    assert await lock.release() is False
    assert lock.state == "free"
    assert await lock.acquire() is True
    assert lock.fence > fence
    assert len(lost.locks) == 1
    await lock.release()


async def test_releasing_a_lock_that_is_gone(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock = client.lock(key, server)
    await lock.acquire()
    assert server.connect().ask("r", key, lock.token) == "ok"
    assert await lock.release() is False
