"""`lock_unique`: what is on its way is not sent again, and becomes free again however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Task
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from celery.signals import after_task_publish
from kombu.exceptions import OperationalError

from celery_dflock.unique import publish
from dflockd import admin
from examples.demo.stage import ROOT, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter, node_of
from tests.celery_dflock.unique.support import Parked, hold, locks_of, own_app, own_task, wait_over

pytestmark = pytest.mark.usefixtures("workers")


def test_until_executing(cluster: Cluster, key: str, gate: Path) -> None:
    task = jobs.until_executing
    first = cluster.send(task, key, gate=str(gate))
    cluster.wait_event("start", first)
    second = cluster.send(task, key)
    assert second.id != first.id
    assert cluster.send(task, key).id == second.id, "it waits for the first"

    gate.touch()

    assert first.get(timeout=PATIENCE) == first.id
    assert second.get(timeout=PATIENCE) == second.id
    assert hold(cluster, task, key) is None


def test_until_executed(cluster: Cluster, parked: Parked, key: str, gate: Path) -> None:
    task = jobs.until_executed
    first = cluster.send(task, key, gate=str(gate), queue=parked.name)
    assert cluster.send(task, key, queue=parked.name).id == first.id
    assert len(parked) == 1
    parked.deliver()
    cluster.wait_event("start", first)
    assert cluster.send(task, key).id == first.id
    assert cluster.send(task, f"{key}:other").id != first.id

    gate.touch()

    assert first.get(timeout=PATIENCE) == first.id
    assert hold(cluster, task, key) is None
    second = cluster.send(task, key)
    assert second.get(timeout=PATIENCE) == second.id != first.id


def test_until_expired(cluster: Cluster, key: str) -> None:
    task, short = jobs.until_expired, {"dflock": {"lock_unique_ttl": 1}}
    first = cluster.send(task, key)
    assert first.get(timeout=PATIENCE) == first.id
    assert cluster.send(task, key).id == first.id
    second = cluster.send(task, f"{key}:short", headers=short)
    assert second.get(timeout=PATIENCE) == second.id
    wait_over(cluster, task, f"{key}:short")
    assert cluster.send(task, f"{key}:short").id != second.id


def test_a_task_that_has_not_begun_counts_for_so_long(
    cluster: Cluster, parked: Parked, key: str
) -> None:
    unbegun = cluster.send(jobs.until_executed, f"{key}:long", queue=parked.name)
    assert cluster.send(jobs.until_executed, f"{key}:long", queue=parked.name).id == unbegun.id
    options = {"headers": {"dflock": {"lock_unique_ttl": 1}}, "queue": parked.name}
    first = cluster.send(jobs.until_executed, key, **options)

    wait_over(cluster, jobs.until_executed, key)

    second = cluster.send(jobs.until_executed, key, **options)
    assert second.id != first.id
    assert len(parked) == 3
    parked.deliver()
    sent = (unbegun, first, second)
    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]


@pytest.mark.parametrize("then", ["raise", "ignore", "reject"])
def test_over_with_its_end(cluster: Cluster, key: str, gate: Path, then: str) -> None:
    sent = cluster.send(jobs.until_executed, key, then=then, gate=str(gate))
    cluster.wait_event("start", sent)
    assert hold(cluster, jobs.until_executed, key)

    gate.touch()

    cluster.wait_event("end", sent)
    wait_over(cluster, jobs.until_executed, key)


@pytest.mark.parametrize(
    ("task", "then"),
    [
        (jobs.until_executed, "retry later"),
        (jobs.until_executed, "retry with headers"),
        (jobs.unique_retried, "raise once"),
    ],
)
def test_goes_on_through_retries(
    cluster: Cluster, parked: Parked, key: str, task: Task, then: str
) -> None:
    sent = cluster.send(task, key, then=then, queue=parked.name)
    parked.deliver(home=parked.name)
    cluster.wait_event("end", sent)

    def probe() -> dict[str, Any] | None:
        found = hold(cluster, task, key)
        assert found is not None
        return found if found["owner_conn_id"] == 0 else None

    found = cluster.wait(probe, "the lock to be held by nobody")
    assert found["lease_expires_in_s"] > 3000, "for lock_unique_ttl again"
    assert cluster.send(task, key).id == sent.id
    cluster.wait(lambda: len(parked) or None, "the retry")
    parked.deliver()
    assert sent.get(timeout=PATIENCE) == 1
    wait_over(cluster, task, key)


def test_a_retry_that_comes_before_its_run_has_ended(cluster: Cluster, key: str) -> None:
    sent = cluster.send(jobs.unique_patient, key, then="retry slowly")
    assert sent.get(timeout=PATIENCE) == "retried"
    wait_over(cluster, jobs.unique_patient, key)


@pytest.mark.parametrize("task", [jobs.until_executed, jobs.until_executing])
def test_goes_on_while_it_is_requeued(cluster: Cluster, key: str, task: Task) -> None:
    with cluster.lock(key):
        sent = cluster.send(task, key)
        cluster.wait_event("requeued", sent, 2)
        assert cluster.send(task, key).id == sent.id

    assert sent.get(timeout=PATIENCE) == sent.id
    wait_over(cluster, task, key)


def test_goes_on_when_it_is_rejected_to_the_queue(
    cluster: Cluster, key: str, gate: Path, waiter: Callable[..., Waiter]
) -> None:
    task = jobs.unique_late
    sent = cluster.send(task, key, then="reject to the queue", gate=str(gate))
    cluster.wait_event("start", sent)
    waiting = waiter(key)
    cluster.wait_waiters(key, 1)

    gate.touch()

    waiting.wait_granted()
    cluster.wait_event("requeued", sent)
    assert cluster.send(task, key).id == sent.id
    waiting.lock.release()
    assert sent.get(timeout=PATIENCE) is True
    wait_over(cluster, task, key)


@pytest.mark.parametrize("task", [jobs.unique_skipped, jobs.unique_failed])
def test_over_when_it_cannot_run(cluster: Cluster, key: str, task: Task) -> None:
    with cluster.lock(key):
        sent = cluster.send(task, key)
        sent.get(timeout=PATIENCE, propagate=False)
        wait_over(cluster, task, key)


def test_revoked_before_it_ran(
    cluster: Cluster, workers: tuple[Worker, Worker], parked: Parked, key: str
) -> None:
    sent = cluster.send(jobs.until_executed, key, queue=parked.name)
    nodes = [node_of(worker) for worker in workers]
    jobs.app.control.revoke(sent.id, destination=nodes, reply=True, timeout=PATIENCE, limit=2)
    assert hold(cluster, jobs.until_executed, key)
    parked.deliver()

    with pytest.raises(TaskRevokedError):
        sent.get(timeout=PATIENCE)
    wait_over(cluster, jobs.until_executed, key)


def test_expired_before_it_ran(
    cluster: Cluster, parked: Parked, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "CLOCK_MARGIN", 600)
    sent = cluster.send(jobs.until_executed, key, expires=0.2, queue=parked.name)
    found = hold(cluster, jobs.until_executed, key)
    assert found is not None
    assert found["lease_expires_in_s"] == pytest.approx(601, abs=10)
    time.sleep(0.3)  # what is to come is a time, and no event
    parked.deliver()

    with pytest.raises(TaskRevokedError):
        sent.get(timeout=PATIENCE)
    wait_over(cluster, jobs.until_executed, key)


def end_child(cluster: Cluster, sent: AsyncResult, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def terminate(cluster: Cluster, sent: AsyncResult, pid: int) -> None:
    sent.revoke(terminate=True, signal="SIGKILL")


HOWEVER = pytest.mark.parametrize("end", [end_child, terminate])


@HOWEVER
def test_killed_while_it_runs(
    cluster: Cluster, key: str, gate: Path, end: Callable[[Cluster, AsyncResult, int], None]
) -> None:
    sent = cluster.send(jobs.until_executed, key, gate=str(gate))
    end(cluster, sent, cluster.wait_event("start", sent)["pid"])
    wait_over(cluster, jobs.until_executed, key)


@HOWEVER
@pytest.mark.parametrize("task", [jobs.unique_patient, jobs.unique_waiting])
def test_killed_while_it_waits(
    cluster: Cluster, key: str, task: Task, end: Callable[[Cluster, AsyncResult, int], None]
) -> None:
    with cluster.lock(key):
        sent = cluster.send(task, key)
        cluster.wait_waiters(key, 1)
        end(cluster, sent, cluster.wait_event("asked", sent)["pid"])
        wait_over(cluster, task, key)


def test_sender_killed_before_it_has_sent(cluster: Cluster, parked: Parked, key: str) -> None:
    script = f"""
