"""What happens when the lock of a task is lost while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import ref

from celery_dflock.exceptions import LockLostError
from celery_dflock.held import TaskLock
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_lost
from celery_dflock.worker.interrupt import Interruptible

logger = logging.getLogger("celery_dflock")


class Loss:
    """What to do when a lock of one run is lost. `happened` runs on the renewal thread."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lost = plan.options.lost
        self._run: Interruptible | None = None
        # Weak, for a lock knows whom to tell: see `celery_dflock.locks`.
        self._lock: Callable[[], TaskLock | None] = lambda: None

    def watched(self, lock: TaskLock) -> Interruptible:
        """Return the stretch of code that a loss interrupts."""
        self._lock = ref(lock)
        self._run = Interruptible()
        return self._run

    def check(self, lock: TaskLock) -> None:
        """Raise what came too early to interrupt anything."""
        if self._lost == "raise":
            lock.check()

    def happened(self, key: str) -> None:
        """Interrupt the body, or say that it goes on unlocked."""
        plan = self._plan
        error = LockLostError(key, "its lease ended unrenewed or the server forgot it")
        interrupted = self._lost == "raise" and self._run is not None and self._run.interrupt(error)
        logger.error(
            "task %s: %s; the task %s",
            plan.name,
            error,
            "is interrupted" if interrupted else "goes on unlocked",
        )
        lock = self._lock()
        lock_lost.send(sender=plan.task, request=plan.request, key=key, lock=lock)
        if callable(self._lost):
            self._lost(plan.task, lock)
