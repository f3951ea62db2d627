"""A worker has no free process for a moment: that costs those who wait in its consumer nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.worker.waiting import ids, keep_busy, started, turns, wait_started


@pytest.fixture(
    scope="module",
    params=["prefork", "threads", "gevent", pytest.param("eventlet", marks=pytest.mark.soak)],
)
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Worker]:
    with cluster.worker(f"moments-{request.param}", pool=request.param) as worker:
        cluster.wait_ready(worker)
        yield worker


def told_to(worker: Worker, **said: Any) -> dict[str, Any]:
    return {"queue": worker.name, "headers": {"dflock": said}}


def end_all(cluster: Cluster, gate: Path, busy: list[AsyncResult], sent: list[AsyncResult]) -> None:
    gate.touch()
    assert [each.get(timeout=PATIENCE) for each in (*busy, *sent)] == ids([*busy, *sent])


def test_with_a_rate_all_run_in_order_and_others_are_not_kept_waiting(
    cluster: Cluster, worker: Worker, key: str, gate: Path
) -> None:
    busy = keep_busy(cluster, worker, key, gate)
    options = told_to(worker, lock_rate=[20, 1], lock_limit=None)
    sent = [cluster.send(jobs.parked, key, **options) for _ in range(40)]
    cluster.wait_waiters(key, 40)
    gate.touch()
    wait_started(cluster, key, 5)
    others = []
    for number in range(10):
        others.append(cluster.send(jobs.patient, f"{key}-{number}", queue=worker.name))
        assert others[-1].get(timeout=PATIENCE) == others[-1].id
    end_all(cluster, gate, busy, sent)
    order = turns(cluster, key, sent)
    assert sorted(order) == list(range(40))
    # Two processes run them: whenever one begins, at most one before it is on its way to the other.
    for place, number in enumerate(order):
        assert len(set(range(number)) - set(order[:place])) <= 1, order
    assert not cluster.events(what="requeued", key=key)
    for number, other in enumerate(others):
        [start] = cluster.events(what="start", key=f"{key}-{number}")
        [asked] = cluster.events(what="asked", id=other.id) or [start]
        assert start["at"] - asked["at"] < 1


@pytest.mark.parametrize("conflict", ["skip", "fail"])
def test_a_free_lock_is_no_conflict(
    cluster: Cluster, worker: Worker, key: str, gate: Path, conflict: str
) -> None:
    """Its time is over before its worker has a process, and nobody has the lock."""
    busy = keep_busy(cluster, worker, key, gate)
    options = told_to(worker, lock_timeout=1, lock_conflict=conflict)
    sent = cluster.send(jobs.parked, key, **options)
    cluster.wait_waiters(key, 1)
    cluster.wait_free(key)
    end_all(cluster, gate, busy, [sent])
    assert started(cluster, key) == [sent.id]


def test_groups_take_turns(cluster: Cluster, worker: Worker, key: str, gate: Path) -> None:
    busy = keep_busy(cluster, worker, key, gate)
    big = [cluster.send(jobs.parked, key, **told_to(worker, lock_group="big")) for _ in range(16)]
    cluster.wait_waiters(key, 16)
    small = cluster.send(jobs.parked, key, **told_to(worker, lock_group="small"))
    cluster.wait_waiters(key, 17)
    end_all(cluster, gate, busy, [*big, small])
    assert started(cluster, key) == ids([big[0], small, *big[1:]])
    assert not cluster.events(what="requeued", key=key)


def test_who_is_passed_comes_first_afterwards(
    cluster: Cluster, worker: Worker, key: str, gate: Path
) -> None:
    with cluster.lock(key):
        sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(6)]
        cluster.wait_waiters(key, 6)
        busy = keep_busy(cluster, worker, key, gate)
    with cluster.lock(key, timeout=PATIENCE):  # the worker has no process for it
        assert not started(cluster, key)
    end_all(cluster, gate, busy, sent)
    assert started(cluster, key) == ids(sent)
    assert not cluster.events(what="requeued", key=key)


def test_two_workers_share_the_order_of_arrival(
    cluster: Cluster, worker: Worker, key: str, gate: Path
) -> None:
    """Those of the busy one are passed by those of the other, and come first afterwards."""
    with cluster.worker(f"{worker.name}-other") as other:
        cluster.wait_ready(other)
        with cluster.lock(key):
            mixed = []
            for number in range(12):
                its = (worker, other)[number % 2]
                mixed.append(cluster.send(jobs.parked, key, queue=its.name, seconds=0.01))
                cluster.wait_waiters(key, number + 1)
            busy = keep_busy(cluster, worker, key, gate)
        wait_started(cluster, key, 2)
        end_all(cluster, gate, busy, mixed)
    order = turns(cluster, key, mixed)
    assert [number for number in order if number % 2] == [1, 3, 5, 7, 9, 11]
    assert [number for number in order if not number % 2] == [0, 2, 4, 6, 8, 10]
    assert order[:2] == [1, 3]
