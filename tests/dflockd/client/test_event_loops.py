"""Locks and event loops: one that is cancelled, busy, closed, not the only one, not the right one.

The lock is the process's, not the loop's: as long as the process lives it is renewed.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import process
from dflockd.wire import Acquire, encode_reply
from tests.dflockd.client.loops import (
    LEASE,
    SOON,
    LoopThread,
    NewLoop,
    acquire,
    lock_on,
    release,
    run_alone,
    stays_held,
)
from tests.dflockd.client_support import Calls, is_free, renewed, wait_renewed
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess, StartServer, eventually
from tests.dflockd.scripted_server import Reset, ScriptedServer, grant
from tests.pace import Pace

pytestmark = [
    # Where the warning of a transport that is left is an error, uvloop hangs as it closes, and no
    # signal interrupts that.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.timeout(60, method="thread"),
]

# All tasks are cancelled: the usual way down.


@pytest.mark.parametrize("lease", [20, 600])
async def test_all_tasks_cancelled_while_a_renewal_is_under_way(
    server: ServerProcess, key: str, lease: int
) -> None:
    """Nobody believes in a lock that others get; it is renewed as before, or lost."""
    proxy = Proxy(server.port)
    try:
        lost = Calls()
        lock = lock_on(proxy, key, lease_ttl_s=lease, renew_ratio=0.3 / lease, on_lost=lost)
        await lock.acquire()
        proxy.withhold_replies()
        await asyncio.sleep(0.5)  # a renewal is sent, and not answered
        ours = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not ours:
                task.cancel()
        await asyncio.sleep(0.1)
        proxy.pass_on()
        for _ in range(3):
            if await asyncio.to_thread(is_free, server, key):
                assert not lock.held, "two can hold it"
            await renewed(server, key)
        assert lock.held, "the connection was fine all the time"
        assert not lost.locks
        assert await lock.release() is True
    finally:
        proxy.close()


async def test_all_tasks_cancelled_again_and_again(server: ServerProcess, key: str) -> None:
    lost = Calls()
    often = {"renew_ratio": 0.05 / LEASE, "on_lost": lost}
    locks = [lock_on(server, f"{key}-{n}", **often) for n in range(5)]
    for lock in locks:
        await lock.acquire()
    ours = asyncio.current_task()
    with ThreadPoolExecutor() as threads:
        renewing = [threads.submit(wait_renewed, server, lock.key, 10) for lock in locks]
        while not all(each.done() for each in renewing):
            for task in asyncio.all_tasks():
                if task is not ours:
                    task.cancel()
            await asyncio.sleep(0.002)
    for each in renewing:
        each.result()
    for lock in locks:
        assert lock.held == (not is_free(server, lock.key))
        assert lock.held, "its owner has cancelled nothing of it"
        assert await lock.release() is True
    assert not lost.locks


def test_the_end_of_asyncio_run_beside_a_held_lock(
    server: ServerProcess, new_loop: NewLoop, key: str
) -> None:
    """It cancels what is left; the lock is still the process's."""
    lock = lock_on(server, key)

    async def main() -> None:
        await lock.acquire()
        await asyncio.sleep(0.2)

    run_alone(new_loop, main())
    stays_held(lock, server)
    with Pace() as pace:
        assert run_alone(new_loop, release(lock)) is True
    assert pace.seconds < SOON
    assert is_free(server, key)


# A loop that has no time.


def test_a_loop_that_runs_now_and_then(server: ServerProcess, new_loop: NewLoop, key: str) -> None:
    """As in a notebook, or beside the loop of a window system."""
    lock = lock_on(server, key)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(acquire(lock)) is True
        stays_held(lock, server)
        assert runner.run(release(lock)) is True
    assert is_free(server, key)


# Another loop.


@pytest.mark.parametrize("first", ["runs", "stands", "closed"])
@pytest.mark.parametrize("held_for", [0, 0.3])
def test_released_in_another_loop(
    server: ServerProcess,
    start_loop: Callable[..., LoopThread],
    key: str,
    first: str,
    held_for: float,
) -> None:
    lock = lock_on(server, key, lease_ttl_s=20)
    one, two = start_loop(), start_loop()
    assert one.run(acquire(lock)) is True
    time.sleep(held_for)
    one.goes(first)
    assert lock.held
    with Pace() as pace:
        assert two.run(release(lock)) is True
    assert pace.seconds < SOON
    assert not lock.held
    assert is_free(server, key)


