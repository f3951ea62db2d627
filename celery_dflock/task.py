"""Tasks that run while they hold a lock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, TypeAlias

from celery import Celery, Task

from celery_dflock import bases, keys, policy
from celery_dflock.config import Settings, settings
from celery_dflock.exceptions import (
    LockError,
    LockLostError,
    LockNotAcquiredError,
    LockUnavailableError,
)
from celery_dflock.interrupt import Interruptible
from celery_dflock.lifecycle import shutdown
from celery_dflock.locks import Locks, process_label
from celery_dflock.options import LockOptions
from celery_dflock.signals import lock_acquired, lock_lost, lock_released
from dflockd import errors

logger = logging.getLogger("celery_dflock")

RETRY_PATIENCE = 1.0
"""Seconds that a retry waits at least: it can arrive before the run that sent it has ended."""

ENTERED = "_dflock_entered"
"""Set on a request once its task has been called under a lock, or tried to be."""

LockKey: TypeAlias = str | Callable[..., str] | Sequence[str | Callable[..., str]] | None

_current: ContextVar[TaskLock | None] = ContextVar("celery_dflock.current_lock", default=None)


class TaskLock:
    """The lock of the task that is running; see `current_lock`.

    Attributes:
        keys: what is locked, prefix included; nearly always one key.
        waited: seconds that the task waited for the grant.
        outer: the lock of the task that called this one in the same thread, if any.
    """

    def __init__(self, locks: Locks, waited: float, outer: TaskLock | None) -> None:
        self._locks = locks
        self.keys = locks.keys
        self.waited = waited
        self.outer = outer

    @property
    def key(self) -> str:
        """What is locked; the first in order where ``lock_key`` gives several."""
        return self.keys[0]

    @property
    def held(self) -> bool:
        """Whether the lock is certainly still held."""
        return self._locks.held

    @property
    def token(self) -> str | None:
        """The token of the grant of `key`; ``None`` once it is lost."""
        return self._locks.tokens[self.key]

    @property
    def fence(self) -> int | None:
        """A number that grows with every grant of `key`, for the resource to compare.

        Send it along with each write; a resource that remembers the largest and refuses smaller
        ones is safe even from a task that does not know yet that its lock is lost.
        """
        return self._locks.fences[self.key]

    @property
    def fences(self) -> dict[str, int | None]:
        """The fence of each of `keys`."""
        return self._locks.fences

    def extend(self, seconds: int | None = None) -> bool:
        """Renew the lease now, for `seconds` (default: ``lock_ttl``); ``False`` if it is lost.

        The renewal thread does this all the time. It is for what stops all threads of the process
        longer than the lease: call it before.
        """
        return self._locks.renew(seconds)

    def check(self) -> None:
        """Raise `LockLostError` if the lock is not held any more."""
        if not self.held:
            raise LockLostError(self.key, "its lease ended or the server forgot it")

    def __repr__(self) -> str:
        """Without the token."""
        return f"<TaskLock {self.key!r} fence={self.fence} {'held' if self.held else 'lost'}>"


def current_lock() -> TaskLock | None:
    """Return the lock of the locked task that this code runs in, or ``None`` outside of one."""
    return _current.get()


class LockedTask(Task):
    """A task that runs while it holds a lock, for ``@app.task(base=LockedTask, ...)``.

    The lock is taken in the worker just before the body runs and released when the body ends in any
    way. While the body runs a thread renews the lease; if the process dies, the lock is free at
    once. Calling the task like a function, ``task()``, takes no lock.

    Options, as decorator arguments, class attributes or ``task_annotations``:

    Attributes:
        lock_key: template over the arguments (``"account:{account_id}"``), or a function
            ``(task, args, kwargs) -> key``, or a list of these: all are taken, in sorted order. By
            default the task's name and all its arguments.
        lock_limit: how many may hold the key at once; the same for all users of the key.
        lock_ttl: lease in seconds. It bounds how long the lock outlives a worker that is cut off.
        lock_timeout: seconds to wait for the lock in the worker, first come, first served; 0 tries
            once, ``None`` has no end.
        lock_conflict: what happens if it is not granted in time: ``"requeue"`` sends the task again
            with a pause, ``"skip"`` ends it with a `Skipped` result, ``"fail"`` with
            `LockNotAcquiredError`. Or a function ``(task, error)`` that returns one of these words
            or the result of the task, or raises.
        lock_requeue: the pauses of ``requeue``; see `celery_dflock.options.Backoff`.
        lock_lost: what happens if the lock is lost while the body runs: ``"raise"`` raises
            `LockLostError` in it, ``"warn"`` logs. Or a function ``(task, lock)``, which runs on
            the renewal thread and must not block.

    One call can have options of its own, in its message header:
    ``task.apply_async(args, headers={"dflock": {"lock_timeout": 60}})``.
    """

    lock_key: ClassVar[LockKey] = None
    lock_limit: ClassVar[int] = 1
    lock_ttl: ClassVar[int] = 30
    lock_timeout: ClassVar[float | None] = 5
    lock_conflict: ClassVar[str | Callable[..., Any]] = "requeue"
    lock_requeue: ClassVar[dict[str, float]] = {}
    lock_lost: ClassVar[str | Callable[..., Any]] = "raise"

    _lock_options: ClassVar[LockOptions]

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the options and the bases, so that a bad one stops the program and not a task."""
        super().on_bound(app)
        bases.check(cls, LockedTask)
        cls._lock_options = LockOptions.of(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under the lock."""
        body = super().__call__
        request = self.request
        # The body may call its own task directly, and finds the request that is running.
        if request.called_directly or getattr(request, ENTERED, False):
            return body(*args, **kwargs)
        setattr(request, ENTERED, True)
        if getattr(body, "__func__", None) is Task.__call__:
            # Celery's own would push a request without an id where it was not optimised away.
            body = self.run
        if bases.is_of_celery(type(self)):
            return body(*args, **kwargs)
        app_settings = settings(self.app)
        if not app_settings.enabled:
            return body(*args, **kwargs)
        options = self._options()
        lost = _Loss(self, options)
        locks = Locks(
            [
                keys.finish(key, app_settings.key_prefix)
                for key in options.keys_of(self, args, kwargs)
            ],
            limit=options.limit,
            timeout=self._patience(options),
            ttl=options.ttl,
            settings=app_settings,
            label=f"{self.name}[{request.id}] {process_label()}",
            on_lost=lost.happened,
        )
        try:
            started = time.monotonic()
            try:
                self._acquire(locks)
            except LockUnavailableError as error:
                if app_settings.unavailable != "run":
                    return self._unavailable(error, app_settings, options)
                logger.warning("task %s[%s] runs unlocked: %s", self.name, self.request.id, error)
                return body(*args, **kwargs)
            except LockNotAcquiredError as error:
                return self._conflict(error, options)
            held = TaskLock(locks, time.monotonic() - started, current_lock())
            return self._run(held, lost, body, args, kwargs)
        finally:
            locks.release()

    def _options(self) -> LockOptions:
        given = policy.options_of_call(self.request)
        return LockOptions.of_call(type(self), given) if given else self._lock_options

    def _patience(self, options: LockOptions) -> float | None:
        is_fresh_retry = self.request.retries and not policy.attempts(self.request)
        if options.timeout is None or not is_fresh_retry:
            return options.timeout
        return max(options.timeout, RETRY_PATIENCE)

    def _acquire(self, locks: Locks) -> None:
        """Wait for the locks.

        Raises:
            LockNotAcquiredError: one was not granted in time.
            LockUnavailableError: no server could be asked.
        """
        outer = current_lock()
        while outer is not None:
            for key in set(outer.keys).intersection(locks.keys) if outer.held else ():
                why = "a task that waits for this one, in the same thread, holds it"
                raise LockNotAcquiredError(key, why)
            outer = outer.outer
        try:
            refused = locks.acquire()
        except errors.AcquireCancelledError:
            raise LockNotAcquiredError(locks.keys[0], "the worker is shutting down") from None
        if refused is not None:
            seconds = locks.timeout
            why = f"after {seconds} s (lock_timeout) still held" if seconds else "it is held"
            raise LockNotAcquiredError(refused, why, locks.holder(refused))

    def _conflict(self, error: LockNotAcquiredError, options: LockOptions) -> Any:
        verdict: Any = options.conflict
        if shutdown.begun:
            # A shutdown says nothing about the lock: whatever the policy, the task goes elsewhere.
            verdict = "requeue"
        elif callable(verdict):
            verdict = verdict(self, error)
        if verdict == "requeue":
            policy.requeue(self, error, options.requeue)
        if verdict == "skip":
            return policy.skip(self, error)
        if verdict == "fail":
            raise error
        return verdict

    def _unavailable(self, error: LockError, app_settings: Settings, options: LockOptions) -> Any:
        if app_settings.unavailable == "requeue":
            policy.requeue(self, error, options.requeue)
        raise error

    def _run(
        self,
        held: TaskLock,
        lost: _Loss,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        token = _current.set(held)
        try:
            lock_acquired.send(sender=self, lock=held)
            with lost.watched(held):
                lost.check(held)
                return body(*args, **kwargs)
        finally:
            _current.reset(token)
            lock_released.send(sender=self, lock=held)


class SingletonTask(LockedTask):
    """A task of which one runs at a time, whatever its arguments; an overlapping one is skipped.

    For jobs that are sent on a schedule: ``@app.task(base=SingletonTask)``. It is a `LockedTask`
    with other defaults, and every option can be set.
    """

    lock_key: ClassVar[LockKey] = staticmethod(lambda task, _args, _kwargs: task.name)
    lock_timeout: ClassVar[float | None] = 0
    lock_conflict: ClassVar[str | Callable[..., Any]] = "skip"


class _Loss:
    """What to do when a lock of one run is lost. `happened` runs on the renewal thread."""

    def __init__(self, task: LockedTask, options: LockOptions) -> None:
        self._task = task
        self._task_id = task.request.id
        self._lost = options.lost
        self._run: Interruptible | None = None
        self._lock: TaskLock | None = None

    def watched(self, lock: TaskLock) -> Interruptible:
        """Return the stretch of code that a loss interrupts."""
        self._lock = lock
        self._run = Interruptible()
        return self._run

    def check(self, lock: TaskLock) -> None:
        """Raise what came too early to interrupt anything."""
        if self._lost == "raise":
            lock.check()

    def happened(self, key: str) -> None:
        """Interrupt the body, or say that it goes on unlocked."""
        error = LockLostError(key, "its lease ended unrenewed or the server forgot it")
        interrupted = self._lost == "raise" and self._run is not None and self._run.interrupt(error)
        logger.error(
            "task %s[%s]: %s; the task %s",
            self._task.name,
            self._task_id,
            error,
            "is interrupted" if interrupted else "goes on unlocked",
        )
        lock_lost.send(sender=self._task, lock=self._lock)
        if callable(self._lost):
            self._lost(self._task, self._lock)
