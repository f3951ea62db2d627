"""What worker processes owe to those who wait: at shutdown, waiting for locks ends at once.

``worker_shutting_down`` fires in the main process only, inside a signal handler. Prefork children
learn of it through a pipe that they inherit: the main process closes its end, which every child
sees at once, and a write end that a child has inherited is closed by a fork hook.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from celery import signals

from dflockd.sync_client import DistributedLock


class Shutdown:
    """Whether this worker is shutting down, and who has to be told."""

    def __init__(self) -> None:
        self._begun = False
        self._waiting: set[DistributedLock] = set()
        self._read_end = -1
        self._write_end = -1
        self._listener: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        """Whether nobody should begin to wait any more."""
        return self._begun

    def add(self, lock: DistributedLock) -> None:
        """From now on a shutdown makes `lock.acquire()` raise `AcquireCancelledError`."""
        self._listen()
        self._waiting.add(lock)
        if self._begun:
            lock.cancel()

    def discard(self, lock: DistributedLock) -> None:
        """Nobody waits for a lock any more."""
        self._waiting.discard(lock)

    def prepare(self, **_: Any) -> None:
        """Make the pipe, before the pool forks."""
        self._begun = False
        if self._read_end < 0:
            self._read_end, self._write_end = os.pipe()

    def begin(self, **_: Any) -> None:
        """Tell everybody. Runs in a signal handler: it takes no lock and does not block."""
        self._begun = True
        self._close_write_end()
        for lock in list(self._waiting):
            lock.cancel()

    def after_fork(self) -> None:
        """Start as a child: with the read end only, and nobody waiting yet."""
        self._waiting = set()
        self._listener = None
        self._close_write_end()

    def _listen(self) -> None:
        is_child = self._read_end >= 0 and self._write_end < 0
        if is_child and self._listener is None and not self._begun:
            self._listener = threading.Thread(
                target=self._hear, name="dflock-shutdown", daemon=True
            )
            self._listener.start()

    def _hear(self) -> None:
        os.read(self._read_end, 1)  # returns at the end of the pipe
        self.begin()

    def _close_write_end(self) -> None:
        write_end, self._write_end = self._write_end, -1
        if write_end >= 0:
            os.close(write_end)


shutdown = Shutdown()
"""The shutdown of the worker that this process belongs to."""

os.register_at_fork(after_in_child=shutdown.after_fork)
signals.worker_init.connect(shutdown.prepare, dispatch_uid="celery_dflock.prepare")
signals.worker_shutting_down.connect(shutdown.begin, dispatch_uid="celery_dflock.begin")
