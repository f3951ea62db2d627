"""A lock object is for one owner at a time: whoever else tries is told so, at once."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dflockd import client as async_client
from dflockd import errors, sync_client
from tests import effort
from tests.dflockd.client_support import Client, is_free, soon, until, waiters
from tests.dflockd.raw_server import ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")

THREADS = 4
ROUNDS = 150


class Inside:
    """How many have come in, and how many came in while somebody was there."""

    def __init__(self) -> None:
        self.entries = self.overlaps = self.now = 0
        self.failed: list[BaseException] = []

    def enter(self) -> None:
        self.now += 1
        self.entries += 1
        self.overlaps += self.now > 1

    def leave(self) -> None:
        self.now -= 1

    def check(self) -> None:
        assert not self.failed, [repr(exc) for exc in self.failed]
        assert self.overlaps == 0, f"{self.overlaps} of {self.entries} entries overlapped"
        assert self.entries


def together(number: int, work: Callable[[], None]) -> None:
    """Run something in so many threads that begin at once."""
    begin = threading.Barrier(number)

    def run() -> None:
        begin.wait(15)
        work()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_threads_that_share_an_object(server: ServerProcess, key: str) -> None:
    servers = [("127.0.0.1", server.port)]
    lock = sync_client.DistributedLock(key, 5, servers=servers)
    inside = Inside()

    def work() -> None:
        for _ in range(ROUNDS):
            try:
                with lock:
                    inside.enter()
                    time.sleep(0.0002)  # the others try meanwhile
                    inside.leave()
            except errors.AlreadyHeldError:
                pass
            except BaseException as exc:
                inside.failed.append(exc)
                return

    together(THREADS, work)
    inside.check()
    assert not lock.held
    eventually(lambda: is_free(server, key))
    with lock:
        assert lock.held


async def test_tasks_that_share_an_object(server: ServerProcess, key: str) -> None:
    lock = async_client.DistributedLock(key, 5, servers=[("127.0.0.1", server.port)])
    inside = Inside()

    async def work() -> None:
        for _ in range(ROUNDS):
            try:
                async with lock:
                    inside.enter()
                    await asyncio.sleep(0)
                    inside.leave()
            except errors.AlreadyHeldError:
                await asyncio.sleep(0)

    results = await asyncio.gather(*(work() for _ in range(THREADS)), return_exceptions=True)
    inside.failed += [result for result in results if result is not None]
    inside.check()
    assert not lock.held
    await until(lambda: is_free(server, key))
    async with lock:
        assert lock.held


async def test_a_second_owner_while_the_first_waits(
    client: Client, server: ServerProcess, key: str
) -> None:
    """He is refused whatever he tries, and the first goes on waiting."""
    raw = server.connect()
    token = raw.lock(key, "0 600")
    lock = client.lock(key, server, acquire_timeout_s=600)
    waiting = asyncio.ensure_future(lock.acquire())
    await until(lambda: waiters(server, key) == 1)
    for attempt in (lock.acquire, lock.enqueue, lambda: lock.adopt(token), lock.__aenter__):
        with pytest.raises(errors.AlreadyHeldError):
            await soon(attempt())
        assert waiters(server, key) == 1
    assert raw.ask("r", key, token) == "ok"
    assert await soon(waiting) is True
    assert lock.held
    assert await lock.release() is True
    assert is_free(server, key)


async def test_a_second_owner_of_a_place_in_the_queue(
    client: Client, server: ServerProcess, key: str
) -> None:
    raw = server.connect()
    token = raw.lock(key, "0 600")
    lock = client.lock(key, server, acquire_timeout_s=600)
    assert await lock.enqueue() == "queued"
    waiting = asyncio.ensure_future(lock.wait())
    await asyncio.sleep(0.1)
    for attempt in (lock.acquire, lock.enqueue, lock.wait):
        with pytest.raises(errors.LocalError):
            await soon(attempt())
        assert waiters(server, key) == 1
    assert raw.ask("r", key, token) == "ok"
    assert await soon(waiting) is True
    assert await lock.release() is True
    assert is_free(server, key)


@pytest.mark.parametrize("number", [2, 4])
async def test_one_of_many_releases_is_the_one(
    client: Client, server: ServerProcess, key: str, number: int
) -> None:
    lock = client.lock(key, server)
    for _ in range(60):
        assert await lock.acquire() is True
        results = await soon(
            asyncio.gather(*(lock.release() for _ in range(number)), return_exceptions=True)
        )
        others = [result for result in results if result is not True]
        assert len(others) == number - 1, results
        for other in others:
            assert other is False or isinstance(other, errors.AlreadyHeldError), results
        assert not lock.held
    await until(lambda: is_free(server, key))


@pytest.mark.parametrize(
    "pair",
    [
        "acquire acquire",
        "acquire enqueue",
        "acquire release",
        "enqueue enqueue",
        "enqueue release",
        "wait wait",
        "wait release",
        "wait acquire",
        "renew renew",
        "renew release",
        "renew detach",
        "detach detach",
        "detach release",
        "renew acquire",
        "release acquire",
    ],
)
async def test_two_calls_at_once(
    client: Client, server: ServerProcess, key: str, pair: str
) -> None:
    """One of them is made, and the other before it, after it, or refused."""
    first, second = pair.split()
    key = key.replace(" ", "-")
    for number in range(40):
        name = f"{key}-{number}"
        lock = client.lock(name, server, acquire_timeout_s=0.5, lease_ttl_s=600)
        raw, token = server.connect(), ""
        if first == "wait":
            token = raw.lock(name, "0 600")
            assert await lock.enqueue() == "queued"
        elif first in ("renew", "detach", "release"):
            assert await lock.acquire() is True
        calls = [asyncio.ensure_future(getattr(lock, first)())]
        if number % 2:
            await asyncio.sleep(0)
        calls.append(asyncio.ensure_future(getattr(lock, second)()))
        await asyncio.sleep(random.uniform(0, 0.002))
        if token:
            assert raw.ask("r", name, token) == "ok"
        results = await soon(asyncio.gather(*calls, return_exceptions=True))
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, errors.LocalError), results
        tokens = [result for result in results if isinstance(result, str) and len(result) == 32]
        assert len(tokens) <= 1, results
        for token in tokens:
            assert raw.ask("r", name, token) == "ok"
        if lock.held:
            assert not is_free(server, name), "it is not held at all"
        await soon(lock.release())
        assert not lock.held
        await until(lambda name=name: is_free(server, name))  # type: ignore[misc]
        raw.close()


class Storm:
    """Calls of all kinds on one object, by many at once, while somebody else wants the lock too."""

    EXPECTED = (errors.LocalError, errors.AcquireCancelledError, errors.LockTimeoutError)

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.failed: list[str] = []
        self.calls: list[tuple[str, Callable[[], Any]]] = [
            ("acquire", lock.acquire),
            ("acquire", lock.acquire),
            ("release", lock.release),
            ("release", lock.release),
            ("renew", lock.renew),
            ("enqueue", lock.enqueue),
            ("wait", lambda: lock.wait(0.01)),
            ("repr", lambda: repr(lock)),
            ("held", lambda: (lock.held, lock.token, lock.lease, lock.fence)),
        ]

    def note(self, name: str, exc: BaseException) -> None:
        if not isinstance(exc, self.EXPECTED):
            self.failed.append(f"{name}: {exc!r}")


@effort.seconds
def test_a_storm_of_threads(server: ServerProcess, key: str, seconds: float) -> None:
    servers = [("127.0.0.1", server.port)]
    storm = Storm(sync_client.DistributedLock(key, 0.02, servers=servers))
    rival = sync_client.DistributedLock(key, 0.02, servers=servers)
    seeds = iter(range(THREADS))

    def work() -> None:
        order = random.Random(next(seeds))
        end = time.monotonic() + seconds
        while time.monotonic() < end and not storm.failed:
            name, call = order.choice(storm.calls)
            try:
                call()
            except BaseException as exc:
                storm.note(name, exc)

    ended = threading.Event()

    def compete() -> None:
        while not ended.is_set():
            if rival.acquire():
                time.sleep(0.002)
                rival.release()

    competing = threading.Thread(target=compete, daemon=True)
    competing.start()
    try:
        together(THREADS, work)
    finally:
        ended.set()
        competing.join(15)
    assert not storm.failed
    _is_sound_after(storm, server, key)


def _is_sound_after(storm: Storm, server: ServerProcess, key: str) -> None:
    storm.lock.release()
    assert not storm.lock.held
    eventually(lambda: is_free(server, key))
    assert storm.lock.acquire() is True
    assert not is_free(server, key)
    assert storm.lock.release() is True


@effort.seconds
async def test_a_storm_of_tasks(server: ServerProcess, key: str, seconds: float) -> None:
    servers = [("127.0.0.1", server.port)]
    storm = Storm(async_client.DistributedLock(key, 0.02, servers=servers))
    rival = async_client.DistributedLock(key, 0.02, servers=servers)
    end = time.monotonic() + seconds

    async def work(seed: int) -> None:
        order = random.Random(seed)
        while time.monotonic() < end and not storm.failed:
            name, call = order.choice(storm.calls)
            try:
                result = call()
                if asyncio.iscoroutine(result):
                    await soon(result)  # who hangs fails, and is named
            except BaseException as exc:
                storm.note(name, exc)
            await asyncio.sleep(0)

    async def compete() -> None:
        while time.monotonic() < end:
            if await rival.acquire():
                await asyncio.sleep(0.002)
                await rival.release()

    await asyncio.gather(compete(), *(work(seed) for seed in range(THREADS)))
    assert not storm.failed
    await storm.lock.release()
    assert not storm.lock.held
    await until(lambda: is_free(server, key))
    assert await storm.lock.acquire() is True
    assert not is_free(server, key)
    assert await storm.lock.release() is True
