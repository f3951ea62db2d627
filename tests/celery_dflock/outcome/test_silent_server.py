"""A lock server that hangs: nobody has said that the lock is held, so no task is skipped for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from celery import Celery

from celery_dflock import LockUnavailableError, dflock
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.pace import Pace

TOO_LONG = 8.0
"""Seconds beyond those that were given; it was ten and more, and is two."""


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="hanging-locks") as server:
        yield server


@pytest.fixture(scope="module")
def worker(cluster: Cluster, server: LockServer) -> Iterator[Worker]:
    with cluster.worker("hung", servers=server.address) as worker:
        worker.wait_ready()
        yield worker


@contextmanager
def hanging(server: LockServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("where", ["slot", "consumer"])
@pytest.mark.parametrize("timeout", [0, pytest.param(1, marks=pytest.mark.soak), 0.4])
def test_requeued_and_not_skipped(
    cluster: Cluster, worker: Worker, server: LockServer, key: str, where: str, timeout: float
) -> None:
    options = {"lock_wait": where, "lock_timeout": timeout, "lock_conflict": "skip"}
    with hanging(server):
        sent = cluster.send(
            jobs.patient,
            key,
            queue=worker.name,
            headers={"dflock": {**options, "lock_requeue": jobs.AT_ONCE}},
        )
        cluster.wait_event("requeued", sent)
    assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.events(what="skipped", id=sent.id) == []


@pytest.mark.parametrize("where", ["slot", "consumer"])
def test_it_hangs_while_a_task_waits(
    cluster: Cluster, worker: Worker, server: LockServer, key: str, where: str
) -> None:
    options = {"lock_wait": where, "lock_timeout": 2, "lock_conflict": "skip"}
    holder = cluster.lock(key, server)
    assert holder.acquire()
    sent = cluster.send(
        jobs.patient,
        key,
        queue=worker.name,
        headers={"dflock": {**options, "lock_requeue": jobs.AT_ONCE}},
    )
    cluster.wait_waiters(key, 1, server)
    with hanging(server):
        cluster.wait_event("requeued", sent)
    holder.release()
    assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.events(what="skipped", id=sent.id) == []


@pytest.mark.parametrize("timeout", [0, pytest.param(1, marks=pytest.mark.soak), 1.4])
def test_outside_of_tasks(cluster: Cluster, server: LockServer, key: str, timeout: float) -> None:
    app = Celery("outside", set_as_current=False)
    app.conf.dflock_servers = [server.address]

    def blocking() -> None:
        with dflock(key, timeout=timeout, app=app):
            pass

    async def on_a_loop() -> None:
        async with dflock(key, timeout=timeout, app=app):
            pass

    blocking()  # a connection is there from now on
    with hanging(server):
        for use in (blocking, lambda: asyncio.run(on_a_loop())):
            with Pace() as pace, pytest.raises(LockUnavailableError, match="no answer in time"):
                use()
            assert pace.seconds < timeout + TOO_LONG
    # What it grants when it goes on, it grants to connections that have ended.
    cluster.wait_free(key, server)
    blocking()
