"""Looks now and then whether somebody waits in a circle, and says so. Nothing is broken here."""

from __future__ import annotations

import math
from collections.abc import Generator

from dflockd import clock
from dflockd.server.log import SparingLog
from dflockd.table import LockTable
from dflockd.table.blocking import DeadlockSearch, in_words

INTERVAL = 5.0
"""Seconds from one look to the next, while somebody waits."""

MOST_SAID = 20
"""Deadlocks that are reported; all are counted."""


class Deadlocks:
    """What the last look at who waits for whom has shown.

    Args:
        table: what is looked at.

    Attributes:
        longest: most waits in a row: a holder that waits itself is the second.
        circles: each in words; logged when they are first seen.
        number: how many circles there are.
        groups: in how many somebody waits, of the keys where groups take turns.
    """

    def __init__(self, table: LockTable) -> None:
        self._table = table
        self._next = clock.now() + INTERVAL
        self.longest = 0
        self.circles: list[str] = []
        self.number = 0
        self.groups = 0
        self._since = math.inf

    def oldest(self, now: float) -> float:
        """Return for how long somebody has waited who has waited longest; 0 while nobody does."""
        return max(0.0, now - self._since) if self._table.counts.waiting else 0.0

    def is_due(self, now: float) -> bool:
        """Say whether it is time for the next look, which none goes on with so far."""
        return now >= self._next

    def look(self, log: SparingLog) -> Generator[None, None, None]:
        """Look, and say in the log what was not there the last time."""
        self._next = math.inf
        look = DeadlockSearch(self._table.each_partition() if self._table.counts.waiting else ())
        while not look.step():
            yield
        self._next = clock.now() + INTERVAL
        before = set(self.circles)
        self.longest, self.number = look.longest, len(look.circles)
        self._since, self.groups = look.since, look.groups
        self.circles = sorted(map(in_words, look.circles[:MOST_SAID]))
        for circle in self.circles:
            if circle not in before:
                text = "deadlock, which only a timeout or the end of a lease resolves: %s"
                log.warning(text, ascii(circle)[1:-1])  # keys can contain anything
        if self.circles:
            self._table.about["circles"] = self.circles
        else:
            self._table.about.pop("circles", None)
