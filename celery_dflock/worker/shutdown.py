"""What worker processes owe to those who wait: at shutdown, waiting for locks ends at once.

Only the main process knows that the worker ends; `celery_dflock.worker.ending` tells it here. Prefork
children learn of it through a pipe that they inherit: the main process closes its end, which every
child sees at once, and a write end that a child has inherited is closed by a fork hook. In shared
memory each child says whether a task waits in it, or has been told and has not moved on yet.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import Any

from celery import signals

from dflockd.sync_client import DistributedLock

MARKS = 4096
"""One for each child, by its pid."""

LAST_MOMENT = 2.0
"""Seconds that tasks have to move on, before a cold shutdown kills the processes that they are in."""

LOOK = 0.01
"""Seconds between looks at whether they have."""


class Shutdown:
    """Whether this worker is shutting down, and who has to be told."""

    def __init__(self) -> None:
        self.begun = False
        """Whether nobody should begin to wait any more."""
        self.waiting: dict[DistributedLock, int] = {}
        """Those that are waited for, with the thread in which; `look_again` once one is gone."""
        self._told: set[int] = set()
        """The threads that waited when this began, until their tasks have moved on."""
        self._read_end = -1
        self._write_end = -1
        self._marks: mmap.mmap | None = None
        self._mark = -1
        """The one of this process, if it is a child."""
        self._listener: threading.Thread | None = None

    def add(self, lock: DistributedLock) -> None:
        """From now on a shutdown makes `lock.acquire()` raise `AcquireCancelledError`."""
        self.waiting[lock] = threading.get_ident()
        if self._marks is not None and self._mark >= 0:  # a child
            if self._listener is None:
                self._listen()
            self._marks[self._mark] = 1
        if self.begun:
            self._tell(lock)

    def look_again(self) -> None:
        """See whether anybody waits still."""
        if self.begun:
            self._sees_ends()  # its task has to move on first
        elif self._mark >= 0:
            self._set_mark(bool(self.waiting))

    def prepare(self, **_: Any) -> None:
        """Make the pipe, before the pool forks."""
        self.begun = False
        self._told.clear()
        if self._write_end < 0:
            self._close_read_end()
            self._read_end, self._write_end = os.pipe()
            self._marks = mmap.mmap(-1, MARKS)

    def begin(self, **_: Any) -> None:
        """Tell everybody. Runs in a signal handler: it takes no lock and does not block."""
        self.begun = True
        self._close_write_end()
        for lock in list(self.waiting):
            self._tell(lock)

    def _tell(self, lock: DistributedLock) -> None:
        thread = self.waiting.get(lock)
        if thread is not None:
            self._told.add(thread)
        lock.cancel()

    def settle(self) -> None:
        """Return once those who were told have moved on, or are given up.

        Not those of this very thread: they cannot go on before this returns.
        """
        until = time.monotonic() + LAST_MOMENT
        while self._is_awaited and time.monotonic() < until:
            time.sleep(LOOK)

    def after_fork(self) -> None:
        """Start as a child: with the read end only, and nobody waiting yet."""
        self.waiting = {}
        self._told = set()
        self._listener = None
        self._close_write_end()
        self._mark = -1 if self._marks is None else os.getpid() % MARKS
        self._set_mark(0)

    @property
    def _is_awaited(self) -> bool:
        if self._marks is not None and any(self._marks[:]):
            return True
        here = threading.get_ident()
        return any(thread != here for thread in list(self._told))

    def _set_mark(self, value: int) -> None:
        if self._mark >= 0 and self._marks is not None:
            self._marks[self._mark] = value

    def _sees_ends(self) -> None:
        """Notice the end of each task from now on; in the thread of one that has been told."""
        signals.task_postrun.connect(self._moved_on, weak=False)

    def _listen(self) -> None:
        is_child = self._read_end >= 0 and self._write_end < 0
        if is_child and self._listener is None and not self.begun:
            self._listener = threading.Thread(
                target=self._hear, name="dflock-shutdown", daemon=True
            )
            self._listener.start()

    def _hear(self) -> None:
        os.read(self._read_end, 1)  # returns at the end of the pipe
        self.begin()

    def _moved_on(self, **_: Any) -> None:
        """A task has ended, however: its message is sent, its state is stored."""
        self._told.discard(threading.get_ident())
        self._set_mark(0)

    def _close_read_end(self) -> None:
        read_end, self._read_end = self._read_end, -1
        if read_end >= 0:
            os.close(read_end)

    def _close_write_end(self) -> None:
        write_end, self._write_end = self._write_end, -1
        if write_end >= 0:
            os.close(write_end)


shutdown = Shutdown()
"""The shutdown of the worker that this process belongs to."""

os.register_at_fork(after_in_child=shutdown.after_fork)
signals.worker_init.connect(shutdown.prepare, dispatch_uid="celery_dflock.prepare")
signals.worker_shutting_down.connect(shutdown.begin, dispatch_uid="celery_dflock.begin")
