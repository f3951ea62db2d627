"""In eager mode tasks take their locks too; a direct call takes none; settings from everywhere."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
from celery import Celery, Task
from celery._state import _set_task_join_will_block
from celery.exceptions import ImproperlyConfigured

from celery_dflock import (
    LockedTask,
    LockNotAcquiredError,
    Skipped,
    TaskLock,
    current_lock,
    dflock,
    require_lock,
)
from celery_dflock.config import settings
from celery_dflock.signals import lock_acquired, lock_released
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import waiters


@pytest.fixture
def app(lock_server: LockServer) -> Celery:
    app = Celery("eager", set_as_current=False)
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True
    app.conf.task_store_eager_result = False
    app.conf.dflock_servers = [lock_server.address]
    return app


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def eager_in_threads() -> Iterator[None]:
    """Celery notes in one variable for all threads that a task runs, and so forgets to undo it."""
    yield
    _set_task_join_will_block(False)


def locked(app: Celery, **options: Any) -> Any:
    options = {"base": LockedTask, "lock_key": "{key}", "shared": False, **options}
    return app.task(**options)


@pytest.mark.usefixtures("no_collector")
def test_a_run_leaves_no_more_to_the_collector_than_one_without_a_lock(
    app: Celery, key: str
) -> None:
    """Of its own nothing that only the collector can free: a worker need not stop for it."""

    @app.task(shared=False)
    def plain(key: str) -> None:
        pass

    @locked(app)
    def task(key: str) -> None:
        assert current_lock() is not None

    def left(run: Task) -> int:
        run.apply((key,))
        gc.collect()
        for _ in range(20):
            run.apply((key,))
        return gc.collect()

    assert left(task) <= left(plain)


def test_lock_is_held_while_it_runs(app: Celery, lock_server: LockServer, key: str) -> None:
    @locked(app, bind=True)
    def task(self: Task, key: str) -> tuple[Any, ...]:
        lock = current_lock()
        assert lock is not None
        assert lock.held
        assert waiters(lock_server, key) == 0
        assert len(lock.token or "") == 32
        assert lock.token not in repr(lock)
        assert lock.extend()
        lock.check()
        return self.request.id, self.request.is_eager, lock.key, lock.fence

    for send in (task.delay, lambda key: task.apply((key,), task_id="its-id")):
        sent = send(key)
        task_id, is_eager, locked_key, fence = sent.get()
        assert (task_id, is_eager, locked_key) == (sent.id, True, key)
        assert fence > 0
        assert waiters(lock_server, key) is None
    assert current_lock() is None


def test_a_lock_is_required_where_there_is_one(app: Celery, key: str) -> None:
    @locked(app)
    def task(key: str) -> bool:
        return require_lock() is current_lock()

    assert task.delay(key).get()
    with pytest.raises(RuntimeError, match="no lock is held here"):
        require_lock()
    app.conf.dflock_enabled = False
    with pytest.raises(RuntimeError, match="dflock_enabled"):
        task.delay(key).get()


def test_released_after_an_exception(app: Celery, lock_server: LockServer, key: str) -> None:
    @locked(app)
    def task(key: str) -> None:
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        task.delay(key)
    assert waiters(lock_server, key) is None


@pytest.mark.parametrize("conflict", ["requeue", "fail"])
def test_conflict_with_an_outer_task_fails_fast(app: Celery, key: str, conflict: str) -> None:
    """Its lock cannot become free while it waits for this one."""

    @locked(app, name="inner", lock_timeout=60, lock_conflict=conflict)
    def inner(key: str) -> None: ...

    @locked(app, name="between")
    def between(key: str, inner_key: str) -> None:
        inner.delay(inner_key).get()

    @locked(app, name="outer")
    def outer(key: str) -> None:
        between.delay(f"{key}:between", key).get()

    with pytest.raises(
        LockNotAcquiredError, match="held by a task in the same thread that waits for this one"
    ) as failure:
        outer.delay(key)
    assert failure.value.key == key


def test_conflict_with_another_thread(app: Celery, lock_server: LockServer, key: str) -> None:
    @locked(app, lock_timeout=0, lock_conflict="skip")
    def task(key: str) -> int:
        return 1

    with DistributedLock(key, 0, 10, [lock_server.address]):
        sent = task.delay(key)
        skipped = Skipped.of(sent.get())
        assert skipped is not None
        assert (skipped.key, skipped.task_id) == (key, sent.id)
    assert task.delay(key).get() == 1


def test_direct_call_takes_no_lock(app: Celery, lock_server: LockServer, key: str) -> None:
    @locked(app)
    def task(key: str) -> object:
        assert waiters(lock_server, key) is None
        return current_lock()

    assert task(key) is None


def test_direct_call_in_a_task_takes_no_lock(app: Celery, key: str) -> None:
    @locked(app, name="other", lock_conflict="fail", lock_timeout=0)
    def other(key: str) -> TaskLock | None:
        return current_lock()

    @locked(app, bind=True, name="recursive", lock_conflict="fail", lock_timeout=0)
    def recursive(self: Task, key: str, depth: int = 0) -> int:
        lock = current_lock()
        assert lock is not None
        assert other(key) is lock, "its body is part of this task's"
        # The request is still that of the task that a worker runs.
        return depth if depth == 2 else recursive(key, depth + 1)

    assert recursive.delay(key).get() == 2


def test_signals(app: Celery, key: str) -> None:
    seen = []

    @locked(app)
    def task(key: str) -> None:
        seen.append(("runs", key))

    def acquired(sender: Task, lock: TaskLock, **_: Any) -> None:
        seen.append((f"acquired by {sender.name}", lock.key))
        assert lock.held

    def released(sender: Task, lock: TaskLock, **_: Any) -> None:
        seen.append((f"released by {sender.name}", lock.key))
        assert not lock.held

    lock_acquired.connect(acquired)
    lock_released.connect(released)
    try:
        task.delay(key)
    finally:
        lock_acquired.disconnect(acquired)
        lock_released.disconnect(released)
    assert seen == [
        (f"acquired by {task.name}", key),
        ("runs", key),
        (f"released by {task.name}", key),
    ]


@pytest.mark.usefixtures("eager_in_threads")
def test_threads_take_turns(app: Celery, key: str) -> None:
    balance = [0]

    @locked(app, lock_timeout=10)
    def deposit(key: str) -> None:
        read = balance[0]
        threading.Event().wait(0.002)
        balance[0] = read + 1

    threads = [threading.Thread(target=deposit.delay, args=(key,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert balance == [10]


def test_dflock_is_the_lock_of_tasks(app: Celery, key: str) -> None:
    app.conf.dflock_key_prefix = "shop:"

    @locked(app, lock_timeout=0, lock_conflict="fail")
    def task(key: str) -> int:
        return 1

    key = f"{key} with a space"
    with dflock(key, app=app) as lock:
        assert lock.key == f"shop:{key}".replace(" ", "%20")
        with pytest.raises(LockNotAcquiredError) as failure:
            task.delay(key)
        assert failure.value.key == lock.key
        with pytest.raises(LockNotAcquiredError), dflock(key, 0, app=app):
            pass
    assert task.delay(key).get() == 1


# Where settings come from.


def test_namespace() -> None:
    app = Celery("namespace", set_as_current=False)
    app.config_from_object(
        {
            "CELERY_DFLOCK_SERVERS": ["lock-1:6388", "lock-2"],
            "CELERY_DFLOCK_UNAVAILABLE": "fail",
            "CELERY_DFLOCK_KEY_PREFIX": "shop:",
        },
        namespace="CELERY",
    )
    found = settings(app)
    assert found.servers == (("lock-1", 6388), ("lock-2", 6388))
    assert (found.unavailable, found.key_prefix) == ("fail", "shop:")


class DjangoLike:
    """As Django's settings: an object with all names in capitals, some of which change in tests."""

    CELERY_DFLOCK_SERVERS: ClassVar = ["lock-1:6388"]
    CELERY_DFLOCK_AUTH_TOKEN = "of-the-project"
    CELERY_DFLOCK_SHARDING_STRATEGY = f"{__name__}:last_server"
    CELERY_DFLOCK_ENABLED = True
    CELERY_TASK_ALWAYS_EAGER = True
    CELERY_TASK_ANNOTATIONS: ClassVar = {"annotated": {"lock_ttl": 7}}
    DFLOCK_UNAVAILABLE = "of another package: it is in no namespace"


