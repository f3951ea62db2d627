"""Tasks that run while they hold a lock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

from celery import Celery, Task

from celery_dflock import keys, policy
from celery_dflock.config import Settings, settings
from celery_dflock.exceptions import (
    LockError,
    LockLostError,
    LockNotAcquiredError,
    LockUnavailableError,
)
from celery_dflock.interrupt import Interruptible
from celery_dflock.lifecycle import shutdown
from celery_dflock.options import LockOptions
from celery_dflock.signals import lock_acquired, lock_lost, lock_released
from dflockd import errors
from dflockd.sync_client import DistributedLock

logger = logging.getLogger("celery_dflock")

RETRY_PATIENCE = 1.0
"""Seconds that a retry waits at least: it can arrive before the run that sent it has ended."""

ENTERED = "_dflock_entered"
"""Set on a request once its task has been called under a lock, or tried to be."""

_current: ContextVar[TaskLock | None] = ContextVar("celery_dflock.current_lock", default=None)


class TaskLock:
    """The lock of the task that is running; see `current_lock`.

    Attributes:
        key: what is locked, prefix included.
        waited: seconds that the task waited for the grant.
        outer: the lock of the task that called this one in the same thread, if any.
    """

    def __init__(self, lock: DistributedLock, waited: float, outer: TaskLock | None) -> None:
        self._lock = lock
        self.key = lock.key
        self.waited = waited
        self.outer = outer

    @property
    def held(self) -> bool:
        """Whether the lock is certainly still held."""
        return self._lock.held

    @property
    def token(self) -> str | None:
        """The token of the grant; ``None`` once it is lost."""
        return self._lock.token

    @property
    def fence(self) -> int | None:
        """A number that grows with every grant of the key, for the resource to compare.

        Send it along with each write; a resource that remembers the largest and refuses smaller
        ones is safe even from a task that does not know yet that its lock is lost.
        """
        return self._lock.fence

    def extend(self, seconds: int | None = None) -> bool:
        """Renew the lease now, for `seconds` (default: ``lock_ttl``); ``False`` if it is lost.

        The renewal thread does this all the time. It is for what stops all threads of the process
        longer than the lease: call it before.
        """
        return self._lock.renew(seconds)

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
            ``(task, args, kwargs) -> key``; by default the task's name and all its arguments.
        lock_ttl: lease in seconds. It bounds how long the lock outlives a worker that is cut off.
        lock_timeout: seconds to wait for the lock in the worker, first come, first served; 0 tries
            once, ``None`` has no end.
        lock_conflict: what happens if it is not granted in time: ``"requeue"`` sends the task again
            with a pause, ``"skip"`` ends it with a `Skipped` result, ``"fail"`` with
            `LockNotAcquiredError`.
        lock_requeue: the pauses of ``requeue``; see `celery_dflock.options.Backoff`.
        lock_lost: what happens if the lock is lost while the body runs: ``"raise"`` raises
            `LockLostError` in it, ``"warn"`` logs.
    """

    lock_key: ClassVar[str | Callable[..., str] | None] = None
    lock_ttl: ClassVar[int] = 30
    lock_timeout: ClassVar[float | None] = 5
    lock_conflict: ClassVar[str] = "requeue"
    lock_requeue: ClassVar[dict[str, float]] = {}
    lock_lost: ClassVar[str] = "raise"

    _lock_options: ClassVar[LockOptions]

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the options, so that a bad one stops the program and not a task."""
        super().on_bound(app)
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
        options = self._lock_options
        app_settings = settings(self.app)
        key = keys.finish(options.key_of(self, args, kwargs), app_settings.key_prefix)
        lost = _Loss(self, options)
        lock = DistributedLock(
            key,
            acquire_timeout_s=self._patience(options),
            lease_ttl_s=options.ttl,
            on_lost=lost.happened,
            **app_settings.connection_options(),
        )
        try:
            started = time.monotonic()
            try:
                self._acquire(lock, app_settings)
            except LockUnavailableError as error:
                if app_settings.unavailable != "run":
                    return self._unavailable(error, app_settings, options)
                logger.warning("task %s[%s] runs unlocked: %s", self.name, self.request.id, error)
                return body(*args, **kwargs)
            except LockNotAcquiredError as error:
                return self._conflict(error, options)
            held = TaskLock(lock, time.monotonic() - started, current_lock())
            return self._run(held, lost, body, args, kwargs)
        finally:
            lock.release()

    def _patience(self, options: LockOptions) -> float | None:
        is_fresh_retry = self.request.retries and not policy.attempts(self.request)
        if options.timeout is None or not is_fresh_retry:
            return options.timeout
        return max(options.timeout, RETRY_PATIENCE)

    def _acquire(self, lock: DistributedLock, app_settings: Settings) -> None:
        """Wait for the lock.

        Raises:
            LockNotAcquiredError: it was not granted in time.
            LockUnavailableError: no server could be asked.
        """
        outer = current_lock()
        while outer is not None:
            if outer.key == lock.key and outer.held:
                why = "a task that waits for this one, in the same thread, holds it"
                raise LockNotAcquiredError(lock.key, why)
            outer = outer.outer
        try:
            with shutdown.waiting(lock):
                granted = lock.acquire()
        except errors.AcquireCancelledError:
            raise LockNotAcquiredError(lock.key, "the worker is shutting down") from None
        except errors.RemoteError as exc:
            raise LockUnavailableError(lock.key, str(exc)) from exc
        if not granted:
            seconds = lock.acquire_timeout_s
            why = f"still held after {seconds} s (lock_timeout)" if seconds else "it is held"
            raise LockNotAcquiredError(lock.key, why)

    def _conflict(self, error: LockNotAcquiredError, options: LockOptions) -> Any:
        if shutdown.begun or (options.conflict == "requeue"):
            # A shutdown says nothing about the lock: whatever the policy, the task goes elsewhere.
            policy.requeue(self, error, options.requeue)
        if options.conflict == "skip":
            return policy.skip(self, error)
        raise error

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


class _Loss:
    """What to do when the lock of one run is lost. `happened` runs on the renewal thread."""

    def __init__(self, task: LockedTask, options: LockOptions) -> None:
        self._task = task
        self._task_id = task.request.id
        self._raises = options.lost == "raise"
        self._run: Interruptible | None = None
        self._lock: TaskLock | None = None

    def watched(self, lock: TaskLock) -> Interruptible:
        """Return the stretch of code that a loss interrupts."""
        self._lock = lock
        self._run = Interruptible()
        return self._run

    def check(self, lock: TaskLock) -> None:
        """Raise what came too early to interrupt anything."""
        if self._raises:
            lock.check()

    def happened(self, lock: DistributedLock) -> None:
        """Interrupt the body, or say that it goes on unlocked."""
        error = LockLostError(lock.key, "its lease ended unrenewed or the server forgot it")
        interrupted = self._raises and self._run is not None and self._run.interrupt(error)
        logger.error(
            "task %s[%s]: %s; the task %s",
            self._task.name,
            self._task_id,
            error,
            "is interrupted" if interrupted else "goes on unlocked",
        )
        lock_lost.send(sender=self._task, lock=self._lock)
