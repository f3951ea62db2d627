"""What becomes of a task whose lock is not free in time: requeue, skip, fail."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from celery import Task, chain, chord, group, states
from celery.result import AsyncResult, allow_join_result

from celery_dflock import LockNotAcquiredError, Skipped
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter

pytestmark = pytest.mark.usefixtures("workers")


def lines_about(workers: tuple[Worker, Worker], sent: AsyncResult, text: str) -> list[str]:
    """What the plugin logged about the task."""
    lines = "".join(worker.log_text() for worker in workers).splitlines()
    return [line for line in lines if sent.id in line and text in line]


# Requeue.


def test_requeue_keeps_what_the_task_is(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str
) -> None:
    expires = datetime.now(UTC) + timedelta(minutes=5)
    with cluster.lock(key):
        sent = jobs.requeued.apply_async(
            (key,),
            {"then": "return", "more": [1, {"two": 3}]},
            headers={"x-tenant": "blue"},
            priority=6,
            retries=1,
            time_limit=60,
            soft_time_limit=50,
            expires=expires,
            queue="two",
        )
        cluster.wait_event("requeued", sent, 5)
        assert sent.state == states.RETRY

    assert sent.get(timeout=PATIENCE) == sent.id
    start = cluster.wait_event("start", sent)
    assert start["args"] == [key]
    assert start["kwargs"] == {"then": "return", "more": [1, {"two": 3}]}
    assert start["retries"] == 1, "no retry is used up"
    assert start["headers"] == {"x-tenant": "blue"}
    assert start["priority"] == 6
    assert start["timelimit"] == [60, 50]
    assert datetime.fromisoformat(start["expires"]) == expires
    assert start["worker"] == "two", "it stays in its queue"
    assert len(cluster.events(what="start", id=sent.id)) == 1

    requeued = cluster.events(what="requeued", id=sent.id)
    assert [event["attempt"] for event in requeued] == list(range(1, len(requeued) + 1))
    assert {event["key"] for event in requeued} == {key}
    assert all(0 <= event["countdown"] <= jobs.AT_ONCE["cap"] for event in requeued)
    lines = [line for line in lines_about(workers, sent, "") if "requeued for " in line]
    assert len(lines) == len(requeued), "one line each"
    assert all("INFO" in line and repr(key) in line for line in lines)
    assert all(re.search(r"requeued for [\d.]+ s, attempt \d+: lock ", line) for line in lines)


def test_a_retry_counts_anew(
    cluster: Cluster, waiter: Callable[..., Waiter], gate: Path, key: str
) -> None:
    with cluster.lock(key):
        sent = cluster.send(jobs.requeued, key, then="retry once", gate=str(gate))
        cluster.wait_event("requeued", sent, 2)
    cluster.wait_event("start", sent)
    before = len(cluster.events(what="requeued", id=sent.id))
    other = waiter(key)
    cluster.wait_waiters(key, 1)
    gate.touch()
    other.wait_granted()

    event = cluster.wait_event("requeued", sent, before + 1)

    assert event["attempt"] == 1
    other.lock.release()
    assert sent.get(timeout=PATIENCE) == 1


@pytest.mark.parametrize("task", [jobs.limited, jobs.hurried], ids=["max_attempts", "max_wait"])
def test_requeue_gives_up(cluster: Cluster, key: str, task: Task) -> None:
    with cluster.lock(key):
        sent_at = time.monotonic()
        sent = cluster.send(task, key)
        with pytest.raises(LockNotAcquiredError, match="gave up after") as failure:
            sent.get(timeout=PATIENCE)
        waited = time.monotonic() - sent_at

    assert failure.value.key == key
    requeued = cluster.events(what="requeued", id=sent.id)
    if task is jobs.limited:
        assert len(requeued) == 2, "the third attempt is the last"
    else:
        assert requeued
        assert waited > jobs.hurried.lock_requeue["max_wait"]
    assert not cluster.events(what="start", id=sent.id)


def test_requeue_in_a_chord(cluster: Cluster, key: str) -> None:
    with cluster.lock(key):
        members = [jobs.requeued.s(key, seconds=0.02) for _ in range(3)]
        sent = chord(members)(jobs.collect.s(key=key))
        for member in sent.parent.results:
            cluster.wait_event("requeued", member, 2)

    results = sent.get(timeout=PATIENCE)
    assert results == [member.id for member in sent.parent.results]
    assert len(cluster.events(what="collected", key=key)) == 1


def test_requeue_in_a_group_and_a_chain(cluster: Cluster, key: str) -> None:
    with cluster.lock(key):
        both = group(jobs.requeued.s(key), jobs.requeued.s(key)).apply_async()
        linked = chain(jobs.requeued.s(key), jobs.collect.s(key=key)).apply_async()
        for sent in (*both.results, linked.parent):
            cluster.wait_event("requeued", sent, 2)

    assert both.get(timeout=PATIENCE) == [member.id for member in both.results]
    assert linked.get(timeout=PATIENCE) == linked.parent.id
    assert len(cluster.events(what="collected", key=key)) == 1


# Skip.


def test_skip_ends_as_success(cluster: Cluster, workers: tuple[Worker, Worker], key: str) -> None:
    with cluster.lock(key):
        sent = cluster.send(jobs.skipped, key)
        result = sent.get(timeout=PATIENCE)

    assert sent.state == states.SUCCESS
    skipped = Skipped.of(result)
    assert skipped is not None
    assert (skipped.key, skipped.task_id) == (key, sent.id)
    assert not cluster.events(what="start", id=sent.id)
    assert [event["key"] for event in cluster.events(what="skipped", id=sent.id)] == [key]
    (line,) = lines_about(workers, sent, "] skipped: ")
    assert "INFO" in line
    assert repr(key) in line


def test_not_skipped_if_free(cluster: Cluster, key: str) -> None:
    sent = cluster.send(jobs.skipped, key)

    assert Skipped.of(sent.get(timeout=PATIENCE)) is None
    assert sent.result == sent.id


def test_skip_in_a_chord(cluster: Cluster, key: str) -> None:
    free = f"{key}:free"
    with cluster.lock(key):
        sent = chord([jobs.skipped.s(key), jobs.skipped.s(free)])(jobs.collect.s(key=key))
        first, second = sent.get(timeout=PATIENCE)

    skipped = Skipped.of(first)
    assert skipped is not None
    assert (skipped.key, skipped.task_id) == (key, sent.parent.results[0].id)
    assert second == sent.parent.results[1].id
    assert len(cluster.events(what="collected", key=key)) == 1


# Fail.


def test_fail_names_the_key(cluster: Cluster, key: str) -> None:
    with cluster.lock(key):
        sent = cluster.send(jobs.failed, key)
        with pytest.raises(LockNotAcquiredError) as failure:
            sent.get(timeout=PATIENCE)

    assert failure.value.key == key
    assert str(failure.value).startswith(f"lock {key!r} was not acquired: it is held by ")
    assert failure.value.holder is not None
    assert sent.state == states.FAILURE
    assert len(cluster.events(what="asked", id=sent.id)) == 1, (
        "autoretry_for=Exception is no matter"
    )


def test_fail_in_a_chord(cluster: Cluster, key: str) -> None:
    with cluster.lock(key), allow_join_result():
        sent = chord([jobs.failed.s(key), jobs.plain.s(key)])(jobs.collect.s(key=key))
        sent.get(timeout=PATIENCE, propagate=False)

    assert sent.state == states.FAILURE
    assert repr(key) in str(sent.result)
