"""The broker delivers a message again (``acks_late``): no overlap, nothing lost, one result."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest
from celery import Task, chord, states
from celery.result import AsyncResult

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters

VISIBILITY = 0.5
"""Seconds after which Redis takes a worker for dead and delivers again; the tasks run longer."""

ENV = {jobs.VISIBILITY: str(VISIBILITY)}

POLICIES = {
    "requeue": jobs.late_requeued,
    "skip": jobs.late_skipped,
    "fail": jobs.late_failed,
    "function": jobs.late_decided,
}
WHATEVER_THE_POLICY = pytest.mark.parametrize("task", POLICIES.values(), ids=POLICIES)

# A worker needs up to five seconds to see that a child is dead.
FAIL_AT_LEAST = pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, id=name, marks=() if name == "fail" else pytest.mark.soak)
        for name, task in POLICIES.items()
    ],
)


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    with cluster.worker("impatient", env=ENV) as worker:
        worker.wait_ready()
        yield worker


def start_until_delivered_again(cluster: Cluster, task: Task, key: str, gate: Path) -> AsyncResult:
    sent = cluster.send(task, key, gate=str(gate), queue="impatient")
    cluster.wait_event("start", sent)
    # More often than the task would be requeued for any other reason, and for longer than a broker
    # that delivers every copy once more would take for the next.
    cluster.wait_event("requeued", sent, 5)
    return sent


def assert_in_turns(cluster: Cluster, sent: AsyncResult, runs: int) -> None:
    starts = cluster.events(what="start", id=sent.id)
    assert len(starts) == runs, sorted(cluster.events(id=sent.id), key=itemgetter("at"))
    fences = [start["fence"] for start in starts]
    assert fences == sorted(set(fences)), "each has a grant of its own"


def wait_all_quiet(cluster: Cluster) -> None:
    """Until Redis knows of no message that is to come, or could come again."""
    redis = jobs.app.backend.client

    def probe() -> bool | None:
        return not any(map(redis.exists, ("impatient", "impatient_unacked_index"))) or None

    cluster.wait(probe, "the queue to be empty and everything acknowledged")


@WHATEVER_THE_POLICY
def test_delivered_again_while_it_runs(
    cluster: Cluster, worker: Worker, gate: Path, key: str, task: Task
) -> None:
    sent = start_until_delivered_again(cluster, task, key, gate)
    assert len(cluster.events(what="start", id=sent.id)) == 1
    assert sent.state == states.PENDING, "the copies say nothing in its place"

    gate.touch()

    assert sent.get(timeout=PATIENCE) == sent.id
    cluster.wait_event("deduplicated", sent)
    wait_all_quiet(cluster)
    assert_in_turns(cluster, sent, runs=1)
    assert AsyncResult(sent.id, app=jobs.app).get(timeout=PATIENCE) == sent.id
    assert not cluster.events(what="skipped", id=sent.id)
    lines = [line for line in worker.log_text().splitlines() if f"[{sent.id}] was deliv" in line]
    assert lines[0].endswith("Is visibility_timeout shorter than the task?")
    assert "WARNING" in lines[0]
    first = [e for e in cluster.events(what="requeued", id=sent.id) if e["attempt"] == 1]
    warnings = [line for line in lines if "WARNING" in line]
    assert len(warnings) == len(first), "said once of each copy: a slow machine makes several"


@pytest.mark.timeout(300)
def test_its_many_copies_come_to_an_end_soon_after_it(
    cluster: Cluster, worker: Worker, gate: Path, key: str
) -> None:
    """Its pauses would be longer than Redis waits before it delivers again: none waits for a copy."""
    sent = cluster.send(jobs.late_seldom, key, gate=str(gate), queue=worker.name)
    cluster.wait_event("requeued", sent, 20)

    gate.touch()

    assert sent.get(timeout=PATIENCE) == sent.id
    wait_all_quiet(cluster)
    assert_in_turns(cluster, sent, runs=1)


def test_a_failure_stands_as_well(cluster: Cluster, worker: Worker, gate: Path, key: str) -> None:
    sent = cluster.send(jobs.late_skipped, key, then="raise", gate=str(gate), queue=worker.name)
    cluster.wait_event("requeued", sent, 2)

    gate.touch()

    with pytest.raises(ValueError, match="as asked"):
        sent.get(timeout=PATIENCE)
    cluster.wait_event("deduplicated", sent)
    assert_in_turns(cluster, sent, runs=1)
    assert AsyncResult(sent.id, app=jobs.app).state == states.FAILURE


def test_a_retry_runs_though_its_message_was_delivered_again(
    cluster: Cluster, worker: Worker, gate: Path, key: str
) -> None:
    sent = cluster.send(
        jobs.late_skipped, key, then="retry once", gate=str(gate), queue=worker.name
    )
    cluster.wait_event("requeued", sent, 2)

    gate.touch()

    assert sent.get(timeout=PATIENCE) == 1
    wait_all_quiet(cluster)
    retries = [start["retries"] for start in cluster.events(what="start", id=sent.id)]
    assert retries[0] == 0
    assert 1 in retries


def test_without_a_result_it_runs_once_more(
    cluster: Cluster, worker: Worker, gate: Path, key: str
) -> None:
    """And not for ever, though each run is long enough for a copy of its own."""
    sent = cluster.send(
        jobs.late_untold, key, seconds=3 * VISIBILITY, gate=str(gate), queue=worker.name
    )
    cluster.wait_event("start", sent)
    cluster.wait_event("requeued", sent, 5)
    assert len(cluster.events(what="start", id=sent.id)) == 1

    gate.touch()

    second = cluster.wait_event("start", sent, 2)
    first_end = cluster.wait_event("end", sent)
    assert first_end["at"] < second["at"]
    worker.wait_log(f"[{sent.id}] runs again")
    cluster.wait_event("end", sent, 2)
    cluster.wait_event("deduplicated", sent)
    wait_all_quiet(cluster)
    assert_in_turns(cluster, sent, runs=2)


@FAIL_AT_LEAST
def test_dies_while_its_copy_waits(
    cluster: Cluster, worker: Worker, gate: Path, key: str, task: Task
) -> None:
    sent = start_until_delivered_again(cluster, task, key, gate)
    (first,) = cluster.events(what="start", id=sent.id)
    killed_at = time.monotonic()
    os.kill(first["pid"], signal.SIGKILL)

    second = cluster.wait_event("start", sent, 2)
    gate.touch()

    assert second["at"] > killed_at
    assert sent.get(timeout=PATIENCE) == sent.id
    wait_all_quiet(cluster)
    assert_in_turns(cluster, sent, runs=2)


@FAIL_AT_LEAST
def test_the_child_is_killed(
    cluster: Cluster, workers: tuple[Worker, Worker], gate: Path, key: str, task: Task
) -> None:
    sent = cluster.send(task, key, gate=str(gate))
    first = cluster.wait_event("start", sent)
    killed_at = time.monotonic()
    os.kill(first["pid"], signal.SIGKILL)

    second = cluster.wait_event("start", sent, 2)
    gate.touch()

    assert second["at"] > killed_at
    assert sent.get(timeout=PATIENCE) == sent.id
    assert_in_turns(cluster, sent, runs=2)


def test_the_whole_worker_is_killed(cluster: Cluster, worker: Worker, gate: Path, key: str) -> None:
    # One whose copy waits in that worker's memory, and one that has no copy yet.
    copied = start_until_delivered_again(cluster, jobs.late_skipped, f"{key}:copied", gate)
    alone = cluster.send(jobs.late_failed, key, gate=str(gate), queue=worker.name)
    cluster.wait_event("start", alone)
    killed_at = time.monotonic()
    worker.kill()
    cluster.wait_free(key)
    worker.start()

    for sent in (copied, alone):
        assert cluster.wait_event("start", sent, 2)["at"] > killed_at
    gate.touch()

    for sent in (copied, alone):
        assert sent.get(timeout=PATIENCE) == sent.id
    wait_all_quiet(cluster)
    for sent in (copied, alone):
        assert_in_turns(cluster, sent, runs=2)


def test_a_copy_takes_no_second_place_of_a_semaphore(
    cluster: Cluster, worker: Worker, gate: Path, key: str
) -> None:
    sent = start_until_delivered_again(cluster, jobs.late_by_twos, key, gate)
    assert len(cluster.events(what="start", id=sent.id)) == 1

    gate.touch()

    assert sent.get(timeout=PATIENCE) == sent.id
    wait_all_quiet(cluster)
    assert_in_turns(cluster, sent, runs=1)


def test_a_copy_holds_up_no_process(cluster: Cluster, worker: Worker, gate: Path, key: str) -> None:
    sent = start_until_delivered_again(cluster, jobs.late_patient, key, gate)
    assert waiters(cluster.lock_server, key) == 0

    gate.touch()

    assert sent.get(timeout=PATIENCE) == sent.id
    wait_all_quiet(cluster)
    assert_in_turns(cluster, sent, runs=1)


def test_a_chord_gets_the_result_of_the_run(
    cluster: Cluster, worker: Worker, gate: Path, key: str
) -> None:
    quick = jobs.plain.s(key=key).set(queue=worker.name)
    copied = jobs.late_skipped.s(key=key, gate=str(gate)).set(queue=worker.name)
    sent = chord([copied, quick])(jobs.collect.s(key=key).set(queue=worker.name))
    member = sent.parent.results[0]
    cluster.wait_event("requeued", member, 3)

    gate.touch()

    assert sent.get(timeout=PATIENCE) == [each.id for each in sent.parent.results]
    wait_all_quiet(cluster)
    assert len(cluster.events(what="collected", key=key)) == 1
    assert_in_turns(cluster, member, runs=1)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
def test_children_are_killed_all_the_time(
    cluster: Cluster, worker: Worker, key: str, seed: int
) -> None:
    """Every task is longer or shorter than the visibility timeout, and has its result in the end."""
    dice = random.Random(seed)
    keys = [f"{key}:{number}" for number in range(4)]
    sent = [
        cluster.send(
            dice.choice(list(POLICIES.values())[:3]),
            each,
            seconds=dice.uniform(0, 3 * VISIBILITY),
            queue=worker.name,
            # Another task may hold the key: that is a conflict, and not the matter here.
            headers={"dflock": {"lock_conflict": "requeue", "lock_requeue": jobs.AT_ONCE}},
        )
        for each in keys * 15
    ]
    until = time.monotonic() + 40
    with cluster.worker("impatient-2", queues=worker.name, env=ENV) as second:
        second.wait_ready()
        while time.monotonic() < until:
            time.sleep(dice.uniform(0, 2))
            # Not the whole worker: what it takes from Redis in that moment is lost to Celery.
            if running := children_at_work(cluster, dice.choice((worker, second))):
                os.kill(dice.choice(running), signal.SIGKILL)
        for each in sent:
            assert each.get(timeout=60) == each.id
        wait_all_quiet(cluster)

    ends = cluster.events(what="end")
    for each in keys:
        starts = cluster.events(what="start", key=each)
        assert len({start["id"] for start in starts}) == 15
        fences = [start["fence"] for start in starts]
        assert fences == sorted(set(fences))
        for one, other in itertools.combinations(starts, 2):
            # Who has no end was killed, and its lock was free only then.
            same = (end for end in ends if (end["id"], end["pid"]) == (one["id"], one["pid"]))
            end_at = next((end["at"] for end in same if end["at"] > one["at"]), 0)
            assert end_at < other["at"]


def children_at_work(cluster: Cluster, worker: Worker) -> list[int]:
    """The processes of this worker that have begun a task and not ended it."""
    ended = {(event["id"], event["pid"]) for event in cluster.events(what="end")}
    pids = {
        event["pid"]
        for event in cluster.events(what="start")
        if (event["id"], event["pid"]) not in ended
    }
    return [pid for pid in sorted(pids) if group_of(pid) == worker.pid]


def group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
