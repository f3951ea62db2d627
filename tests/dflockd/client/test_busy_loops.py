"""An event loop that stands still while a renewal is waited for there loses no lock."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from tests.dflockd.client.loops import NewLoop, acquire, lock_on, release, run_alone, stays_held
from tests.dflockd.client_support import Calls, is_free, soon
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess, eventually

pytestmark = pytest.mark.timeout(60, method="thread")


def test_a_loop_that_is_busy_during_a_renewal(
    server: ServerProcess, new_loop: NewLoop, key: str
) -> None:
    lost = Calls()
    lock = lock_on(server, key, on_lost=lost)

    async def main() -> None:
        async with lock:
            await asyncio.sleep(0.3)
            renewing = asyncio.create_task(lock.renew())
            await asyncio.sleep(0)
            stays_held(lock, server)  # the loop stands still
            assert await soon(renewing) is True
            assert lock.held

    run_alone(new_loop, main())
    assert not lost.locks
    assert is_free(server, key)


def test_a_lease_that_ends_unrenewed_while_the_loop_is_busy(
    server: ServerProcess, new_loop: NewLoop, key: str
) -> None:
    """The lock is lost; the connections of others, with the number of its own, are theirs."""
    proxy, fillers = Proxy(server.port), list[int]()
    lost = Calls()

    def fill_below(number: int) -> None:
        """Have the next descriptor that is made get this number once it is free."""
        while (filler := os.dup(0)) < number:
            fillers.append(filler)
        os.close(filler)

    lock = lock_on(proxy, key, lease_ttl_s=1, renew_ratio=0.1, on_lost=lost)

    async def main() -> None:
        await acquire(lock)
        fill_below(lock._session.lease.link.fileno())  # type: ignore[union-attr]
        proxy.withhold_replies()
        waiting = [asyncio.create_task(lock.renew()), asyncio.create_task(lock.check())]
        releasing = lock_on(proxy, f"{key}-free")
        await asyncio.sleep(0.05)
        until = time.monotonic() + 10
        while lock.state != "lost":
            assert time.monotonic() < until
            time.sleep(0.02)  # noqa: ASYNC251 - the loop stands still
        others = [lock_on(server, f"{key}-{number}") for number in range(5)]
        for other in others:
            assert await soon(acquire(other)) is True
        assert all(
            isinstance(each, Exception) or not each
            for each in await soon(asyncio.gather(*waiting, return_exceptions=True))
        )
        assert not await release(lock)
        proxy.pass_on()
        async with releasing:
            assert releasing.held
        for other in others:
            assert await soon(release(other)) is True

    try:
        run_alone(new_loop, main())
    finally:
        proxy.close()
        for each in fillers:
            os.close(each)
    eventually(lambda: bool(lost.locks))
    assert lost.locks == [lock]
