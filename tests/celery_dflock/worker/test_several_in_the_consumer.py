"""Tasks of several keys wait in the consumer for all of them, one after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import states

from celery_dflock import Skipped, dflock
from dflockd.sync_client import DistributedLock
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.bodies import SHORT
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter, node_of
from tests.stopping import stopped

POOLS = ["prefork", "threads", pytest.param("gevent", marks=pytest.mark.soak)]


@pytest.fixture
def alone(cluster: Cluster) -> Iterator[Worker]:
    """A worker with one process, which a test may kill."""
    with cluster.worker("alone", concurrency=1) as worker:
        cluster.wait_ready(worker)
        yield worker


def holders(cluster: Cluster, key: str) -> list[dict[str, Any]]:
    report: list[dict[str, Any]] = cluster.lock(key).inspect()["holders"]
    return report


def wait_held(cluster: Cluster, key: str, number: int = 1) -> None:
    cluster.wait(lambda: len(holders(cluster, key)) == number or None, f"{number} holders of {key}")


def release(lock: DistributedLock) -> None:
    assert lock.release()


@pytest.mark.parametrize("pool", POOLS)
def test_it_waits_for_all_of_them_without_a_slot(cluster: Cluster, key: str, pool: str) -> None:
    first, second = cluster.lock(f"{key}:a"), cluster.lock(f"{key}:b")
    with cluster.worker(f"free-{pool}", pool=pool, concurrency=1) as worker:
        cluster.wait_ready(worker)
        assert first.acquire()
        assert second.acquire()
        sent = cluster.send(jobs.parked_pair, key, queue=worker.name)
        worker.wait_log(f"parked_pair[{sent.id}] waits for lock '{key}:a' in the consumer")
        release(first)
        worker.wait_log(f"parked_pair[{sent.id}] waits for lock '{key}:b' in the consumer")
        [holder] = holders(cluster, f"{key}:a")
        assert holder["label"].startswith(f"parked_pair[{sent.id}] ")
        assert cluster.events(what="asked", id=sent.id) == []
        # The only slot is free.
        other = cluster.send(jobs.patient, f"{key}:other", queue=worker.name)
        assert other.get(timeout=PATIENCE) == other.id
        rows = jobs.app.control.inspect([node_of(worker)], timeout=10)._request("dflock")
        states_of = {row["key"]: row["state"] for row in rows[node_of(worker)]}
        assert states_of == {f"{key}:a": "holds", f"{key}:b": "waits"}
        release(second)
        assert sent.get(timeout=PATIENCE) == sent.id
        assert cluster.wait_event("end", sent)["held"] is True
        for name in ("a", "b"):
            cluster.wait_free(f"{key}:{name}")


def test_its_process_has_them_all(cluster: Cluster, alone: Worker, key: str, never: str) -> None:
    """They are adopted: free as soon as that process dies, without the worker's doing anything."""
    sent = cluster.send(jobs.parked_pair, key, gate=never, queue=alone.name)
    start = cluster.wait_event("start", sent)
    with stopped(alone):
        for name in ("a", "b"):
            assert not cluster.lock(f"{key}:{name}").acquire()
        os.kill(start["pid"], signal.SIGKILL)
        for name in ("a", "b"):
            cluster.wait_free(f"{key}:{name}")


def test_its_process_renews_them_all(cluster: Cluster, alone: Worker, key: str, gate: Path) -> None:
    sent = cluster.send(jobs.parked_pair_lease, key, gate=str(gate), queue=alone.name)
    cluster.wait_event("start", sent)
    with stopped(alone):
        for name in ("a", "b"):
            lock = cluster.lock(f"{key}:{name}")
            for _ in range(3):  # which takes longer than the lease
                wait_renewed(cluster, lock)
        gate.touch()
        assert cluster.wait_event("end", sent)["held"] is True
    assert sent.get(timeout=PATIENCE) == sent.id


def wait_renewed(cluster: Cluster, lock: DistributedLock) -> None:
    left = SHORT + 1.0

    def probe() -> bool | None:
        nonlocal left
        before, left = left, lock.inspect()["holders"][0]["lease_expires_in_s"]
        return left > before or None

    cluster.wait(probe, f"a renewal of {lock.key}")


@pytest.mark.parametrize("how", ["killed", "revoked", "stopped", "in time"])
def test_what_it_holds_is_free_if_it_does_not_run(
    cluster: Cluster, alone: Worker, key: str, how: str
) -> None:
    task = jobs.parked_pair_short if how == "in time" else jobs.parked_pair
    with cluster.lock(f"{key}:b"):
        sent = cluster.send(task, key, queue=alone.name)
        cluster.wait_waiters(f"{key}:b", 1)
        if how != "in time":
            wait_held(cluster, f"{key}:a")
        match how:
            case "killed":
                alone.kill()
            case "revoked":
                jobs.app.control.revoke(sent.id)
            case "stopped":
                alone.stop()
            case "in time":
                skipped = Skipped.of(sent.get(timeout=PATIENCE))
                assert skipped is not None
                assert skipped.key == f"{key}:b"
        cluster.wait_free(f"{key}:a")
        cluster.wait_waiters(f"{key}:b", 0)
        if how == "revoked":
            cluster.wait(lambda: sent.state == states.REVOKED or None, "its state")
        if how == "stopped":
            alone.start()
            cluster.wait_waiters(f"{key}:b", 1)
    if how == "stopped":
        assert sent.get(timeout=PATIENCE) == sent.id


