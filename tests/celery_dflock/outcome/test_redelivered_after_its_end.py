"""A message that is delivered again, and comes to its turn when the first run has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer

from celery_dflock import LockedTask
from celery_dflock.outcome import redelivery
from celery_dflock.signals import task_deduplicated
from examples.demo.stage import LockServer


@pytest.fixture
def runs() -> list[str]:
    return []


@pytest.fixture
def backend() -> str:
    return "cache+memory://"


@pytest.fixture
def task(lock_server: LockServer, key: str, runs: list[str], backend: str) -> Task:
    app = Celery("again", backend=backend, set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]

    @app.task(base=LockedTask, lock_key=key, shared=False, name="again." + key, acks_late=True)
    def again(how: str) -> str:
        runs.append(how)
        if how == "fails":
            raise ValueError("as asked")
        return how

    return app.tasks[again.name]


@pytest.fixture
def dropped() -> Iterator[list[str]]:
    seen: list[str] = []

    def note(task_id: str, **_: Any) -> None:
        seen.append(task_id)

    task_deduplicated.connect(note)
    yield seen
    task_deduplicated.disconnect(note)


def deliver(task: Task, task_id: str, how: str, *, redelivered: bool) -> None:
    """Run it as a process of a worker does."""
    info = {"redelivered": redelivered}
    request = {"id": task_id, "args": [how], "kwargs": {}, "retries": 0, "delivery_info": info}
    build_tracer(task.name, task, app=task.app)(task_id, (how,), {}, {**request, "is_eager": False})


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long it has waited, each time. It need not wait here."""
    seen: list[float] = []
    monkeypatch.setattr(redelivery.time, "sleep", seen.append)
    return seen


@pytest.mark.parametrize(("how", "state"), [("works", "SUCCESS"), ("fails", "FAILURE")])
def test_it_does_not_run_again(
    task: Task,
    runs: list[str],
    dropped: list[str],
    pauses: list[float],
    key: str,
    how: str,
    state: str,
) -> None:
    deliver(task, key, how, redelivered=False)
    assert task.AsyncResult(key).state == state
    deliver(task, key, how, redelivered=True)
    assert runs == [how]
    assert dropped == [key]
    assert task.AsyncResult(key).state == state
    assert not pauses


def test_it_looks_again_for_a_result_that_is_stored_after_the_lock_is_free(
    task: Task, runs: list[str], dropped: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(_: float) -> None:
        task.backend.store_result(key, "works", "SUCCESS")

    monkeypatch.setattr(redelivery.time, "sleep", store)
    deliver(task, key, "works", redelivered=True)
    assert not runs
    assert dropped == [key]


@pytest.mark.parametrize(("backend", "waits"), [("cache+memory://", 1), ("disabled://", 0)])
def test_it_runs_where_there_is_no_result(
    task: Task, runs: list[str], dropped: list[str], pauses: list[float], key: str, waits: int
) -> None:
    """The worker of the first was killed."""
    deliver(task, key, "works", redelivered=True)
    assert runs == ["works"]
    assert not dropped
    assert len(pauses) == waits, "it does not wait where no result is stored"
