"""Looks now and then whether somebody waits in a circle, and says so. Nothing is broken here."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from dflockd.server.searches import REST, SLICE
from dflockd.table.blocking import Look, in_words

if TYPE_CHECKING:
    from dflockd.server.handling import Handling

INTERVAL = 5.0
"""Seconds from one look to the next, while somebody waits."""

MOST_SAID = 20
"""Deadlocks that are reported; all are counted."""

logger = logging.getLogger("dflockd.server")


class Blocking:
    """What the last look at who waits for whom has shown.

    Args:
        server: whose table is looked at.

    Attributes:
        longest: most waits in a row: a holder that waits itself is the second.
        circles: each in words; logged when they are first seen.
        number: how many circles there are.
        groups: in how many somebody waits, of the keys where groups take turns.
    """

    def __init__(self, server: Handling) -> None:
        self._server = server
        self._look: Look | None = None
        self._timer: asyncio.Handle | None = None
        self.longest = 0
        self.circles: list[str] = []
        self.number = 0
        self.groups = 0
        self._since = math.inf

    def oldest(self, now: float) -> float:
        """Return for how long somebody has waited who has waited longest; 0 while nobody does."""
        return max(0.0, now - self._since) if self._server.table.counts.waiting else 0.0

    def start(self) -> None:
        """Look from now on."""
        self._timer = self._server.loop.call_later(INTERVAL, self._go_on)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        table, pause = self._server.table, REST
        if self._look is None:
            self._look = Look(table.each_partition() if table.counts.waiting else ())
        until, is_done = time.monotonic() + SLICE, self._look.step()
        while not is_done and time.monotonic() < until:
            is_done = self._look.step()
        if is_done:
            self._take(self._look)
            self._look, pause = None, INTERVAL
        self._timer = self._server.loop.call_later(pause, self._go_on)

    def _take(self, look: Look) -> None:
        before = set(self.circles)
        self.longest, self.number = look.longest, len(look.circles)
        self._since, self.groups = look.since, look.groups
        self.circles = sorted(map(in_words, look.circles[:MOST_SAID]))
        for circle in self.circles:
            if circle not in before:
                text = "deadlock, which only a timeout or the end of a lease resolves: %s"
                logger.warning(text, ascii(circle)[1:-1])  # keys can contain anything
        if self.circles:
            self._server.table.about["circles"] = self.circles
        else:
            self._server.table.about.pop("circles", None)
