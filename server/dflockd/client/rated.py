"""Locks with a rate: what is asked, and that a run has begun.

The server counts a run for one window after it learns that the run has begun. So the client says
that a moment late. If it said so before the first line of the run, the next run could begin a
moment too soon. The release of a run that is over before says that it has begun.
"""

from __future__ import annotations

import math
from typing import Final

from dflockd import clock
from dflockd.client.session import LockSession
from dflockd.rates import RunRate
from dflockd.wire import Rate

REPORT_AFTER: Final = 0.01
"""Seconds from the beginning of a run to the request that says so, at least."""

SHORT: Final = 20.0
"""Seconds. The thread of the process is woken for the runs of a shorter window; it comes by anyway
within a hundredth of a longer one."""


class RatedSession(LockSession):
    """A session with a rate.

    Args:
        plain: as it would be without.
        rate: how many runs may begin.
        begins: whether the run begins with the grant, or when `begin` is called.
    """

    def __init__(self, plain: LockSession, rate: RunRate, *, begins: bool) -> None:
        # Rounded up, else runs could begin sooner than they may; a float may be a little too large.
        asked = Rate(rate.runs, math.ceil(round(rate.per_s * 1000, 6)))
        super().__init__(
            plain.target._replace(rate=asked),
            plain.route,
            plain._renew_ratio,
            plain.shards,
            plain._home,
            plain._on_lost,
        )
        self._begins = begins
        self._is_short = rate.per_s < SHORT

    def begin(self) -> None:
        """Take in that the run begins; nothing happens if it has, or nothing is held."""
        lease = self.lease
        if lease is None or lease.begun is not False or lease.is_over:
            return
        lease.begin(clock.now() + REPORT_AFTER)
        if self._is_short or lease.task is not None:
            self._home().reactor.report(lease)

    def _settle(self, grant: tuple[bytes, int, float] | None, claim: object) -> bool:
        is_held = super()._settle(grant, claim)
        if is_held and self.lease is not None:
            self.lease.begun = False
            if self._begins:
                self.begin()
        return is_held
