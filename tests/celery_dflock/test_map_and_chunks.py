"""What Celery would run without its lock: the items of map, starmap and chunks, and errbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task, chunks, group, xmap, xstarmap
from celery.app.task import Context
from celery.result import allow_join_result

from celery_dflock import LockedTask, current_lock
from examples.demo.stage import LockServer
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster

ITEMS = [("a",), ("b",)]

METHODS: dict[str, Callable[[Task], Any]] = {
    "map": lambda task: task.map(["a", "b"]),
    "starmap": lambda task: task.starmap(ITEMS),
    "chunks": lambda task: task.chunks(ITEMS, 1),
}
"""What a task has."""

CANVAS: dict[str, Callable[[Task], Any]] = {
    "map": lambda task: xmap(task.s(), ["a", "b"], app=task.app),
    "starmap": lambda task: xstarmap(task.s(), ITEMS, app=task.app),
    "chunks": lambda task: chunks(task.s(), ITEMS, 1, app=task.app).group(),
}
"""The same past the task."""

WITHOUT = "() would run it without its lock: send group(task.s("

INSTEAD = {
    "map": f"map{WITHOUT}item) for item in items) instead",
    "starmap": f"starmap{WITHOUT}*item) for item in items) instead",
    "chunks": f"chunks{WITHOUT}*item) for item in items) instead",
}


def add(address: str = "127.0.0.1:1", **options: Any) -> tuple[Task, list[str]]:
    app, ran = Celery("each", set_as_current=False), list[str]()
    app.conf.update(
        task_always_eager=True, task_eager_propagates=True, dflock_servers=address, **options
    )

    @app.task(name="locked", base=LockedTask, shared=False, lazy=False, lock_key="{key}")
    def locked(key: str) -> str:
        lock = current_lock()
        ran.append(f"{key} {'locked' if lock and lock.held else 'unlocked'}")
        return key

    return locked, ran


@pytest.mark.parametrize("method", METHODS)
def test_it_is_refused_where_it_is_made(method: str) -> None:
    task, _ = add()
    with pytest.raises(NotImplementedError) as refused:
        METHODS[method](task)
    assert str(refused.value) == f"task locked: {INSTEAD[method]}"


@pytest.mark.parametrize("method", CANVAS)
def test_it_is_refused_where_it_runs(method: str) -> None:
    task, ran = add()
    with pytest.raises(NotImplementedError) as refused:
        CANVAS[method](task).apply()
    # Chunks are sent as starmaps.
    assert str(refused.value) == f"task locked: {INSTEAD[method.replace('chunks', 'starmap')]}"
    assert not ran


def test_an_errback_of_several_parameters_is_refused() -> None:
    app, ran = Celery("fails", task_always_eager=True, set_as_current=False), list[str]()
    app.conf.dflock_servers = "127.0.0.1:1"

    @app.task(base=LockedTask, lock_key="{account}", shared=False)
    def refund(request: Context, exc: Exception, traceback: object, account: str) -> None:
        ran.append(account)

    call, error = refund.s(account="a"), ValueError()
    with pytest.raises(NotImplementedError, match=f"task {refund.name}: .* give it one, the id"):
        call(Context(id="failed"), error, None)
    app.conf.dflock_enabled = False
    call(Context(id="failed"), error, None)
    assert ran == ["a"]


def test_what_to_send_instead(lock_server: LockServer) -> None:
    task, ran = add(lock_server.address)
    assert group(task.s(item) for item in ["a", "b"]).apply().get() == ["a", "b"]
    assert group(task.s(*item) for item in ITEMS).apply().get() == ["a", "b"]
    assert ran == ["a locked", "b locked"] * 2


def test_a_direct_call_in_the_body_of_an_item() -> None:
    """It takes no lock, as ever, and is not the map's."""
    task, ran = add()

    @task.app.task(name="free", shared=False, lazy=False)
    def free(key: str) -> str:
        return str(task(key))

    assert free.map(["a"]).apply().get() == ["a"]
    assert ran == ["a unlocked"]


@pytest.mark.parametrize("method", METHODS)
def test_where_locking_is_off(method: str) -> None:
    for make in (METHODS[method], CANVAS[method]):
        task, ran = add(dflock_enabled=False)
        with allow_join_result():
            made = make(task)
            (made.group() if isinstance(made, chunks) else made).apply().get()
        assert ran == ["a unlocked", "b unlocked"]


@pytest.mark.usefixtures("workers")
def test_in_a_worker(cluster: Cluster, key: str) -> None:
    with pytest.raises(NotImplementedError, match=r"requeued: starmap\(\) would run it without"):
        xstarmap(jobs.requeued.s(), [(key,)], app=jobs.app).delay().get(timeout=PATIENCE)
    assert not cluster.events(key=key)
