"""A critical section, and what is noted about it."""

from __future__ import annotations

import time
from typing import Any

from dflockd import clock
from dflockd.client.lock import LockBase
from tests.chaos.history import Recorder, now, shared
from tests.chaos.resource import FencedResource

SLICE = 0.01
"""Seconds after which a section looks whether its lease was renewed."""


_TO_MONOTONIC = time.monotonic() - clock.now()
"""Seconds from the clock of the clients, which goes on while a machine is suspended, to that of events.

Determined once, so that the end of a lease is always the same number.
"""


def deadline(lock: Any) -> int | None:
    """When the lease of a lock ends, as its client knows: what `held` goes by, unless in doubt."""
    if isinstance(lock, LockBase):
        lease = lock._session.lease
        return None if lease is None else shared(lease.deadline + _TO_MONOTONIC)
    ends: float | None = lock.deadline
    return None if ends is None else shared(ends)


def work(
    recorder: Recorder, resource: FencedResource, lock: Any, named: dict[str, Any], seconds: float
) -> None:
    """A critical section of `seconds`, with a write before its end.

    It does not look whether the lock is still held before it writes: nothing that it could see would
    be certain. That is what the fence is for.

    Args:
        recorder: where it is noted.
        resource: what it writes to.
        lock: a lock of the clients; held, as far as one can tell.
        named: what its events have in common.
        seconds: how long it takes.
    """
    began, until = now(), deadline(lock)
    fence = lock.fence
    if not lock.held:
        return
    recorder.note("begin", at=began, fence=fence, until=until, **named)
    try:
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            time.sleep(min(SLICE, rest))
            latest = deadline(lock)
            if latest != until:
                until = latest
                recorder.note("renewed", until=until, **named)
        if named.get("limit", 1) == 1:
            resource.write(named["key"], fence, named["who"])
    finally:
        # Held when that is asked, it was held just before.
        at, until = now(), deadline(lock)
        recorder.note("end", at=at, fence=fence, held=lock.held, until=until, **named)


class Heedless:
    """A lock whose holder ignores that its lease can end."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.deadline = None
        self.fence = lock.fence
        self.held = True
