"""Locks that come into doubt in this process: of eager tasks, of blocks, and by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import queue
import time
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Retry

from celery_dflock import LockedTask, LockLostError, LockNotAcquiredError, current_lock, dflock
from celery_dflock.config import settings
from celery_dflock.locks import Locks
from celery_dflock.signals import lock_acquired
from celery_dflock.unique.run import Carried
from dflockd import admin, client, errors
from dflockd.sharding import stable_hash_shard
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer
from tests.celery_dflock import jobs
from tests.celery_dflock.doubt.support import (
    LONG,
    back_in,
    forgets,
    remembers,
    wait_for,
    wait_in_doubt,
)
from tests.celery_dflock.processes import PATIENCE


@remembers
def test_nested_in_doubt(app: Celery, server: LockServer, key: str) -> None:
    """Who waits for it would wait for himself; nobody has to be asked to know that."""

    @app.task(base=LockedTask, lock_key=key, lock_conflict="fail", shared=False)
    def inner() -> None:
        pytest.fail("it runs beside the task that holds its lock")

    @app.task(base=LockedTask, lock_key=key, lock_ttl=LONG, shared=False)
    def outer() -> str:
        lock = current_lock()
        assert lock is not None
        server.kill()
        wait_in_doubt(lock)
        with pytest.raises(LockNotAcquiredError, match="in the same thread") as failure:
            inner.apply(throw=True)
        assert failure.value.key == key
        server.start()
        lock.check()
        with pytest.raises(LockNotAcquiredError, match="in the same thread"):
            inner.apply(throw=True)
        assert lock.extend()
        return lock.state

    assert outer.apply(throw=True).get() == "held"


@forgets
def test_certain_from_the_first_instant(app: Celery, server: LockServer, key: str) -> None:
    """Its server ends as the body begins, and `check` does not say that the lock is held."""

    @app.task(base=LockedTask, lock_key=key, lock_ttl=1, lock_lost="warn", shared=False)
    def task() -> None:
        lock = current_lock()
        assert lock is not None
        lock.check()
        server.kill()
        with pytest.raises(LockLostError):
            lock.check()

    task.apply(throw=True).get()


@forgets
def test_nested_under_one_of_several_keys_that_is_not_lost(
    app: Celery, server: LockServer, lock_server: LockServer, key: str
) -> None:
    app.conf.dflock_servers = [lock_server.address, server.address]
    names = [f"{key}:{number}" for number in range(20)]
    kept = next(name for name in names if stable_hash_shard(name, 2) == 0)
    gone = next(name for name in names if stable_hash_shard(name, 2) == 1)
    ran = []

    @app.task(base=LockedTask, lock_key="{key}", lock_conflict="fail", shared=False)
    def inner(key: str) -> None:
        ran.append(key)

    @app.task(base=LockedTask, lock_key=[kept, gone], lock_lost="warn", shared=False)
    def outer() -> None:
        lock = current_lock()
        assert lock is not None
        server.kill()
        wait_in_doubt(lock)
        server.start()
        wait_for(lambda: lock.state == "lost", f"{lock!r} to be lost")
        with pytest.raises(LockLostError) as failure:
            lock.check()
        assert failure.value.key == gone
        with pytest.raises(LockNotAcquiredError, match="in the same thread"):
            inner.apply((kept,), throw=True)
        inner.apply((gone,), throw=True)

    outer.apply(throw=True)
    assert ran == [gone]


@remembers
def test_lock_unique_in_doubt(app: Celery, server: LockServer, key: str) -> None:
    """It is not asked for again, which nobody could answer, and goes on to a retry."""

    @app.task(base=LockedTask, lock_key=key, lock_unique="until_executed", shared=False)
    def task() -> None: ...

    sender = DistributedLock(key, 0, LONG, [server.address])
    assert sender.acquire()
    ours = {"key": key, "token": sender.detach() or "", "until": "until_executed"}
    carried = Carried(task, Context(id="an-id", retries=0), ours, 10, settings(app))
    carried.take()
    server.kill()
    wait_in_doubt(carried._lock)
    carried.begin()
    with back_in(server, 0.3):
        carried.end(Retry(), task._lock_options)
    [holder] = admin.inspect(server.address, key)["holders"]
    assert holder["lease_expires_in_s"] > LONG


def test_check_before_the_body_begins(app: Celery, server: LockServer, key: str) -> None:
    """What comes into doubt before the body waits for the end of that, and then runs or does not."""
    ran = []

    @app.task(base=LockedTask, lock_key=key, lock_ttl=LONG, shared=False)
    def task() -> None:
        lock = current_lock()
        assert lock is not None
        ran.append(lock.state)

    back = contextlib.ExitStack()

    def doubt(lock: Any, **_: object) -> None:
        server.kill()
        wait_in_doubt(lock)
        back.enter_context(back_in(server, 0.5))

    lock_acquired.connect(doubt)
    try:
        with back:
            if "remembers" in server.name:
                task.apply(throw=True)
            else:
                with pytest.raises(LockLostError):
                    task.apply(throw=True)
    finally:
        lock_acquired.disconnect(doubt)
    assert ran == (["held"] if "remembers" in server.name else [])


def test_outside_of_tasks(app: Celery, server: LockServer, key: str) -> None:
    with dflock(key, ttl=LONG, app=app) as lock:
        server.kill()
        wait_in_doubt(lock)
        assert not lock.held
        assert lock.token is not None
        with back_in(server, 0.5) as back:
            if "remembers" in server.name:
                lock.check()
                assert lock.held
            else:
                with pytest.raises(LockLostError) as failure:
                    lock.check()
                assert_told_well(failure.value, key)
                assert lock.token is None
            assert time.monotonic() > back[0]


async def test_on_an_event_loop(app: Celery, server: LockServer, key: str) -> None:
    async with dflock(key, ttl=LONG, app=app) as lock:
        server.kill()
        while lock.state == "held":  # noqa: ASYNC110 - the reactor finds it out
            await asyncio.sleep(0.01)
        assert lock.state == "doubtful"
        checking = asyncio.ensure_future(lock.check())
        await asyncio.sleep(0.1)  # the loop goes on meanwhile
        assert not checking.done()
        await asyncio.to_thread(server.start)
        if "remembers" in server.name:
            await checking
            assert lock.held
        else:
            with pytest.raises(LockLostError) as failure:
                await checking
            assert_told_well(failure.value, key)


def assert_told_well(error: LockLostError, key: str) -> None:
    assert isinstance(error.__cause__, errors.LockLostError)
    assert error.key == key
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is LockLostError
    assert (copied.key, str(copied)) == (key, str(error))


@forgets
def test_where_nobody_can_wait(app: Celery, server: LockServer, key: str) -> None:
    """What is called when a lock is lost runs on the thread that would have to end the doubt."""
    said: queue.Queue[Any] = queue.Queue()
    doubtful = Locks([Locks.maker(1, LONG, settings(app))(f"{key}:doubtful")], 5)

    def lost(_: object) -> None:
        try:
            doubtful.check()
        except LockLostError as exc:
            said.put(exc)

    short = Locks([Locks.maker(1, jobs.SHORT, settings(app))(f"{key}:short", on_lost=lost)], 5)
    assert doubtful.acquire() is None
    assert short.acquire() is None
    try:
        server.kill()
        error = said.get(timeout=PATIENCE)
        assert "in doubt" in str(error)
        assert error.key == f"{key}:doubtful"
        assert doubtful.state == "doubtful"
    finally:
        server.start()
        short.release()
        doubtful.release()


@remembers
def test_granted_at_once_and_in_doubt_by_the_time_it_is_waited_for(
    server: LockServer, key: str
) -> None:
    locks = (
        DistributedLock(f"{key}:blocking", 5, LONG, [server.address]),
        client.DistributedLock(f"{key}:asyncio", 5, LONG, [server.address]),
    )
    blocking, on_a_loop = locks
    assert blocking.enqueue() == "acquired"
    assert asyncio.run(on_a_loop.enqueue()) == "acquired"
    server.kill()
    for lock in locks:
        wait_in_doubt(lock)
    assert blocking.wait() is True
    assert asyncio.run(on_a_loop.wait()) is True
    server.start()
    blocking.check()
    asyncio.run(on_a_loop.check())
    assert blocking.release()
    assert asyncio.run(on_a_loop.release())
