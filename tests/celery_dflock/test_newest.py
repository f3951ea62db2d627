"""``lock_conflict="newest"``: who runs goes on, and of those that wait only the newest stays."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from celery import Task, chord, group, states
from celery.result import AsyncResult, allow_join_result

from celery_dflock import LockedTask, LockNotAcquiredError, Skipped
from celery_dflock.outcome import header
from celery_dflock.testing import supersede
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters
from tests.celery_dflock.test_superseding import ended
from tests.celery_dflock.test_superseding_again import (
    REDELIVERED,
    impatient,
    put_aside,
    taken_aside,
    wait_skipped,
)

__all__ = ["impatient"]

WAYS = pytest.mark.parametrize("task", [jobs.last, jobs.last_parked], ids=["slot", "consumer"])


def by_whom(sent: AsyncResult) -> str:
    skipped = Skipped.of(sent.result)
    assert skipped is not None
    return skipped.superseded_by or ""


@pytest.mark.usefixtures("workers")
@WAYS
def test_who_runs_goes_on_and_of_those_that_wait_the_newest_stays(
    cluster: Cluster, key: str, gate: Path, task: LockedTask
) -> None:
    running = cluster.send(task, key, gate=str(gate))
    cluster.wait_event("start", running)
    waiting = []
    for number in range(4):
        waiting.append(cluster.send((jobs.last, jobs.last_parked)[number % 2], key))
        cluster.wait_waiters(key, 1)
        if number:
            assert ended(cluster, waiting[-2]) == states.SUCCESS
            assert waiting[-1].id in by_whom(waiting[-2])
    assert cluster.events(what="end", id=running.id) == []
    told = cluster.wait_event("superseded", waiting[0])
    assert (told["key"], told["was_running"]) == (key, False)
    gate.touch()
    assert running.get(timeout=PATIENCE) == running.id
    assert waiting[-1].get(timeout=PATIENCE) == waiting[-1].id
    start = cluster.wait_event("start", waiting[-1])
    assert cluster.wait_event("end", running)["at"] <= start["at"]
    begun = {event["id"] for event in cluster.events(what="start", key=key)}
    assert begun == {running.id, waiting[-1].id}


@pytest.mark.usefixtures("workers")
@WAYS
def test_an_older_one_that_comes_later_is_skipped(
    cluster: Cluster, key: str, gate: Path, task: LockedTask
) -> None:
    first, message = put_aside(cluster, key, task)
    second, later_message = put_aside(cluster, key, task)
    newest = cluster.send(task, key, gate=str(gate))
    cluster.wait_event("start", newest)
    jobs.app.backend.client.lpush("celery", message)
    wait_skipped(cluster, first)
    gate.touch()
    assert newest.get(timeout=PATIENCE) == newest.id
    jobs.app.backend.client.lpush("celery", later_message)  # even if the newest has ended
    wait_skipped(cluster, second)


@pytest.mark.usefixtures("workers")
@WAYS
@pytest.mark.parametrize("is_newer_there", [True, False])
def test_a_retry_runs_unless_a_newer_one_has_come(
    cluster: Cluster, key: str, gate: Path, task: LockedTask, is_newer_there: bool
) -> None:
    older = cluster.send(task, key, then="retry aside")
    message = taken_aside(cluster)
    # Celery stores that after it has sent the retry, whatever came of that meanwhile.
    cluster.wait(lambda: older.state == states.RETRY or None, "the state of the first run")
    newest = None
    if is_newer_there:
        newest = cluster.send(task, key, gate=str(gate))
        cluster.wait_event("start", newest)
    jobs.app.backend.client.lpush("celery", message)
    assert ended(cluster, older) == states.SUCCESS
    if newest is None:
        assert older.result == 1
        return
    assert newest.id in by_whom(older)
    gate.touch()
    assert newest.get(timeout=PATIENCE) == newest.id


@pytest.mark.usefixtures("workers")
def test_a_requeued_one_is_skipped_once_a_newer_one_has_come_and_else_runs(
    cluster: Cluster, key: str
) -> None:
    at_once = {"dflock": {"lock_timeout": 0}}
    with cluster.lock(key):
        older = cluster.send(jobs.last, key, headers=at_once)
        cluster.wait_event("requeued", older, 2)
        newest = cluster.send(jobs.last, key, headers=at_once)
        wait_skipped(cluster, older)
        cluster.wait_event("requeued", newest, 2)
    assert newest.get(timeout=PATIENCE) == newest.id


@pytest.mark.usefixtures("workers")
def test_who_does_not_get_the_lock_in_time_does_as_the_second_word_says(
    cluster: Cluster, key: str
) -> None:
    with cluster.lock(key):
        skipped = cluster.send(jobs.last_skipped, key)
        assert Skipped.of(skipped.get(timeout=PATIENCE)) is not None
        failed = cluster.send(jobs.last_failed, key)
        with pytest.raises(LockNotAcquiredError):
            failed.get(timeout=PATIENCE)
    assert by_whom(skipped) == ""


@pytest.mark.usefixtures("workers")
def test_a_redelivery_of_the_one_that_runs_is_not_skipped_for_a_newer_one(
    cluster: Cluster, key: str, gate: Path
) -> None:
    """It would end under the id of a task that runs on."""
    age = cluster.lock(key).draw_age()
    same = {"task_id": f"older:{key}", "headers": header.said_of(f"older:{key}", {}, "age", age)}
    older = cluster.send(jobs.last, key, gate=str(gate), **same)
    cluster.wait_event("start", older)
    newest = cluster.send(jobs.last_parked, key)
    cluster.wait_waiters(key, 1)
    cluster.send(jobs.last, key, **same, **REDELIVERED)
    cluster.wait_event("requeued", older)
    assert not older.ready()
    gate.touch()
    assert older.get(timeout=PATIENCE) == older.id
    assert newest.get(timeout=PATIENCE) == newest.id
    cluster.wait_event("deduplicated", older)
    assert older.get(timeout=PATIENCE) == older.id
    assert len(cluster.events(what="start", id=older.id)) == 1


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("wait", ["slot", "consumer"])
def test_the_worker_of_the_newest_is_killed_while_it_waits(
    cluster: Cluster, impatient: Worker, key: str, gate: Path, wait: str
) -> None:
    given = {"queue": impatient.name, "headers": {"dflock": {"lock_wait": wait}}}
    running = cluster.send(jobs.last, key, gate=str(gate), queue="one")
    cluster.wait_event("start", running)
    older, message = put_aside(cluster, key, jobs.last_late)
    newest = cluster.send(jobs.last_late, key, **given)
    cluster.wait_waiters(key, 1)
    impatient.kill()
    cluster.wait_waiters(key, 0)
    jobs.app.backend.client.lpush("two", message)
    wait_skipped(cluster, older)
    gate.touch()
    impatient.start()
    assert newest.get(timeout=PATIENCE) == newest.id


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", ["last", "last_parked", "last_late"])
def test_a_chord_goes_on(cluster: Cluster, key: str, task: str) -> None:
    member = jobs.app.tasks[task]
    with cluster.lock(key):
        sent = chord(group(member.s(key=key) for _ in range(3)))(jobs.collect.s(key=key))
    with allow_join_result():
        results = sent.get(timeout=PATIENCE)
    assert len(results) == 3
    assert any(Skipped.of(each) is None for each in results)


@pytest.mark.usefixtures("workers")
def test_of_many_arrivals_none_is_stopped_and_the_last_runs(cluster: Cluster, key: str) -> None:
    arrive(cluster, key, 120)


@pytest.mark.soak
@pytest.mark.usefixtures("workers")
def test_of_a_thousand_arrivals_none_is_stopped_and_the_last_runs(
    cluster: Cluster, key: str
) -> None:
    arrive(cluster, key, 1000)


def arrive(cluster: Cluster, key: str, number: int) -> None:
    """Send so many, at random, and judge what became of them by the record of the workers."""
    dice = random.Random(number)
    sent: list[AsyncResult] = []
    while len(sent) < number:
        task: Task = dice.choice([jobs.last, jobs.last, jobs.last_parked, jobs.last_late])
        queue = dice.choice(["celery", "one", "two"])
        sent.append(cluster.send(task, key, seconds=dice.uniform(0, 0.05), queue=queue))
        time.sleep(dice.choice([0, 0, 0.01, 0.05]))
    assert sent[-1].get(timeout=5 * PATIENCE) == sent[-1].id
    assert {ended(cluster, each) for each in sent} == {states.SUCCESS}
    ran = [each for each in sent if Skipped.of(each.result) is None]
    assert all(each.result == each.id for each in ran)
    assert all(by_whom(each) for each in sent if each not in ran)
    record = [e for e in cluster.events(key=key) if e["what"] in ("start", "end")]
    assert [e["what"] for e in record] == ["start", "end"] * (len(record) // 2)
    assert all(e["error"] is None for e in record[1::2])
    order = {each.id: place for place, each in enumerate(sent)}
    begun = [order[e["id"]] for e in record[::2]]
    assert begun == sorted(begun), "an older one has run after a newer one"
    assert begun[-1] == number - 1
    assert len(begun) == len(ran)
    assert len(ran) < number, "none had to wait"
    print(f"{number} arrivals: {len(ran)} ran, {number - len(ran)} skipped")
    assert waiters(cluster.lock_server, key) in (None, 0)


def test_a_test_cannot_have_it_superseded(key: str) -> None:
    with pytest.raises(AssertionError, match="never supersedes"):
        supersede(jobs.last.s(key=key))
