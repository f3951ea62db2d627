"""A lock that was just taken, and what becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from dflockd import clock, errors
from tests.dflockd.client_support import Calls, Client, Time, soon, until
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess

LEASE = 600
"""Seconds; they end when the test sets the clock of the clients forward, and not before."""


class Held:
    """A lock that was just taken, and what becomes of it."""

    def __init__(
        self, client: Client, server: ServerProcess | Proxy | None, suffix: str = "", **options: Any
    ) -> None:
        self.calls = Calls()
        self.key = f"key-{client.name}{suffix}"
        self.lock = client.lock(self.key, server, on_lost=self.calls, **options)
        self.asked_at = self.granted_at = 0.0

    @classmethod
    async def take(
        cls, client: Client, server: ServerProcess | Proxy | None, **options: Any
    ) -> Held:
        self = cls(client, server, **options)
        self.asked_at = clock.now()
        assert await soon(self.lock.acquire()) is True
        self.granted_at = clock.now()
        return self

    async def lost_at_once(self) -> None:
        """It is told of that long before its lease ends."""
        await self.calls.first()
        await self.stays_lost()

    async def stays_lost(self) -> None:
        assert (self.lock.held, self.lock.token, self.lock.lease) == (False, None, 0)
        assert self.lock.state == "lost"
        with pytest.raises(errors.LockLostError):
            await self.lock.check()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert not self.lock.held, "resurrected"
            await asyncio.sleep(0.01)
        assert self.calls.locks == [getattr(self.lock, "lock", self.lock)]
        assert await self.lock.release() is False
        assert len(self.calls.locks) == 1

    async def kept_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.lock.held
            await asyncio.sleep(0.01)
        assert not self.calls.locks


async def end_leases(
    clients_time: Time, held: Sequence[Held], doubtful: Sequence[Held] = ()
) -> None:
    """Check that locks are lost with their leases, not before, and that they are told.

    They are held until then; those whose connections break are in doubt soon, and never held again.
    """
    for hold in doubtful:
        await until(lambda hold=hold: not hold.lock.held)  # type: ignore[misc]
    holds = [*held, *doubtful]
    states = ["held"] * len(held) + ["doubtful"] * len(doubtful)
    assert [hold.lock.state for hold in holds] == states
    first, last = (min(each.asked_at for each in holds), max(each.granted_at for each in holds))
    clients_time.go_on_from(first + 0.75 * LEASE)  # the renewals are due
    await asyncio.sleep(0.3)
    clients_time.stand_at(first + LEASE - 0.001)
    assert [hold.lock.state for hold in holds] == states
    assert not any(hold.calls.locks for hold in holds), "lost before its lease ended"
    clients_time.stand_at(last + LEASE)
    assert {hold.lock.state for hold in holds} == {"lost"}, "held past its lease"
    clients_time.go_on_from(last + LEASE)
    for hold in holds:
        assert hold.lock.fence
        await hold.calls.first()
