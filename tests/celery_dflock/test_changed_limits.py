"""A deploy changes `lock_limit`: for a while workers with the old and with the new one are there."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster

QUEUE = "rolled"
WORK = 0.1
TASKS = 16


def most_at_once(cluster: Cluster, key: str) -> int:
    """How many bodies have run at the same time."""
    changes = [(event["at"], 1) for event in cluster.events(what="start", key=key)]
    changes += [(event["at"], -1) for event in cluster.events(what="end", key=key)]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def release(cluster: Cluster, stack: ExitStack, limit: int) -> Worker:
    """Start a worker of a release that has this limit."""
    annotations = {name: {"lock_limit": limit} for name in (jobs.patient.name, jobs.parked.name)}
    settings = {jobs.MORE: json.dumps({"task_annotations": annotations})}
    worker = cluster.worker(f"limit-{limit}", queues=QUEUE, concurrency=4, env=settings)
    stack.enter_context(worker)
    worker.wait_ready()
    return worker


def test_a_deploy_changes_it_while_tasks_run_and_wait(cluster: Cluster, key: str) -> None:
    sent = []

    def send_more() -> None:
        """Let half of them wait in a slot and half in the consumer."""
        for number in range(TASKS):
            task = (jobs.patient, jobs.parked)[number % 2]
            sent.append(cluster.send(task, key, queue=QUEUE, seconds=WORK))

    def wait_ended(number: int) -> None:
        cluster.wait(
            lambda: len(cluster.events(what="end", key=key)) >= number or None, f"{number} runs"
        )

    with ExitStack() as stack:
        workers = [release(cluster, stack, 1)]
        send_more()
        wait_ended(4)
        assert most_at_once(cluster, key) == 1
        for limit in (3, 2):
            workers.append(release(cluster, stack, limit))
            send_more()
            wait_ended(len(sent) - TASKS)  # both releases are at work
            workers[-2].stop()
        for each in sent:
            assert each.get(timeout=PATIENCE) == each.id
        logs = [worker.log_text() for worker in workers]

    assert 1 < most_at_once(cluster, key) <= 3
    starts = [event["id"] for event in cluster.events(what="start", key=key)]
    assert sorted(starts) == sorted(each.id for each in sent), "each ran once"
    for log in logs:
        assert "refuses a lock" not in log
        assert "is unavailable" not in log
        assert "Traceback" not in log


@pytest.mark.parametrize("task", [jobs.patient, jobs.parked], ids=["slot", "consumer"])
def test_a_task_with_a_smaller_limit_waits_until_there_is_room(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str, task: jobs.Task
) -> None:
    """Nobody is thrown out, and nobody is refused."""
    by_three = {"dflock": {"lock_limit": 3}}
    running = [
        cluster.send(jobs.patient, key, seconds=0.5, headers=by_three, queue=workers[0].name)
        for _ in range(2)
    ]
    for each in running:
        cluster.wait_event("start", each)
    alone = cluster.send(task, key, queue=workers[1].name)
    assert alone.get(timeout=PATIENCE) == alone.id
    start = cluster.wait_event("start", alone)
    assert all(cluster.wait_event("end", each)["at"] <= start["at"] for each in running)
