"""A firing that is sent twice is run once: its copies have one id."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_dflock.beat.firing import Firing
from dflockd import admin
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    with cluster.ready("copies") as worker:
        yield worker


def firing(key: str) -> Firing:
    return Firing("celery-beat:copies", key, datetime(2026, 3, 1, tzinfo=UTC))


def send(cluster: Cluster, worker: Worker, task: Any, key: str, **options: Any) -> AsyncResult:
    return cluster.send(task, key, **firing(key).options({"queue": worker.name}, None), **options)


def wait_dropped(cluster: Cluster, worker: Worker, sent: AsyncResult) -> None:
    def probe() -> bool | None:
        lines = worker.log_text().splitlines()
        return any(sent.id in line and "its copy is dropped" in line for line in lines) or None

    cluster.wait(probe, f"the copy of {sent.id} to be dropped")
    assert len(cluster.events(what="start", id=sent.id)) == 1


def test_a_copy_after_its_run(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = send(cluster, worker, jobs.patient, key)
    assert sent.get(timeout=PATIENCE) == sent.id == firing(key).id

    again = send(cluster, worker, jobs.patient, key)

    wait_dropped(cluster, worker, again)
    assert again.get(timeout=PATIENCE) == sent.id
    cluster.wait_free(key)


@pytest.mark.parametrize("task", [jobs.patient, jobs.skipped], ids=["waits", "skips"])
def test_a_copy_while_it_runs(
    cluster: Cluster, worker: Worker, gate: Path, key: str, task: Any
) -> None:
    sent = send(cluster, worker, task, key, gate=str(gate))
    cluster.wait_event("start", sent)
    send(cluster, worker, task, key)
    cluster.wait_event("asked", sent, nth=2)
    gate.touch()

    wait_dropped(cluster, worker, sent)
    assert sent.get(timeout=PATIENCE) == sent.id


def test_a_failure_has_been_run(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = send(cluster, worker, jobs.patient, key, then="raise")
    with pytest.raises(ValueError, match="as asked"):
        sent.get(timeout=PATIENCE)

    send(cluster, worker, jobs.patient, key)

    wait_dropped(cluster, worker, sent)
    assert sent.state == "FAILURE"


def test_a_retry_is_no_copy(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = send(cluster, worker, jobs.retried, key, then="raise once")
    assert sent.get(timeout=PATIENCE) == 1
    assert [e["retries"] for e in cluster.events(what="start", id=sent.id)] == [0, 1]


def test_a_run_that_was_cut_short_is_run_again(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = send(cluster, worker, jobs.patient, key, then="exit")
    cluster.wait_event("start", sent)
    cluster.wait_free(key)

    again = send(cluster, worker, jobs.patient, key)

    cluster.wait_event("end", again)
    assert len(cluster.events(what="start", id=sent.id)) == 2


def test_what_is_remembered_is_one_key(cluster: Cluster, worker: Worker, key: str) -> None:
    """The lock server has so many, and users want them."""
    sent = [send(cluster, worker, jobs.patient, f"{key}-{number}") for number in range(3)]
    ids = {each.get(timeout=PATIENCE) for each in sent}
    done = f"celery-done:{jobs.patient.name}"
    holders = admin.inspect(cluster.lock_server.address, done)["holders"]
    assert ids <= {holder["label"].partition(":")[0] for holder in holders}


def test_other_tasks_with_the_header_are_no_firings(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    options = firing(key).options({"queue": worker.name}, None)
    del options["task_id"]
    for _ in range(2):
        sent = cluster.send(jobs.patient, key, **options)
        assert sent.get(timeout=PATIENCE) == sent.id
