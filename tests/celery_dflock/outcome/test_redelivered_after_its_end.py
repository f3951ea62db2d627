"""A message that is delivered again, and comes to its turn when the first run has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Retry

from celery_dflock import LockedTask
from celery_dflock.outcome import redelivery
from celery_dflock.outcome.header import RUN
from celery_dflock.signals import task_deduplicated
from dflockd.sync_client import DistributedLock
from examples.demo.stage import POLL, LockServer, wait_until
from tests.celery_dflock.processes import PATIENCE, waiters


@pytest.fixture
def runs() -> list[str]:
    return []


@pytest.fixture
def backend() -> str:
    return "cache+memory://"


@pytest.fixture
def task(lock_server: LockServer, key: str, runs: list[str], backend: str) -> Task:
    app = Celery("again", broker="memory://", backend=backend, set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]
    app.conf.task_default_queue = key

    @app.task(base=LockedTask, lock_key=key, shared=False, name="again." + key, acks_late=True)
    def again(how: str) -> str:
        runs.append(how)
        if how == "fails":
            raise ValueError("as asked")
        if how == "says nothing":
            raise Ignore
        if how == "is retried":
            raise Retry
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


def deliver(
    task: Task, task_id: str, how: str, *, redelivered: bool, nesting: int = 0, **headers: Any
) -> None:
    """Run it as a process of a worker does."""
    info = {"redelivered": redelivered, "routing_key": task_id}
    request = {"id": task_id, "args": [how], "kwargs": {}, "retries": 0, "delivery_info": info}
    request["headers"] = headers
    request["replaced_task_nesting"] = nesting
    build_tracer(task.name, task, app=task.app)(task_id, (how,), {}, {**request, "is_eager": False})


def sent_again(task: Task, key: str) -> dict[str, Any]:
    """The headers with which the latest run has sent it again."""
    with task.app.connection_for_read() as connection, connection.SimpleQueue(key) as queue:
        message = queue.get(timeout=10)
        message.ack()
    return {RUN: message.headers[RUN]}


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


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("how", ["works", "is retried"])
def test_what_was_sent_again_out_of_the_consumer_finds_its_message_of_before_run(
    task: Task, runs: list[str], dropped: list[str], key: str, how: str
) -> None:
    """A broker that hung while the worker ended has both, and says of the old one alone that it is."""
    deliver(task, key, how, redelivered=True)
    deliver(task, key, how, redelivered=False, **{RUN: {"id": key, "retries": 0, "waited": 5.0}})
    assert runs == [how]
    assert dropped == [key]


def test_what_was_sent_again_out_of_the_consumer_runs(
    task: Task, runs: list[str], key: str
) -> None:
    deliver(
        task, key, "works", redelivered=False, **{RUN: {"id": key, "retries": 0, "waited": 5.0}}
    )
    assert runs == ["works"]


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


def test_one_that_has_waited_for_its_lock_looks_once(
    task: Task, runs: list[str], pauses: list[float], key: str, lock_server: LockServer
) -> None:
    """When a worker ends its tasks come again, perhaps hundreds for one lock: none holds it to wait."""
    with DistributedLock(key, servers=[lock_server.address]):
        deliver_it = partial(deliver, task, key, "works", redelivered=True)
        thread = threading.Thread(target=deliver_it)
        thread.start()
        wait_until(lambda: waiters(lock_server, key) or None, PATIENCE, lambda: "nobody waits")
        threading.Event().wait(redelivery.FIRST_LOOK)
    thread.join(PATIENCE)
    assert runs == ["works"]
    assert set(pauses) <= {POLL}, "it waits for nothing but the lock"


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("how", ["works", "fails"])
def test_one_that_is_killed_between_its_work_and_its_result_is_no_end(
    task: Task, runs: list[str], dropped: list[str], key: str, how: str
) -> None:
    """It was the second delivery itself: the lock server remembers its run, but there is no result."""
    deliver(task, key, how, redelivered=True)
    task.AsyncResult(key).forget()
    deliver(task, key, how, redelivered=True)
    assert runs == [how], "the result may be on its way: it looks again in a second"
    deliver(task, key, how, redelivered=False, **sent_again(task, key))
    assert runs == [how, how]
    assert not dropped


@pytest.mark.usefixtures("pauses")
def test_one_that_has_run_between_two_looks_may_be_about_to_store_its_result(
    task: Task, runs: list[str], dropped: list[str], key: str
) -> None:
    """Three deliveries: one finds the lock free twice, and another one has run in between."""
    met = {RUN: {"id": key, "retries": 0, "redelivery": 1}}
    deliver(task, key, "works", redelivered=False, **met)
    free = sent_again(task, key)
    deliver(task, key, "works", redelivered=True)
    result = task.AsyncResult(key).result
    task.AsyncResult(key).forget()

    deliver(task, key, "works", redelivered=False, **free)

    assert runs == ["works"]
    task.backend.store_result(key, result, "SUCCESS")
    deliver(task, key, "works", redelivered=False, **sent_again(task, key))
    assert runs == ["works"]
    assert dropped == [key]


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("cache+memory://", "says nothing"),
        ("cache+memory://", "is retried"),
        ("disabled://", "works"),
    ],
)
def test_without_a_result_it_runs_once_more_and_no_more(
    task: Task, runs: list[str], dropped: list[str], key: str, how: str
) -> None:
    deliver(task, key, how, redelivered=False)
    for _ in range(3):
        deliver(task, key, how, redelivered=True)
    assert runs == [how, how]
    assert dropped == [key, key]


@pytest.mark.usefixtures("pauses")
def test_one_that_runs_says_what_it_has_found(
    task: Task, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_dflock")
    deliver(task, key, "works", redelivered=True)
    said = (
        f"task {task.name}[{key}] runs: it was delivered before, and its result (PENDING) does not say "
        "that it has ended"
    )
    assert said in caplog.messages


def test_the_second_copy_of_a_firing_needs_no_result_to_be_dropped(
    task: Task, runs: list[str], dropped: list[str], key: str
) -> None:
    """The broker does not say of it that it was delivered before."""
    for _ in range(2):
        deliver(task, key, "works", redelivered=False, dflock_firing={"id": key})
        task.AsyncResult(key).forget()
    assert runs == ["works"]
    assert dropped == [key]


@pytest.mark.usefixtures("pauses")
def test_what_a_task_has_put_in_its_place_runs(
    task: Task, runs: list[str], dropped: list[str], key: str
) -> None:
    """It has the id and the number of retries of the task, which has run and has no result."""
    deliver(task, key, "says nothing", redelivered=True)
    deliver(task, key, "works", redelivered=True, nesting=1)
    assert runs == ["says nothing", "works"]
    assert not dropped


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("backend", ["rpc://"])
def test_results_that_only_the_sender_sees_say_nothing_here(task: Task) -> None:
    task.app.conf.result_persistent = True
    assert task.backend.persistent
    assert not redelivery._keeps_results(task.backend)
