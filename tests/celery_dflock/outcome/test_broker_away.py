"""The broker is away when a task is to be sent again: nothing is lost."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from celery import Task
from celery.result import AsyncResult

from examples.demo.stage import Redis, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.worker_log import CheckedWorker

VISIBILITY = "3"
"""Seconds after which Redis delivers again what a worker has not acknowledged."""


class LastingRedis(Redis):
    """One that has everything again when it is back."""

    def _command(self) -> Sequence[str]:
        return [*super()._command(), "--appendonly", "yes", "--appendfsync", "always"]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LastingRedis]:
    with LastingRedis(tmp_path, name="r") as broker:
        yield broker


@pytest.fixture
def worker(cluster: Cluster, broker: LastingRedis) -> Iterator[CheckedWorker]:
    env = {jobs.BROKER: broker.url, jobs.VISIBILITY: VISIBILITY}
    with cluster.ready(f"away-{next(_numbers)}", env=env) as worker:
        yield worker


_numbers = itertools.count()


def send(broker: LastingRedis, worker: Worker, task: Task, key: str, timeout: float) -> AsyncResult:
    with jobs.app.connection_for_write(broker.url) as connection:
        headers = {"dflock": {"lock_timeout": timeout}}
        return task.apply_async(
            (), {"key": key}, queue=worker.name, connection=connection, headers=headers
        )


def wait_acknowledged(cluster: Cluster, broker: LastingRedis) -> None:
    """Wait until only the worker knows of what it has: kombu may not survive that the rest is lost."""
    with redis.Redis(unix_socket_path=str(broker.socket)) as client:
        cluster.wait(lambda: client.hlen("unacked") == 0 or None, "the worker to acknowledge")


def test_a_requeue_waits_for_the_broker(
    cluster: Cluster, broker: LastingRedis, worker: Worker, key: str
) -> None:
    with cluster.lock(key):
        sent = send(broker, worker, jobs.patient, key, 1.5)
        cluster.wait_waiters(key, 1)
        wait_acknowledged(cluster, broker)
        broker.kill()
        worker.wait_log(f"[{sent.id}] cannot be sent again yet")
    broker.start()
    cluster.wait_event("end", sent)
    assert len(cluster.events(what="start", id=sent.id)) == 1


def test_a_message_that_is_acknowledged_late(
    cluster: Cluster, broker: LastingRedis, worker: CheckedWorker, key: str
) -> None:
    """Celery with Redis may not survive that, with any task. The message does, and runs once."""
    worker.may_fail = True
    with cluster.lock(key):
        sent = send(broker, worker, jobs.late_patient, key, 1.5)
        cluster.wait_waiters(key, 1)
        broker.kill()
        moved_on = (f"[{sent.id}] cannot be sent again yet", f"[{sent.id}] reject requeue=True")
        cluster.wait(lambda: any(map(worker.log_text().__contains__, moved_on)) or None, "its move")
        broker.start()
    env = {jobs.BROKER: broker.url, jobs.VISIBILITY: VISIBILITY}
    with cluster.worker(f"{worker.name}-2", queues=worker.name, env=env):
        cluster.wait_event("end", sent)
    assert len(cluster.events(what="start", id=sent.id)) == 1


def test_a_worker_that_ends_without_a_broker_says_what_is_lost(
    cluster: Cluster, broker: LastingRedis, worker: CheckedWorker, key: str
) -> None:
    worker.may_fail = True  # Celery itself has a traceback for the task that is lost
    with cluster.lock(key):
        sent = send(broker, worker, jobs.patient, key, 60)
        cluster.wait_waiters(key, 1)
        wait_acknowledged(cluster, broker)
        broker.kill()
        os.kill(worker.pid, signal.SIGTERM)
        line = worker.wait_log(f"] task patient[{sent.id}] is lost")
        assert ": ERROR/" in line
