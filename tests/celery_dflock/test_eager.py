"""In eager mode tasks take their locks too; a direct call takes none; settings from everywhere."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_dflock import (
    LockedTask,
    LockNotAcquiredError,
    LockUnavailableError,
    Skipped,
    TaskLock,
    current_lock,
    require_lock,
)
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import waiters
from tests.collector import collector_off


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    with collector_off():
        yield


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

    # What a run leaves is there in every round; threads of earlier tests leave theirs in one or two.
    assert min(left(task) for _ in range(5)) <= min(left(plain) for _ in range(5))


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


def test_an_unavailable_server_fails_the_task_and_requeues_nothing(
    app: Celery, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    @locked(app)
    def task(key: str) -> None: ...

    app.conf.dflock_servers = ["127.0.0.1:1"]
    with pytest.raises(LockUnavailableError, match=r"127\.0\.0\.1:1"):
        task.delay(key)
    assert "requeued" not in caplog.text


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


@pytest.mark.parametrize(("limit", "weight"), [(2, 1), (4, 2), (None, 1)])
def test_slots_that_an_outer_task_leaves_are_free(
    app: Celery, key: str, limit: int | None, weight: int
) -> None:
    options: dict[str, Any] = {"lock_limit": limit, "lock_weight": weight}
    if limit is None:
        options["lock_rate"] = "100/s"

    @locked(app, name="inner", lock_timeout=0, lock_conflict="fail", **options)
    def inner(key: str, deep: int) -> int:
        return inner.delay(key, deep - 1).get(disable_sync_subtasks=False) if deep else 1

    @locked(app, name="outer", **options)
    def outer(key: str, deep: int) -> int:
        return int(inner.delay(key, deep).get(disable_sync_subtasks=False))

    assert outer.delay(key, 0).get() == 1
    if limit is None:
        return
    with pytest.raises(LockNotAcquiredError, match="in the same thread that waits for this one"):
        outer.delay(key, 1)


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
