"""A lock server that hangs: nobody has said that the lock is held, so no task is skipped for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_dflock import LockUnavailableError, dflock
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.pace import Pace
from tests.stopping import stopped

TOO_LONG = 8.0
"""Seconds beyond those that were given; it was ten and more, and is two."""


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="hanging-locks") as server:
        yield server


@pytest.fixture(scope="module")
def worker(cluster: Cluster, server: LockServer) -> Iterator[Worker]:
    with cluster.ready("hung", servers=server.address, concurrency=3) as worker:
        yield worker


WAITING = ("slot", "consumer")
"""Where a task waits for its lock: those of a test do it side by side."""


def send(cluster: Cluster, worker: Worker, key: str, where: str, timeout: float) -> AsyncResult:
    """Send a task that is skipped if it does not get the lock in time."""
    options = {"lock_wait": where, "lock_timeout": timeout, "lock_conflict": "skip"}
    headers = {"dflock": {**options, "lock_requeue": jobs.AT_ONCE}}
    return cluster.send(jobs.patient, key, queue=worker.name, headers=headers)


def assert_run_and_not_skipped(cluster: Cluster, each: AsyncResult) -> None:
    assert each.get(timeout=PATIENCE) == each.id
    assert cluster.events(what="skipped", id=each.id) == []


def test_requeued_and_not_skipped(
    cluster: Cluster, worker: Worker, server: LockServer, key: str
) -> None:
    with stopped(server):
        sent = [
            send(cluster, worker, f"{key}:{where}:{timeout}", where, timeout)
            for where, timeout in itertools.product(WAITING, (0, 0.4, 1))
        ]
        for each in sent:
            cluster.wait_event("requeued", each)
    for each in sent:
        assert_run_and_not_skipped(cluster, each)


def test_it_hangs_while_a_task_waits(
    cluster: Cluster, worker: Worker, server: LockServer, key: str
) -> None:
    keys = {where: f"{key}:{where}" for where in WAITING}
    holders = [cluster.lock(each, server) for each in keys.values()]
    assert all(holder.acquire() for holder in holders)
    sent = [send(cluster, worker, each, where, 2) for where, each in keys.items()]
    for each in keys.values():
        cluster.wait_waiters(each, 1, server)
    with stopped(server):
        for each in sent:
            cluster.wait_event("requeued", each)
    for holder in holders:
        holder.release()
    for each in sent:
        assert_run_and_not_skipped(cluster, each)


def test_outside_of_tasks(cluster: Cluster, server: LockServer, key: str) -> None:
    app = Celery("outside", set_as_current=False)
    app.conf.dflock_servers = [server.address]

    def blocking(timeout: float) -> None:
        with dflock(key, timeout=timeout, app=app):
            pass

    async def on_a_loop(timeout: float) -> None:
        async with dflock(key, timeout=timeout, app=app):
            pass

    def hangs(use: Callable[[float], None], timeout: float) -> float:
        """Return by how many seconds it waits longer than it was told to."""
        with Pace() as pace, pytest.raises(LockUnavailableError, match="no answer in time"):
            use(timeout)
        return pace.seconds - timeout

    uses = (blocking, lambda timeout: asyncio.run(on_a_loop(timeout)))
    cases = list(itertools.product(uses, (0, 1, 1.4)))
    blocking(PATIENCE)  # a connection is there from now on
    with stopped(server), ThreadPoolExecutor(len(cases)) as side_by_side:
        longer = list(side_by_side.map(lambda case: hangs(*case), cases))
    assert max(longer) < TOO_LONG
    # What it grants when it goes on, it grants to connections that have ended.
    cluster.wait_free(key, server)
    blocking(PATIENCE)
