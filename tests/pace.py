"""How long something took, without what the machine took from this process meanwhile."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

BEAT = 0.01
USUAL = 0.002
"""Seconds by which a short sleep is too long on an idle machine."""


class Pace:
    """A stopwatch for what must be done in time, on a machine that is busy with other things.

    A thread sleeps over and over for a moment. By as much as its sleeps are too long this process was
    not served, and that does not count. On an idle machine nothing is taken off; on a busy one each
    wait of the thread is as late as those of the code under test, and there are more of them.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._late = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def wall(self) -> float:
        """Seconds so far, as a clock has them: for what must not end too early."""
        return time.monotonic() - self._began

    @property
    def seconds(self) -> float:
        """Seconds so far, of those in which this process was served."""
        return self.wall - self._late

    def _beat(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            time.sleep(BEAT)
            self._late += max(0.0, time.monotonic() - before - BEAT - USUAL)
