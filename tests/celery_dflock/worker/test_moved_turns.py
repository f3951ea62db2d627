"""A shard moves to another lock server at the very moment of a turn: that costs nobody his turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery.result import AsyncResult

from dflockd.client.process import close_idle_connections
from dflockd.sync_client import DistributedLock
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.worker import standing
from tests.celery_dflock.worker.waiting import ids, present, started
from tests.dflockd.cluster.stage import ClusterStage, settled
from tests.effort import more
from tests.pace import Pace

SOON = 5.0
"""Seconds, of which a move takes a fraction; what waits for the end of anything takes longer."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("moved-turns")
    with settled(directory, number=2, lease=jobs.LONG) as stage:
        yield stage
        close_idle_connections()


@pytest.fixture
def at(stage: ClusterStage) -> str:
    """A key that is at the first of them."""
    return stage.key_at(stage.servers[0])


def lock_at(stage: ClusterStage, key: str) -> DistributedLock:
    return DistributedLock(key, PATIENCE, jobs.LONG, stage.address)


def send(cluster: Cluster, stage: ClusterStage, worker: Worker, key: str) -> AsyncResult:
    """Send a task, and wait until it has its position behind the others."""
    lock = lock_at(stage, key)
    number = len(present(lock))
    sent = cluster.send(jobs.parked, key, queue=worker.name)
    cluster.wait(lambda: len(present(lock)) > number or None, "its position")
    return sent


def wait_told(cluster: Cluster, stage: ClusterStage, key: str) -> None:
    lock = lock_at(stage, key)
    cluster.wait(lambda: any(each["told"] for each in present(lock)) or None, "its turn")


@contextmanager
def in_order(cluster: Cluster, key: str, sent: list[AsyncResult]) -> Iterator[None]:
    """All that were sent run once, as they were sent, soon after what is done in here."""
    with Pace() as pace:
        yield
        assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    assert started(cluster, key) == ids(sent)
    assert not cluster.events(what="requeued", key=key)
    assert pace.seconds < SOON


def move(stage: ClusterStage, key: str) -> None:
    """Have the other server have the key."""
    shard = stage.shard_of(key)
    here = stage.mapping.records()[shard].current
    [there] = [server for server in stage.servers if server.address != here]
    stage.move([shard], there)


def test_a_turn_that_its_worker_has_not_heard_of(
    cluster: Cluster, stage: ClusterStage, at: str, gate: Path
) -> None:
    """It hears of it twice, from either server, and runs one task."""
    env = {jobs.TOLD_MS: str(1000 * jobs.LONG)}
    with cluster.worker("unheard", servers=stage.address, app=standing.APP, env=env) as worker:
        cluster.wait_ready(worker)
        held = lock_at(stage, at)
        assert held.acquire()
        sent = [send(cluster, stage, worker, at) for _ in range(4)]
        with in_order(cluster, at, sent), standing.standing(cluster, worker, gate):
            held.release()
            wait_told(cluster, stage, at)
            move(stage, at)
            wait_told(cluster, stage, at)
            assert not started(cluster, at)


def test_a_turn_whose_ticket_is_on_its_way_to_a_process(
    cluster: Cluster, stage: ClusterStage, at: str
) -> None:
    with cluster.worker("on-its-way", servers=stage.address, concurrency=1) as worker:
        cluster.wait_ready(worker)
        first = cluster.send(jobs.plain, f"{at}-first", queue=worker.name)
        pid = cluster.wait_event("end", first)["pid"]
        held = lock_at(stage, at)
        assert held.acquire()
        sent = [send(cluster, stage, worker, at) for _ in range(4)]
        os.kill(pid, signal.SIGSTOP)
        try:
            held.release()
            wait_told(cluster, stage, at)
            move(stage, at)
        finally:
            os.kill(pid, signal.SIGCONT)
        with in_order(cluster, at, sent):
            pass


@pytest.mark.parametrize("moves", [3, more(40)])
def test_turns_while_the_shard_moves_to_and_fro(
    cluster: Cluster, stage: ClusterStage, at: str, moves: int
) -> None:
    """Each move is ordered at a turn, wherever that is by then."""
    with cluster.worker("to-and-fro", servers=stage.address) as worker:
        cluster.wait_ready(worker)
        sent: list[AsyncResult] = []
        for _ in range(moves):
            with lock_at(stage, at):
                sent += [send(cluster, stage, worker, at) for _ in range(3)]
            move(stage, at)
        with in_order(cluster, at, sent):
            pass
