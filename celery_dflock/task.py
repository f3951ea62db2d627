"""Tasks that run while they hold a lock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, TypeAlias
from weakref import ref

from celery import Celery, Task
from celery.app.task import Context
from celery.result import AsyncResult

from celery_dflock import bases, each, keys
from celery_dflock.bases import ENTERED
from celery_dflock.config import Settings, settings
from celery_dflock.exceptions import (
    LockError,
    LockLostError,
    LockNotAcquiredError,
    LockUnavailableError,
)
from celery_dflock.locks import HeldLock, Locks, process_label
from celery_dflock.options import SLOT_TIMEOUT, LockOptions
from celery_dflock.outcome import header, redelivery, requeue, skipped
from celery_dflock.outcome.once import once
from celery_dflock.signals import (
    lock_acquired,
    lock_conflict,
    lock_lost,
    lock_released,
    lock_waiting,
)
from celery_dflock.unique import publish as unique
from celery_dflock.unique.run import carried
from celery_dflock.worker import boot as boot  # connects what a worker calls at its start
from celery_dflock.worker import hand_off
from celery_dflock.worker.interrupt import Interruptible
from celery_dflock.worker.shutdown import shutdown
from dflockd import errors

logger = logging.getLogger("celery_dflock")

RETRY_PATIENCE = 1.0
"""Seconds that a retry waits at least: it can arrive before the run that sent it has ended."""

LockKey: TypeAlias = str | Callable[..., str] | Sequence[str | Callable[..., str]] | None

_current: ContextVar[TaskLock | None] = ContextVar("celery_dflock.current_lock", default=None)


class TaskLock(HeldLock):
    """The lock of the task that is running; see `current_lock`.

    Attributes:
        outer: the lock of the task that called this one in the same thread, if any.
    """

    _locks: Locks

    def __init__(self, locks: Locks, waited: float, outer: TaskLock | None) -> None:
        super().__init__(locks, waited)
        self.outer = outer

    def extend(self, seconds: int | None = None) -> bool:
        """Renew the lease now, for `seconds` (default: ``lock_ttl``); ``False`` if it is lost.

        The renewal thread does this all the time. It is for what stops all threads of the process
        longer than the lease: call it before. In doubt it waits, as `check` does.
        """
        return self._locks.renew(seconds)

    def check(self) -> None:
        """Return if the lock is certainly held; in doubt, once it is certain again.

        That takes no longer than what is left of the lease.

        Raises:
            LockLostError: it is lost. Also, without waiting, if it is in doubt and this is called on
                the renewal thread, where ``lock_lost`` and the signal `lock_lost` are.
        """
        self._locks.check()


def current_lock() -> TaskLock | None:
    """Return the lock of the locked task that this code runs in, or ``None`` outside of one."""
    return _current.get()


class LockedTask(each.OneByOne):
    """A task that runs while it holds a lock, for ``@app.task(base=LockedTask, ...)``.

    The lock is taken in the worker just before the body runs and released when the body ends in any
    way. While the body runs a thread renews the lease; if the process dies, the lock is free at
    once. Calling the task like a function, ``task()``, takes no lock.

    A message that the broker delivers again while its task runs (``acks_late``, visibility timeout)
    is no conflict: whatever ``lock_conflict`` says, the copy is requeued until the lock is free.
    Then it is dropped if the id has its result by now, and else it runs; see docs/redelivery.md.

    Options, as decorator arguments, class attributes or ``task_annotations``:

    Attributes:
        lock_key: template over the arguments (``"account:{account_id}"``), or a function
            ``(task, args, kwargs) -> key``, or a list of these: all are taken, in sorted order. By
            default the task's name and all its arguments.
        lock_limit: how many may hold the key at once; the same for all users of the key.
        lock_ttl: lease in seconds. It bounds how long the lock outlives a worker that is cut off.
        lock_timeout: seconds to wait for the lock in the worker, first come, first served; 0 tries
            once, ``None`` has no end. Of a task that waits in the consumer, where the default is
            1500, it bounds the time there. Rounded up to whole seconds there, and wherever the
            place is kept (see `lock_requeue`). A server that does not answer is given two seconds
            more; then `dflock_unavailable` decides.
        lock_wait: where it waits: ``"slot"``, in a process of the worker's pool, which does nothing
            else meanwhile; or ``"consumer"``, where hundreds can wait. By default the app's
            ``dflock_wait``, that is in the slot. See docs/waiting.md.
        lock_conflict: what happens if it is not granted in time: ``"requeue"`` sends the task again
            with a pause, ``"skip"`` ends it with a `Skipped` result, ``"fail"`` with
            `LockNotAcquiredError`. Or a function ``(task, error)`` that returns one of these words
            or the result of the task, or raises.
        lock_requeue: the pauses of ``requeue``, during which the task keeps its place in the queue,
            and for how long the lock is kept free if its turn comes meanwhile; a dict, see
            `celery_dflock.options.Backoff`.
        lock_lost: what happens if the lock is lost while the body runs: ``"raise"`` raises
            `LockLostError` in it, ``"warn"`` logs. Or a function ``(task, lock)``, which runs on
            the renewal thread and must not block. Nothing happens while that is in doubt.
        lock_unique: whether the task is sent while another with its name and `lock_key` is on its
            way. ``None`` sends it always. Else the other counts ``"until_executing"``: until it has
            the lock and begins; or ``"until_executed"``: until it has ended, retries included; or
            ``"until_expired"``: for `lock_unique_ttl`, whatever becomes of it. A call that somebody
            counts on is always sent: in a chain, group or chord, with callbacks, or with an id of
            the caller's choice. So is one that finds no lock server. See docs/unique.md.
        lock_unique_ttl: seconds after which a task that has not begun does not count any more; it
            may have been purged. At most the server's ``--max-lease-ttl``.
        lock_duplicate: what becomes of the second one: ``"coalesce"`` returns the result of the
            first, ``"raise"`` raises `DuplicateTaskError`, ``"skip"`` returns a result that is
            ready and `Skipped`, and ``"replace"`` sends it and revokes the first, unless that runs;
            not with ``until_expired``.

    One call can have options of its own, in its message header:
    ``task.apply_async(args, headers={"dflock": {"lock_timeout": 60}})``.
    """

    lock_key: ClassVar[LockKey] = None
    lock_limit: ClassVar[int] = 1
    lock_ttl: ClassVar[int] = 30
    lock_timeout: ClassVar[float | None] = SLOT_TIMEOUT
    lock_wait: ClassVar[str | None] = None
    lock_conflict: ClassVar[str | Callable[..., Any]] = "requeue"
    lock_requeue: ClassVar[dict[str, float]] = {}
    lock_lost: ClassVar[str | Callable[..., Any]] = "raise"
    lock_unique: ClassVar[str | None] = None
    lock_unique_ttl: ClassVar[int] = 3600
    lock_duplicate: ClassVar[str] = "coalesce"

    # Celery asks for it in the worker, where requests are received.
    Strategy = "celery_dflock.worker.strategy:default"

    _lock_options: ClassVar[LockOptions]

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the options and the bases, so that a bad one stops the program and not a task."""
        super().on_bound(app)
        bases.check(cls, LockedTask)
        cls._lock_options = LockOptions.of(cls)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Send the task, unless ``lock_unique`` finds another like it on its way.

        For the arguments see `celery.Task.apply_async`.

        Raises:
            DuplicateTaskError: there is one, and ``lock_duplicate`` is ``"raise"``.
        """
        publish = partial(super().apply_async, args, kwargs, producer=producer, shadow=shadow)
        counted_on = {"task_id": task_id, "link": link, "link_error": link_error}
        lock_options = self._options(Context(headers=options.get("headers")))
        if (
            lock_options.unique is None
            or any(counted_on.values())
            or any(options.get(name) for name in ("group_id", "chord", "chain"))
            or self.app.conf.task_always_eager
            or not settings(self.app).enabled
            or bases.is_of_celery(type(self))
        ):
            return publish(**counted_on, **options)
        return unique.send(
            self,
            lock_options,
            args or (),
            kwargs or {},
            options,
            lambda **more: publish(**{**options, **more}),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under the lock."""
        body = super().__call__
        request = self.request
        # The body may call its own task directly, and finds the request that is running.
        if request.called_directly or getattr(request, ENTERED, False):
            each.refuse_item(self)
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
        options = self._options(request)
        return self._run_locked(request, body, args, kwargs, options, app_settings)

    def _run_locked(
        self,
        request: Context,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: LockOptions,
        app_settings: Settings,
    ) -> Any:
        run = redelivery.run_name(self, request)
        handed = hand_off.take_handed(request)
        is_copy = redelivery.is_known_copy(request)
        lost, ticket = _Loss(self, request, options), None
        locks = Locks(
            [
                keys.finish(key, app_settings.key_prefix)
                for key in options.keys_of(self, args, kwargs)
            ],
            limit=options.limit,
            timeout=self._patience(request, options),
            ttl=options.ttl,
            settings=app_settings,
            label=run + process_label(),
            run=run,
            on_wait=self._waits,
            on_lost=lost.happened,
        )
        held = None
        try:
            with carried(self, request, options, app_settings) as brought:
                started = time.monotonic()
                try:
                    ticket = requeue.Ticket.of(request, options, len(locks.keys), locks.timeout)
                    self._acquire(locks, handed, ticket, is_copy)
                except LockUnavailableError as error:
                    if app_settings.unavailable != "run":
                        return self._unavailable(error, app_settings, options)
                    logger.warning("task %s[%s] runs unlocked: %s", self.name, request.id, error)
                    return body(*args, **kwargs)
                except LockNotAcquiredError as error:
                    if handed and hand_off.has_lost_place(handed):
                        requeue.requeue(self, error, options.requeue)
                    return self._conflict(error, options, locks, ticket)
                if is_copy:
                    redelivery.drop_ended_copy(self, locks.keys[0])
                with once(self, request, locks.keys[0], app_settings, is_copy):
                    if brought is not None:
                        brought.begin(options)
                    waited = time.monotonic() - started + (handed or {}).get("waited", 0.0)
                    held = TaskLock(locks, waited, current_lock())
                    return self._run(request, held, lost, body, args, kwargs)
        finally:
            locks.release()
            if held is not None:
                key = ", ".join(held.keys)
                logger.debug("task %s[%s] has released lock %r", self.name, request.id, key)
                lock_released.send(sender=self, request=request, lock=held)

    def _options(self, request: Context) -> LockOptions:
        given = header.options_of_call(request)
        if given:
            return LockOptions.of_call(type(self), given)
        try:
            return self._lock_options
        except AttributeError:
            # Celery registers a task before it binds it, and another thread has got hold of it.
            return LockOptions.of(type(self))

    def _patience(self, request: Context, options: LockOptions) -> float | None:
        is_fresh_retry = request.retries and not header.attempts(request)
        if options.timeout is None or not is_fresh_retry:
            return options.timeout
        return max(options.timeout, RETRY_PATIENCE)

    def _acquire(
        self,
        locks: Locks,
        handed: hand_off.Handed | None,
        ticket: requeue.Ticket | None,
        is_copy: bool,
    ) -> None:
        """Wait for the locks, unless that has been done in the consumer.

        Raises:
            LockNotAcquiredError: one was not granted in time.
            LockUnavailableError: no server could be asked.
        """
        if handed is not None and handed["key"] == locks.keys[0]:
            if ticket is not None:
                ticket.place, ticket.pause = handed.get("place"), handed.get("pause")
            self._take_handed(locks, handed)
            return
        outer = current_lock()
        while outer is not None:
            for key in filter(outer._locks.has, locks.keys):
                why = "a task that waits for this one, in the same thread, holds it"
                raise LockNotAcquiredError(key, why)
            outer = outer.outer
        if is_copy:
            # Waiting for its own message, a copy would have the lock a moment before that message
            # has its result; and in a semaphore it would not even have to wait.
            holder = locks.holder(locks.keys[0])
            if holder is not None and holder.startswith(locks.run):
                raise LockNotAcquiredError(locks.keys[0], "it is held", holder)
        try:
            if ticket is None:
                refused = locks.acquire()
            else:
                refused = locks.acquire(ticket.place, ticket.keep)
                ticket.place = locks.place
        except errors.AcquireCancelledError:
            raise LockNotAcquiredError(locks.keys[0], "the worker is shutting down") from None
        if refused is not None:
            seconds = locks.timeout
            why = f"after {seconds} s (lock_timeout) still held" if seconds else "it is held"
            raise LockNotAcquiredError(refused, why, locks.holder(refused))

    def _take_handed(self, locks: Locks, handed: hand_off.Handed) -> None:
        """Do what follows from the wait in the consumer."""
        key, waited = handed["key"], handed["waited"]
        if "error" in handed:
            raise LockUnavailableError(key, handed["error"])
        if handed.get("is_copy"):
            raise LockNotAcquiredError(key, "it is held", locks.run)
        if "token" not in handed:
            why = f"after {waited:.0f} s (lock_timeout) in the consumer still held"
            raise LockNotAcquiredError(key, why, locks.holder(key))
        if locks.adopt(handed["token"]):
            return
        locks.timeout = 0
        refused = locks.acquire()
        if refused is not None:
            why = "the lock that was handed over by the consumer was lost, and it is held"
            raise LockNotAcquiredError(key, why, locks.holder(key))

    def _waits(self, key: str, holder: Callable[[], str | None]) -> None:
        if logger.isEnabledFor(logging.INFO):
            name, who = f"{self.name}[{self.request.id}]", holder()
            logger.info("task %s waits for lock %r%s", name, key, f", held by {who}" if who else "")
        lock_waiting.send(sender=self, request=self.request, key=key, holder=holder)

    def _conflict(
        self,
        error: LockNotAcquiredError,
        options: LockOptions,
        locks: Locks,
        ticket: requeue.Ticket | None,
    ) -> Any:
        verdict: Any = options.conflict
        if shutdown.begun:
            # A shutdown says nothing about the lock: whatever the policy, the task goes elsewhere.
            verdict = "requeue"
        elif redelivery.is_copy_of_holder(self, error):
            if ticket is not None and ticket.place is not None:
                locks.leave(ticket.place)
            redelivery.requeue_copy(self, error, options.requeue)
        else:
            lock_conflict.send(
                sender=self,
                request=self.request,
                key=error.key,
                holder=error.holder,
                error=error,
            )
            if callable(verdict):
                verdict = verdict(self, error)
        if verdict == "requeue":
            requeue.requeue(self, error, options.requeue, ticket)
        if verdict == "skip":
            return skipped.skip(self, error)
        if verdict == "fail":
            raise error
        logger.info("task %s[%s] ends without running: %s", self.name, self.request.id, error)
        return verdict

    def _unavailable(self, error: LockError, app_settings: Settings, options: LockOptions) -> Any:
        if app_settings.unavailable == "requeue":
            requeue.requeue(self, error, options.requeue)
        raise error

    def _run(
        self,
        request: Context,
        held: TaskLock,
        lost: _Loss,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        token = _current.set(held)
        try:
            logger.debug(
                "task %s[%s] has lock %r after %.3f s, fence %s",
                self.name,
                request.id,
                ", ".join(held.keys),
                held.waited,
                held.fence,
            )
            lock_acquired.send(sender=self, request=request, lock=held)
            with lost.watched(held):
                lost.check(held)
                return body(*args, **kwargs)
        finally:
            _current.reset(token)


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

    def __init__(self, task: LockedTask, request: Context, options: LockOptions) -> None:
        self._task = task
        self._request = request
        self._lost = options.lost
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
        error = LockLostError(key, "its lease ended unrenewed or the server forgot it")
        interrupted = self._lost == "raise" and self._run is not None and self._run.interrupt(error)
        logger.error(
            "task %s[%s]: %s; the task %s",
            self._task.name,
            self._request.id,
            error,
            "is interrupted" if interrupted else "goes on unlocked",
        )
        lock = self._lock()
        lock_lost.send(sender=self._task, request=self._request, key=key, lock=lock)
        if callable(self._lost):
            self._lost(self._task, lock)
