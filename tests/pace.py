"""How long something took, without what the machine took from this process meanwhile."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple, Self

BEAT = 0.01
USUAL = 0.002
"""Seconds by which a short sleep is too long on an idle machine."""


class Reading(NamedTuple):
    """What a stopwatch shows."""

    wall: float
    seconds: float


class Pace:
    """A stopwatch for what must be done in time, on a machine that is busy with other things.

    A thread sleeps over and over for a moment. By as much as it comes round too late this process was
    not served, and that does not count. On an idle machine nothing is taken off; on a busy one each
    wait of the thread is as late as those of the code under test, and there are more of them.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._round = self._began, 0.0
        """When the thread came round last, and how late it has been in all."""
        self._last: Reading | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._round = self._began, 0.0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._last = self._read()
        self._over.set()
        self._thread.join()

    @property
    def wall(self) -> float:
        """Seconds up to now or the end, as a clock has them: for what must not end too early."""
        return self._read().wall

    @property
    def seconds(self) -> float:
        """Seconds up to now or the end, of those in which this process was served."""
        return self._read().seconds

    def _read(self) -> Reading:
        if self._last is not None:
            return self._last
        came_round, late = self._round  # before the time is taken: nothing between them is left out
        now = time.monotonic()
        wall = now - self._began
        return Reading(wall, wall - late - _lateness(now - came_round))

    def _beat(self) -> None:
        while not self._over.is_set():
            time.sleep(BEAT)
            before, late = self._round
            now = time.monotonic()
            self._round = now, late + _lateness(now - before)


def _lateness(since_last_round: float) -> float:
    return max(0.0, since_last_round - BEAT - USUAL)