@pytest.mark.parametrize("namespace", [None, "CELERY", "celery", "Celery_"])
@pytest.mark.parametrize("project", [type("Project", (), {}), ModuleType("project")])
def test_a_change_of_the_settings_is_seen_wherever_it_is_made(
    namespace: str | None, project: Any
) -> None:
    app = Celery("changing", set_as_current=False)
    app.config_from_object(project, namespace=namespace)
    assert settings(app) is settings(app)
    name = "dflock_key_prefix"
    long = f"{(namespace or '').rstrip('_')}_{name}"
    values = iter(f"{number}:" for number in range(100))

    def check() -> str:
        found = settings(app).key_prefix
        assert found == (app.conf.get(name) or "")
        return found

    seen = set()
    for spelling in (name, long, long.lower(), long.upper()):
        setattr(project, spelling, next(values))
        seen.add(check())
        delattr(project, spelling)
        seen.add(check())
    app.conf.add_defaults({name: next(values)})
    seen.add(check())
    for value in (next(values), None):
        for spelling in (name, long, long.lower(), long.upper()):
            app.conf[spelling] = value
            seen.add(check())
    assert len(seen) >= 4
    app.conf.changes.clear()
    assert check() in seen


def test_a_module_that_makes_its_settings_up() -> None:
    project = ModuleType("project")
    made_up = {"CELERY_DFLOCK_KEY_PREFIX": "one:"}

    def make_up(name: str) -> str:
        try:
            return made_up[name]
        except KeyError:
            raise AttributeError(name) from None

    project.__getattr__ = make_up  # type: ignore[method-assign]
    app = Celery("made-up", set_as_current=False)
    app.config_from_object(project, namespace="CELERY")
    assert settings(app).key_prefix == "one:"
    made_up["CELERY_DFLOCK_KEY_PREFIX"] = "other:"
    assert settings(app).key_prefix == "other:"


