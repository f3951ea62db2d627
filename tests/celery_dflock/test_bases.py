"""LockedTask as the default base of an app, and beside base classes that have a __call__."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import celery
import pytest
from celery import Celery, Task, signals
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.contrib.django.task import DjangoTask
from celery.exceptions import ImproperlyConfigured
from kombu.utils.uuid import uuid

from celery_dflock import (
    LockedTask,
    LockLostError,
    LockNotAcquiredError,
    SingletonTask,
    current_lock,
    dflock,
    gate,
)
from celery_dflock.signals import lock_lost
from dflockd import admin
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
        (PoliteLocked, ["polite, locked"]),
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
            return self.run(*args, **kwargs)

        return run()


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


class TwiceTask(Task):
    """One that tries again, as after a stale connection to a database."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class ThreadTask(Task):
    """A home-made time limit."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(super().__call__, *args, **kwargs).result(30)


class RunInThreadTask(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(self.run, *args, **kwargs).result(30)


class BeforeAndAfterTask(Task):
    """One that calls the function itself, while the task has its lock and once more in a thread."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.run(*args, **kwargs)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(self.run, *args, **kwargs).result(30)
        result = super().__call__(*args, **kwargs)
        self.run(*args, **kwargs)
        return result


BASES = [
    None,
    DjangoTask,
    ContextTask,
    wrapped(with_wraps),
    wrapped(without_wraps),
    InnerFunctionTask,
    NamedTask,
    DottedTask,
    in_a_function(),
    SkippingTask,
    PushingTask,
    LookingUpTask,
    SometimesTask,
    TwiceTask,
    BeforeAndAfterTask,
    ThreadTask,
    RunInThreadTask,
]


ENDLESS = (SkippingTask, "behind")
"""It would call itself, without end."""

PLACES = [
    pytest.param(base, place, id=f"{base.__name__} {place}" if base else "alone")
    for base, place in itertools.product(BASES, ["in front", "behind"])
    if (base, place) != ENDLESS and (base or place == "in front")
]

MADE = ["function", "bound", "pydantic", "bound pydantic", "untyped", "shared", "class", "subclass"]
"""How a task can be made."""


@pytest.fixture
def make(
    lock_server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, type[Task], Callable[[str], str]], Task]:
    """What makes a task, with a base and a body; how is one of `MADE`."""
    app = make_app(lock_server)

    def make(how: str, base: type[Task], body: Callable[[str], str]) -> Task:
        if how in ("class", "subclass"):
            fields = {"name": "added", "lock_key": "{key}", "run": lambda self, key: body(key)}
            of_class = type("Added", (base,), fields)
            if how == "subclass":
                app.register_task(of_class())
                again = lambda self, *args: super(of_derived, self).__call__(*args)  # noqa: E731
                of_derived = type("Derived", (of_class,), {"name": "derived", "__call__": again})
                return app.register_task(of_derived())
            return app.register_task(of_class())

        def bound(self: Task, key: str) -> str:
            return body(key)

        options: dict[str, Any] = {"name": "added", "base": base, "lock_key": "{key}"}
        options |= {"pydantic": "pydantic" in how, "typing": how != "untyped"}
        options["bind"] = "bound" in how
        function = bound if "bound" in how else body
        if how != "shared":
            return app.task(shared=False, lazy=False, **options)(function)
        # It is one of every app that there is, or will be.
        apps = set[Celery]()
        monkeypatch.setattr(celery._state, "_apps", {app})
        monkeypatch.setattr(celery._state, "_on_app_finalizers", apps)
        app.finalize()
        celery.shared_task(**options)(function)
        return app.tasks["added"]

    return make


def as_a_worker(task: Task, key: str) -> Any:
    """Run it as a process of a worker does, and return its result."""
    name = uuid()
    request = {"id": name, "args": [key], "kwargs": {}, "retries": 0, "is_eager": False}
    trace = build_tracer(task.name, task, app=task.app)
    result, info, *_ = trace(name, (key,), {}, {**request, "delivery_info": {"routing_key": "q"}})
    if info is not None:
        raise info.retval
    return result


@pytest.mark.parametrize("how", MADE)
@pytest.mark.parametrize(("base", "place"), PLACES)
def test_the_body_has_its_lock(
    lock_server: LockServer,
    make: Callable[[str, type[Task], Callable[[str], str]], Task],
    key: str,
    base: type[Task] | None,
    place: str,
    how: str,
) -> None:
    """However a base calls it, wherever that stands, however the task is made."""
    bases = (base, LockedTask) if place == "in front" else (LockedTask, base)
    seen = list[str | None]()

    def body(key: str) -> str:
        lock = current_lock()
        seen.append(lock.key if lock is not None and lock.held else None)
        return "done"

    task = make(how, type("Mixed", bases, {"abstract": True}) if base else LockedTask, body)

    for run in (lambda: task.delay(key).get(), lambda: as_a_worker(task, key)):
        assert run() == "done"
        assert set(seen) == {key}
        assert len(seen) == {TwiceTask: 2, BeforeAndAfterTask: 4}.get(base, 1)
        assert waiters(lock_server, key) is None, "it is free again"
        seen.clear()
    assert task(key) == "done"
    assert task.run(key) == "done"
    assert set(seen) == {None}, "a direct call takes no lock"


