"""Tasks that wait in the consumer: in which order they were sent and ran, and what keeps them there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from celery.result import AsyncResult

from dflockd.sync_client import DistributedLock
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster

SLOTS = 2


def ids(sent: list[AsyncResult]) -> list[str]:
    return [each.id for each in sent]


def turns(cluster: Cluster, key: str, sent: list[AsyncResult]) -> list[int]:
    """In which order they ran: 0, 1, 2, ... is that in which they were sent."""
    order = ids(sent)
    return [order.index(each) for each in started(cluster, key)]


def assert_in_order(order: list[int], late: int = 0) -> None:
    """They ran in that of being sent; but for so many, which came late."""
    numbers = range(len(order))
    assert sorted(order) == list(numbers)
    assert any(
        left == sorted(left)
        for out in itertools.combinations(numbers, late)
        if (left := [number for number in order if number not in out])
    ), order


def started(cluster: Cluster, key: str) -> list[str]:
    return [event["id"] for event in cluster.events(what="start", key=key)]


def wait_started(cluster: Cluster, key: str, number: int) -> None:
    cluster.wait(lambda: len(started(cluster, key)) >= number or None, f"{number} tasks on {key}")


def present(lock: DistributedLock) -> list[dict[str, Any]]:
    """Those who wait for a lock, without those for whom a position is kept."""
    return [each for each in lock.inspect()["waiters"] if not each["away"]]


def keep_busy(cluster: Cluster, worker: Worker, key: str, gate: Path) -> list[Any]:
    """Have all slots of a worker taken until the gate is there."""
    busy = [
        cluster.send(jobs.plain, f"{key}-busy", gate=str(gate), queue=worker.name)
        for _ in range(SLOTS)
    ]
    wait_started(cluster, f"{key}-busy", SLOTS)
    return busy
