"""Servers that hang, for tests: what is judged of those who wait for one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dflockd import errors, sync_client
from dflockd.client.pending import PendingAcquires
from tests.dflockd.client_support import soon
from tests.pace import Pace

KEY = "account:7"

GRACE = 2.0
"""Seconds beyond those that were given, in which a server that is well would have answered."""

SLACK = 0.8
"""Seconds that the work takes; what a busy machine takes is left out (`Pace`)."""

TOO_LONG = 8.0
"""Seconds beyond those that were given; it was ten, and is two."""


async def is_not_answered(acquiring: Any, timeout: float) -> None:
    """Check that an attempt ends in time, as one of which nobody has said anything."""
    with Pace() as pace, pytest.raises(errors.UnreachableError, match="no answer in time"):
        await soon(acquiring)
    assert timeout <= pace.wall
    assert pace.seconds < timeout + TOO_LONG


class Waiter:
    """Somebody with a pending acquire, and what came of it."""

    def __init__(
        self, acquires: PendingAcquires, lock: sync_client.DistributedLock, timeout: float
    ) -> None:
        self.lock = lock
        self.error: errors.RemoteError | None = None
        self.queued, self.told, self.ended = (threading.Event() for _ in range(3))
        self.pending = acquires.join(
            lock, timeout, queued=self.queued.set, told=self.told.set, ended=self._end
        )
        acquires.ask()

    def _end(self, error: errors.RemoteError | None) -> None:
        self.error = error
        self.ended.set()
