"""`LockedTask` and `SingletonTask`: tasks that run while they hold a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from celery import Celery, Task, uuid
from celery.app.task import Context
from celery.result import AsyncResult

from celery_dflock import gate
from celery_dflock.config import Wait, read, settings
from celery_dflock.limits import LimitSource, RateSource, WeightSource
from celery_dflock.lock_key import LockKey
from celery_dflock.options import (
    SLOT_TIMEOUT,
    Conflict,
    Duplicate,
    KeySource,
    LockOptions,
    Lost,
    RequeueOptions,
    Unique,
)
from celery_dflock.outcome import header
from celery_dflock.plan import Bound, Plan
from celery_dflock.run import run_locked
from celery_dflock.superseding import headers_with_age
from celery_dflock.unique import publish as unique
from celery_dflock.worker import boot as boot  # connects what a worker calls at its start


class LockedTask(Task):
    """A task that runs while it holds a lock: ``@app.task(base=LockedTask, ...)``.

    The worker takes the lock just before the body runs and releases it when the body ends, however
    it ends. A thread renews the lease while the body runs. If the process dies, the lock is free
    at once. A direct call, ``task()``, takes no lock.

    A broker may deliver a message again while its task runs (``acks_late``, visibility timeout).
    Such a redelivery is not a conflict and ``lock_conflict`` does not apply to it. It is requeued
    until the lock is free; then it is dropped if the task has a result, and runs otherwise. See
    docs/redelivery.md.

    `lock_limit`, `lock_weight`, `lock_rate` and `lock_group_limit` may also be a function
    ``(task, args, kwargs)`` that returns such a value, or a template that makes one (``"{seats}"``,
    ``"{per_minute}/m"``). If what they make is bad, the task fails and takes no lock. See docs/keys.md.

    Set the options as arguments of the decorator, as class attributes or in ``task_annotations``:

    Attributes:
        lock_key: the key: a template over the arguments (``"account:{account_id}"``), a function
            ``(task, args, kwargs) -> key``, or a list of these. The task takes all keys of a list,
            those that the fewest may have first. In a list, a `Lock` is a key with limits of its own,
            and other keys have those of the task. Default: the name of the task and all its
            arguments. See docs/keys.md.
        lock_limit: how many runs may hold the key at once; ``None`` is no limit, for tasks with a
            `lock_rate` or a `lock_group_limit`. The latest request for a key sets its limit.
        lock_weight: for how many of the limit a run counts: a whole number up to it, or ``"all"``:
            then nobody else holds the key meanwhile, whatever limit others give. A task that
            waits for several is not passed by others that need fewer. A `lock_rate` and a
            `lock_group_limit` count in the same units. See docs/readers-and-writers.md.
        lock_group: the group of a call: a template or a function, as in `lock_key`
            (``"tenant:{tenant_id}"``). Groups that wait for the same key take turns. Within a
            group the order is first come, first served. Calls without a group form one group.
        lock_group_limit: how many runs of one group may hold the key at once. Default: no limit.
        lock_rate: how many runs may begin in any window of a second, minute or hour, over all
            workers: ``"10/m"``, or ``(10, 60)`` for 10 runs in 60 seconds. `lock_limit` applies
            too: with ``None`` any number may run at once. See docs/rates.md.
        lock_ttl: the lease, in seconds. If a worker is cut off from the lock server, its locks
            are free after this time.
        lock_timeout: how long the task waits for the lock, in seconds. ``0`` tries once, ``None``
            waits without end. The default is 5 in a slot and 1500 in the consumer. Rounded up to
            whole seconds in the consumer, and wherever the task keeps its position (see
            `lock_requeue`). If a server does not answer within this time and two more seconds,
            ``dflock_unavailable`` applies.
        lock_wait: where the task waits: ``"slot"``, in a process of the worker's pool, which does
            nothing else meanwhile, or ``"consumer"``, where hundreds can wait. Default: the setting
            ``dflock_wait``, which is ``"slot"`` if you do not set it. See docs/waiting.md.
        lock_conflict: what happens if the lock is not granted in time. ``"requeue"`` sends the task
            again after a pause. ``"skip"`` ends it with a `Skipped` result. ``"fail"`` fails it with
            `LockNotAcquiredError`. A function ``(task, error)`` returns one of these words or the
            result of the task, or raises. ``"supersede"`` lets the newest task win: the holder is
            interrupted with `SupersededError`, older waiters are skipped, and a task that still
            gets no lock in time is requeued. Write ``("supersede", "skip")`` or
            ``("supersede", "fail")`` to end it instead. ``"newest"`` does the same, but the holder
            runs to its end: of those that wait only the newest stays. See docs/supersede.md.
        lock_requeue: the pauses of ``"requeue"``, a dict; see `celery_dflock.options.Backoff`. The
            task keeps its position in the queue during a pause, and the lock stays reserved for a
            while if its turn comes before it is back.
        lock_lost: what happens if the lock is lost while the body runs. ``"raise"`` raises
            `LockLostError` in the body, ``"warn"`` only logs an error. A function ``(task, lock)``
            runs on the renewal thread and must not block. Nothing happens while it is in doubt
            whether the lock is lost.
        lock_unique: whether to send the task while another one with the same name and `lock_key`
            is on its way. ``None`` always sends it. Otherwise the other one counts until it has the
            lock and begins (``"until_executing"``), until it has ended, retries included
            (``"until_executed"``), or for `lock_unique_ttl` seconds whatever happens to it
            (``"until_expired"``). A call is always sent if its result matters to others (in a
            chain, group or chord, with callbacks, or with a task id that you chose) or if no lock
            server answers. See docs/unique.md.
        lock_unique_ttl: seconds after which a task that has not begun no longer counts: its message
            may have been purged. At most the server's ``--max-lease-ttl``.
        lock_duplicate: what happens to the second task. ``"coalesce"`` returns the result of the
            first, ``"raise"`` raises `DuplicateTaskError`, ``"skip"`` returns a `Skipped` result
            that is ready, and ``"replace"`` sends the second and revokes the first unless it runs.
            ``"replace"`` cannot be combined with ``"until_expired"``.

    Options for a single call go into its message header:
    ``task.apply_async(args, headers={"dflock": {"lock_timeout": 60}})``.
    """

    lock_key: ClassVar[KeySource] = None
    lock_limit: ClassVar[LimitSource] = 1
    lock_weight: ClassVar[WeightSource] = 1
    lock_group: ClassVar[str | Callable[..., Any] | None] = None
    lock_group_limit: ClassVar[LimitSource] = None
    lock_rate: ClassVar[RateSource] = None
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
        """Check the options, so that a bad one stops the program and not a task."""
        super().on_bound(app)
        cls._lock_options = LockOptions.of(cls)
        gate.install(cls, LockedTask)
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
        """Send the task, unless ``lock_unique`` finds another one like it on its way.

        It takes the arguments of `celery.Task.apply_async`.

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
            or gate.is_of_celery(type(self))
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

    def lock_keys(self, *args: Any, **kwargs: Any) -> list[LockKey]:
        """Return the keys that a call with these arguments locks, in order: ``dflock()`` takes them.

        Raises:
            LockKeyError: the arguments make no key.
            TypeError: the arguments do not fit the task.
        """
        return self._bound().keys_of(self, args, kwargs)

    def map(self, it: Iterable[Any]) -> Any:
        """Refuse: the items would run without their locks."""
        gate.refuse_items(self, "map")
        return super().map(it)

    def starmap(self, it: Iterable[Any]) -> Any:
        """Refuse: the items would run without their locks."""
        gate.refuse_items(self, "starmap")
        return super().starmap(it)

    def chunks(self, it: Iterable[Any], n: int) -> Any:
        """Refuse: the items would run without their locks."""
        gate.refuse_items(self, "chunks")
        return super().chunks(it, n)

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
        if task_id != self.request.id:  # else this run sends itself again, as old as it is
            headers = headers_with_age(self, bound, args, kwargs, headers, task_id)
        return publish(task_id=task_id, headers=headers, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under the lock."""
        request = self.request
        if request.called_directly:
            gate.refuse_item(self)
            return super().__call__(*args, **kwargs)
        run = gate.run_of(request)
        if run is None:
            return self._run_locked(request, self._next_call(), args, kwargs)
        if gate.is_outermost(type(self)):
            return self._next_call()(*args, **kwargs)  # by a base that is in front
        # A direct call in the body of the task itself, which finds the request of its run.
        gate.check(type(self), run)
        return super().__call__(*args, **kwargs)

    def _next_call(self) -> Callable[..., Any]:
        call: Callable[..., Any] = super().__call__
        # Celery's own would push a request without an id.
        return self.run if getattr(call, "__func__", None) is Task.__call__ else call

    def _run_locked(
        self,
        request: Context,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        bound = self._bound()
        if not bound.is_locked:
            return body(*args, **kwargs)
        return run_locked(Plan(self, request, body, args, kwargs, bound))

    @classmethod
    def _bound(cls, given: Mapping[str, Any] | None = None) -> Bound:
        """Return what is the same for all runs whose calls have these options of their own, or none."""
        app = cls.app
        if given:
            return Bound(cls, cls._options_of(given), read(app))
        bound = cls._lock_bound
        if bound is None or bound.task is not cls or not bound.read.is_current(app.conf):
            bound = cls._lock_bound = Bound(cls, cls._options_of({}), read(app))
        return bound

    @classmethod
    def _options_of(cls, given: Mapping[str, Any]) -> LockOptions:
        usual = vars(cls).get("_lock_options")  # not those of a base that is bound
        if usual is None:
            # Celery registers a task before it binds it, and another thread has got hold of it.
            usual = LockOptions.of(cls)
        return LockOptions.of(cls, given, usual) if given else usual


class SingletonTask(LockedTask):
    """A task of which one run exists at a time, whatever its arguments; overlapping runs are skipped.

    Made for jobs on a schedule: ``@app.task(base=SingletonTask)``. It is a `LockedTask` with other
    defaults, and you can set every option.
    """

    lock_key: ClassVar[KeySource] = staticmethod(lambda task, _args, _kwargs: task.name)
    lock_timeout: ClassVar[float | None] = 0
    lock_conflict: ClassVar[Conflict | Callable[..., Any]] = "skip"