import os, signal
from celery.signals import before_task_publish
from tests.celery_dflock import jobs

@before_task_publish.connect
def die(**_):
    os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)

jobs.until_executed.apply_async((), {{"key": {key!r}}}, queue={parked.name!r})
"""
    sender = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        os.waitid(os.P_PID, sender.pid, os.WSTOPPED | os.WNOWAIT)
        assert hold(cluster, jobs.until_executed, key), "what the kill is to end"
        sender.send_signal(signal.SIGCONT)
        assert sender.wait(PATIENCE) == -signal.SIGKILL
    finally:
        sender.kill()
        sender.wait()
    wait_over(cluster, jobs.until_executed, key)
    assert len(parked) == 0


def test_lost_by_its_sender_before_it_has_sent(
    cluster: Cluster, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for long, perhaps: what it sends runs, and counts no more."""
    take = publish._Sender.take

    def take_and_lose(sender: Any) -> Any:
        first, lock = take(sender), sender.lock
        admin.evict(cluster.lock_server.address, lock.key, lock.fence)
        assert not lock.renew()
        return first

    with monkeypatch.context() as patch:
        patch.setattr(publish._Sender, "take", take_and_lose)
        sent = cluster.send(jobs.until_executed, key)
    assert sent.get(timeout=PATIENCE) == sent.id
    assert len(cluster.events(what="start", key=key)) == 1