def test_what_stands_in_for_settings_is_looked_at_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Celery("standing-in", set_as_current=False)
    for host in ("lock-1", "lock-2"):
        monkeypatch.setenv("DFLOCK_SERVERS", host)
        monkeypatch.setenv("DFLOCK_AUTH_TOKEN", f"for-{host}")
        assert settings(app).servers == ((host, 6388),)
        assert settings(app).auth_token == f"for-{host}"
    assert settings(app).enabled
    monkeypatch.setattr("celery_dflock.config.switched_off", True)
    assert not settings(app).enabled


def test_a_list_of_servers_that_is_changed_in_place() -> None:
    app = Celery("in-place", set_as_current=False)
    app.conf.dflock_servers = ["lock-1"]
    assert len(settings(app).servers) == 1
    app.conf.dflock_servers.append("lock-2")
    assert len(settings(app).servers) == 2


def test_django_settings(lock_server: LockServer, key: str) -> None:
    project = DjangoLike()
    app = Celery("project", set_as_current=False)
    app.config_from_object(project, namespace="CELERY")

    @locked(app, name="annotated")
    def task(key: str) -> str:
        lock = current_lock()
        return lock.key if lock else "unlocked"

    found = settings(app)
    assert found.servers == (("lock-1", 6388),)
    assert (found.auth_token, found.unavailable) == ("of-the-project", "requeue")
    assert found.sharding_strategy is last_server
    assert task._lock_options.ttl == 7

    # What override_settings() does in a test.
    project.CELERY_DFLOCK_SERVERS = [lock_server.address]
    project.CELERY_DFLOCK_AUTH_TOKEN = None
    project.CELERY_DFLOCK_KEY_PREFIX = "shop:"
    assert task.delay(key).get() == f"shop:{key}"
    project.CELERY_DFLOCK_ENABLED = False
    assert task.delay(key).get() == "unlocked"
    project.CELERY_DFLOCK_ENABLED = "off"
    with pytest.raises(ImproperlyConfigured, match="dflock_enabled is 'off': give True or False"):
        task.apply((key,), throw=True)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOCK_SERVERS", "lock-1, lock-2:7000,unix:/run/dflockd.sock")
    monkeypatch.setenv("DFLOCK_AUTH_TOKEN", "from-there")
    app = Celery("environment", set_as_current=False)
    assert settings(app).servers == (
        ("lock-1", 6388),
        ("lock-2", 7000),
        ("unix:/run/dflockd.sock", 0),
    )
    assert settings(app).auth_token == "from-there"

    app.conf.dflock_servers = "lock-3"
    app.conf.dflock_auth_token = "from-here"
    assert settings(app).servers == (("lock-3", 6388),), "what the app says comes first"
    assert settings(app).auth_token == "from-here"


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLOCK_SERVERS", raising=False)
    found = settings(Celery("defaults", set_as_current=False))
    assert found.servers == (("127.0.0.1", 6388),)
    assert (found.unavailable, found.key_prefix, found.auth_token) == ("requeue", "", None)


def test_sharding_strategy_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("strategy", set_as_current=False)
    app.conf.dflock_sharding_strategy = f"{__name__}:last_server"
    assert settings(app).sharding_strategy is last_server


def last_server(_key: str, number: int) -> int:
    return number - 1
