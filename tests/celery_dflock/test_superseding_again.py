"""The newest wins: an older task that comes again, in whatever way, never stops the newest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Task, states
from celery.app.task import Context
from celery.result import AsyncResult

from celery_dflock import LockedTask, LockNotAcquiredError, Skipped, SupersededError, superseding
from celery_dflock.outcome import header
from celery_dflock.plan import Plan
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.test_superseding import assert_revoked, ended

REDELIVERED = {"delivery_info": {"redelivered": True}}
"""As a broker says it."""


@pytest.fixture(scope="module")
def impatient(cluster: Cluster) -> Iterator[Worker]:
    """A worker whose broker delivers again what has not been acknowledged in half a second."""
    with cluster.ready("impatient", env={jobs.VISIBILITY: "0.5"}) as worker:
        yield worker


def wait_skipped(cluster: Cluster, sent: AsyncResult) -> None:
    assert ended(cluster, sent) == states.SUCCESS
    assert Skipped.of(sent.result) is not None
    assert cluster.events(what="start", id=sent.id) == []


def put_aside(cluster: Cluster, key: str, task: Task = jobs.latest) -> tuple[AsyncResult, Any]:
    """Send a task that no worker gets; return its message with it."""
    sent = cluster.send(task, key, queue=jobs.ASIDE)
    return sent, taken_aside(cluster)


def taken_aside(cluster: Cluster) -> Any:
    """The message that no worker gets."""
    return cluster.wait(lambda: jobs.app.backend.client.lpop(jobs.ASIDE), "a message put aside")


@pytest.mark.usefixtures("workers")
def test_one_that_was_sent_without_a_number_keeps_that_of_its_arrival(
    cluster: Cluster, key: str
) -> None:
    with cluster.lock(key):  # which takes no part, and does not stop
        headers = {"dflock": {"lock_timeout": 0}}
        older = jobs.app.send_task("latest", (), {"key": key}, headers=headers)
        cluster.wait_event("requeued", older, 2)
        newest = cluster.send(jobs.latest, key)
        wait_skipped(cluster, older)
    assert newest.get(timeout=PATIENCE) == newest.id


def test_the_number_of_its_arrival_goes_along_when_it_is_sent_again(
    cluster: Cluster, key: str
) -> None:
    request = Context(id=f"sent:{key}", headers={"x-tenant": "blue"}, retries=0)
    task = jobs.latest
    run = Plan(task, request, task.run, (), {"key": key}, task._bound())
    assert superseding.prepare(run) is None
    newer = cluster.lock(key).draw_age()
    again = run.header.write(request)
    assert again["x-tenant"] == "blue"
    assert 0 < header.age_of(again, request.id) == run.age < newer


@pytest.mark.usefixtures("workers")
def test_a_retry_is_as_old_as_its_first_attempt(cluster: Cluster, key: str, gate: Path) -> None:
    older = cluster.send(jobs.latest, key, then="retry aside")
    message = taken_aside(cluster)
    newest = cluster.send(jobs.latest, key, gate=str(gate))
    cluster.wait_event("start", newest)
    jobs.app.backend.client.lpush("celery", message)
    assert ended(cluster, older) == states.SUCCESS
    assert Skipped.of(older.result) is not None
    gate.touch()
    assert newest.get(timeout=PATIENCE) == newest.id


def test_copies_of_one_that_was_stopped(
    cluster: Cluster, impatient: Worker, key: str, gate: Path, never: str
) -> None:
    older = cluster.send(jobs.latest_late, key, gate=never, queue=impatient.name)
    cluster.wait_event("start", older)
    cluster.wait_event("requeued", older, 2)
    newest = cluster.send(jobs.latest_parked, key, gate=str(gate), queue=impatient.name)
    assert_revoked(cluster, older, newest)
    cluster.wait_event("start", newest)
    cluster.wait_event("deduplicated", older)
    assert cluster.events(what="end", id=newest.id) == []
    gate.touch()
    assert newest.get(timeout=PATIENCE) == newest.id
    assert_revoked(cluster, older, newest)
    assert len(cluster.events(what="start", id=older.id)) == 1


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("wait", ["slot", pytest.param("consumer", marks=pytest.mark.soak)])
def test_the_newest_is_killed_and_an_older_one_comes_back(
    cluster: Cluster, impatient: Worker, key: str, gate: Path, wait: str
) -> None:
    older, message = put_aside(cluster, key, jobs.latest_late)
    given = {"queue": impatient.name, "headers": {"dflock": {"lock_wait": wait}}}
    newest = cluster.send(jobs.latest_late, key, gate=str(gate), **given)
    cluster.wait_event("start", newest)
    impatient.kill()
    cluster.wait_free(key)
    jobs.app.backend.client.lpush("two", message)
    wait_skipped(cluster, older)
    gate.touch()
    impatient.start()
    assert newest.get(timeout=PATIENCE) == newest.id
    assert len(cluster.events(what="start", id=newest.id)) == 2


@pytest.mark.usefixtures("workers")
def test_an_older_one_is_killed_while_the_newest_waits(
    cluster: Cluster, impatient: Worker, key: str, gate: Path, never: str
) -> None:
    older = cluster.send(jobs.latest_late, key, gate=never, queue=impatient.name)
    cluster.wait_event("start", older)
    impatient.kill()
    newest = cluster.send(jobs.latest, key, gate=str(gate), queue="one")
    cluster.wait_event("start", newest)
    impatient.start()
    cluster.wait_event("skipped", older)
    assert ended(cluster, older) == states.SUCCESS
    assert len(cluster.events(what="start", id=older.id)) == 1
    assert cluster.events(what="end", id=newest.id) == []
    gate.touch()
    assert newest.get(timeout=PATIENCE) == newest.id


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("stored", [True, False])
def test_a_copy_that_comes_later_leaves_the_result_as_it_is(
    cluster: Cluster, key: str, stored: bool, never: str
) -> None:
    age = cluster.lock(key).draw_age()
    same = {"task_id": f"older:{key}", "headers": header.said_of(f"older:{key}", {}, "age", age)}
    older = cluster.send(jobs.latest, key, gate=never, ignore_result=not stored, **same)
    cluster.wait_event("start", older)
    newest = cluster.send(jobs.latest, key)
    assert newest.get(timeout=PATIENCE) == newest.id
    cluster.wait_event("superseded", older)
    if stored:
        assert_revoked(cluster, older, newest)
    cluster.send(jobs.latest, key, ignore_result=not stored, **same, **REDELIVERED)
    # It is dropped; where nothing says that it has ended, it is skipped.
    cluster.wait_event("deduplicated" if stored else "skipped", older)
    again = AsyncResult(older.id, app=jobs.app)
    assert again.state == (states.REVOKED if stored else states.PENDING)


def test_an_eager_task_of_the_same_key_fails_at_once(cluster: Cluster, key: str) -> None:
    seen: list[BaseException] = []

    def outer() -> str:
        for conflict in ("supersede", ["supersede", "skip"]):
            headers = {"dflock": {"lock_conflict": conflict}}
            try:
                inner = jobs.latest.apply((), {"key": key}, headers=headers, throw=True)
            except (LockNotAcquiredError, SupersededError) as error:
                seen.append(error)
            else:
                assert Skipped.of(inner.get()) is not None
        return "ran on"

    options = {"lock_key": key, "lock_conflict": "supersede", "name": f"outer {key}"}
    task = jobs.app.task(base=LockedTask, shared=False, **options)(outer)
    assert task.apply(throw=True).get() == "ran on"
    [error] = seen
    assert "held by a task in the same thread that waits for this one" in str(error)
