"""Locks that come into doubt under the tasks of workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Task

from celery_dflock import LockLostError
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.doubt.support import LONG, forgets, remembers
from tests.celery_dflock.processes import PATIENCE, Cluster


@pytest.fixture(scope="module", params=["prefork", "threads"])
def worker(
    cluster: Cluster, server: LockServer, request: pytest.FixtureRequest
) -> Iterator[Worker]:
    name = f"{server.name}-{request.param}"
    with cluster.ready(name, pool=request.param, servers=server.address) as worker:
        yield worker


def send_checked(cluster: Cluster, task: Any, key: str, queue: str, gate: Path, ttl: int) -> Any:
    headers = {"dflock": {"lock_ttl": ttl}}
    return task.apply_async((key, str(gate)), queue=queue, headers=headers)


@remembers
@pytest.mark.parametrize("worker", ["prefork", "threads", "gevent", "eventlet"], indirect=True)
def test_a_restart_goes_unnoticed(
    cluster: Cluster, server: LockServer, worker: Worker, key: str, gate: Path
) -> None:
    sent = send_checked(cluster, jobs.checked, key, worker.name, gate, LONG)
    start = cluster.wait_event("start", sent)
    server.kill()
    doubt = cluster.wait_event("doubt", sent)
    assert doubt["state"] == "doubtful"
    assert doubt["held"] is False
    assert doubt["has_token"] is True
    assert doubt["fence"] == start["fence"]

    back_at = time.monotonic()
    server.start()

    checked = cluster.wait_event("checked", sent)
    assert checked["at"] > back_at
    assert (checked["state"], checked["held"]) == ("held", True)
    assert checked["fence"] == start["fence"]
    assert cluster.lock(key, server).acquire() is False
    gate.touch()
    assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.wait_event("end", sent)["held"] is True
    assert not cluster.events(what="lost", key=key)
    cluster.wait_free(key, server)


@forgets
@pytest.mark.parametrize("task", [jobs.checked, jobs.checked_alone], ids=["raise", "warn"])
def test_another_has_it_and_the_task_learns_of_that_at_once(
    cluster: Cluster, server: LockServer, worker: Worker, key: str, task: Task, tmp_path: Path
) -> None:
    """The second one is not interrupted: what it raises is what `check` has raised."""
    sent = send_checked(cluster, task, key, worker.name, tmp_path / "never", LONG)
    cluster.wait_event("start", sent)
    server.kill()
    assert cluster.wait_event("doubt", sent)["state"] == "doubtful"
    assert not cluster.events(what="lost", key=key)
    server.start()
    other = cluster.lock(key, server, timeout=PATIENCE)
    assert other.acquire()

    with pytest.raises(LockLostError) as failure:  # long before the end of its lease
        sent.get(timeout=PATIENCE)
    assert type(failure.value) is LockLostError
    assert failure.value.key == key
    [lost] = cluster.events(what="lost", key=key)
    assert lost["task"] == task.name
    assert not cluster.events(what="checked", id=sent.id)
    other.check()
    assert other.release()


@forgets
def test_interrupted_only_once_it_is_certain(
    cluster: Cluster, server: LockServer, worker: Worker, key: str, tmp_path: Path
) -> None:
    headers = {"dflock": {"lock_ttl": jobs.SHORT}}
    never = str(tmp_path / "never")
    sent_at = time.monotonic()
    sent = cluster.send(jobs.patient, key, gate=never, queue=worker.name, headers=headers)
    cluster.wait_event("start", sent)
    server.kill()
    end = cluster.wait_event("end", sent)
    assert end["error"] == "LockLostError"
    assert end["at"] - sent_at > jobs.SHORT, "not before its lease has ended"
    with pytest.raises(LockLostError):
        sent.get(timeout=PATIENCE)


@remembers
def test_a_body_that_ends_in_doubt(
    cluster: Cluster, server: LockServer, worker: Worker, key: str
) -> None:
    """Its lock is free once the server is back, and not at the end of the lease."""
    headers = {"dflock": {"lock_ttl": LONG}}
    sent = cluster.send(jobs.patient, key, then="end in doubt", queue=worker.name, headers=headers)
    cluster.wait_event("start", sent)
    server.kill()
    assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.wait_event("doubt", sent)["state"] == "doubtful"
    assert not cluster.events(what="lost", key=key)
    server.start()
    cluster.wait_free(key, server)


@remembers
def test_what_is_sent_on_in_doubt_is_still_the_only_one(
    cluster: Cluster, server: LockServer, worker: Worker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of `lock_unique` goes to the retry, after the end of the doubt."""
    monkeypatch.setenv("DFLOCK_SERVERS", server.address)
    task, options = jobs.unique_patient, {"then": "retry in doubt", "queue": worker.name}
    sent = cluster.send(task, key, **options)
    cluster.wait_event("start", sent)
    server.kill()
    assert cluster.wait_event("doubt", sent)["state"] == "doubtful"
    server.start()
    assert cluster.send(task, key, **options).id == sent.id
    assert sent.get(timeout=PATIENCE) == sent.id
    assert len(cluster.events(what="start", key=key)) == 2
    assert not cluster.events(what="lost", key=key)
