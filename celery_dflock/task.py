"""Tasks that run while they hold a lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from celery import Celery, Task, uuid
from celery.app.task import Context
from celery.result import AsyncResult

from celery_dflock import bases, each
from celery_dflock.bases import ENTERED
from celery_dflock.config import Wait, read, settings
from celery_dflock.options import (
    ONE,
    SLOT_TIMEOUT,
    Conflict,
    Duplicate,
    LockKey,
    LockOptions,
    Lost,
    RequeueOptions,
    Unique,
)
from celery_dflock.outcome import header
from celery_dflock.plan import Bound, plan
from celery_dflock.run import run_locked
from celery_dflock.superseding import headers_with_age
from celery_dflock.unique import publish as unique
from celery_dflock.worker import boot as boot  # connects what a worker calls at its start
from dflockd.rates import RateLike


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
        lock_group: as `lock_key`, one template or function: to which group a call belongs
            (``"tenant:{tenant_id}"``). The groups that wait for a key take turns; within one, and
            among all calls without, it is first come, first served.
        lock_group_limit: how many of one group may hold the key at once; by default all.
        lock_rate: how many runs may begin in any window of a second, minute or hour, over all
            workers: ``"10/m"``, or ``(10, 60)``. Without a `lock_limit` any number of them go on at
            once. See docs/rates.md.
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
            or the result of the task, or raises. ``"supersede"``: the newest wins. The holder is
            interrupted with `SupersededError`, those who wait are skipped if they are older, and
            what is not granted in time even so is requeued; ``("supersede", "skip")`` and
            ``("supersede", "fail")`` say else. See docs/supersede.md.
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
    lock_limit: ClassVar[int] = ONE
    lock_group: ClassVar[str | Callable[..., Any] | None] = None
    lock_group_limit: ClassVar[int | None] = None
    lock_rate: ClassVar[RateLike | None] = None
    lock_ttl: ClassVar[int] = 30
    lock_timeout: ClassVar[float | None] = SLOT_TIMEOUT
    lock_wait: ClassVar[Wait | None] = None
    lock_conflict: ClassVar[Conflict | Callable[..., Any]] = "requeue"
    lock_requeue: ClassVar[RequeueOptions] = {}
    lock_lost: ClassVar[Lost | Callable[..., Any]] = "raise"
    lock_unique: ClassVar[Unique | None] = None
    lock_unique_ttl: ClassVar[int] = 3600
    lock_duplicate: ClassVar[Duplicate] = "coalesce"

    # Celery asks for it in the worker, where requests are received.
    Strategy = "celery_dflock.worker.strategy:default"

    _lock_options: ClassVar[LockOptions]
    _lock_bound: ClassVar[Bound | None] = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the options and the bases, so that a bad one stops the program and not a task."""
        super().on_bound(app)
        bases.check(cls, LockedTask)
        cls._lock_options = LockOptions.of(cls)
        cls._lock_bound = None

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
        headers = options.get("headers")
        given = (
            {} if header.is_silent(headers) else header.options_of_call(Context(headers=headers))
        )
        lock_options = self._options_of(given)
        if lock_options.unique is None and not lock_options.supersedes:
            # Nearly always; with nothing in the way.
            return super().apply_async(
                args, kwargs, task_id, producer, link, link_error, shadow, **options
            )
        publish = partial(super().apply_async, args, kwargs, producer=producer, shadow=shadow)
        counted_on = {"task_id": task_id, "link": link, "link_error": link_error}
        if (
            self.app.conf.task_always_eager
            or not settings(self.app).enabled
            or bases.is_of_celery(type(self))
        ):
            return publish(**counted_on, **options)
        if lock_options.supersedes:
            bound = self._bound(given)
            publish = partial(self._send_with_age, publish, bound, args or (), kwargs or {})
        if (
            lock_options.unique is None
            or any(counted_on.values())
            or any(options.get(name) for name in ("group_id", "chord", "chain"))
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

    def _send_with_age(
        self,
        publish: Callable[..., AsyncResult],
        bound: Bound,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        task_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncResult:
        task_id = task_id or uuid()
        more = headers_with_age(self, bound, args, kwargs, headers, task_id)
        return publish(task_id=task_id, headers=more, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under the lock."""
        body, request = super().__call__, self.request
        # That of a worker: the body may call its own task and finds its own request.
        if request.called_directly or getattr(request, ENTERED, False):
            each.refuse_item(self)
            return body(*args, **kwargs)
        setattr(request, ENTERED, True)
        if getattr(body, "__func__", None) is Task.__call__:
            # Celery's own would push a request without an id where it was not optimised away.
            body = self.run
        bound = self._bound()
        if not bound.is_locked:
            return body(*args, **kwargs)
        return run_locked(plan(self, request, body, args, kwargs, bound))

    def _bound(self, given: Mapping[str, Any] | None = None) -> Bound:
        """Return what is the same for all runs whose calls have these options of their own, or none."""
        cls, app = type(self), self.app
        if given:
            return Bound(cls, self._options_of(given), read(app))
        bound = self._lock_bound
        if bound is None or bound.task is not cls or not bound.read.is_current(app.conf):
            bound = cls._lock_bound = Bound(cls, self._options_of({}), read(app))
        return bound

    def _options_of(self, given: Mapping[str, Any]) -> LockOptions:
        try:
            usual = self._lock_options
        except AttributeError:
            # Celery registers a task before it binds it, and another thread has got hold of it.
            usual = LockOptions.of(type(self))
        return LockOptions.of_call(type(self), given, usual) if given else usual


class SingletonTask(LockedTask):
    """A task of which one runs at a time, whatever its arguments; an overlapping one is skipped.

    For jobs that are sent on a schedule: ``@app.task(base=SingletonTask)``. It is a `LockedTask`
    with other defaults, and every option can be set.
    """

    lock_key: ClassVar[LockKey] = staticmethod(lambda task, _args, _kwargs: task.name)
    lock_limit: ClassVar[int] = 1
    lock_timeout: ClassVar[float | None] = 0
    lock_conflict: ClassVar[Conflict | Callable[..., Any]] = "skip"
