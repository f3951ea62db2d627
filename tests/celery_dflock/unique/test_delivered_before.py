"""A message that the broker has delivered before: whose the lock of `lock_unique` is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery import Task
from celery.app.task import Context
from celery.exceptions import Retry
from celery.result import AsyncResult
from celery.signals import task_revoked

from celery_dflock import LockedTask
from celery_dflock.outcome.header import RUN
from celery_dflock.unique.run import _errands
from dflockd import admin
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import PATIENCE
from tests.celery_dflock.unique.support import own_app
from tests.celery_dflock.unique.test_failed_before import run, send

EXPIRES = 100
"""Seconds: for so long the sender asks for it, and a requeued task for longer."""


@pytest.fixture
def task(lock_server: LockServer, key: str) -> Task:
    app = own_app(lock_server, result_backend="cache+memory://")
    name = "delivered." + key.replace(":", "-")
    options: dict[str, Any] = {"lock_timeout": 0, "lock_unique": "until_executed"}

    @app.task(
        name=name, base=LockedTask, lock_key="{account}", shared=False, expires=EXPIRES, **options
    )
    def delivered(account: str) -> None:
        raise Retry

    return app.tasks[name]


def seconds_left(server: LockServer, task: Task) -> float:
    keys = admin.stats(server.address)["locks"]
    [lock] = [
        each for each in keys if each["key"].startswith("unique:") and task.name in each["key"]
    ]
    return float(lock["lease_expires_in_s"])


@pytest.mark.parametrize("has_met_its_run", [False, True])
def test_it_is_taken_along_by_a_redelivery_that_is_requeued_unless_that_has_met_its_run(
    task: Task, lock_server: LockServer, key: str, has_met_its_run: bool
) -> None:
    sent, headers = send(task, key)
    assert seconds_left(lock_server, task) < 2 * EXPIRES
    if has_met_its_run:
        headers[RUN] |= {"redelivery": 1, "retries": 0}
    with DistributedLock(key, 0, 30, [lock_server.address]):
        run(task, sent, key, headers, redelivered=True, routing_key=key)
    assert (seconds_left(lock_server, task) < 2 * EXPIRES) == has_met_its_run
    assert sent.state == "PENDING"


@pytest.mark.parametrize("is_redelivered", [True, False], ids=["redelivered", "sent again"])
def test_it_stays_with_the_retry_when_a_copy_of_the_run_that_sent_it_is_dropped(
    task: Task, lock_server: LockServer, key: str, is_redelivered: bool
) -> None:
    """A copy that has waited in the consumer is not marked as redelivered, and takes it at first."""
    sent, headers = send(task, key)
    run(task, sent, key, headers, redelivered=True, routing_key=key)
    assert seconds_left(lock_server, task) > 2 * EXPIRES
    headers[RUN] |= {"retries": 0, "waited": 5.0}
    run(task, sent, key, headers, redelivered=is_redelivered, routing_key=key)
    assert seconds_left(lock_server, task) > 2 * EXPIRES


def revoke(task: Task, sent: AsyncResult, headers: dict[str, Any], **info: Any) -> None:
    """Do as a worker does that has received the task, and finds it revoked or expired."""
    request = Context(id=sent.id, headers={RUN: headers[RUN]}, delivery_info=info)
    task_revoked.send(sender=task, request=request, terminated=False, signum=None, expired=True)
    done = threading.Event()
    _errands.run(done.set)
    assert done.wait(PATIENCE)


def test_it_stays_with_the_run_whose_redelivery_is_revoked(
    lock_server: LockServer, key: str
) -> None:
    app = own_app(lock_server, result_backend="cache+memory://")
    left = list[float]()

    @app.task(
        name="runs." + key.replace(":", "-"),
        base=LockedTask,
        lock_unique="until_executed",
        shared=False,
    )
    def runs(_: str) -> None:
        revoke(runs, sent, headers, redelivered=True)
        left.append(seconds_left(lock_server, runs))

    sent, headers = send(runs, key)
    run(runs, sent, key, headers)
    assert sent.state == "SUCCESS"
    assert left

    sent, headers = send(runs, key)
    revoke(runs, sent, headers, redelivered=True)
    assert send(runs, key)[0].id != sent.id, "nobody had it any more"
