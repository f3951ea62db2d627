"""LockedTask as the default base of an app, and beside base classes that have a __call__."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured

from celery_dflock import LockedTask, SingletonTask, current_lock
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import waiters

contexts: list[str] = []
"""What is entered now, outermost first."""


@contextlib.contextmanager
def context(name: str = "app") -> Iterator[None]:
    contexts.append(name)
    try:
        yield
    finally:
        contexts.pop()


class ContextTask(Task):
    """As in Flask's documentation."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return self.run(*args, **kwargs)


class PoliteTask(Task):
    """One that hands on."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context(f"polite, {'locked' if current_lock() else 'not locked'}"):
            return super().__call__(*args, **kwargs)


def make_app(lock_server: LockServer | None = None, **options: Any) -> Celery:
    app = Celery("bases", set_as_current=False, **options)
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True
    app.conf.dflock_servers = [lock_server.address if lock_server else "127.0.0.1:1"]
    return app


def add(app: Celery, **options: Any) -> Task:
    options = {"name": "added", "shared": False, "lazy": False, **options}

    @app.task(**options)
    def task(key: str = "") -> tuple[list[str], str | None]:
        lock = current_lock()
        return list(contexts), lock.key if lock and lock.held else None

    return task


class LockedInContext(LockedTask, ContextTask):
    abstract = True


class SingletonInContext(SingletonTask, ContextTask):
    abstract = True


class PoliteLocked(PoliteTask, LockedTask):
    abstract = True


class LockedPolite(LockedTask, PoliteTask):
    abstract = True


@pytest.mark.parametrize(
    ("base", "entered"),
    [
        (LockedInContext, ["app"]),
        (SingletonInContext, ["app"]),
        (PoliteLocked, ["polite, not locked"]),
        (LockedPolite, ["polite, locked"]),
    ],
)
def test_both_take_part(
    lock_server: LockServer, key: str, base: type[Task], entered: list[str]
) -> None:
    task = add(make_app(lock_server), base=base, lock_key="{key}")

    assert task.delay(key).get() == (entered, key)
    directly, locked = task(key)
    assert (len(directly), locked) == (1, None), "a direct call has the context and takes no lock"
    assert waiters(lock_server, key) is None


def wrapped(how: Callable[[Any], Any]) -> type[Task]:
    class WrappedTask(Task):
        abstract = True

        @how
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    return WrappedTask


def with_wraps(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def without_wraps(function: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class InnerFunctionTask(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return Task.run(self, *args, **kwargs)

        return run()


@pytest.mark.parametrize(
    "base", [ContextTask, wrapped(with_wraps), wrapped(without_wraps), InnerFunctionTask]
)
def test_a_call_that_shadows_the_lock_is_refused(base: type[Task]) -> None:
    mixed = type("Mixed", (base, LockedTask), {"abstract": True})

    with pytest.raises(ImproperlyConfigured) as refused:
        add(make_app(), base=mixed)
    name = base.__name__
    assert str(refused.value) == (
        f"task added: {name}.__call__ runs the task before LockedTask can lock it: put LockedTask "
        f"first, class ...(LockedTask, {name}), or let {name} call "
        "super().__call__(*args, **kwargs) instead of self.run(*args, **kwargs)"
    )


TaskBase = Celery("other", set_as_current=False).Task


class NamedTask(TaskBase):
    """As in Flask's documentation of old: TaskBase is that of an app."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return TaskBase.__call__(self, *args, **kwargs)


