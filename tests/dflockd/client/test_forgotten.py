"""With the last reference to a lock object its lock is free, wherever that reference goes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dflockd import client as async_client
from dflockd import sync_client
from tests.dflockd.client.loops import NewLoop
from tests.dflockd.client_support import Calls, Script, is_free, stats, until, waiters
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess, StartServer, eventually

pytestmark = [
    pytest.mark.usefixtures("no_idle_connections", "_refcounts_only"),
    # A connection on which nothing stands may be left to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


def options(server: ServerProcess | Proxy) -> dict[str, Any]:
    return {"servers": [("127.0.0.1", server.port)], "lease_ttl_s": 600}


def freed_at_once(server: ServerProcess, key: str) -> None:
    """Long before its lease ends."""
    eventually(lambda: is_free(server, key))


def in_thread(function: Callable[[], None]) -> None:
    """Run something in a thread of its own; raise what it raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("held_for", [0, 0.3])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("on_lost", [None, print])
def test_in_another_thread_while_the_loop_sleeps(
    server: ServerProcess, new_loop: NewLoop, key: str, debug: bool, held_for: float, on_lost: Any
) -> None:
    """The loop has nothing to do and is told of nothing."""

    async def main() -> None:
        locks = [async_client.DistributedLock(key, on_lost=on_lost, **options(server))]
        assert await locks[0].acquire()
        await asyncio.sleep(held_for)

        def forget() -> None:
            assert not is_free(server, key)
            locks.clear()
            freed_at_once(server, key)

        await asyncio.to_thread(forget)

    with asyncio.Runner(loop_factory=new_loop, debug=debug) as runner:
        runner.run(main())


@pytest.mark.parametrize("debug", [False, True])
def test_a_place_in_another_thread(
    server: ServerProcess, new_loop: NewLoop, key: str, debug: bool
) -> None:
    raw = server.connect()
    raw.lock(key, "0 600")

    async def main() -> None:
        locks = [async_client.DistributedLock(key, **options(server))]
        assert await locks[0].enqueue() == "queued"

        def forget() -> None:
            assert waiters(server, key) == 1
            locks.clear()
            eventually(lambda: not waiters(server, key))

        await asyncio.to_thread(forget)

    with asyncio.Runner(loop_factory=new_loop, debug=debug) as runner:
        runner.run(main())
    raw.close()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("where", ["here", "thread", "loop"])
@pytest.mark.parametrize("how", ["stands", "closed"])
def test_after_its_loop_has_ended(
    server: ServerProcess, new_loop: NewLoop, key: str, debug: bool, how: str, where: str
) -> None:
    loop = new_loop()
    loop.set_debug(debug)
    locks = [async_client.DistributedLock(key, **options(server))]
    try:
        assert loop.run_until_complete(locks[0].acquire())
        if how == "closed":
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        assert not is_free(server, key)

        async def forget() -> None:
            locks.clear()

        if where == "here":
            locks.clear()
        elif where == "thread":
            in_thread(locks.clear)
        else:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(forget())
        freed_at_once(server, key)
    finally:
        loop.close()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("on_lost", [None, print])
async def test_on_its_own_loop(server: ServerProcess, key: str, debug: bool, on_lost: Any) -> None:
    asyncio.get_running_loop().set_debug(debug)
    before = stats(server)["connections"]
    lock = async_client.DistributedLock(key, on_lost=on_lost, **options(server))
    await lock.acquire()
    queued = async_client.DistributedLock(key, **options(server))
    assert await queued.enqueue() == "queued"
    del queued
    await until(lambda: waiters(server, key) == 0)
    del lock
    await asyncio.to_thread(freed_at_once, server, key)
    await until(lambda: stats(server)["connections"] == before)


async def test_on_a_loop_that_has_no_time(server: ServerProcess, key: str) -> None:
    lock = async_client.DistributedLock(key, **options(server))
    await lock.acquire()
    del lock
    freed_at_once(server, key)  # the loop stands still


@pytest.mark.parametrize("where", ["here", "thread"])
@pytest.mark.parametrize("held_for", [0, 0.2])
@pytest.mark.parametrize("on_lost", [None, print])
def test_a_blocking_lock(
    server: ServerProcess, key: str, where: str, held_for: float, on_lost: Any
) -> None:
    locks = [sync_client.DistributedLock(key, on_lost=on_lost, **options(server))]
    assert locks[0].acquire()
    queued = sync_client.DistributedLock(key, **options(server))
    assert queued.enqueue() == "queued"
    time.sleep(held_for)
    del queued
    eventually(lambda: waiters(server, key) == 0)
    locks.clear() if where == "here" else in_thread(locks.clear)
    freed_at_once(server, key)