@pytest.mark.parametrize("first", ["runs", "stands", "closed"])
def test_used_in_another_loop(
    server: ServerProcess, start_loop: Callable[..., LoopThread], key: str, first: str
) -> None:
    lock = lock_on(server, key, lease_ttl_s=1200)
    one, two = start_loop(), start_loop()
    assert one.run(acquire(lock)) is True
    one.goes(first)

    async def use() -> None:
        assert await lock.renew(600) is True
        assert (lock.held, lock.lease) == (True, 600)  # until the next renewal, in minutes
        token = await lock.detach(30)
        assert token
        assert not is_free(server, key)
        assert await lock.adopt(token) is True
        assert await lock.release() is True
        async with lock:
            assert lock.held

    with Pace() as pace:
        two.run(use())
    assert pace.seconds < SOON
    assert is_free(server, key)


@pytest.mark.parametrize("first", ["runs", "stands", "closed"])
def test_a_place_of_another_loop(
    server: ServerProcess, start_loop: Callable[..., LoopThread], key: str, first: str
) -> None:
    """It is waited for, or given up, wherever its owner is by now."""
    raw = server.connect()
    token = raw.lock(key, "0 600")
    lock, given_up = lock_on(server, key), lock_on(server, key)
    one, two = start_loop(), start_loop()

    async def enqueue() -> None:
        assert await given_up.enqueue() == "queued"
        assert await lock.enqueue() == "queued"

    async def wait() -> None:
        assert await given_up.release() is False
        waiting = asyncio.ensure_future(lock.wait(5))
        await asyncio.sleep(0.1)
        assert raw.ask("r", key, token) == "ok"
        assert await waiting is True
        assert await lock.release() is True

    one.run(enqueue())
    one.goes(first)
    two.run(wait())
    eventually(lambda: is_free(server, key))


def test_one_object_in_one_loop_after_the_other(
    server: ServerProcess, new_loop: NewLoop, key: str
) -> None:
    """As a module's lock is used by the tests of an application, each with its own loop."""
    lock = lock_on(server, key)

    async def use() -> None:
        async with lock:
            assert lock.held

    with Pace() as pace:
        for _ in range(20):
            run_alone(new_loop, use())
    assert pace.seconds < 2 * SOON
    assert is_free(server, key)


# The end of a lock whose loop has ended.


@pytest.mark.parametrize("first", ["stands", "closed"])
def test_on_lost_without_its_loop(
    server: ServerProcess, start_loop: Callable[..., LoopThread], key: str, first: str
) -> None:
    """It is called all the same if the loop is closed; of one that stands, once it goes on."""
    lost, calls = Calls(), []

    def on_lost(lock: Any) -> None:
        calls.append(threading.get_ident())
        lost(lock)

    lock = lock_on(server, key, on_lost=on_lost)
    one, two = start_loop(), start_loop()
    assert one.run(acquire(lock)) is True
    one.goes(first)

    async def evict() -> bool:
        return await lock_on(server, key).evict(lock.fence or 0)

    assert two.run(evict()) is True
    eventually(lambda: not lock.held)
    if first == "stands":
        one.loop.run_until_complete(asyncio.sleep(0.1))
        assert calls == [threading.get_ident()], "on its loop"
    eventually(lambda: bool(lost.locks))
    time.sleep(0.3)
    assert lost.locks == [lock]
    assert two.run(release(lock)) is False


def test_on_lost_of_a_closed_loop_whose_server_ends(
    start: StartServer, new_loop: NewLoop, key: str
) -> None:
    server = start()
    lost = Calls()
    lock = lock_on(server, key, lease_ttl_s=2, renew_ratio=0.5, on_lost=lost)
    assert run_alone(new_loop, acquire(lock)) is True
    server.end()
    eventually(lambda: bool(lost.locks))
    assert not lock.held


# Connections that are reset: uvloop says so once, and to who reads at that moment.


@pytest.mark.parametrize("rest", [b"", b"ok 00"])
def test_a_connection_is_reset(scripted: ScriptedServer, new_loop: NewLoop, rest: bytes) -> None:
    """Nothing stays of it, nor is the next one with its number taken for it."""
    scripted.script(Acquire, *[Reset(rest), grant] * 3)

    async def main() -> None:
        for _ in range(3):
            with Pace() as pace, pytest.raises(errors.UnreachableError, match="reset"):
                await acquire(lock_on(scripted, "key"))
            assert pace.seconds < SOON
            gc.collect()
            async with lock_on(scripted, "key"):
                pass
            process.close_idle_connections()

    run_alone(new_loop, main())


def test_a_connection_is_reset_right_after_a_reply(
    scripted: ScriptedServer, new_loop: NewLoop
) -> None:
    def granted(request: Acquire) -> Reset:
        return Reset(encode_reply(grant(request)))

    scripted.script(Acquire, granted)

    async def main() -> None:
        for number in range(1, 11):
            lock = lock_on(scripted, "key")
            await acquire(lock)
            await lock.check()
            await lock.release()
            process.close_idle_connections()
            del lock
            gc.collect()
            assert len(scripted.asked(Acquire)) == number

    run_alone(new_loop, main())
