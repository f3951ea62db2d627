"""Announces that tasks wait, and asks servers for them, where that holds nobody up."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("celery_dflock")


class Announcer:
    """Says who waits, on a thread of its own: receivers of the signal may ask servers and take long."""

    def __init__(self) -> None:
        self._sayings: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def announce(self, say: Callable[[], object]) -> None:
        """Have something said, after what came before. Returns at once."""
        self._sayings.put(say)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dflock-waiting", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """End the thread, once it has said all."""
        self._sayings.put(None)

    def _run(self) -> None:
        while (say := self._sayings.get()) is not None:
            try:
                say()
            except Exception:
                logger.exception("%r of a task that waits failed", say)
