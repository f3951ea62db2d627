"""A lock is lost while its task runs: the server forgot it, or the worker was stopped too long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.app.trace import build_tracer

from celery_dflock import LockedTask, LockLostError, TaskLock, current_lock
from celery_dflock.locks import Locks
from celery_dflock.loss import Loss
from celery_dflock.outcome.types import Overtaken
from celery_dflock.plan import Plan
from celery_dflock.run import acquire, locks_of
from celery_dflock.signals import lock_acquired, lock_lost
from celery_dflock.worker.interrupt import SIGNAL, Interruptible
from dflockd import admin
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, Worker, wait_until
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter


@pytest.fixture(scope="module")
def own_server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="forgetful") as server:
        yield server


@pytest.fixture(scope="module", params=["prefork", "threads"])
def worker(
    cluster: Cluster, own_server: LockServer, request: pytest.FixtureRequest
) -> Iterator[Worker]:
    name = f"lost-{request.param}"
    with cluster.ready(name, pool=request.param, servers=own_server.address) as worker:
        yield worker


def restart(server: LockServer) -> None:
    """Kill the server and start it again with nothing in memory."""
    server.kill()
    server.start()


def test_server_forgot_it(
    cluster: Cluster, own_server: LockServer, worker: Worker, never: str, key: str
) -> None:
    # In the main thread a blocking call is interrupted; other threads have to run Python code.
    if "prefork" in worker.name:
        sent = cluster.send(jobs.patient, key, seconds=jobs.LONG, queue=worker.name)
    else:
        sent = cluster.send(jobs.patient, key, gate=never, queue=worker.name)
    cluster.wait_event("start", sent)

    restart(own_server)

    end = cluster.wait_event("end", sent)  # neither its lease nor its body would end so soon
    assert end["error"] == "LockLostError"
    assert end["held"] is False
    with pytest.raises(LockLostError) as failure:
        sent.get(timeout=PATIENCE)
    assert failure.value.key == key
    assert len(cluster.events(what="lost", id=None, key=key)) == 1
    (line,) = [line for line in worker.log_text().splitlines() if f"{sent.id}]: lock" in line]
    assert "ERROR" in line
    assert repr(key) in line
    assert line.endswith("the task is interrupted")
    # The process goes on as before.
    following = cluster.send(jobs.patient, key, queue=worker.name)
    assert following.get(timeout=PATIENCE) == following.id


def test_only_a_warning_if_wanted(
    cluster: Cluster, own_server: LockServer, worker: Worker, gate: Path, key: str
) -> None:
    sent = cluster.send(jobs.warned, key, gate=str(gate), queue=worker.name)
    cluster.wait_event("start", sent)

    restart(own_server)
    line = worker.wait_log(f"{sent.id}]: lock")
    assert line.endswith("the task continues without its lock\n")
    gate.touch()

    assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.wait_event("end", sent)["held"] is False


@pytest.mark.parametrize("worker", ["prefork"], indirect=True)
def test_stopped_for_longer_than_its_lease(
    cluster: Cluster, own_server: LockServer, worker: Worker, key: str
) -> None:
    sent = cluster.send(jobs.short, key, seconds=jobs.LONG, queue=worker.name)
    start = cluster.wait_event("start", sent)
    with Waiter(cluster.lock(key, own_server)) as other:
        cluster.wait_waiters(key, 1, own_server)

        os.kill(start["pid"], signal.SIGSTOP)
        try:
            other.wait_granted()
            assert not cluster.events(what="end", id=sent.id)
        finally:
            os.kill(start["pid"], signal.SIGCONT)

        end = cluster.wait_event("end", sent)
        assert end["error"] == "LockLostError"
        assert other.lock.held, "its end takes nothing from the next holder"
    with pytest.raises(LockLostError):
        sent.get(timeout=PATIENCE)


def test_lost_before_the_body_begins(directory: Path, key: str) -> None:
    ran = []
    with LockServer(directory, name="early") as server:
        app = Celery("early", set_as_current=False)
        app.conf.dflock_servers = [server.address]

        @app.task(base=LockedTask, lock_key=key, lock_ttl=5, shared=False)
        def task() -> None:
            ran.append(1)

        def lose(lock: TaskLock, **_: object) -> None:
            restart(server)
            wait_until(lambda: not lock.held or None, PATIENCE, lambda: "lock is not lost")

        lock_acquired.connect(lose)
        try:
            with pytest.raises(LockLostError):
                task.apply(throw=True)
        finally:
            lock_acquired.disconnect(lose)
    assert not ran


def test_lost_while_it_looks_whether_it_has_run(
    own_server: LockServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body begins all the same, as it would go on; but who is to be told is told with the lock."""
    app = Celery("looks", result_backend="cache+memory://", set_as_current=False)
    app.conf.dflock_servers = [own_server.address]
    told, known = list[str](), threading.Event()

    @app.task(
        name=key,
        base=LockedTask,
        lock_key=key,
        lock_ttl=jobs.SHORT,
        lock_lost=lambda _, lock: told.append(lock.state),
        shared=False,
    )
    def task() -> str:
        return "ended"

    def lose(*_: Any, **__: Any) -> dict[str, Any]:
        fences = [each["fence"] for each in admin.inspect(own_server.address, key)["holders"]]
        if fences:
            assert admin.evict(own_server.address, key, fences[0])
            assert known.wait(PATIENCE)
        return {"status": "PENDING", "result": None}

    def happened(loss: Loss, lock: DistributedLock, happened: Any = Loss.happened) -> None:
        happened(loss, lock)
        known.set()

    monkeypatch.setattr(type(app.backend), "get_task_meta", lose)
    monkeypatch.setattr(Loss, "happened", happened)
    request = {"id": key, "args": [], "kwargs": {}, "headers": {}, "retries": 0}
    info = {"delivery_info": {"redelivered": True}, "is_eager": False}
    traced = build_tracer(key, app.tasks[key], app=app)(key, (), {}, {**request, **info})
    assert (traced[0], traced[1]) == ("ended", None)
    assert told == ["lost"]


