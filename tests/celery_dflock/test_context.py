"""The locks of tasks in other code, with ``with`` and with ``async with``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_dflock import (
    LockedTask,
    LockKey,
    LockLostError,
    LockNotAcquiredError,
    LockUnavailableError,
    dflock,
)
from celery_dflock.testing import assert_locked, assert_not_locked
from celery_dflock.worker.shutdown import shutdown
from dflockd import admin
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters

Hold = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
def app(lock_server: LockServer) -> Celery:
    app = Celery("outside", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]
    return app


@contextlib.asynccontextmanager
async def with_(made: dflock) -> AsyncIterator[Any]:
    """``with made``, on threads."""
    lock = await asyncio.to_thread(made.__enter__)
    try:
        yield lock
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)


@pytest.fixture(params=["with", "async with"])
def enter(request: pytest.FixtureRequest) -> Hold:
    return with_ if request.param == "with" else lambda made: made


@pytest.fixture
def hold(enter: Hold, app: Celery) -> Hold:
    return lambda *args, **options: enter(dflock(*args, app=app, **options))


def lock_of(server: LockServer, key: str) -> DistributedLock:
    return DistributedLock(key, 0, 30, [server.address])


async def checked(lock: Any) -> None:
    """Have it say whether it is held; in an ``async with`` that is to be awaited."""
    outcome = lock.check()
    if outcome is not None:
        await outcome


async def until(probe: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not probe():  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(0.01)


async def test_it_is_the_lock_of_tasks(
    app: Celery, hold: Hold, lock_server: LockServer, key: str
) -> None:
    app.conf.update(dflock_key_prefix="shop:", task_always_eager=True, task_eager_propagates=True)
    options = {"base": LockedTask, "lock_key": "{key}", "lock_timeout": 0, "shared": False}

    @app.task(lock_conflict="fail", **options)
    def task(key: str) -> str:
        return "ran"

    key = f"{key} with a space"
    async with hold(key) as lock:
        assert lock.key == f"shop:{key}".replace(" ", "%20")
        assert waiters(lock_server, lock.key) == 0
        with pytest.raises(LockNotAcquiredError) as failure:
            task.delay(key)
        assert failure.value.key == lock.key
        with pytest.raises(LockNotAcquiredError):
            async with hold(key, 0):
                pass
    assert task.delay(key).get() == "ran"


def test_the_key_of_a_call_names_the_lock_of_its_run(
    app: Celery, cluster: Cluster, workers: tuple[Worker, Worker], tmp_path: Path, key: str
) -> None:
    region, gate = f"eu:{key} 50%", tmp_path / "gate"
    gate.touch()
    said = cluster.send(jobs.in_region, region, 7, gate=str(gate)).get(timeout=PATIENCE)
    gate.unlink()
    sent = cluster.send(jobs.in_region, region, 7, gate=str(gate))
    cluster.wait_event("start", sent)
    try:
        [made] = jobs.in_region.lock_keys(7, key=region, gate="")
        assert said == made
        for name in (made, LockKey(said)):
            with pytest.raises(LockNotAcquiredError) as failure, dflock(name, 0, app=app):
                raise AssertionError
            assert type(failure.value.key) is LockKey
            with pytest.raises(LockNotAcquiredError), dflock(failure.value.key, 0, app=app):
                raise AssertionError
            assert_locked(name, app)
        with dflock(said, 0, app=app) as lock:
            assert lock.key != said, "a text is encoded"
            assert_not_locked(LockKey(f"{said}?"), app)
    finally:
        gate.touch()
    assert sent.get(timeout=PATIENCE) == made
    with dflock(made, 0, app=app) as lock:
        assert (lock.key, type(lock.key)) == (made, LockKey)


async def test_what_the_lock_says(hold: Hold, lock_server: LockServer, key: str) -> None:
    async with hold(key) as lock:
        await checked(lock)
        assert lock.held
        assert lock.state == "held"
        assert len(lock.token) == 32
        assert lock.token not in repr(lock)
        assert lock.fence == int(lock.token[:16], 16)
        assert lock.fences == {key: lock.fence}
        assert lock.waited < PATIENCE
        fence = lock.fence
        [holder] = admin.inspect(lock_server.address, key)["holders"]
        assert holder["fence"] == fence
        assert f" pid {os.getpid()}" in holder["label"]
    assert not lock.held
    assert lock.state == "free"
    assert lock.token is None
    assert lock.fence == fence
    with pytest.raises(LockLostError) as failure:
        await checked(lock)
    assert failure.value.key == key
    async with hold(key) as lock:
        assert lock.fence > fence


def test_extend(app: Celery, lock_server: LockServer, key: str) -> None:
    def lease() -> float:
        [holder] = admin.inspect(lock_server.address, key)["holders"]
        return holder["lease_expires_in_s"]

    async def extend_awaited() -> None:
        async with dflock(key, app=app) as lock:
            assert lease() < 31
            assert await lock.extend(100)
            assert lease() > 90

    with dflock(key, app=app) as lock:
        assert lock.extend(100)
        assert lease() > 90
    asyncio.run(extend_awaited())


@pytest.mark.parametrize("timeout", [0, 0.2, 1])
async def test_not_granted_in_time(
    hold: Hold, lock_server: LockServer, key: str, timeout: float
) -> None:
    with lock_of(lock_server, key):
        with pytest.raises(LockNotAcquiredError) as failure:
            async with hold(key, timeout):
                pytest.fail("not held, and yet in the block")
        assert failure.value.key == key
        assert failure.value.holder.startswith("somebody, for ")
        assert str(failure.value).endswith(f" by {failure.value.holder}")
        assert waiters(lock_server, key) == 0, "it has left the queue"


async def test_first_come_first_served(hold: Hold, lock_server: LockServer, key: str) -> None:
    order = []

    async def one(number: int) -> None:
        async with hold(key) as lock:
            order.append((number, lock.fence))
            assert lock.waited > 0

    with lock_of(lock_server, key):
        running = []
        for number in range(5):
            running.append(asyncio.create_task(one(number)))
            await until(lambda: waiters(lock_server, key) == len(running))
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*running)
    assert [number for number, _ in order] == list(range(5))
    assert order == sorted(order, key=lambda run: run[1])
    assert waiters(lock_server, key) is None


async def test_limit(hold: Hold, key: str) -> None:
    async with hold(key, limit=2), hold(key, limit=2):
        with pytest.raises(LockNotAcquiredError):
            async with hold(key, 0, limit=2):
                pass


async def test_group(hold: Hold, lock_server: LockServer, key: str) -> None:
    given: dict[str, Any] = {"limit": 2, "group": "tenant 7", "group_limit": 1}
    async with hold(key, **given) as lock:
        assert lock.group == "tenant%207"
        semaphore = DistributedSemaphore(key, 2, servers=[lock_server.address])
        assert [each["group"] for each in semaphore.inspect()["holders"]] == ["tenant%207"]
        with pytest.raises(LockNotAcquiredError):
            async with hold(key, 0, **given):
                pass
        async with hold(key, 0, limit=2, group="another") as other:
            assert other.held


async def test_weight(hold: Hold, lock_server: LockServer, key: str) -> None:
    semaphore = DistributedSemaphore(key, 9, servers=[lock_server.address])
    async with hold(key, limit=9, weight=4), hold(key, limit=9, weight=5):
        assert [each["weight"] for each in semaphore.inspect()["holders"]] == [4, 5]
        with pytest.raises(LockNotAcquiredError):
            async with hold(key, 0, limit=9):
                pass
    async with hold(key, limit=9, weight="all"):
        assert [each["weight"] for each in semaphore.inspect()["holders"]] == ["all"]
    assert repr(dflock(key, limit=9, weight="all")).endswith("limit=9, weight='all')")


async def test_a_newer_task_waits_for_it(
    app: Celery, hold: Hold, lock_server: LockServer, key: str
) -> None:
    """Nobody stops a block: where the newest wins it takes no part."""
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    options = {"base": LockedTask, "lock_key": "{key}", "lock_conflict": "supersede"}

    @app.task(shared=False, lock_timeout=PATIENCE, **options)
    def latest(key: str) -> str:
        return "ran"

    async with hold(key) as lock:
        running = asyncio.create_task(asyncio.to_thread(latest.delay, key))
        await until(lambda: waiters(lock_server, key) == 1)
        await checked(lock)
        assert not running.done()
    assert (await running).get() == "ran"


async def test_error_in_the_block(hold: Hold, lock_server: LockServer, key: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with hold(key):
            _ = 1 / 0
    assert waiters(lock_server, key) is None


async def test_lost(hold: Hold, lock_server: LockServer, key: str) -> None:
    async with hold(key, ttl=1) as lock:
        admin.evict(lock_server.address, key, lock.fence)
        await until(lambda: not lock.held)
        assert lock.state == "lost"
        with pytest.raises(LockLostError):
            await checked(lock)
        assert lock.fence is not None


async def test_no_server(app: Celery, hold: Hold, key: str) -> None:
    app.conf.dflock_servers = ["127.0.0.1:1"]
    with pytest.raises(LockUnavailableError) as failure:
        async with hold(key):
            pass
    assert failure.value.key == key
    assert "127.0.0.1:1" in str(failure.value)


async def test_switched_off(app: Celery, hold: Hold, key: str) -> None:
    app.conf.update(dflock_enabled=False, dflock_servers=["127.0.0.1:1"])
    async with hold(key) as lock:
        assert (lock.held, lock.fence, lock.waited) == (False, None, 0)


async def test_one_block_at_a_time(
    app: Celery, enter: Hold, lock_server: LockServer, key: str
) -> None:
    made = dflock(key, 0, app=app)
    for _ in range(2):
        async with enter(made) as lock:
            with pytest.raises(RuntimeError, match="is in use: make another one"):
                async with enter(made):
                    pass
            assert lock.held, "that of the first block"
        assert waiters(lock_server, key) is None


def test_of_two_threads_one_has_the_object(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    app.conf.update(dflock_enabled=False)
    # Both have looked at the object before either goes on.
    both = threading.Barrier(2)
    make = dflock._make

    def make_slowly(self: dflock, kind: Any) -> Any:
        made = make(self, kind)
        both.wait(PATIENCE)
        return made

    monkeypatch.setattr(dflock, "_make", make_slowly)
    made, tried = dflock("shared", app=app), threading.Barrier(2)
    outcomes = []

    def use() -> None:
        try:
            made.__enter__()
        except RuntimeError:
            outcomes.append("refused")
        else:
            outcomes.append("in")
        tried.wait(PATIENCE)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(outcomes) == ["in", "refused"]
    made.__exit__(None, None, None)


def test_the_end_of_a_worker_is_none_of_its_business(
    app: Celery, lock_server: LockServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "begun", True)
    with dflock(key, app=app) as lock:
        assert lock.held
    with (
        lock_of(lock_server, key),
        pytest.raises(LockNotAcquiredError, match=r"waited 0\.1 s"),
        dflock(key, 0.1, app=app),
    ):
        pass


async def test_cancelled_while_waiting(app: Celery, lock_server: LockServer, key: str) -> None:
    async def one() -> None:
        async with dflock(key, app=app):
            pytest.fail("cancelled, and yet in the block")

    with lock_of(lock_server, key):
        waiting = asyncio.create_task(one())
        await until(lambda: waiters(lock_server, key) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: waiters(lock_server, key) == 0)
    assert waiters(lock_server, key) is None


async def test_cancelled_in_the_block(app: Celery, lock_server: LockServer, key: str) -> None:
    entered = asyncio.Event()

    async def one() -> None:
        async with dflock(key, app=app):
            entered.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(one())
    await asyncio.wait_for(entered.wait(), PATIENCE)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: waiters(lock_server, key) is None)


async def test_the_loop_goes_on_while_it_is_waited_for(
    app: Celery, lock_server: LockServer, key: str
) -> None:
    held = lock_of(lock_server, key)
    assert held.acquire()

    async def one() -> float:
        async with dflock(key, app=app) as lock:
            return lock.waited

    waiting = [asyncio.create_task(one()) for _ in range(20)]
    # Only a loop that runs gets here, and lets them all in.
    await until(lambda: waiters(lock_server, key) == len(waiting))
    await asyncio.sleep(0.05)
    held.release()
    async with asyncio.timeout(PATIENCE):
        assert min(await asyncio.gather(*waiting)) >= 0.05