def test_begun_before_its_sender_has_let_go_of_it(cluster: Cluster, key: str, gate: Path) -> None:
    def dawdle(sender: str, **_: Any) -> None:
        cluster.wait(lambda: cluster.events(what="start", key=key) or None, "its start")

    after_task_publish.connect(dawdle, sender="until_executed")
    try:
        cluster.send(jobs.until_executed, key, gate=str(gate))
    finally:
        after_task_publish.disconnect(dawdle, sender="until_executed")
    found = hold(cluster, jobs.until_executed, key)
    assert found is not None
    assert found["owner_conn_id"], "with the worker, and not with nobody"
    assert found["lease_expires_in_s"] <= jobs.until_executed.lock_ttl


def test_broker_down(cluster: Cluster, key: str) -> None:
    app = own_app(cluster.lock_server, broker_transport_options={"max_retries": 0})
    task = own_task(app, key)
    app.conf.broker_url = "redis://127.0.0.1:1//"

    with pytest.raises(OperationalError):
        task.apply_async((1,), retry=False)

    assert locks_of(cluster, key) == []


def test_a_copy_leaves_the_lock_to_the_run(
    cluster: Cluster, parked: Parked, key: str, gate: Path
) -> None:
    task = jobs.until_executed
    sent = cluster.send(task, key, gate=str(gate), queue=parked.name)
    parked.deliver(copies=2)
    cluster.wait_event("start", sent)
    cluster.wait_event("requeued", sent, 5)
    assert cluster.send(task, key).id == sent.id
    assert len(cluster.events(what="start", id=sent.id)) == 1

    gate.touch()

    assert sent.get(timeout=PATIENCE) == sent.id
    wait_over(cluster, task, key)
    cluster.wait_event("deduplicated", sent)


def test_what_is_known_to_be_a_copy_does_not_touch_the_lock(
    cluster: Cluster, parked: Parked, key: str, gate: Path
) -> None:
    sent = cluster.send(jobs.until_executed, key, gate=str(gate), queue=parked.name)
    [message] = parked.messages
    parked.deliver()
    cluster.wait_event("start", sent)
    parked.put_copy(message)
    parked.deliver()
    cluster.wait_event("requeued", sent, 2)
    found = hold(cluster, jobs.until_executed, key)
    assert found is not None
    assert found["owner_conn_id"], "the run"
    assert found["lease_expires_in_s"] <= jobs.until_executed.lock_ttl
