"""Keys that are paused, with real workers: nobody begins, then all do, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from celery import Celery

from celery_dflock import LockNotAcquiredError, dflock
from dflockd import admin
from dflockd.sync_client import DistributedLock
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.test_signals import locked
from tests.celery_dflock.worker.waiting import assert_in_order, ids, started, turns

MANY = 40


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    with cluster.worker("pausing") as worker:
        cluster.wait_ready(worker)
        yield worker


@pytest.mark.parametrize("is_in_consumer", [True, False])
def test_nobody_begins_while_it_is_paused_and_all_do_after_in_order(
    cluster: Cluster, worker: Worker, key: str, is_in_consumer: bool
) -> None:
    task, number = (jobs.parked, MANY) if is_in_consumer else (jobs.patient, 2)
    server = cluster.lock_server.address
    with cluster.lock(key):
        sent = []
        for position in range(1, number + 1):
            sent.append(cluster.send(task, key, queue=worker.name))
            cluster.wait_waiters(key, position)
        admin.pause(server, key, reason="the vendor is down", by="ann@w1")
    report = admin.inspect(server, key)
    assert (report["holders"], len(report["waiters"])) == ([], number)
    # Another key goes on, in the slots of this worker.
    if is_in_consumer:
        other = cluster.send(jobs.patient, f"{key}-other", queue=worker.name)
        assert other.get(timeout=PATIENCE) == other.id
    assert not started(cluster, key)
    assert admin.resume(server, key)
    assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    assert_in_order(turns(cluster, key, sent))
    cluster.wait_free(key)


def test_a_requeued_task_comes_back_until_the_pause_is_over(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    server = cluster.lock_server.address
    admin.pause(server, key)
    sent = cluster.send(jobs.requeued, key, queue=worker.name)
    cluster.wait_event("requeued", sent)
    assert not started(cluster, key)
    assert admin.resume(server, key)
    assert sent.get(timeout=PATIENCE) == sent.id


SAID = r"waited 0.1 s.*, paused by ann@w1 for \d s, \d+ min left: the vendor is down$"


def test_the_error_of_a_task_says_so(app: Celery, key: str) -> None:
    task = locked(app, lock_timeout=0.1, lock_conflict="fail")
    lock = DistributedLock(key, servers=app.conf.dflock_servers)
    lock.pause(3600, "the vendor is down", "ann@w1")
    with pytest.raises(LockNotAcquiredError, match=SAID):
        task.delay(key)
    assert lock.resume()
    task.delay(key)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_error_of_a_block_says_so(app: Celery, key: str, is_async: bool) -> None:
    async def enter_async() -> None:
        async with dflock(key, 0.1, app=app):
            pass

    def enter() -> None:
        with dflock(key, 0.1, app=app):
            pass

    lock = DistributedLock(key, servers=app.conf.dflock_servers)
    lock.pause(3600, "the vendor is down", "ann@w1")
    with pytest.raises(LockNotAcquiredError, match=SAID):
        asyncio.run(enter_async()) if is_async else enter()
    assert lock.resume()
    enter()
