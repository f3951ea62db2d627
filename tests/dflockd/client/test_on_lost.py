"""`on_lost`: whatever it does, it is called once, where it may be, and costs no other lock."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from typing import Any

import pytest

from dflockd import client as async_client
from dflockd import errors, sync_client
from dflockd.client import process
from dflockd.client.flow import Flow
from tests.dflockd.client.doubts import evict
from tests.dflockd.client_support import Calls, Client, Script, is_free, soon, until
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")


QUICK: dict[str, Any] = {"lease_ttl_s": 600, "renew_ratio": 0.2 / 600}
"""A lock that is renewed several times a second: an evicted one is lost soon."""


# What it raises.

FAILING = """
import asyncio, logging, sys, threading, time
from dflockd import client, sync_client

logging.basicConfig(stream=sys.stdout, format="%(message)s")
face, port = sys.argv[1], int(sys.argv[2])
options = {"servers": [("127.0.0.1", port)], "lease_ttl_s": 600, "renew_ratio": 0.2 / 600}

class Own(BaseException):
    pass

kinds = (SystemExit, KeyboardInterrupt, GeneratorExit, Own, ValueError)
kinds = {kind.__name__: kind for kind in kinds}
told = []

def fail(lock):
    told.append(lock)
    if sys.argv[3] == "sys.exit":
        sys.exit(1)
    raise kinds[sys.argv[3]]("on purpose")

def evict(lock):
    assert sync_client.DistributedLock(lock.key, servers=options["servers"]).evict(lock.fence)

def wait_told(number):
    end = time.monotonic() + 60
    while len(told) < number:
        assert time.monotonic() < end, "on_lost was not called"
        time.sleep(0.01)

def wait_renewed(locks):
    before = [lock._session.lease.deadline for lock in locks]
    while not all(lock._session.lease.deadline > at for lock, at in zip(locks, before)):
        time.sleep(0.01)

def blocking():
    others = [sync_client.DistributedLock(f"other-{n}", **options) for n in range(3)]
    for other in others:
        assert other.acquire()
    for n in (1, 2):
        lock = sync_client.DistributedLock("failing", on_lost=fail, **options)
        assert lock.acquire()
        evict(lock)
        wait_told(n)
        wait_renewed(others)
        print("held", [other.held for other in others], flush=True)
    print("told", len(told))
    print("renewed", [other.release() for other in others], flush=True)

async def not_blocking():
    others = [client.DistributedLock(f"other-{n}", **options) for n in range(3)]
    for other in others:
        assert await other.acquire()
    for n in (1, 2):
        lock = client.DistributedLock("failing", on_lost=fail, **options)
        assert await lock.acquire()
        await asyncio.to_thread(evict, lock)
        await asyncio.to_thread(wait_told, n)
        await asyncio.to_thread(wait_renewed, others)
        print("held", [other.held for other in others], flush=True)
    print("told", len(told))
    print("renewed", [await other.release() for other in others], flush=True)

if face == "sync":
    blocking()
else:
    asyncio.run(not_blocking())
"""


@pytest.mark.parametrize(
    "what", ["sys.exit", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "Own", "ValueError"]
)
def test_one_that_fails_costs_no_other_lock(server: ServerProcess, what: str) -> None:
    _fails("sync", server, what)


def test_one_that_fails_on_the_loop_costs_no_other_lock(server: ServerProcess) -> None:
    """There an exit or an interrupt is the loop's, as everywhere in asyncio."""
    _fails("asyncio", server, "ValueError")


def _fails(face: str, server: ServerProcess, what: str) -> None:
    script = Script(FAILING, face, server.port, what)
    try:
        lines = []
        while not lines or not (lines[-1].startswith("renewed") or lines[-1] == ""):
            lines.append(script.line())
        text = "\n".join(lines)
        assert "held [False, False, False]" not in lines, text
        assert lines.count("held [True, True, True]") == 2, text
        assert "told 2" in lines, text
        assert lines[-1] == "renewed [True, True, True]", text
        assert text.count("on_lost of lock 'failing'") == 2, "each failure is said"
    finally:
        script.close()


