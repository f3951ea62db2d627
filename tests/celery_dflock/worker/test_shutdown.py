"""However a worker ends, it does not wait for those who wait: their tasks go to other workers.

They would wait for `jobs.LONG`, and no test does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from celery import signals
from celery.result import AsyncResult

from celery_dflock.outcome.requeue import LEAST_PAUSE
from celery_dflock.worker.shutdown import LAST_MOMENT, Shutdown
from dflockd.sync_client import DistributedLock
from examples.demo.stage import ROOT, Worker
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
    with cluster.ready(leaving, pool=pool, concurrency=len(waiting)) as worker:
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


def test_a_holder_finishes(cluster: Cluster, gate: Path, key: str) -> None:
    """And keeps its lock, for longer than its lease: in each pool, side by side."""
    with contextlib.ExitStack() as running:
        workers = [
            running.enter_context(cluster.worker(f"finishing-{pool}", pool=pool))
            for pool in ("prefork", "threads")
        ]
        for worker in workers:
            worker.wait_ready()
        keys = [f"{key}:{worker.name}" for worker in workers]
        sent = [
            cluster.send(jobs.short, each, gate=str(gate), queue=worker.name)
            for each, worker in zip(keys, workers, strict=True)
        ]
        begun = max(cluster.wait_event("start", each)["at"] for each in sent)
        for worker in workers:
            os.kill(worker.pid, signal.SIGTERM)
            worker.wait_log("Warm shutdown")
        others = [running.enter_context(Waiter(cluster.lock(each))) for each in keys]
        leases_are_over = begun + 1.5 * jobs.short.lock_ttl
        cluster.wait(lambda: time.monotonic() > leases_are_over or None, "the leases")
        assert not any(other.granted for other in others)
        gate.touch()
        for other, each in zip(others, sent, strict=True):
            assert other.wait_granted() > cluster.wait_event("end", each)["at"]
        for worker in workers:
            cluster.wait(lambda w=worker: not w.running or None, "the end of the worker")
    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_a_body_gets_its_inner_locks(cluster: Cluster, gate: Path, key: str, pool: str) -> None:
    """Those that are free, and those that it has to wait for: of a locked task and of a plain one."""
    tasks = [jobs.patient, jobs.plain][: 1 if pool == "solo" else None]
    held = f"{key}:held"
    with cluster.ready(f"inner-{pool}", pool=pool) as worker, cluster.lock(held) as lock:
        sent = [
            cluster.send(task, key, then="take more", gate=str(gate), queue=worker.name)
            for task in tasks
        ]
        for each in sent:
            cluster.wait_event("start", each)
        os.kill(worker.pid, signal.SIGTERM)
        worker.wait_log("Warm shutdown")
        gate.touch()
        cluster.wait_waiters(held, len(sent))
        lock.release()
        assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]
        cluster.wait(lambda: not worker.running or None, "the end of the worker")
    for inner in (f"{key}:free", held):
        assert len(cluster.events(what="start", key=inner)) == len(sent)


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


class Case(NamedTuple):
    """A worker that ends, with tasks that are acknowledged early or late."""

    pool: str
    how: str
    late: bool = False

    @property
    def slots(self) -> int:
        return 1 if self.pool == "solo" else 2

    def __str__(self) -> str:
        return f"{self.pool}-{self.how}{'-late' * self.late}"


QUICK = [
    Case("prefork", "warm", late=True),
    Case("prefork", "cold"),
    Case("prefork", "cold", late=True),
    Case("prefork", "soft"),
    Case("threads", "remote"),
]
"""Each way to end that Celery goes of its own: SIGINT and SIGHUP are warm."""

OTHERS = [
    case
    for pool, hows in POOLS.items()
    for case in itertools.starmap(Case, itertools.product([pool], hows, [False, True]))
    if case not in QUICK
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="side by side"),
        *(pytest.param([case], marks=pytest.mark.soak, id=str(case)) for case in OTHERS),
    ],
)
def test_nobody_is_lost(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str, cases: list[Case]
) -> None:
    """Those who wait in slots and in the consumer end elsewhere, each once, with their results.

    Also those whose messages are acknowledged late; of these Celery promises that each runs at least
    once.
    """
    with contextlib.ExitStack() as stack:
        keys = {case: f"{key}:{case}" for case in cases}
        held = [stack.enter_context(cluster.lock(each)) for each in keys.values()]
        ending = {case: stack.enter_context(_worker_of(cluster, case)) for case in cases}
        for worker in ending.values():
            worker.wait_ready()
        sent = {case: _fill(cluster, case, keys[case]) for case in cases}
        for case, worker in ending.items():
            ENDINGS[case.how](worker)
        for case, worker in ending.items():
            # Celery restarts what the command `celery` has started, and this is `python -m celery`.
            cluster.wait(lambda w=worker: not w.running or None, f"the end of {case}")
            assert not cluster.events(what="start", key=keys[case])
        for worker in ending.values():
            stack.enter_context(served_by(workers, worker.name))
        for lock in held:
            lock.release()
        for of_case in sent.values():
            assert [each.get(timeout=PATIENCE) for each in of_case] == [e.id for e in of_case]
    for case in cases:
        starts = [event["id"] for event in cluster.events(what="start", key=keys[case])]
        if (case.how, case.late) == ("cold", True):
            # Sent again, and not acknowledged yet when the worker was cut off: the broker has both.
            starts = sorted(set(starts))
        assert sorted(starts) == sorted(each.id for each in sent[case]), case


def _worker_of(cluster: Cluster, case: Case) -> Worker:
    env = {jobs.SOFT: str(SOFT)} if case.how == "soft" else {}
    return cluster.worker(f"ending-{case}", pool=case.pool, concurrency=case.slots, env=env)


def _fill(cluster: Cluster, case: Case, key: str) -> list[AsyncResult]:
    """Have tasks wait in the consumer, and one in each slot."""
    in_consumer = jobs.parked_late if case.late else jobs.parked
    in_slot = jobs.late_patient if case.late else jobs.patient
    queue = f"ending-{case}"
    sent = [cluster.send(in_consumer, key, queue=queue) for _ in range(3)]
    cluster.wait_waiters(key, 3)
    sent += [cluster.send(in_slot, key, queue=queue) for _ in range(case.slots)]
    cluster.wait_waiters(key, 3 + case.slots)
    return sent


CHILDREN = """
import os, signal
from celery_dflock.worker.shutdown import Shutdown
from dflockd.sync_client import DistributedLock

shutdown = Shutdown()
shutdown.prepare()
told, tell = os.pipe()
if (child := os.fork()) == 0:
    shutdown.after_fork()
    shutdown.add(DistributedLock("key", 0))
    os.write(tell, b"!")
    signal.pause()
os.read(told, 1)
assert shutdown._is_awaited
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert not shutdown._is_awaited
"""


def test_nobody_is_awaited_in_a_child_that_was_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN], cwd=ROOT, timeout=PATIENCE, check=False, stderr=-1
    )
    assert done.returncode == 0, done.stderr.decode()


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
        shutdown.look_again()
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
