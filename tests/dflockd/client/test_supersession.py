"""The newest wins: what a client that asks with an age is told, and one that holds the lock hears."""

from __future__ import annotations

import asyncio
import pickle
import queue
import signal
import sys
from collections.abc import Callable

import pytest

from dflockd import errors
from dflockd.client import DistributedLock as AsyncLock
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from tests.dflockd.client_support import waiters
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")


def lock_of(server: ServerProcess, key: str, age: int = 0, timeout: float = 0) -> DistributedLock:
    owner = (f"run-{age}", 0, age) if age else None
    label = f"task-{age}" if age else ""
    at = [("127.0.0.1", server.port)]
    return DistributedLock(key, timeout, 30, at, label=label, owner=owner)


def test_ages_grow(server: ServerProcess, key: str) -> None:
    lock = lock_of(server, key)
    ages = [lock.draw_age() for _ in range(3)]
    assert ages == sorted(set(ages))


def test_who_holds_the_lock_hears_of_the_newest(server: ServerProcess, key: str) -> None:
    heard: queue.Queue[str] = queue.Queue()
    older, newer = lock_of(server, key, 1), lock_of(server, key, 2)
    assert older.acquire()
    older.listen(heard.put)
    assert not newer.acquire()
    assert heard.get(timeout=PATIENCE) == "task-2"
    assert older.held
    assert older.release()
    assert newer.acquire()
    with pytest.raises(errors.SupersededError, match=f"{key}.*task-2 is newer") as caught:
        older.acquire()
    assert caught.value.by == "task-2"
    assert pickle.loads(pickle.dumps(caught.value)).by == "task-2"
    newer.listen(heard.put)
    newer.release()
    assert heard.empty()


def test_who_ends_the_thread_that_tells_him_costs_no_other_lock(
    server: ServerProcess, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """That thread renews all locks of the process."""

    def end(_: str) -> object:
        sys.exit(1)

    heard: queue.Queue[str] = queue.Queue()
    tell: list[Callable[[str], object]] = [end, heard.put]
    for number, told in enumerate(tell):
        older, newer = (lock_of(server, f"{key}-{number}", age) for age in (1, 2))
        assert older.acquire()
        older.listen(told)
        assert not newer.acquire()
        if number == 0:
            eventually(lambda: f"who listens at lock '{key}-0' failed" in caplog.text)
        else:
            assert heard.get(timeout=PATIENCE) == "task-2"
        assert older.release()


async def test_asyncio_draws_and_hears_on_its_loop(server: ServerProcess, key: str) -> None:
    at, loop = [("127.0.0.1", server.port)], asyncio.get_running_loop()
    drawn = AsyncLock(key, servers=at)
    first, second = await drawn.draw_age(), await drawn.draw_age()
    assert first < second
    heard: asyncio.Future[tuple[str, object]] = loop.create_future()
    older = AsyncLock(key, 0, 30, at, owner=("older", 0, first))
    newer = AsyncLock(key, 60, 30, at, label="the newer", owner=("newer", 0, second))
    older.listen(lambda by: heard.set_result(("", "not held yet")))
    assert await older.acquire()
    older.listen(lambda by: heard.set_result((by, asyncio.get_running_loop())))
    waiting = asyncio.create_task(newer.acquire())
    assert await asyncio.wait_for(heard, PATIENCE) == ("the newer", loop)
    assert older.held
    assert not waiting.done()
    assert await older.release()
    assert await asyncio.wait_for(waiting, PATIENCE)
    with pytest.raises(errors.SupersededError):
        await older.acquire()
    await newer.release()


def test_who_listens_on_a_loop_that_is_closed_is_told_nothing(
    server: ServerProcess, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    at = [("127.0.0.1", server.port)]
    older = AsyncLock(key, 0, 30, at, owner=("older", 0, 1))

    async def hold() -> None:
        assert await older.acquire()
        older.listen(lambda _: pytest.fail("its loop is closed"))

    asyncio.run(hold())
    newer = lock_of(server, key, 2, 60)
    heard: queue.Queue[str] = queue.Queue()
    assert newer.enqueue() == "queued"
    asyncio.run(older.release())
    assert newer.wait()
    newer.listen(heard.put)
    # The same thread tells this one later than that one.
    assert not lock_of(server, key, 3).acquire()
    assert heard.get(timeout=PATIENCE) == "task-3"
    assert newer.release()
    assert caplog.records == []


def test_who_waits_is_told(server: ServerProcess, key: str) -> None:
    holder, older, newer = (lock_of(server, key, age, 60) for age in (1, 2, 3))
    assert holder.acquire()
    assert older.enqueue() == "queued"
    newer.acquire_timeout_s = 0
    assert not newer.acquire()
    with pytest.raises(errors.SupersededError):
        older.wait()
    assert older.state == "free"
    holder.release()
    assert waiters(server, key) == 0


def test_it_hears_though_the_server_has_ended_meanwhile(
    start: StartServer, tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    state = str(tmp_path_factory.mktemp("state") / "state")
    first = start("--state-dir", state)
    heard: queue.Queue[str] = queue.Queue()
    older = lock_of(first, key, 1)
    assert older.acquire()
    older.listen(heard.put)
    first.signal(signal.SIGKILL)
    first.wait()
    second = start("--state-dir", state, "--port", str(first.port))
    newer = lock_of(second, key, 2)
    eventually(lambda: not newer.acquire())
    assert heard.get(timeout=PATIENCE) == "task-2"
    older.release()


@pytest.mark.parametrize("age", [0, -1, 2**64, 1.5, True, "1"])
def test_what_is_no_age_is_refused(age: object) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="owner is"):
        DistributedLock("k", owner=("run", 0, age))  # type: ignore[arg-type]


def test_no_semaphore_has_an_age() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"owner is .*'k'.*at a lock alone"):
        DistributedSemaphore("k", 2, owner=("run", 0, 7))
