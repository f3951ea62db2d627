"""What takes long, done on threads, for somebody who has no time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from dflockd import clock

Job: TypeAlias = Callable[[], object]

logger = logging.getLogger("celery_dflock")


class Errands:
    """Jobs that one thread does, one after the other, in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        """Guards the making of the thread: a signal handler, which must not wait, comes later."""

    def run(self, job: Job) -> None:
        """Have something done, after what came before. Returns at once."""
        self._jobs.put(job)
        if self._thread is not None:
            return
        with self._mutex:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the thread, once it has done all."""
        self._jobs.put(None)

    def join(self) -> None:
        """Return once it has ended, after `close`."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            do(job)


def do(job: Job) -> None:
    """Do something that must not end who does it."""
    try:
        job()
    except Exception:
        logger.exception("%r failed", job)


def at_once(jobs: Sequence[Callable[[], None]], deadline: float) -> list[bool]:
    """Do all of them at once, on threads; say of each whether it was done by the deadline.

    Nobody waits for the threads of the others: a connection that is not made ends in seconds.

    Args:
        jobs: raise nothing.
        deadline: on `dflockd.clock`.
    """
    threads = [threading.Thread(target=job, name="dflock-asking", daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - clock.now()))
    return [not thread.is_alive() for thread in threads]
