"""At most one on its way: the lock of ``lock_unique`` in the worker that runs the task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

from celery import Task, signals, states
from celery.app.task import Context
from celery.exceptions import Ignore, ImproperlyConfigured, Reject, Retry

from celery_dflock.config import Settings, settings
from celery_dflock.locks import MOMENT, is_kept
from celery_dflock.options import LockOptions
from celery_dflock.outcome import header
from celery_dflock.outcome.requeue import CopyDropped, RedeliveryRequeued, UnmetRequeued
from celery_dflock.plan import Plan
from celery_dflock.unique.lock import first_of, label_of, lock_on, mark_of
from celery_dflock.worker.errands import Errands
from dflockd import errors

_LOOKED_AFTER = "_dflock_looked_after"
"""Set on a request whose lock of this kind ends with its run."""

ENDED = (states.FAILURE, states.IGNORED, states.REJECTED)
"""The states of a task that may have ended before it began; one that is rejected may come again."""

T = TypeVar("T")

_errands = Errands("dflock-revoked")

logger = logging.getLogger("celery_dflock")


class Carried:
    """The lock that a task has brought along from its sender, in the worker that runs it.

    Args:
        task: the task.
        request: what has brought the lock along.
        ours: what it says of the lock; see `celery_dflock.outcome.header.unique_of`.
        ttl: lease in seconds.
        app_settings: where the servers are.
    """

    def __init__(
        self,
        task: Task,
        request: Context,
        ours: Mapping[str, str],
        ttl: int,
        app_settings: Settings,
    ) -> None:
        self._task = task
        self._request = request
        self._settings = app_settings
        self._token = ours["token"]
        self._until = ours["until"]
        self._lock = lock_on(ours["key"], app_settings, ttl, label_of(task, request.id))
        self._has_begun = False

    def take(self) -> bool:
        """Make the lock that of this process, so that it ends with that; ``False`` if it is over."""
        return is_kept(self._lock) or bool(self._ask(partial(self._lock.adopt, self._token)))

    def begin(self) -> None:
        """Make sure that the lock is that of this process, for the task is about to run; or end it.

        Raises:
            Ignore: the task was replaced by a newer one, and is revoked.
        """
        self._has_begun = True
        held = self.take()
        if self._until == "until_executing":
            held = self._lock.release()
        elif self._lock.held:  # in doubt nobody could answer
            # It may have been replaced while it waited for the other lock. Or the run that has sent
            # it again has detached the lock after it was taken here; but before it gave back the
            # other lock, which is held by now.
            held = bool(self._ask(self._lock.renew))
        if not held:
            self._check_replaced()

    def end(self, exc: BaseException | None, options: LockOptions) -> None:
        """Release the lock, or pass it on if the task continues elsewhere."""
        if self._has_begun and self._until == "until_executing":
            return
        is_copy = isinstance(exc, RedeliveryRequeued | CopyDropped)
        if is_copy and not isinstance(exc, UnmetRequeued) and not is_kept(self._lock):
            return  # it belongs to the other run, or to the retry of that
        held = is_kept(self._lock) or (not self._has_begun and self.take())
        if _goes_on(exc):
            if held:
                self._ask(partial(self._lock.detach, options.unique_ttl))
        elif not (held and self._lock.release()):
            self._ask(self._unmark)  # replaced while it ran already: no worker receives it again

    def prolong(self, ttl: int) -> None:
        """Have the lock last for `ttl` seconds from now, while the task waits and nobody renews it.

        A process that has taken it meanwhile keeps it: its next renewal takes it back.
        """
        if self.take():
            self._ask(partial(self._lock.detach, ttl))

    def free(self) -> None:
        """Release the lock: the task will never run."""
        if self.take():
            self._lock.release()

    def free_unless_it_runs(self) -> None:
        """Release the lock of a redelivery that will never run; but not that of its first delivery."""
        first = self._ask(partial(first_of, self._lock))
        if first is not None and not first.is_a_run:
            self.free()

    @property
    def _name(self) -> str:
        return f"{self._task.name}[{self._request.id}]"

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Ask the server; ``None`` if it cannot say."""
        try:
            return question()
        except errors.RemoteError as exc:
            logger.warning("task %s goes on without lock_unique: %s", self._name, exc)
            return None

    def _check_replaced(self) -> None:
        newer = self._ask(self._unmark)
        if newer is None:
            return
        task, request = self._task, self._request
        logger.info("task %s does not run: it is replaced by %s", self._name, newer)
        keep = not (task.ignore_result or request.ignore_result)
        task.backend.mark_as_revoked(
            request.id, f"replaced by {newer}", request=request, store_result=keep
        )
        raise Ignore

    def _unmark(self) -> str | None:
        """Return which task has replaced this one, if any, and end the marks that say so."""
        mark = mark_of(self._request.id, self._settings, "")
        newer = left = first_of(mark)
        while left is not None:  # several may have set out to replace it, of whom one has
            mark.evict(left.fence)
            left = first_of(mark)
        return newer.task_id if newer is not None else None


def _goes_on(exc: BaseException | None) -> bool:
    # For a copy that is dropped: its other run has ended the lock, or has a retry that needs it.
    return isinstance(exc, Retry | RedeliveryRequeued | CopyDropped) or (
        isinstance(exc, Reject) and bool(exc.requeue)
    )


def carried(plan: Plan) -> AbstractContextManager[Carried | None]:
    """Look after what a task has brought along from its sender, if anything, while it runs."""
    ours = plan.header.unique
    return _NOTHING if ours is None else _looked_after(plan, ours)


_NOTHING = nullcontext()


@contextmanager
def _looked_after(plan: Plan, ours: Mapping[str, str]) -> Iterator[Carried]:
    options = plan.options
    brought = Carried(plan.task, plan.request, ours, options.ttl, plan.settings)
    try:  # at once: who is said to look after it does, whenever an exception of a signal comes
        setattr(plan.request, _LOOKED_AFTER, True)
        if not plan.is_redelivered:  # one has no claim to it, as far as it is known to be one
            brought.take()
        yield brought
    except BaseException as exc:
        brought.end(exc, options)
        raise
    else:
        brought.end(None, options)


def free_ended(sender: Task, state: str, retval: Any, **_: Any) -> None:
    """Release the lock of a task that has ended before its run could look after it.

    Its key could not be made here, or its `before_start` raised, whatever that is: no other signal of
    Celery's comes after `Ignore`. A redelivery has no claim to it.
    """
    if state not in ENDED or getattr(retval, "requeue", False):
        return
    request = sender.request
    ours = header.unique_of(request)
    if ours is None or getattr(request, _LOOKED_AFTER, False) or _is_redelivery(request):
        return
    with suppress(errors.InvalidArgumentError):  # it is not ours: somebody else has written it
        Carried(sender, request, ours, MOMENT, settings(sender.app)).free()


def _is_redelivery(request: Context) -> bool:
    try:
        return header.Header.read(request).is_redelivered(request)
    except ImproperlyConfigured:
        return True  # nobody can say what it is


signals.task_postrun.connect(free_ended, dispatch_uid="celery_dflock.free_ended")


# Where it is revoked, or found to have expired: in the main process of a worker.


def free_revoked(sender: Task, request: Context, **_: Any) -> None:
    """Give back the lock of a task that will not run, on a thread: the worker must not wait."""
    ours = header.unique_of(request)
    if ours is not None:
        brought = Carried(sender, request, ours, MOMENT, settings(sender.app))
        _errands.run(brought.free_unless_it_runs if _is_redelivery(request) else brought.free)


signals.task_revoked.connect(free_revoked, dispatch_uid="celery_dflock.free_revoked")