class NeverTask(Task):
    """One that calls nothing; it has the lock itself."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lock = current_lock()
        return lock.key if lock is not None and lock.held else None


@pytest.mark.parametrize("how", MADE)
def test_a_base_that_never_calls_the_body(
    lock_server: LockServer,
    make: Callable[[str, type[Task], Callable[[str], str]], Task],
    key: str,
    how: str,
) -> None:
    ran = list[str]()

    def body(key: str) -> str:
        ran.append(key)
        return "done"

    task = make(how, type("Mixed", (NeverTask, LockedTask), {"abstract": True}), body)
    assert as_a_worker(task, key) == key
    assert not ran
    assert waiters(lock_server, key) is None


def test_a_body_that_outlives_its_run_keeps_the_lock(lock_server: LockServer, key: str) -> None:
    """The base gives it up, as a time limit does, and its thread goes on."""
    app, begun, go_on, ended = make_app(lock_server), Event(), Event(), Event()
    states = list[str]()

    class Impatient(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            threads.append(Thread(target=super().__call__, args=args, daemon=True))
            threads[0].start()
            assert begun.wait(30)
            raise TimeoutError

    threads = list[Thread]()

    @app.task(
        name="slow",
        base=type("Both", (Impatient, LockedTask), {"abstract": True}),
        shared=False,
        lazy=False,
        lock_key="{key}",
    )
    def slow(key: str) -> None:
        begun.set()
        assert go_on.wait(30)
        lock = current_lock()
        assert lock is not None
        states.append(lock.state)
        ended.set()

    with pytest.raises(TimeoutError):
        slow.delay(key).get()
    with pytest.raises(LockNotAcquiredError), dflock(key, timeout=0, app=app):
        pass
    go_on.set()
    assert ended.wait(30)
    threads[0].join(30)
    assert states == ["held"]
    with dflock(key, timeout=0, app=app):
        pass


class Late(Task):
    """One that has ended before its thread begins."""

    abstract = True
    calls: ClassVar[list[Callable[[], Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls[:] = [functools.partial(super().__call__, *args, **kwargs)]


class Worker:
    """As much of one as receivers of its signals look at."""

    app = Celery("worker", set_as_current=False)


@pytest.fixture
def in_a_worker() -> Iterator[None]:
    worker = Worker()
    signals.worker_init.send(sender=worker)
    yield
    signals.worker_shutdown.send(sender=worker)


@pytest.mark.usefixtures("in_a_worker")
def test_a_body_after_the_end_of_its_run_is_refused(
    lock_server: LockServer, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = add(
        make_app(lock_server),
        base=type("Both", (Late, LockedTask), {"abstract": True}),
        lock_key="{key}",
    )
    assert task.delay(key).get() is None
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(ImproperlyConfigured, match="added: its body was called without its lock"),
    ):
        threads.submit(Late.calls[0]).result(30)
    assert "no run that goes on holds" in caplog.text
    assert task(key) is None, "a direct call is one everywhere"


@pytest.mark.usefixtures("in_a_worker")
def test_a_body_with_other_arguments_is_not_in_the_run(lock_server: LockServer, key: str) -> None:
    class Wrong(Task):
        abstract = True

        def __call__(self, key: str) -> Any:
            with ThreadPoolExecutor(1) as threads:
                return threads.submit(super().__call__, f"{key}:other").result(30)

    base = type("Both", (Wrong, LockedTask), {"abstract": True})
    task = add(make_app(lock_server), base=base, lock_key="{key}")
    with pytest.raises(ImproperlyConfigured, match=f"holds '{key}:other'"):
        task.delay(key).get()


@pytest.mark.usefixtures("in_a_worker")
def test_no_body_begins_while_its_run_gives_the_lock_back(key: str) -> None:
    @make_app().task(name="plain", base=PoliteLocked, shared=False, lazy=False, lock_key="{key}")
    def task(key: str) -> str:
        return key

    locks: Any = SimpleNamespace(keys=[key], state="held", check=lambda: None)
    request, run = Context(), gate.Run(type(task), locks)
    gate.begin(request, run, is_outermost=True)
    try:
        assert task.run(key) == key, "beside it, under its lock"
        assert gate.end(run)
        with pytest.raises(ImproperlyConfigured):
            task.run(key)
    finally:
        gate.forget(request, run)


def test_a_base_in_front_of_an_item_that_takes_no_lock(lock_server: LockServer) -> None:
    base = type("Both", (ContextTask, LockedTask), {"abstract": True})
    app = make_app(lock_server)
    task = add(app, base=base, lock_key="{key}")
    with pytest.raises(NotImplementedError, match="would run it without its lock"):
        app.tasks["celery.map"].delay(task.s(), ["a"]).get()


def test_a_base_in_front_when_no_server_answers() -> None:
    app = make_app()
    app.conf.dflock_unavailable = "run"
    assert add(app, base=PoliteLocked).delay("").get() == (["polite, not locked"], None)


def test_a_body_without_its_lock_is_refused(lock_server: LockServer, key: str) -> None:
    """The function of ``lock_conflict`` runs when the task has no lock."""
    app = make_app(lock_server)

    def anyway(task: Task, _error: LockNotAcquiredError) -> Any:
        return task(key)

    for number, base in enumerate([LockedTask, PoliteLocked]):
        task = add(
            app, name=f"{number}", base=base, lock_key="{key}", lock_timeout=0, lock_conflict=anyway
        )
        with dflock(key, app=app), pytest.raises(ImproperlyConfigured, match="is not held"):
            task.delay(key).get()


@pytest.mark.parametrize("base", [LockedTask, PoliteLocked])
def test_a_lock_that_is_lost_lets_no_body_in(
    lock_server: LockServer, key: str, base: type[Task]
) -> None:
    app, ran = make_app(lock_server), list[int]()

    @app.task(
        name="lost",
        base=base,
        shared=False,
        lazy=False,
        bind=True,
        lock_key="{key}",
        lock_lost="warn",
    )
    def lost(self: Task, key: str) -> None:
        ran.append(1)
        if len(ran) == 1:
            lock = current_lock()
            assert lock is not None
            assert lock.fence is not None
            ended = Event()
            on_lost = lambda **_: ended.set()  # noqa: E731
            lock_lost.connect(on_lost, weak=False)
            assert admin.evict(lock_server.address, key, lock.fence)
            assert not lock.extend()
            assert ended.wait(30)
            self(key)

    with pytest.raises(LockLostError):
        lost.delay(key).get()
    assert ran == [1]


def test_a_coroutine_function_is_refused() -> None:
    async def body() -> None: ...

    with pytest.raises(ImproperlyConfigured, match=r"async with dflock\(\.\.\.\)"):
        make_app().task(name="added", base=LockedTask, shared=False, lazy=False)(body)


def test_a_base_does_not_hinder_calls_in_the_body(lock_server: LockServer, key: str) -> None:
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


@pytest.mark.parametrize("base", [LockedTask, PoliteLocked, LockedPolite])
def test_a_direct_call_in_the_body_has_arguments_of_its_own(
    lock_server: LockServer, key: str, base: type[Task]
) -> None:
    """It says so in its request too, as with Celery's own base, and is in the run for all that."""
    app, seen = make_app(lock_server), list[tuple[Any, ...]]()

    @app.task(name="nested", base=base, shared=False, lazy=False, bind=True, lock_key="{key}")
    def nested(self: Task, key: str, left: int) -> None:
        lock, request = current_lock(), self.request
        seen.append((*request.args, *request.kwargs.values(), left, lock and lock.key))
        if left == 2:
            self(key, 1)
            self(key, left=0)
            seen.append((*request.args, self.request is request))

    nested.delay(key, 2).get()
    assert seen == [(key, 2, 2, key), (key, 1, 1, key), (key, 0, 0, key), (key, 2, True)]


