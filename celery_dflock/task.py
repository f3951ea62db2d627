"""`LockedTask` and `SingletonTask`: tasks that run while they hold a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from celery import Celery, Task, uuid
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured
from celery.result import AsyncResult

from celery_dflock import gate
from celery_dflock.config import Wait, read, settings
from celery_dflock.limits import LimitSource, RateSource, WeightSource
from celery_dflock.lock_key import LockKey
from celery_dflock.options import (
    OPTIONS,
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

    Set its options as arguments of the decorator, as class attributes or in ``task_annotations``.
    `TaskOptions` lists and describes them. Options for a single call go into its message header:
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

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse an option: they are read from the class, once, so this one would have no effect."""
        if name in OPTIONS:
            raise ImproperlyConfigured(
                f"task {self.name or type(self).__name__}: {name} is set too late, on the task itself: "
                f"write @app.task(base=LockedTask, {name}=...), or set it in the class or in "
                "task_annotations"
            )
        super().__setattr__(name, value)

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
            or any(options.get(name) for name in ("group_id", "chord", "chain", "parent_id"))
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

    def retry(self, *args: Any, **options: Any) -> Any:
        """Try the task again, as `celery.Task.retry` does; ``headers`` are added to those before."""
        if "headers" in options:
            options["headers"] = header.of_retry(self.request, options["headers"])
        return super().retry(*args, **options)

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
            try:
                headers = headers_with_age(self, bound, args, kwargs, headers, task_id)
            except Exception:
                # A callback whose parent has done its work, and would fail: it fails where it arrives.
                if not options.get("parent_id"):
                    raise
        return publish(task_id=task_id, headers=headers, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under the lock."""
        request = self.request
        if request.called_directly:
            gate.refuse_of_celery(self, args)
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
