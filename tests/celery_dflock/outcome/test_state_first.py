"""What a run stores of its task, it stores before the next run can begin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, states
from celery.result import AsyncResult
from kombu.utils.uuid import uuid

from dflockd.sync_client import DistributedLock
from tests.celery_dflock import jobs
from tests.celery_dflock.outcome.stalling import (
    POINTS,
    BrokenBackend,
    StallingDatabase,
    StallingRedis,
    StallingRPC,
)
from tests.celery_dflock.processes import PATIENCE, Cluster

POOLS = ("prefork", "threads", "gevent", "solo")


def url_of(backend: type, url: str) -> str:
    return f"{backend.__module__}:{backend.__name__}+{url}"


@contextlib.contextmanager
def stored(url: str, kind: str) -> Iterator[tuple[Celery, Callable[[str], list[str]]]]:
    """An app that sends tasks, and what returns the states of one: all of them, or the last."""
    app = Celery("sender", broker=jobs.app.conf.broker_url, backend=url, set_as_current=False)
    said: dict[str, list[str]] = {}

    def of(task_id: str) -> list[str]:
        if kind != "rpc":
            return [app.AsyncResult(task_id).state]
        with app.connection_for_read() as connection, connection.channel() as channel:
            while message := channel.basic_get(app.backend.oid, no_ack=True):
                meta: dict[str, Any] = channel.message_to_python(message).decode()
                said.setdefault(meta["task_id"], []).append(meta["status"])
        return said[task_id]

    try:
        yield app, of
    finally:
        app.close()


def combinations() -> Iterator[Any]:
    """Each pool and each kind of backend in the ordinary run, all of both together in the long one."""
    for pool in POOLS:
        for kind in ("redis", "sql", "rpc"):
            is_short = kind == "redis" or pool == "prefork"
            yield pytest.param(pool, kind, marks=[] if is_short else [pytest.mark.soak])


def send(app: Celery, point: str, key: str, queue: str) -> AsyncResult:
    kwargs = {"key": key, "then": "raise"}
    return app.send_task("requeued", kwargs=kwargs, task_id=f"{point}-{uuid()}", queue=queue)


def let_go(
    cluster: Cluster, sent: dict[str, AsyncResult], locks: dict[str, DistributedLock]
) -> bool | None:
    """Give each task its lock once a run of it was sent again."""
    for point in tuple(locks):
        if cluster.events(what="requeued", id=sent[point].id):
            locks.pop(point).release()
    return not locks or None


@pytest.mark.parametrize(("pool", "kind"), list(combinations()))
def test_a_requeue_overwrites_no_final_state(
    cluster: Cluster, key: str, tmp_path: Path, pool: str, kind: str
) -> None:
    """Wherever it is held up between its end and the last that it says."""
    urls = {
        "redis": (StallingRedis, jobs.app.conf.result_backend),
        "sql": (StallingDatabase, f"sqlite:///{tmp_path}/results"),
        "rpc": (StallingRPC, "rpc://"),
    }
    backend, url = urls[kind]
    env = {jobs.RESULTS: url_of(backend, url.removeprefix("redis+"))}
    name = f"stalled-{pool}-{kind}"
    with contextlib.ExitStack() as running:
        app, states_of = running.enter_context(stored(f"db+{url}" if kind == "sql" else url, kind))
        sent: dict[str, AsyncResult] = {}
        locks: dict[str, DistributedLock] = {}
        with contextlib.ExitStack() as ending:
            # Two of one process: in one that is held up nothing else happens.
            workers = [
                ending.enter_context(
                    cluster.worker(
                        f"{name}-{n}", queues=name, env=env, pool=pool, concurrency=len(POINTS) + 1
                    )
                )
                for n in range(2 if pool == "solo" else 1)
            ]
            cluster.wait_ready(*workers)
            # One task after the other where a process has one at a time.
            for points in [[point] for point in POINTS] if pool == "solo" else [POINTS]:
                for point in points:
                    lock = cluster.lock(f"{key}-{point}")
                    assert lock.acquire()
                    ending.callback(lock.release)
                    sent[point], locks[point] = send(app, point, lock.key, name), lock
                cluster.wait(partial(let_go, cluster, sent, locks), "their requeueing")
                for point in points:
                    cluster.wait_event("end", sent[point])
            for worker in workers:
                worker.stop(PATIENCE)  # then all that its runs had to say is said
        for each in sent.values():
            said = states_of(each.id)
            assert said[-1] == states.FAILURE, said
            assert any(
                f"[{each.id}] retry: requeued" in worker.log.read_text() for worker in workers
            )


def test_a_state_that_cannot_be_stored_keeps_no_message_back(cluster: Cluster, key: str) -> None:
    url = jobs.app.conf.result_backend.removeprefix("redis+")
    with cluster.worker("broken", env={jobs.RESULTS: url_of(BrokenBackend, url)}) as worker:
        cluster.wait_ready(worker)
        with cluster.lock(key):
            sent = cluster.send(jobs.requeued, key, queue=worker.name)
            cluster.wait_event("requeued", sent)
        assert sent.get(timeout=PATIENCE) == sent.id
        worker.wait_log("is requeued, and its state is not stored: ValueError('as asked')")
