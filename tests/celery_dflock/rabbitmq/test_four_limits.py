"""Several limits of one task under load, on RabbitMQ, which loses no message of a killed worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Task

from tests.celery_dflock import jobs
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.celery_dflock.worker.test_four_limits import go_through_faults


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("task", [jobs.four, jobs.four_in_turns], ids=["four", "in_turns"])
def test_each_task_runs_while_workers_are_killed_and_stopped(
    make_bus: Callable[..., Bus], key: str, kind: str, task: Task
) -> None:
    bus = make_bus(kind)
    with bus.running("one", concurrency=4) as one, bus.running("two", concurrency=4) as two:
        route = {"queue": bus.queue, "connection": bus.connection}
        go_through_faults(bus.cluster, [one, two], key, task, 1500, may_lose=False, **route)
