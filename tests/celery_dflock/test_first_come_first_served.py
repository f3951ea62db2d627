"""Over two workers: one at a time for each key, in the order of asking."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from celery import Task

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster, Event

pytestmark = pytest.mark.usefixtures("workers")

KEYS = 4
TASKS = 200
WORK = 0.005


def run_all(cluster: Cluster, task: Task, name: str) -> list[list[tuple[Event, Event]]]:
    """Send the tasks, mixed up, and return the start and the end of each, by key."""
    keys = [f"{name}:{number}" for number in range(KEYS)]
    calls = keys * (TASKS // KEYS)
    random.Random(3).shuffle(calls)
    sent = {cluster.send(task, key, seconds=WORK).id for key in calls}
    assert len(sent) == TASKS

    def ends() -> list[Event]:
        return [event for event in cluster.events(what="end") if event["id"] in sent]

    cluster.wait(lambda: len(ends()) >= TASKS or None, f"{TASKS} {task.name} tasks", 60)
    starts = [event for event in cluster.events(what="start") if event["id"] in sent]
    end_of = {event["id"]: event for event in ends()}
    assert len(starts) == len(end_of) == TASKS, "each runs once"
    starts.sort(key=lambda event: event["at"])
    return [[(s, end_of[s["id"]]) for s in starts if s["key"] == key] for key in keys]


def overlaps(runs: Sequence[tuple[Event, Event]]) -> int:
    """How many pairs of these runs were there at the same time."""
    return sum(
        later[0]["at"] < earlier[1]["at"] for earlier, later in itertools.combinations(runs, 2)
    )


def test_one_at_a_time_and_fences_grow(cluster: Cluster) -> None:
    by_key = run_all(cluster, jobs.patient, "turns")

    assert [overlaps(runs) for runs in by_key] == [0] * KEYS
    for runs in by_key:
        # A fence is given out with the grant, so this is: bodies start in the order of the grants.
        fences = [start["fence"] for start, _ in runs]
        assert all(one < other for one, other in itertools.pairwise(fences))
        assert {start["worker"] for start, _ in runs} == {"one", "two"}
    every_fence = [start["fence"] for runs in by_key for start, _ in runs]
    assert len(set(every_fence)) == TASKS
    assert any(start["waited"] > WORK for runs in by_key for start, _ in runs), "nobody waited"


def test_without_locks_they_overlap(cluster: Cluster, key: str, gate: Path) -> None:
    sent = [cluster.send(jobs.plain, key, gate=str(gate)) for _ in range(2)]
    for each in sent:
        cluster.wait_event("start", each)
    assert not cluster.events(what="end", key=key)
    gate.touch()


def test_first_come_first_served_between_workers(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str
) -> None:
    with cluster.lock(key):
        sent = []
        for number, worker in enumerate(workers * 2, 1):
            sent.append(cluster.send(jobs.patient, key, queue=worker.name))
            # Seen in the queue of the lock before the next one is sent: it has asked earlier.
            cluster.wait_waiters(key, number)
        assert not cluster.events(what="start", key=key)

    starts = [cluster.wait_event("start", each) for each in sent]
    assert [start["worker"] for start in starts] == ["one", "two", "one", "two"]
    assert starts == sorted(starts, key=lambda start: start["at"])
    fences = [start["fence"] for start in starts]
    assert all(one < other for one, other in itertools.pairwise(fences))
    ends = [cluster.wait_event("end", each) for each in sent]
    assert all(end["at"] < start["at"] for end, start in zip(ends, starts[1:], strict=False))
