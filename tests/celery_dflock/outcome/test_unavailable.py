"""No lock server can be asked: nothing runs unlocked unless wanted, and nothing is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from celery import Celery
from celery.app.task import Context

from celery_dflock import LockedTask, LockUnavailableError, current_lock
from celery_dflock.outcome.decide import LONGEST_PAUSE, decide
from celery_dflock.outcome.header import RUN
from celery_dflock.outcome.requeue import RedeliveryRequeued
from celery_dflock.outcome.types import Unavailable
from celery_dflock.plan import Plan
from celery_dflock.run import acquire, locks_of
from dflockd.sharding import stable_hash_shard
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter


@pytest.fixture(scope="module")
def second_server(cluster: Cluster) -> Iterator[LockServer]:
    """A server that is down; its port is known."""
    with LockServer(cluster.directory, name="second") as server:
        server.stop()
        yield server


@pytest.fixture(scope="module")
def worker(cluster: Cluster, second_server: LockServer) -> Iterator[Worker]:
    """A worker with two servers: the one of all tests, and the second one."""
    with worker_of_both(cluster, second_server, "sharded") as worker:
        yield worker


@pytest.fixture
def new_worker(cluster: Cluster, second_server: LockServer) -> Iterator[Worker]:
    """One like it that has not met an outage yet."""
    with worker_of_both(cluster, second_server, "unavailable") as worker:
        yield worker


@contextlib.contextmanager
def worker_of_both(cluster: Cluster, second_server: LockServer, name: str) -> Iterator[Worker]:
    servers = f"{cluster.lock_server.address},{second_server.address}"
    with cluster.ready(name, servers=servers) as worker:
        yield worker


def key_on(index: int, key: str) -> str:
    """A key that belongs to the server with this index, of two."""
    names = (f"{key}:{number}" for number in range(100))
    return next(name for name in names if stable_hash_shard(name, 2) == index)


def test_requeued_until_the_server_is_there(
    cluster: Cluster, new_worker: Worker, second_server: LockServer, key: str
) -> None:
    second_server.kill()
    key = key_on(1, key)
    sent = [cluster.send(jobs.patient, key, seconds=0.05, queue=new_worker.name) for _ in range(3)]
    for each in sent:
        cluster.wait_event("requeued", each, 2)
    assert not cluster.events(what="start", key=key), "never unlocked"

    second_server.start()

    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]
    starts = sorted(cluster.events(what="start", key=key), key=lambda event: event["at"])
    assert len(starts) == len(sent), "each once"
    assert all(start["fence"] for start in starts)
    ends = sorted(event["at"] for event in cluster.events(what="end", key=key))
    assert all(end < start["at"] for end, start in zip(ends, starts[1:], strict=False))

    address = second_server.address
    lines = [line for line in new_worker.log_text().splitlines() if ": WARNING/" in line]
    about = [line for line in lines if address in line]
    # The main process looks at its servers as it starts, and runs nothing.
    assert sum("MainProcess" in line for line in about) <= 1
    ended = []
    for process in ("ForkPoolWorker-1]", "ForkPoolWorker-2]"):
        own = [line for line in about if process in line]
        if own:  # it had a task meanwhile, and perhaps none since
            begins, *ends = own
            away = f"lock server {address} is unavailable, its tasks are requeued until it answers"
            assert f"{away}: cannot be reached: " in begins
            assert len(ends) <= 1, "however many tasks meet it"
            ended += ends
    assert ended
    assert all(f"lock server {address} answers again after " in line for line in ended)
    requeues = sum(int(line.rpartition(" ")[2]) for line in ended)
    assert 2 <= requeues <= len(cluster.events(what="requeued", key=key))
    assert "Traceback" not in new_worker.log_text()


@pytest.mark.parametrize("task", [jobs.patient, jobs.parked], ids=["slot", "consumer"])
def test_a_server_that_refuses_is_not_away(cluster: Cluster, key: str, task: LockedTask) -> None:
    """It is asked again and again, and the log says what it said: nobody looks for an outage."""
    with (
        LockServer(cluster.directory, "--max-waiters", "1", name="narrow") as narrow,
        cluster.worker("narrow", servers=narrow.address) as worker,
    ):
        worker.wait_ready()
        lock = partial(DistributedLock, key, None, servers=[narrow.address])
        with lock(), Waiter(lock()):
            sent = cluster.send(task, key, queue=worker.name)
            cluster.wait_event("requeued", sent, 2)
        assert sent.get(timeout=PATIENCE) == sent.id
        said = f"lock server {narrow.address} "
        lines = worker.log_text().splitlines()
    about = [line for line in lines if ": WARNING/" in line and said in line]
    assert about
    assert all(f"{said}refuses a lock, its task is requeued until it is" in line for line in about)


def test_an_outage_uses_nothing_up(
    cluster: Cluster, worker: Worker, second_server: LockServer, key: str
) -> None:
    """Neither attempts nor time, and its pauses stay short; nobody asks what a conflict becomes.

    Who waits when the server is killed gives up his slot, after some seconds.
    """
    if not second_server.running:
        second_server.start()
    awaited = key_on(1, f"{key}:awaited")
    names = ("limited", "hurried", "skipped", "failed", "decided")
    with cluster.lock(awaited, second_server):
        waiting = cluster.send(jobs.patient, awaited, queue=worker.name)
        cluster.wait_waiters(awaited, 1, second_server)

        second_server.kill()

        # Keys of their own: they meet nobody when the server is back.
        sent = [
            cluster.send(getattr(jobs, name), key_on(1, f"{key}:{name}"), queue=worker.name)
            for name in names
        ]
        for each in sent:
            cluster.wait_event("requeued", each, 4)
        cluster.wait_event("requeued", waiting)
        assert not cluster.events(what="start", id=waiting.id)
        down_for = time.monotonic() - cluster.wait_event("requeued", sent[0])["at"]
        assert down_for > jobs.hurried.lock_requeue["max_wait"]
        second_server.start()

    assert waiting.get(timeout=PATIENCE) == waiting.id
    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]
    for each in sent:
        requeued = cluster.events(what="requeued", id=each.id)
        assert [event["attempt"] for event in requeued] == list(range(1, len(requeued) + 1))
        assert all(0.5 <= event["countdown"] <= LONGEST_PAUSE for event in requeued)


def test_the_other_server_goes_on(
    cluster: Cluster, worker: Worker, second_server: LockServer, key: str
) -> None:
    second_server.kill()
    down, up = key_on(1, key), key_on(0, key)
    stuck = cluster.send(jobs.patient, down, queue=worker.name)
    cluster.wait_event("requeued", stuck)

    sent = cluster.send(jobs.patient, up, queue=worker.name)

    assert sent.get(timeout=PATIENCE) == sent.id
    assert not cluster.events(what="start", id=stuck.id)
    second_server.start()
    assert stuck.get(timeout=PATIENCE) == stuck.id


def app_without_server(unavailable: str | None, port: int) -> Celery:
    app = Celery("alone", set_as_current=False)
    app.conf.dflock_servers = [("127.0.0.1", port)]
    app.conf.dflock_unavailable = unavailable
    return app


@pytest.fixture
def closed_port(tmp_path_factory: pytest.TempPathFactory) -> int:
    with LockServer(tmp_path_factory.mktemp("closed")) as server:
        return server.port


@pytest.mark.parametrize("unavailable", ["fail", "requeue", None])
def test_fail(unavailable: str | None, closed_port: int) -> None:
    """Requeueing has nowhere to go to in eager mode, and still nothing runs unlocked."""
    app = app_without_server(unavailable, closed_port)
    ran = []

    @app.task(base=LockedTask, lock_key="the-key", shared=False)
    def task() -> None:
        ran.append(1)

    with pytest.raises(LockUnavailableError, match=f"127.0.0.1:{closed_port}") as failure:
        task.apply().get()
    assert failure.value.key == "the-key"
    assert not ran


def test_it_does_not_run_beside_holders_that_the_server_knows(tmp_path: Path, key: str) -> None:
    with LockServer(tmp_path, "--max-waiters", "1") as server:
        app = Celery("full", set_as_current=False)
        app.conf.update(dflock_servers=[server.address], dflock_unavailable="run")

        @app.task(base=LockedTask, lock_key=key, shared=False)
        def task() -> None:
            pytest.fail("it runs beside the holder")

        holder = DistributedLock(key, 0, 30, [server.address])
        waiter = DistributedLock(key, 0, 30, [server.address])
        with holder:
            assert waiter.enqueue() == "queued"
            with pytest.raises(LockUnavailableError, match="max-waiters"):
                task.apply(throw=True)
            waiter.release()


@pytest.mark.parametrize("unavailable", ["run", "fail"])
def test_a_redelivery_that_has_met_its_run_is_requeued(closed_port: int, unavailable: str) -> None:
    app = app_without_server(unavailable, closed_port)
    app.conf.broker_url = "memory://"

    @app.task(base=LockedTask, lock_key="the-key", shared=False)
    def task() -> None:
        pytest.fail("it runs beside its first delivery")

    headers = {RUN: {"id": "its-id", "redelivery": 1, "retries": 0}}
    request = Context(id="its-id", headers=headers, retries=0, delivery_info={})
    plan = Plan(task, request, task.run, (), {}, task._bound())
    refusal = acquire(plan, locks_of(plan, lambda _: None))
    assert isinstance(refusal, Unavailable)
    with pytest.raises(RedeliveryRequeued):
        decide(plan, refusal)


def test_run_if_wanted(closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    app = app_without_server("run", closed_port)

    @app.task(base=LockedTask, lock_key="the-key", shared=False)
    def task() -> object:
        return current_lock()

    assert task.apply(task_id="its-id").get() is None
    (line,) = [record for record in caplog.records if record.name == "celery_dflock"]
    assert line.levelname == "WARNING"
    assert "[its-id] runs without its lock" in line.getMessage()
    assert f"127.0.0.1:{closed_port}" in line.getMessage()
