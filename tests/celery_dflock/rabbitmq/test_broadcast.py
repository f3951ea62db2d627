"""A message for all workers: each runs it once, and what is requeued comes back to it alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from celery import Task
from celery.exceptions import ImproperlyConfigured
from celery.exceptions import TimeoutError as ResultTimeoutError
from celery.result import AsyncResult
from kombu.common import Broadcast

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.rabbitmq import RabbitMQ

APP = "tests.celery_dflock.rabbitmq.broadcasting"


@pytest.fixture(scope="module")
def bus(rabbitmq: RabbitMQ, cluster: Cluster) -> Iterator[Bus]:
    with Bus(rabbitmq, cluster, "broadcast", "classic") as bus:
        yield bus


@pytest.fixture(scope="module")
def three_workers(bus: Bus) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as running:
        workers = [running.enter_context(bus.worker(each, app=APP)) for each in "abc"]
        for worker in workers:
            worker.wait_ready()
        yield workers


@pytest.mark.parametrize("task", [jobs.requeued, jobs.parked])
def test_each_worker_runs_it_once_and_one_at_a_time(
    bus: Bus, three_workers: list[Worker], key: str, task: Task
) -> None:
    cluster = bus.cluster
    with cluster.lock(key):
        sent = bus.send(task, key, seconds=0.05, queue=Broadcast("for-all"))
        if task is jobs.requeued:
            cluster.wait_event("requeued", sent, 3)
        else:
            cluster.wait_waiters(key, 3)
    cluster.wait_event("end", sent, 3)
    # Each worker gets this behind whatever else there is for all.
    last = bus.send(jobs.plain, key, queue=Broadcast("for-all"))
    cluster.wait_event("end", last, 3)
    received = sum(worker.log_text().count(f"[{sent.id}] received") for worker in three_workers)

    starts, ends = (cluster.events(what=what, id=sent.id) for what in ("start", "end"))
    assert len({start["worker"] for start in starts}) == len(starts) == 3
    assert all(end["at"] <= start["at"] for end, start in zip(ends, starts[1:], strict=False))
    requeued = cluster.events(what="requeued", id=sent.id)
    assert bool(requeued) == (task is jobs.requeued)
    assert received == 3 + len(requeued)


def test_redis_says_that_it_cannot_send_it_to_one_worker_alone(cluster: Cluster, key: str) -> None:
    with cluster.worker("for-all", queues="for-all", app=APP) as worker, cluster.lock(key):
        worker.wait_ready()
        # Celery gives the queue of a worker this key, and Redis looks at it; so does it at the kind.
        for_all = Broadcast("for-all", routing_key=jobs.app.conf.task_default_routing_key)

        def answered() -> AsyncResult | None:
            # Redis keeps nothing for those who do not listen yet, and "ready" a worker is before.
            sent = cluster.send(jobs.requeued, key, queue=for_all, declare=[for_all.exchange])
            try:
                sent.get(timeout=5, propagate=False)
            except ResultTimeoutError:
                return None
            return sent

        sent = cluster.wait(answered, "an answer")
        with pytest.raises(ImproperlyConfigured, match="redis cannot send it back to one of them"):
            sent.get(timeout=PATIENCE)
