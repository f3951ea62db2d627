"""The lock server is restarted under tasks that hold and tasks that wait; it keeps its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServer]:
    directory = tmp_path_factory.mktemp("restart")
    with LockServer(directory, "--state-dir", str(directory / "state"), name="kept") as server:
        yield server


@pytest.fixture(scope="module")
def worker(cluster: Cluster, server: LockServer) -> Iterator[Worker]:
    with cluster.ready("restarted", servers=server.address, concurrency=3) as worker:
        yield worker


@pytest.mark.parametrize("end", [LockServer.kill, LockServer.stop], ids=["killed", "stopped"])
def test_neither_holder_nor_waiters_notice(
    cluster: Cluster,
    server: LockServer,
    worker: Worker,
    key: str,
    gate: Path,
    end: Callable[[LockServer], None],
) -> None:
    holder = cluster.send(jobs.patient, key, gate=str(gate), queue=worker.name)
    held = cluster.wait_event("start", holder)
    waiters = [cluster.send(jobs.patient, key, queue=worker.name) for _ in range(2)]
    cluster.wait_waiters(key, 2, server)

    end(server)
    server.start()
    cluster.wait_waiters(key, 2, server)
    gate.touch()

    assert holder.get(timeout=PATIENCE) == holder.id
    assert cluster.wait_event("end", holder)["state"] in ("held", "doubtful")
    for waiter in waiters:
        assert waiter.get(timeout=PATIENCE) == waiter.id
    starts = sorted(cluster.events(what="start", key=key), key=lambda event: event["at"])
    fences = [event["fence"] for event in starts]
    assert [held["fence"], *sorted(fences[1:])] == fences
    ends = sorted(cluster.events(what="end", key=key), key=lambda event: event["at"])
    assert all(end["at"] <= start["at"] for end, start in zip(ends, starts[1:], strict=False))
    for told in ("requeued", "lost"):
        assert not cluster.events(what=told, key=key)


def test_waiters_do_not_wait_for_a_server_for_ever(
    cluster: Cluster, server: LockServer, worker: Worker, key: str, gate: Path
) -> None:
    holder = cluster.send(jobs.patient, key, gate=str(gate), queue=worker.name)
    cluster.wait_event("start", holder)
    waiter = cluster.send(jobs.patient, key, queue=worker.name)
    cluster.wait_waiters(key, 1, server)
    server.kill()
    cluster.wait_event("requeued", waiter)
    server.start()
    gate.touch()
    assert holder.get(timeout=PATIENCE) == holder.id
    assert waiter.get(timeout=PATIENCE) == waiter.id
