"""What happens when the lock of a task is lost while it runs."""

from __future__ import annotations

import logging
from weakref import ref

from celery_dflock.exceptions import SupersededError
from celery_dflock.held import TaskLock
from celery_dflock.locks import Locks, lost_error
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_lost
from celery_dflock.worker.interrupt import Interruptible
from dflockd.client.lock import LockBase

logger = logging.getLogger("celery_dflock")


class Loss(Interruptible):
    """The code that one run has under its lock, which the loss of that interrupts.

    It has only a weak reference to the locks, because they refer to it: so they are freed with
    their last user. Anything in a cycle would stay until the garbage collector runs.

    Attributes:
        is_raised: whether the code is interrupted.
        has_begun: whether the locks have been held.
    """

    has_begun = False
    _locks: ref[Locks] | None = None
    _is_told = False
    _superseded: SupersededError | None = None

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.is_raised = plan.options.lost == "raise"

    def concerns(self, locks: Locks) -> None:
        """Know the locks: they are held from now on."""
        self._locks = ref(locks)
        self.has_begun = True

    def supersede(self, by: str) -> None:
        """Interrupt the body, since a newer task wins. Runs on the renewal thread."""
        plan = self._plan
        by = by or "a newer task"
        reason = f"{plan.name} is superseded by {by}"
        error = self._superseded = SupersededError(plan.keys[0], reason, by)
        interrupted = self.interrupt(error)
        level = logging.INFO if interrupted else logging.DEBUG
        logger.log(level, "task %s: superseded by %s", plan.name, by)

    def has_superseded(self, error: SupersededError) -> bool:
        """Whether an error is that of this run; one that was raised in a thread is a copy."""
        return self._superseded is not None and error.args == self._superseded.args

    def happened(self, lock: LockBase) -> None:
        """Interrupt the body, or log that it continues without its lock. Runs on the renewal thread.

        Of several locks, the first that is lost counts. Before the body who runs it looks himself.
        """
        if self._is_told or not self.has_begun:
            return
        self._is_told = True
        plan, lost = self._plan, self._plan.options.lost
        locks = None if self._locks is None else self._locks()
        error = lost_error(lock)
        interrupted = self.is_raised and self.interrupt(error)
        logger.error(
            "task %s: %s; the task %s",
            plan.name,
            error,
            "is interrupted" if interrupted else "continues without its lock",
        )
        held = None if locks is None else TaskLock.of(locks)
        lock_lost.send(sender=plan.task, request=plan.request, key=lock.key, lock=held)
        if callable(lost):
            lost(plan.task, held)
