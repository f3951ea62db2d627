"""What workers owe to those who wait: at shutdown, tasks that have not begun wait no more.

Only the run of a message listens, until it has its locks. Nobody else does: what the code of a body,
an eager task or a program takes has nothing to do with the end of a worker.

Only the main process knows that the worker ends; `WorkersEnd` tells it here. Prefork
children learn of it through a pipe that they inherit: the main process closes its end, which every
child sees at once, and a write end that a child has inherited is closed by a fork hook. In shared
memory each child leaves its pid while a task waits in it, or has been told and has not moved on yet.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, signals

from dflockd import clock
from dflockd.sync_client import DistributedLock

MARKS = 4096
"""One for each child, by its pid."""

LAST_MOMENT = 2.0
"""Seconds that tasks have to move on, before a cold shutdown kills the processes that they are in."""

LOOK = 0.01
"""Seconds between looks at whether they have."""


class Shutdown:
    """Whether the worker is shutting down, and who has to be told."""

    def __init__(self) -> None:
        self.begun = False
        """Whether no task should begin to wait any more: until the next worker is made."""
        self.waiting: dict[DistributedLock, int] = {}
        """What runs wait for, with their threads; once this has begun, until these runs have ended."""
        self._pipe = [-1, -1]
        self._marks: memoryview[int] | None = None
        self._mark = -1
        """The one of this process, if it is a child."""
        self._listener: threading.Thread | None = None

    def add(self, lock: DistributedLock) -> None:
        """From now on a shutdown makes `lock.acquire()` raise `AcquireCancelledError`."""
        self.waiting[lock] = threading.get_ident()
        if self._mark >= 0:
            self._set_mark()
        self.listen()
        if self.begun:
            lock.cancel()

    def listen(self) -> None:
        """From now on `begun` says it in a child as well: a thread there waits for the mark."""
        if self._mark >= 0 and self._listener is None and not self.begun:
            hear = threading.Thread(target=self._hear, name="dflock-shutdown", daemon=True)
            self._listener = hear
            hear.start()

    def look_again(self) -> None:
        """See whether anybody waits still; those who were told have to move on first."""
        if self.begun:
            signals.task_postrun.connect(self._moved_on, weak=False)
        else:
            self._set_mark()

    def prepare(self, **_: Any) -> None:
        """Begin with a worker: make the pipe, before the pool forks."""
        self.begun = False
        self.waiting.clear()
        if self._pipe[1] < 0:
            self._close(0)
            self._pipe[:] = os.pipe()
            self._marks = memoryview(mmap.mmap(-1, 4 * MARKS)).cast("I")

    def begin(self, **_: Any) -> None:
        """Tell everybody. Runs in a signal handler: it takes no lock and does not block."""
        self.begun = True
        self._close(1)
        for lock in list(self.waiting):
            lock.cancel()

    def settle(self) -> None:
        """Return once those who were told have moved on, or are given up.

        Not those of this very thread: they cannot go on before this returns.
        """
        until = clock.now() + LAST_MOMENT
        while self._is_awaited and clock.now() < until:
            time.sleep(LOOK)

    def after_fork(self) -> None:
        """Start as a child: with the read end only, and nobody waiting yet."""
        self.waiting = {}
        self._listener = None
        self._close(1)
        self._mark = -1 if self._marks is None else os.getpid() % MARKS
        self._set_mark()

    @property
    def _is_awaited(self) -> bool:
        here = threading.get_ident()
        marks = () if self._marks is None else self._marks
        is_child_awaited = any(pid and _is_alive(pid) for pid in marks)
        return is_child_awaited or any(each != here for each in list(self.waiting.values()))

    def _set_mark(self) -> None:
        if self._mark >= 0 and self._marks is not None:
            self._marks[self._mark] = os.getpid() if self.waiting else 0

    def _hear(self) -> None:
        os.read(self._pipe[0], 1)  # returns at the end of the pipe
        self.begin()

    def _moved_on(self, **_: Any) -> None:
        """A task has ended, however: its message is sent, its state is stored."""
        here = threading.get_ident()
        for lock, thread in list(self.waiting.items()):
            if thread == here:
                self.waiting.pop(lock, None)
        self._set_mark()

    def _close(self, end: int) -> None:
        descriptor, self._pipe[end] = self._pipe[end], -1
        if descriptor >= 0:
            os.close(descriptor)


def _is_alive(pid: int) -> bool:
    """Whether there is such a process: one that was killed has left its mark."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


shutdown = Shutdown()
"""The shutdown of the worker that this process belongs to."""

os.register_at_fork(after_in_child=shutdown.after_fork)
signals.worker_init.connect(shutdown.prepare, dispatch_uid="celery_dflock.prepare")
signals.worker_shutting_down.connect(shutdown.begin, dispatch_uid="celery_dflock.begin")


class WorkersEnd(bootsteps.StartStopStep):
    """Tells those who wait that the worker ends, in whatever way, before anything else is waited for.

    A signal is heard of early, by ``worker_shutting_down``. A shutdown that was asked for from remote,
    and a restart, come as an exception out of the event loop: then this is the first to know, before
    anybody waits for the pool.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        if hasattr(worker, "wait_for_soft_shutdown"):  # since Celery 5.5
            worker.wait_for_soft_shutdown = partial(
                _end_softly, worker, worker.wait_for_soft_shutdown
            )

    def close(self, _worker: Any) -> None:
        """The worker is about to end its parts."""
        shutdown.begin()
        shutdown.settle()


def _end_softly(worker: Any, wait: Callable[[], object]) -> None:
    """Begin before a soft shutdown waits, and before a cold one kills what it finds.

    This runs in a signal handler, in the thread of the event loop: the messages of those who wait in
    the consumer go back when that goes on, but nobody else has to wait for them until then.
    """
    shutdown.begin()
    consumer_wait = getattr(getattr(worker, "consumer", None), "dflock_wait", None)
    if consumer_wait is not None:
        consumer_wait.leave()
    shutdown.settle()
    wait()