class DottedTask(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return celery.Task.__call__(self, *args, **kwargs)


def in_a_function() -> type[Task]:
    Base = TaskBase

    class EnclosedTask(Base):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return (lambda: Base.__call__(self, *args, **kwargs))()

    return EnclosedTask


@pytest.mark.parametrize(
    ("base", "called"),
    [(NamedTask, TaskBase.__name__), (DottedTask, "Task"), (in_a_function(), TaskBase.__name__)],
)
def test_a_call_by_name_past_the_lock_is_refused(base: type[Task], called: str) -> None:
    mixed = type("Mixed", (base, LockedTask), {"abstract": True})

    with pytest.raises(ImproperlyConfigured) as refused:
        add(make_app(), base=mixed)
    name = base.__name__
    assert str(refused.value) == (
        f"task added: {name}.__call__ runs the task before LockedTask can lock it: put LockedTask "
        f"first, class ...(LockedTask, {name}), or let {name} call "
        f"super().__call__(*args, **kwargs) instead of {called}.__call__(self, *args, **kwargs)"
    )


class SkippingTask(Task):
    """One that hands on, past the next."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super(LockedTask, self).__call__(*args, **kwargs)


class PushingTask(Task):
    """One that hands on a call that looks as if it were direct."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.request_stack.push(Context(args=args, kwargs=kwargs))
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.pop_request()


class LookingUpTask(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(Task, "__call__")(self, *args, **kwargs)  # noqa: B004, B009


class SometimesTask(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self.run(*args, **kwargs)
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("base", [SkippingTask, PushingTask, LookingUpTask, SometimesTask])
def test_a_body_does_not_run_past_the_lock(base: type[Task], bind: bool) -> None:
    """Where the code of a base does not say for certain what it calls."""
    mixed, ran = type("Mixed", (base, LockedTask), {"abstract": True}), list[str]()
    app = make_app()

    def body(key: str) -> None:
        ran.append(key)

    def bound(self: Task, key: str) -> None:
        ran.append(key)

    task = app.task(
        name="added", base=mixed, shared=False, lazy=False, bind=bind, lock_key="{key}"
    )(bound if bind else body)
    with pytest.raises(ImproperlyConfigured) as refused:
        task.delay("a").get()
    assert not ran
    name = base.__name__
    assert str(refused.value) == (
        f"task added: {name}.__call__ bypassed LockedTask.__call__, so the task has no "
        f"lock: put LockedTask first, class ...(LockedTask, {name}), or let {name} call "
        "super().__call__(*args, **kwargs)"
    )
    task("directly")
    task.run("directly")
    assert ran == ["directly"] * 2


def test_a_base_that_is_watched_and_hands_on(lock_server: LockServer, key: str) -> None:
    """It is not in the way of what a body does: calling its own task, and sending it."""
    app = make_app(lock_server)

    @app.task(name="again", base=PoliteLocked, shared=False, lazy=False, lock_key="{key}:{left}")
    def again(key: str, left: int) -> list[int]:
        if not left:
            return [0]
        sent = again.delay(key, left - 1)
        return [
            left,
            *again(key, left - 1),
            *again.run(key, 0),
            *sent.get(disable_sync_subtasks=False),
        ]

    assert again.delay(key, 1).get() == [1, 0, 0, 0]
    assert again(key, 1) == [1, 0, 0, 0]


def test_locking_that_is_switched_off_runs_what_is_watched() -> None:
    app = make_app()
    app.conf.dflock_enabled = False
    assert add(app, base=PoliteLocked).delay("").get() == (["polite, not locked"], None)


def test_its_own_call_that_shadows_the_lock_is_refused() -> None:
    class Own(LockedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    with pytest.raises(ImproperlyConfigured, match=r"task added: Own\.__call__ runs the task"):
        add(make_app(), base=Own)


def test_shadowing_by_the_apps_default_base_is_refused() -> None:
    class Shadowing(ContextTask, LockedTask):
        abstract = True

    app = make_app(task_cls=Shadowing)
    with pytest.raises(ImproperlyConfigured, match="before LockedTask can lock it"):
        app.finalize()


# As the default base.


@pytest.mark.parametrize(
    "task_cls",
    [LockedTask, "celery_dflock:LockedTask", "celery_dflock.LockedTask", LockedInContext],
)
def test_task_cls(lock_server: LockServer, key: str, task_cls: Any) -> None:
    task = add(make_app(lock_server, task_cls=task_cls), lock_key="{key}")

    assert isinstance(task, LockedTask)
    assert task.delay(key).get()[1] == key


def test_app_task_is_the_base(lock_server: LockServer, key: str) -> None:
    app = make_app(lock_server)
    app.Task = LockedInContext

    assert add(app, lock_key="{key}").delay(key).get() == (["app"], key)


def test_class_based_task(lock_server: LockServer, key: str) -> None:
    class Import(LockedInContext):
        name = "import"
        lock_key = "{key}"

        def run(self, key: str) -> tuple[list[str], bool]:
            lock = current_lock()
            return list(contexts), lock is not None and lock.held

    app = make_app(lock_server)
    task = app.register_task(Import())

    assert task.delay(key).get() == (["app"], True)


def test_celerys_own_tasks_take_no_locks() -> None:
    """They get the app's default base too; there is no server at the address of this app."""
    app = make_app(task_cls=LockedTask)
    app.finalize()

    numbers = app.tasks["celery.accumulate"]
    assert isinstance(numbers, LockedTask)
    assert list(numbers.apply((1, 2), throw=True).get()) == [1, 2]


def test_another_base_replaces_the_default(lock_server: LockServer, key: str) -> None:
    """So a context of the app's default base is entered only if both are bases of the task."""
    app = make_app(lock_server, task_cls=ContextTask)

    assert add(app, base=LockedTask, lock_key="{key}").delay(key).get() == ([], key)
    both = type("Both", (LockedTask, app.Task), {"abstract": True})
    assert add(app, name="both", base=both, lock_key="{key}").delay(key).get() == (["app"], key)
