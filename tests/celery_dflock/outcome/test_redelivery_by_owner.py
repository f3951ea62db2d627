"""A redelivery that the broker does not mark: the lock server tells it by its owner."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from celery import Task, states
from celery.result import AsyncResult

from celery_dflock.outcome.header import RUN
from tests.celery_dflock import jobs
from tests.celery_dflock.outcome.test_redelivery import assert_in_turns
from tests.celery_dflock.processes import PATIENCE, Cluster

IDS = {"plain": "twice", "long": "twice-" + 260 * "x", "two lines": "twice\nand more"}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task_id", IDS.values(), ids=IDS)
@pytest.mark.parametrize(
    "tasks",
    [
        (jobs.by_twos, jobs.by_twos),
        (jobs.patient, jobs.patient),
        (jobs.skipped, jobs.skipped),
        (jobs.two_keys, jobs.two_keys),
    ],
    ids=["semaphore", "waits", "skip", "two keys"],
)
def test_without_the_flag_of_the_broker(
    cluster: Cluster, tmp_path: Path, key: str, tasks: tuple[Task, Task], task_id: str
) -> None:
    """SQS has none: the lock server knows who asks, whatever the id looks like."""
    gate, name = tmp_path / "gate", f"{task_id}-{key}"
    sent = [cluster.send(tasks[0], key, task_id=name, gate=str(gate))]
    cluster.wait_event("start", sent[0])
    sent.append(cluster.send(tasks[1], key, task_id=name, gate=str(gate)))
    cluster.wait_event("requeued", sent[1], 2)

    gate.touch()

    assert sent[0].get(timeout=PATIENCE) == name
    cluster.wait_event("deduplicated", sent[1])
    assert_in_turns(cluster, sent[0], runs=1)
    assert not cluster.events(what="skipped", id=name)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.skipped, jobs.decided], ids=["skip", "function"])
def test_a_copy_that_meets_another_task_leaves_the_result(
    cluster: Cluster, key: str, task: Task
) -> None:
    """The run that it is a copy of has ended, and somebody else has the lock by now."""
    name = f"ended-{key}"
    sent = cluster.send(task, key, task_id=name, then="raise")
    with pytest.raises(ValueError, match="as asked"):
        sent.get(timeout=PATIENCE)
    with cluster.lock(key):
        copy = {RUN: {"id": name, "redelivery": 1, "retries": 0}}
        cluster.wait_event("deduplicated", cluster.send(task, key, task_id=name, headers=copy))
    assert AsyncResult(name, app=jobs.app).state == states.FAILURE
    assert_in_turns(cluster, sent, runs=1)


@pytest.mark.usefixtures("workers")
def test_a_copy_that_meets_another_task_waits_for_the_lock(cluster: Cluster, key: str) -> None:
    """No result says that the first has ended: it may have been killed."""
    name = f"killed-{key}"
    copy = {RUN: {"id": name, "redelivery": 1, "retries": 0}}
    with cluster.lock(key):
        sent = cluster.send(jobs.skipped, key, task_id=name, headers=copy)
        cluster.wait_event("requeued", sent, 3)
        assert sent.state == states.PENDING
    assert sent.get(timeout=PATIENCE) == name
    assert not cluster.events(what="skipped", id=name)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.patient, jobs.parked], ids=["slot", "consumer"])
def test_an_id_need_not_be_a_text(cluster: Cluster, key: str, task: Task) -> None:
    sent = cluster.send(task, key, task_id=uuid4())
    end = cluster.wait(lambda: (cluster.events(what="end", key=key) or [None])[0], "the end")
    assert (end["id"], end["error"]) == (str(sent.id), None)


@pytest.mark.usefixtures("workers")
def test_another_task_of_the_same_id_is_another_run(
    cluster: Cluster, tmp_path: Path, key: str
) -> None:
    """`Task.replace` keeps the id."""
    gate, name = tmp_path / "gate", f"replaced-{key}"
    cluster.wait_event("start", cluster.send(jobs.patient, key, task_id=name, gate=str(gate)))
    other = cluster.send(jobs.by_twos, f"{key}:2", task_id=name)
    assert cluster.wait_event("end", other)["task"] == "by_twos"
    gate.touch()
    cluster.wait_free(key)