def test_a_place_of_a_rate_is_given_back(cluster: Cluster, alone: Worker, key: str) -> None:
    vendor = cluster.lock(f"{key}:vendor")
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(dflock(f"{key}:fleet", limit=3, app=jobs.app))
        sent = cluster.send(jobs.parked_three, key, queue=alone.name)
        cluster.wait_waiters(f"{key}:fleet", 1)
        alone.wait_log(f"parked_three[{sent.id}] waits for lock '{key}:fleet' in the consumer")
        assert vendor.inspect()["rate"]["free"] == 4
        jobs.app.control.revoke(sent.id)
        cluster.wait(lambda: vendor.inspect()["rate"]["free"] == 5 or None, "its place")
        again = cluster.send(jobs.parked_three, key, queue=alone.name)
        cluster.wait_waiters(f"{key}:fleet", 1)
    assert again.get(timeout=PATIENCE) == again.id
    assert vendor.inspect()["rate"]["free"] == 4


def test_it_is_queued_in_one_order_and_runs_in_it(
    cluster: Cluster, alone: Worker, key: str
) -> None:
    with cluster.lock(f"{key}:b"):
        sent = [cluster.send(jobs.parked_pair, key, queue=alone.name)]
        cluster.wait_waiters(f"{key}:b", 1)
        for number in range(1, 5):
            sent.append(cluster.send(jobs.parked_pair, key, queue=alone.name))
            cluster.wait_waiters(f"{key}:a", number)
    for each in sent:
        assert each.get(timeout=PATIENCE) == each.id
    begun = [event["id"] for event in cluster.events(what="start", key=key)]
    assert begun == [each.id for each in sent]


def test_without_a_free_process_nothing_is_held(
    cluster: Cluster, alone: Worker, key: str, gate: Path
) -> None:
    """The task in the only process may wait for what is held in the consumer: here it does."""
    busy = cluster.send(jobs.patient, f"{key}:busy", gate=str(gate), queue=alone.name)
    cluster.wait_event("start", busy)
    sent = cluster.send(jobs.parked_pair, key, queue=alone.name)
    wait_held(cluster, f"{key}:a")
    with cluster.lock(f"{key}:a", timeout=PATIENCE):
        alone.wait_log("gives back what it holds: no process is free")
    gate.touch()
    assert busy.get(timeout=PATIENCE) == busy.id
    assert sent.get(timeout=PATIENCE) == sent.id


def test_a_busy_solo_worker_holds_nothing(
    cluster: Cluster, waiter: Callable[..., Waiter], key: str, gate: Path
) -> None:
    """The thread that would see to it is in a task."""
    with cluster.worker("busy", pool="solo", concurrency=1) as worker:
        cluster.wait_ready(worker)
        with cluster.lock(f"{key}:a"):
            sent = cluster.send(jobs.parked_pair, key, queue=worker.name)
            cluster.wait_waiters(f"{key}:a", 1)
            busy = cluster.send(jobs.plain, key, gate=str(gate), queue=worker.name)
            cluster.wait_event("start", busy)
            other = waiter(f"{key}:a")
        other.wait_granted()
        other.lock.release()
        gate.touch()
        assert sent.get(timeout=PATIENCE) == sent.id
        assert cluster.wait_event("end", sent)["held"] is True


def test_one_whose_lock_is_lost_meanwhile_waits_anew(
    cluster: Cluster, alone: Worker, key: str
) -> None:
    with cluster.lock(f"{key}:b"):
        sent = cluster.send(jobs.parked_pair, key, queue=alone.name)
        cluster.wait_waiters(f"{key}:b", 1)
        [holder] = holders(cluster, f"{key}:a")
        assert cluster.lock(f"{key}:a").evict(holder["fence"])
    assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.wait_event("end", sent)["held"] is True


def test_another_delivery_of_it_does_not_run_beside_it(
    cluster: Cluster, alone: Worker, key: str, gate: Path
) -> None:
    options: dict[str, Any] = {"queue": alone.name, "task_id": f"twice:{key}"}
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(dflock(f"{key}:fleet", limit=3, app=jobs.app))
        sent = cluster.send(jobs.parked_three_late, key, gate=str(gate), **options)
        cluster.wait_waiters(f"{key}:fleet", 1)
        cluster.send(jobs.parked_three_late, key, gate=str(gate), **options)
        cluster.wait_event("requeued", sent)
    cluster.wait_event("start", sent)
    gate.touch()
    assert sent.get(timeout=PATIENCE) == sent.id
    cluster.wait_event("deduplicated", sent)
    assert len(cluster.events(what="start", id=sent.id)) == 1