def test_a_blocking_lock_in_a_cycle(server: ServerProcess, key: str) -> None:
    lock = sync_client.DistributedLock(key, **options(server))
    lock.itself = lock  # type: ignore[attr-defined]
    assert lock.acquire()
    del lock
    # Again and again: `gc.collect` does nothing while another thread is collecting.
    eventually(lambda: gc.collect() >= 0 and is_free(server, key))


def test_a_blocking_lock_of_a_thread_that_has_ended(server: ServerProcess, key: str) -> None:
    def hold() -> None:
        lock = sync_client.DistributedLock(key, **options(server))
        assert lock.acquire()

    in_thread(hold)
    freed_at_once(server, key)


@pytest.mark.parametrize("face", ["sync", "asyncio"])
async def test_while_a_renewal_is_under_way(server: ServerProcess, key: str, face: str) -> None:
    proxy = Proxy(server.port)
    module = sync_client if face == "sync" else async_client
    try:
        lock: Any = module.DistributedLock(key, **options(proxy) | {"renew_ratio": 0.0005})
        acquiring = lock.acquire()
        assert acquiring is True or await acquiring
        proxy.withhold_replies()
        await asyncio.sleep(0.6)
        del lock, acquiring
        await asyncio.to_thread(freed_at_once, server, key)
    finally:
        proxy.close()


@pytest.mark.parametrize("face", ["sync", "asyncio"])
async def test_in_doubt(start: StartServer, key: str, face: str) -> None:
    """Nothing is done for it any more; nobody is told that it is lost."""
    server = start("--orphan-ttl", "2")
    proxy = Proxy(server.port)
    lost = Calls()
    module = sync_client if face == "sync" else async_client
    try:
        lock: Any = module.DistributedLock(key, on_lost=lost, **options(proxy))
        acquiring = lock.acquire()
        assert acquiring is True or await acquiring
        await asyncio.sleep(0.15)
        proxy.withhold()
        proxy.cut(reset=True)
        await asyncio.sleep(0.3)
        del lock, acquiring
        await asyncio.sleep(0.1)
        accepted = proxy.accepted
        proxy.pass_on()
        await until(lambda: is_free(server, key))
        await asyncio.sleep(1.5)
        assert proxy.accepted <= accepted + 1, "somebody goes on trying"
        assert not lost.locks
    finally:
        proxy.close()


def test_many_at_once_in_many_threads(server: ServerProcess, new_loop: NewLoop, key: str) -> None:
    """Some of them while others are taken."""
    made: list[Any] = []
    ended = threading.Event()

    def forget() -> None:
        while not ended.is_set() or made:
            try:
                made.pop()
            except IndexError:
                time.sleep(0.0005)

    async def main() -> None:
        for number in range(150):
            lock = async_client.DistributedLock(f"{key}-{number}", **options(server))
            assert await lock.acquire()
            made.append(lock)
            blocking = sync_client.DistributedLock(f"{key}-{number}-2", **options(server))
            assert blocking.acquire()
            made.append(blocking)
            del lock, blocking
            await asyncio.sleep(0)

    threads = [threading.Thread(target=forget, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
        ended.set()
        for thread in threads:
            thread.join(30)
        for number in range(150):
            for name in (f"{key}-{number}", f"{key}-{number}-2"):
                freed_at_once(server, name)


WITHOUT_LOOP = """
import asyncio, sys, threading
from dflockd import client

options = {"servers": [("127.0.0.1", int(sys.argv[1]))], "lease_ttl_s": 600}
locks = []

async def main():
    locks.append(client.DistributedLock("forgotten", **options))
    assert await locks[0].acquire()

asyncio.run(main())
print("held", flush=True)
sys.stdin.readline()
if sys.argv[2] == "thread":
    thread = threading.Thread(target=locks.clear)
    thread.start()
    thread.join()
else:
    locks.clear()
print("forgotten", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("where", ["here", "thread"])
def test_where_there_is_no_loop_any_more(server: ServerProcess, where: str) -> None:
    script = Script(WITHOUT_LOOP, server.port, where)
    try:
        assert script.line() == "held"
        assert not is_free(server, "forgotten"), "it is the process's, not the loop's"
        script.say()
        assert script.line() == "forgotten"
        freed_at_once(server, "forgotten")
    finally:
        script.close()
    eventually(lambda: is_free(server, "forgotten"))


# What was given back.


class Told:
    def __call__(self, lock: object) -> None: ...


def test_a_lock_that_was_given_back_leaves_nothing_to_the_collector(server: ServerProcess) -> None:
    def blocking() -> weakref.ref[Told]:
        told = Told()
        with sync_client.DistributedLock("given-back", on_lost=told, **options(server)):
            return weakref.ref(told)

    async def in_asyncio() -> weakref.ref[Told]:
        told = Told()
        async with async_client.DistributedLock("given-back", on_lost=told, **options(server)):
            return weakref.ref(told)

    for _ in range(2):
        assert blocking()() is None
        assert asyncio.run(in_asyncio())() is None