@pytest.mark.parametrize("lost", ["raise", "warn"])
def test_the_first_is_lost_while_the_second_is_waited_for(
    own_server: LockServer, key: str, lost: str
) -> None:
    """It waits for both anew: the body has not begun, so that there is nothing to lose."""
    app = Celery("anew", set_as_current=False)
    app.conf.dflock_servers = [own_server.address]
    keys, known = [f"{key}:a", f"{key}:b"], threading.Event()

    @app.task(
        name=key,
        base=LockedTask,
        lock_key=keys,
        lock_ttl=jobs.SHORT,
        lock_timeout=jobs.LONG,
        lock_lost=lost,
        shared=False,
    )
    def task() -> None: ...

    plan = Plan(app.tasks[key], Context(id="1"), task.run, (), {}, app.tasks[key]._bound())
    locks = locks_of(plan, lambda _: known.set())
    with ThreadPoolExecutor() as pool, DistributedLock(keys[1], 0, 30, [own_server.address]):
        waits = pool.submit(acquire, plan, locks)
        wait_until(
            lambda: admin.inspect(own_server.address, keys[1])["waiters"] or None,
            PATIENCE,
            lambda: "it does not wait",
        )
        [holder] = admin.inspect(own_server.address, keys[0])["holders"]
        assert admin.evict(own_server.address, keys[0], holder["fence"])
        assert known.wait(PATIENCE)
    refusal = waits.result(PATIENCE)
    assert isinstance(refusal, Overtaken)
    assert refusal.error.key == keys[0]
    assert locks.state == "free"
    assert not admin.inspect(own_server.address, keys[1])["holders"]


def test_lost_at_once(own_server: LockServer, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may end just as it has granted it."""
    app = Celery("at-once", set_as_current=False)
    app.conf.dflock_servers = [own_server.address]

    @app.task(name=key, base=LockedTask, lock_key=key, lock_timeout=jobs.LONG, shared=False)
    def task() -> None: ...

    plan = Plan(app.tasks[key], Context(id="1"), task.run, (), {}, app.tasks[key]._bound())
    known, acquired = threading.Event(), Locks.acquire

    def loses(locks: Locks, *said: Any) -> str | None:
        refused = acquired(locks, *said)
        [holder] = admin.inspect(own_server.address, key)["holders"]
        assert admin.evict(own_server.address, key, holder["fence"])
        assert known.wait(PATIENCE)
        return refused

    monkeypatch.setattr(Locks, "acquire", loses)
    locks = locks_of(plan, lambda _: known.set())
    refusal = acquire(plan, locks)
    assert isinstance(refusal, Overtaken)
    assert refusal.error.key == key
    assert locks.state == "free"


def test_a_function_is_told_and_the_task_goes_on(own_server: LockServer, key: str) -> None:
    app = Celery("told", set_as_current=False)
    app.conf.dflock_servers = [own_server.address]
    told, ran = list[tuple[str, str]](), []

    @app.task(
        base=LockedTask,
        lock_key=key,
        lock_lost=lambda task, lock: told.append((task.name, lock.key)),
        shared=False,
        name=key,
    )
    def _task() -> None:
        lock = current_lock()
        assert lock is not None
        assert lock.fence is not None
        assert admin.evict(own_server.address, key, lock.fence)
        assert not lock.extend()
        wait_until(lambda: told or None, PATIENCE, lambda: "nobody was told")
        ran.append(1)

    app.tasks[key].apply(throw=True)
    assert told == [(key, key)]
    assert ran


def test_the_first_lock_that_is_lost_counts(key: str) -> None:
    app = Celery("two-lost", set_as_current=False)

    @app.task(base=LockedTask, lock_key=["a", "b"], lock_lost="warn", shared=False, name=key)
    def _task() -> None: ...

    task, told = app.tasks[key], list[str]()

    def lost(key: str, **_: Any) -> None:
        told.append(key)

    lock_lost.connect(lost)
    loss = Loss(Plan(task, Context(id="1"), task.run, (), {}, task._bound()))
    loss.has_begun = True
    for each in (DistributedLock("a"), DistributedLock("b")):
        loss.happened(each)
    assert told == ["a"]


def test_a_signal_that_somebody_else_has_taken_is_taken_back_for_the_next() -> None:
    assert SIGNAL is not None
    error = LockLostError("a", "gone")
    with Interruptible() as stretch:
        signal.signal(SIGNAL, signal.SIG_IGN)
        assert not stretch.interrupt(error), "it goes on, and that is said"

    def run() -> None:
        with Interruptible() as stretch:
            assert stretch.interrupt(error)
            signal.sigtimedwait((), 5)  # until it is interrupted

    with pytest.raises(LockLostError):
        run()
