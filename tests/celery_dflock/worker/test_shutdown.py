"""However a worker ends, it does not wait for those who wait: their tasks go to other workers.

They would wait for `jobs.LONG`, and no test does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from celery import signals

from celery_dflock.outcome.requeue import LEAST_PAUSE
from celery_dflock.worker.shutdown import LAST_MOMENT, Shutdown
from dflockd.sync_client import DistributedLock
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter, node_of


@contextlib.contextmanager
def served_by(workers: Sequence[Worker], queue: str) -> Iterator[None]:
    """For a while others have the tasks of a queue."""
    said: dict[str, Any] = {
        "destination": [node_of(worker) for worker in workers],
        "reply": True,
        "timeout": PATIENCE,
        "limit": len(workers),
    }
    assert len(jobs.app.control.add_consumer(queue, **said)) == len(workers)
    try:
        yield
    finally:
        jobs.app.control.cancel_consumer(queue, **said)


WAITING: dict[str, dict[str, Any]] = {
    "as usual": {},
    "one attempt": {"lock_requeue": {**jobs.AT_ONCE, "max_attempts": 1}},
    "no time": {"lock_requeue": {**jobs.AT_ONCE, "max_wait": 0.001}},
    "skip": {"lock_conflict": "skip"},
    "fail": {"lock_conflict": "fail"},
}
"""Options of those who wait: nobody asks them what becomes of a conflict, for it is none."""


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_waiters_move_on_and_that_is_no_conflict(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str, pool: str
) -> None:
    """None of their attempts and of their time is used up."""
    leaving = f"leaving-{pool}"
    waiting = list(WAITING.values())[: 1 if pool == "solo" else None]
    with cluster.worker(leaving, pool=pool, concurrency=len(waiting)) as worker:
        worker.wait_ready()
        with cluster.lock(key):
            sent = [
                cluster.send(jobs.patient, key, queue=leaving, headers={"dflock": options})
                for options in waiting
            ]
            cluster.wait_waiters(key, len(sent))

            asked_at = time.monotonic()
            worker.stop(PATIENCE)

            cluster.wait_waiters(key, 0)
        requeued = cluster.events(what="requeued", key=key)
        # It may come back to the same worker, which takes tasks for an instant longer.
        assert {event["id"] for event in requeued} == {each.id for each in sent}
        assert {event["countdown"] for event in requeued} == {LEAST_PAUSE}, "at once"
        assert {event["attempt"] for event in requeued} == {0}, "that is no attempt"
        assert all(event["at"] > asked_at for event in requeued)
        assert "the worker is shutting down" in worker.log_text()
    assert not cluster.events(what="start", key=key)

    with served_by(workers, leaving):
        assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]
    assert {event["worker"] for event in cluster.events(what="start", key=key)} <= {"one", "two"}
    assert {event["attempt"] for event in cluster.events(what="requeued", key=key)} == {0}
    assert not cluster.events(what="skipped", key=key)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_holder_finishes(cluster: Cluster, gate: Path, key: str, pool: str) -> None:
    """And keeps its lock, for longer than its lease."""
    with cluster.worker(f"finishing-{pool}", pool=pool) as worker:
        worker.wait_ready()
        sent = cluster.send(jobs.short, key, gate=str(gate), queue=worker.name)
        start = cluster.wait_event("start", sent)
        os.kill(worker.pid, signal.SIGTERM)
        worker.wait_log("Warm shutdown")
        with Waiter(cluster.lock(key)) as other:
            lease_is_over = start["at"] + 1.5 * jobs.short.lock_ttl
            cluster.wait(lambda: time.monotonic() > lease_is_over or None, "the lease")
            assert not other.granted
            gate.touch()
            assert other.wait_granted() > cluster.wait_event("end", sent)["at"]
        cluster.wait(lambda: not worker.running or None, "the end of the worker")
    assert sent.get(timeout=PATIENCE) == sent.id


SOFT = 1.0
"""Seconds of a soft shutdown here."""

Ending = Callable[[Worker], object]


def _kill(how: signal.Signals) -> Ending:
    return lambda worker: os.kill(worker.pid, how)


def _shut_down_from_remote(worker: Worker) -> None:
    jobs.app.control.shutdown([node_of(worker)])


ENDINGS: dict[str, Ending] = {
    "warm": _kill(signal.SIGTERM),
    "interrupt": _kill(signal.SIGINT),
    "cold": _kill(signal.SIGQUIT),
    "soft": _kill(signal.SIGQUIT),
    "remote": _shut_down_from_remote,
    "restart": _kill(signal.SIGHUP),
}

POOLS = {
    "prefork": list(ENDINGS),
    # Celery's pool of threads knows no cold shutdown of a task that runs.
    "threads": ["warm", "interrupt", "remote", "restart"],
    # A thread that does nothing but wait hears nothing from remote; and see above.
    "solo": ["warm", "interrupt"],
    "gevent": ["warm", "interrupt", "remote"],
}

QUICK = {
    ("prefork", "warm", True),
    ("prefork", "cold", False),
    ("prefork", "cold", True),
    ("prefork", "soft", False),
    ("threads", "remote", False),
}
"""Each way to end that Celery goes of its own: SIGINT and SIGHUP are warm."""


def _cases() -> Iterator[Any]:
    for pool, hows in POOLS.items():
        for how in hows:
            for late in (False, True):
                marks = () if (pool, how, late) in QUICK else pytest.mark.soak
                yield pytest.param(pool, how, late, marks=marks, id=f"{pool}-{how}{'-late' * late}")


@pytest.mark.parametrize(("pool", "how", "late"), list(_cases()))
def test_nobody_is_lost(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str, pool: str, how: str, late: bool
) -> None:
    """Those who wait in slots and in the consumer end elsewhere, each once, with their results.

    Also those whose messages are acknowledged late; of these Celery promises that each runs at least
    once.
    """
    in_consumer = jobs.parked_late if late else jobs.parked
    in_slot = jobs.late_patient if late else jobs.patient
    name, slots = f"ending-{pool}-{how}{'-late' * late}", 1 if pool == "solo" else 2
    env = {jobs.SOFT: str(SOFT)} if how == "soft" else {}
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(cluster.lock(key))
        worker = stack.enter_context(cluster.worker(name, pool=pool, concurrency=slots, env=env))
        worker.wait_ready()
        sent = [cluster.send(in_consumer, key, queue=name) for _ in range(3)]
        cluster.wait_waiters(key, 3)
        sent += [cluster.send(in_slot, key, queue=name) for _ in range(slots)]
        cluster.wait_waiters(key, 3 + slots)
        ENDINGS[how](worker)
        # Celery restarts what the command `celery` has started, and this is `python -m celery`.
        cluster.wait(lambda: not worker.running or None, "the end of the worker")
        assert not cluster.events(what="start", key=key)
        stack.enter_context(served_by(workers, name))
        held.release()
        assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]
    starts = [event["id"] for event in cluster.events(what="start", key=key)]
    if how == "cold" and late:
        # Sent again, and not acknowledged yet when the worker was cut off: the broker has both.
        starts = sorted(set(starts))
    assert sorted(starts) == sorted(each.id for each in sent)


class _Waited:
    """A lock that is waited for until that is cancelled."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self.cancel = self._cancelled.set
        self.wait = self._cancelled.wait


def test_a_cold_shutdown_waits_until_a_task_has_moved_on_not_only_left_the_queue() -> None:
    shutdown, lock = Shutdown(), _Waited()
    waits, left, sends, settled = (threading.Event() for _ in range(4))

    def task() -> None:
        shutdown.add(cast(DistributedLock, lock))
        waits.set()
        lock.wait(PATIENCE)
        shutdown.discard(cast(DistributedLock, lock))
        left.set()
        sends.wait(PATIENCE)
        signals.task_postrun.send(sender=None)

    def end() -> None:
        shutdown.settle()
        settled.set()

    threading.Thread(target=task).start()
    assert waits.wait(PATIENCE)
    shutdown.begin()
    assert left.wait(PATIENCE)
    threading.Thread(target=end).start()
    assert not settled.wait(0.1)
    sends.set()
    assert settled.wait(LAST_MOMENT / 2)
    signals.task_postrun.disconnect(shutdown._moved_on)