def test_locking_that_is_switched_off_lets_all_bodies_run() -> None:
    app = make_app()
    app.conf.dflock_enabled = False
    assert add(app, base=PoliteLocked).delay("").get() == (["polite, not locked"], None)


def test_its_own_call_has_the_lock(lock_server: LockServer, key: str) -> None:
    class Own(LockedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    assert add(make_app(lock_server), base=Own, lock_key="{key}").delay(key).get() == ([], key)


def test_a_class_without_a_name(lock_server: LockServer, key: str) -> None:
    """Celery gives it one, at its instance."""

    class Locked(LockedTask, RunInThreadTask):
        abstract = True

    class Nameless(Locked):
        lock_key = "{key}"

        def run(self, key: str) -> str | None:
            lock = current_lock()
            return lock.key if lock else None

    app = make_app(lock_server)
    signals.worker_init.send(sender=None)
    try:
        assert app.register_task(Nameless()).delay(key).get() == key
    finally:
        signals.worker_shutdown.send(sender=None)


def test_a_class_that_is_derived_from_a_task(lock_server: LockServer, key: str) -> None:
    class First(PoliteLocked):
        name = "first"
        lock_key = "{key}"

        def run(self, key: str) -> tuple[str | None, str | None]:
            lock = current_lock()
            return self.request.id, lock.key if lock else None

    class Second(First):
        name = "second"

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    app = make_app(lock_server)
    for task in app.register_task(First()), app.register_task(Second()):
        sent = task.delay(key)
        # In eager mode Celery 5.4 gives one with a `__call__` an empty request, without a lock too.
        is_told = celery.VERSION >= (5, 5) or not isinstance(task, Second)
        assert sent.get() == (sent.id if is_told else None, key)


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