ENDING_LOOP = """
import asyncio, sys, threading, time
from dflockd import client, sync_client

options = {"servers": [("127.0.0.1", int(sys.argv[1]))], "lease_ttl_s": 600, "renew_ratio": 0.2 / 600}
other = sync_client.DistributedLock("other", **options)
assert other.acquire()

def leave(lock):
    sys.exit(3)

async def main():
    lock = client.DistributedLock("leaving", on_lost=leave, **options)
    assert await lock.acquire()
    evicting = sync_client.DistributedLock("leaving", servers=options["servers"])
    await asyncio.to_thread(evicting.evict, lock.fence)
    await asyncio.sleep(5)

try:
    asyncio.run(main())
except SystemExit:
    pass
before = other._session.lease.deadline
while other._session.lease.deadline == before:  # until it is renewed
    time.sleep(0.01)
print(other.held, other.release(), flush=True)
"""


def test_one_that_ends_its_loop_costs_no_lock_elsewhere(server: ServerProcess) -> None:
    script = Script(ENDING_LOOP, server.port)
    try:
        assert script.line() == "True True"
    finally:
        script.close()


# `async def`


class Told:
    """An `on_lost` of a loop, and where it ran."""

    def __init__(self) -> None:
        self.locks: list[Any] = []
        self.threads: list[int] = []
        self.loops: list[Any] = []
        self.ended = 0

    def __call__(self, lock: Any) -> None:
        self.locks.append(lock)
        self.threads.append(threading.get_ident())
        try:
            self.loops.append(asyncio.get_running_loop())
        except RuntimeError:
            self.loops.append(None)

    async def on_loop(self, lock: Any) -> None:
        self(lock)
        await asyncio.sleep(0.01)
        self.ended += 1

    async def with_more(self, more: str, lock: Any) -> None:
        assert more == "more"
        await self.on_loop(lock)


class AsyncCallable:
    def __init__(self, told: Told) -> None:
        self._told = told

    async def __call__(self, lock: Any) -> None:
        await self._told.on_loop(lock)


@pytest.mark.parametrize("kind", ["method", "function", "partial", "object"])
async def test_a_coroutine_function_is_run(server: ServerProcess, key: str, kind: str) -> None:
    told = Told()

    async def function(lock: Any) -> None:
        await told.on_loop(lock)

    on_lost = {
        "method": told.on_loop,
        "function": function,
        "partial": functools.partial(told.with_more, "more"),
        "object": AsyncCallable(told),
    }[kind]
    servers = [("127.0.0.1", server.port)]
    lock = async_client.DistributedLock(key, servers=servers, on_lost=on_lost, **QUICK)
    await lock.acquire()
    await evict(lock, server)
    await until(lambda: not lock.held)
    await until(lambda: told.ended == 1)
    assert told.locks == [lock]
    assert told.loops == [asyncio.get_running_loop()]
    await asyncio.sleep(0.3)
    assert told.ended == 1


async def test_a_coroutine_function_that_fails(
    server: ServerProcess, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_lock: Any) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    servers = [("127.0.0.1", server.port)]
    other = async_client.DistributedLock(f"{key}-other", servers=servers, **QUICK)
    lock = async_client.DistributedLock(key, servers=servers, on_lost=fail, **QUICK)
    await other.acquire()
    await lock.acquire()
    with caplog.at_level(logging.WARNING, "dflockd.client"):
        await evict(lock, server)
        await until(lambda: "on_lost of lock" in caplog.text)
    assert "ZeroDivisionError" in caplog.text
    await asyncio.sleep(0.3)
    assert other.held
    assert await other.release() is True


