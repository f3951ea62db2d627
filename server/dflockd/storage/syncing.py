"""The thread that brings the journal to the disk while the server goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dflockd import clock
from dflockd.storage.journal import Journal

EVERY = 1.0
"""Seconds from the first record that is not synced to the sync."""

SLOW = 5.0
"""Seconds that a sync takes where something is wrong with the disk."""

logger = logging.getLogger("dflockd.storage")


class Syncing:
    """Syncs a journal, at most once in `EVERY` seconds and only if something was recorded.

    Args:
        journal: what is synced.
        failed: called once, in the thread, if the disk does not take it or the thread cannot go on.
            It is over then.
    """

    def __init__(self, journal: Journal, failed: Callable[[Exception], object]) -> None:
        self._journal = journal
        self._failed = failed
        self._due = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflockd-sync", daemon=True)
        journal.wake = self._due.set
        self._due.set()  # for what was recorded before
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and return when it has ended."""
        self._stopped.set()
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._due.wait()
            if self._stopped.wait(EVERY):
                return
            self._due.clear()
            began = clock.now()
            try:
                self._journal.sync()
            except Exception as exc:
                # Also what is no fault of the disk, such as a lack of memory: without this thread
                # nothing would be synced any more, and nothing deleted, and nobody would know.
                self._failed(exc)
                return
            took = clock.now() - began
            if took > SLOW:
                text = "the disk took %.1f s to sync the journal: a power cut loses as much"
                logger.warning(text, took)
