"""RabbitMQ closes the connections of a worker: nothing of before is left, and each task runs once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.celery_dflock import jobs
from tests.celery_dflock.rabbitmq import ending_late
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.celery_dflock.reconnects import lose_connections
from tests.celery_dflock.worker.waiting import ids, started

POOLS = ["prefork", "threads", pytest.param("gevent", marks=pytest.mark.soak)]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_each_runs_once_however_often_the_connection_breaks(
    make_bus: Callable[..., Bus], key: str, gate: Path, kind: str, pool: str
) -> None:
    """One that runs has a message that comes again, too, and its result decides about that."""
    bus = make_bus(kind)
    cluster = bus.cluster
    with bus.running("one", pool=pool, worker_prefetch_multiplier=8), cluster.lock(key) as held:
        # Seldom: a result that Celery's prefork is just reading when the connection breaks is lost, and
        # its process gets no task any more.
        runs = bus.send(jobs.late_seldom, f"{key}-runs", gate=str(gate))
        cluster.wait_event("start", runs)
        waiting = [bus.send(jobs.parked_late, key) for _ in range(5)]
        cluster.wait_waiters(key, 5)
        for _ in range(2):
            lose_connections(cluster, key, 5, bus.close_connections)
            # In its first tenth of a second Celery's event loop ignores that a connection is closed.
            cluster.wait_event("end", bus.send(jobs.plain, f"{key}-plain"))
        cluster.wait_event("requeued", runs)
        gate.touch()
        cluster.wait_event("end", runs)
        cluster.wait_event("deduplicated", runs)
        assert len(started(cluster, f"{key}-runs")) == 1
        assert not started(cluster, key)
        held.release()
        for each in waiting:
            cluster.wait_event("end", each)
        cluster.wait_free(key)
        # None of them has met a copy of itself.
        assert not cluster.events(what="requeued", key=key)
    assert sorted(started(cluster, key)) == sorted(ids(waiting))


def test_only_the_consumers_thread_waits_for_answers_of_the_broker(
    make_bus: Callable[..., Bus],
    key: str,
    gate: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one would read what that waits for, and the worker would receive nothing any more."""
    monkeypatch.setenv(ending_late.GATE, str(gate))
    bus = make_bus("classic")
    cluster = bus.cluster
    including = ("--include", ending_late.__name__)
    options = {"pool": "threads", "concurrency": 4, "worker_prefetch_multiplier": 4}
    with bus.running("one", *including, **options) as worker:
        # While one runs a reconnect lowers the prefetch count, and one that ends raises it again.
        runs = bus.send(jobs.plain, key, gate=str(tmp_path / "runs"))
        cluster.wait_event("start", runs)
        reconnect(bus, key)
        late = bus.send(jobs.late_patient, key, gate=str(gate))
        cluster.wait_event("start", late)
        reconnect(bus, key)
        cluster.wait_event("end", late)
        (tmp_path / "runs").touch()
        cluster.wait_event("end", bus.send(jobs.plain, key))
        assert ending_late.TOLD not in worker.log_text()


def reconnect(bus: Bus, key: str) -> None:
    # In its first tenth of a second Celery's event loop ignores that a connection is closed.
    bus.cluster.wait_event("end", bus.send(jobs.plain, key))
    bus.close_connections()