async def test_a_coroutine_function_that_uses_locks(server: ServerProcess, key: str) -> None:
    """It may take another, and the same again."""
    servers = [("127.0.0.1", server.port)]
    done = asyncio.Event()

    async def take_again(lock: Any) -> None:
        async with async_client.DistributedLock(f"{key}-other", servers=servers) as other:
            assert other.held
        assert await lock.release() is False
        assert await lock.acquire() is True
        done.set()

    lock = async_client.DistributedLock(key, servers=servers, on_lost=take_again, **QUICK)
    await lock.acquire()
    await evict(lock, server)
    await soon(done.wait())
    assert lock.held
    assert await lock.release() is True


def _function() -> Any:
    async def on_lost(_lock: Any) -> None: ...

    return on_lost


@pytest.mark.parametrize(
    "on_lost",
    [_function(), Told().on_loop, functools.partial(Told().with_more, ""), AsyncCallable(Told())],
    ids=["function", "method", "partial", "object"],
)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_blocking_lock_cannot_run_one(on_lost: Any, kind: str) -> None:
    make: Any = {
        "lock": sync_client.DistributedLock,
        "semaphore": functools.partial(sync_client.DistributedSemaphore, limit=2),
    }[kind]
    with pytest.raises(errors.InvalidArgumentError, match="on_lost") as caught:
        make("key", on_lost=on_lost)
    assert "\n" not in str(caught.value)


# Where and when it is called.


async def test_a_plain_one_runs_on_the_loop(server: ServerProcess, key: str) -> None:
    told = Told()
    servers = [("127.0.0.1", server.port)]
    lock = async_client.DistributedLock(key, servers=servers, on_lost=told, **QUICK)
    await lock.acquire()
    await evict(lock, server)
    await until(lambda: bool(told.locks))
    assert not lock.held
    assert told.threads == [threading.get_ident()]
    await asyncio.sleep(0.3)
    assert told.locks == [lock]


async def test_a_loop_that_was_busy_while_the_lock_was_lost(
    server: ServerProcess, key: str
) -> None:
    """Its owner has forgotten the lock before the loop gets to telling."""
    told = Told()
    servers = [("127.0.0.1", server.port)]
    lock = async_client.DistributedLock(key, servers=servers, on_lost=told, **QUICK)
    await lock.acquire()
    evicting = sync_client.DistributedLock(key, servers=servers)
    assert evicting.evict(lock.fence or 0)
    _wait_lost(lock)  # the loop does nothing meanwhile
    has_told = threading.Event()

    def behind_it() -> Flow[None]:
        has_told.set()
        yield from ()

    process.current().reactor.run(behind_it())
    assert has_told.wait(PATIENCE)
    del lock
    await until(lambda: bool(told.locks))
    assert told.locks[0].key == key
    assert told.threads == [threading.get_ident()]


def _wait_lost(lock: Any) -> None:
    eventually(lambda: lock.state == "lost")


async def test_it_is_called_once(client: Client, server: ServerProcess, key: str) -> None:
    """Also where the loss is seen by several: the owner, a renewal, and the end of the lease."""
    lost = Calls()
    locks = [
        client.lock(f"{key}-{n}", server, on_lost=lost, lease_ttl_s=1, renew_ratio=0.1)
        for n in range(10)
    ]
    for lock in locks:
        await lock.acquire()
        await evict(lock, server)
    renewals = await asyncio.gather(*(lock.renew() for lock in locks), return_exceptions=True)
    assert not any(renewals)
    await asyncio.sleep(1.3)  # their leases are over
    assert len(lost.locks) == 10
    assert len(set(map(id, lost.locks))) == 10
    for lock in locks:
        assert not lock.held
        assert await lock.release() is False
    assert len(lost.locks) == 10


async def test_a_released_lock_is_not_lost(client: Client, server: ServerProcess, key: str) -> None:
    lost = Calls()
    for _ in range(50):
        async with client.lock(key, server, on_lost=lost, **QUICK) as lock:
            assert lock.held
    await asyncio.sleep(0.3)
    assert not lost.locks
    assert is_free(server, key)
