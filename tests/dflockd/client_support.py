"""What the tests of the lock clients share: both clients in one shape, servers, and a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, Self, TypeVar

from dflockd import client as async_client
from dflockd import clock, sync_client
from dflockd.client import process
from tests import forkserver
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually

P = ParamSpec("P")
T = TypeVar("T")


class InThreads:
    """A blocking lock in the shape of an asyncio one: every call runs in a thread of its own."""

    def __init__(self, lock: sync_client.DistributedLock, executor: ThreadPoolExecutor) -> None:
        self.lock = lock
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)

    def __repr__(self) -> str:
        return repr(self.lock)

    async def acquire(self) -> bool:
        return await self._call(self.lock.acquire)

    async def release(self) -> bool:
        return await self._call(self.lock.release)

    async def enqueue(self, *args: Any, **options: Any) -> str:
        return await self._call(partial(self.lock.enqueue, *args, **options))

    async def wait(self, *args: Any, **options: Any) -> bool:
        return await self._call(partial(self.lock.wait, *args, **options))

    async def renew(self, *args: Any) -> bool:
        return await self._call(self.lock.renew, *args)

    async def check(self) -> None:
        await self._call(self.lock.check)

    async def detach(self, *args: Any) -> str | None:
        token: str | None = await self._call(self.lock.detach, *args)
        return token

    async def adopt(self, token: str) -> bool:
        return await self._call(self.lock.adopt, token)

    async def __aenter__(self) -> Self:
        entered = await self._call(self.lock.__enter__)
        assert entered is self.lock
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._call(self.lock.__exit__, *exc)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)


class Client:
    """One of the two clients."""

    def __init__(self, name: str, executor: ThreadPoolExecutor) -> None:
        self.name = name
        self.module: ModuleType = sync_client if name == "sync" else async_client
        self._executor = executor

    def lock(self, key: str, server: ServerProcess | Proxy | None = None, **options: Any) -> Any:
        if server is not None:
            options["servers"] = [("127.0.0.1", server.port)]
        return self._shaped(self.module.DistributedLock(key, **options))

    def semaphore(self, key: str, limit: int, server: ServerProcess, **options: Any) -> Any:
        servers = [("127.0.0.1", server.port)]
        return self._shaped(
            self.module.DistributedSemaphore(key, limit, servers=servers, **options)
        )

    def _shaped(self, lock: Any) -> Any:
        return InThreads(lock, self._executor) if self.name == "sync" else lock


@contextlib.contextmanager
def client_named(name: str) -> Iterator[Client]:
    executor = ThreadPoolExecutor(64)
    try:
        yield Client(name, executor)
    finally:
        executor.shutdown()


class Face:
    """One of the two clients, for tests that are not `async` themselves: properties, and programs."""

    def __init__(self, name: str, runner: asyncio.Runner | None) -> None:
        self.name = name
        self.module: ModuleType = sync_client if runner is None else async_client
        self._runner = runner

    def do(self, result: Any) -> Any:
        """Return what a method of a lock returns, when it is done."""
        if self._runner is None:
            return result
        return self._runner.run(asyncio.wait_for(result, PATIENCE))


@contextlib.contextmanager
def face_named(name: str) -> Iterator[Face]:
    if name == "sync":
        yield Face(name, None)
        return
    with asyncio.Runner() as runner:
        yield Face(name, runner)


class Calls:
    """An `on_lost` that remembers when it was called and with what."""

    def __init__(self) -> None:
        self.locks: list[Any] = []
        self.times: list[float] = []
        self._called = threading.Condition()

    def __call__(self, lock: Any) -> None:
        with self._called:
            self.locks.append(lock)
            self.times.append(time.monotonic())
            self._called.notify_all()

    async def first(self) -> float:
        """Wait for the first call and return its time."""
        await until(lambda: bool(self.times))
        return self.times[0]


_running = clock.now


class Time:
    """The clock of the clients in this process: it goes on, or stands where the test has set it.

    So a lease of ten minutes ends when the test says so, on a busy machine too. It never goes back, not
    at the end of the test either: the client's thread would wait until the time that it has seen.
    """

    def stand_at(self, time: float) -> None:
        clock.now = lambda: time

    def go_on_from(self, time: float) -> None:
        self.jump_to(time)
        process.current().reactor.call(lambda: None)  # it looks at the clock

    def jump_to(self, time: float) -> None:
        """Go on from there, and tell nobody."""
        since = _running()
        clock.now = lambda: time + _running() - since


def in_this_thread(here: Callable[P, T], elsewhere: Callable[P, T]) -> Callable[P, T]:
    """Return a function that is `here` in this thread, and `elsewhere` in others.

    What a simulation puts in the place of a clock is not for threads that earlier tests have left:
    they would plan by it, and on a machine that has run for a minute wait for a quarter of an hour.
    """
    this = threading.get_ident()

    def called(*args: P.args, **options: P.kwargs) -> T:
        return (here if threading.get_ident() == this else elsewhere)(*args, **options)

    return called


async def until(what: Callable[[], bool]) -> None:
    """Wait until `what` is true."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


async def soon(awaitable: Awaitable[Any]) -> Any:
    """Return the result of something that must not take long."""
    return await asyncio.wait_for(awaitable, PATIENCE)


def stats(server: ServerProcess, **options: Any) -> dict[str, Any]:
    """Ask a server what is going on; the connection that asks is not counted."""
    raw = server.connect(**options)
    try:
        report = json.loads(raw.ask("stats").removeprefix("ok "))
    finally:
        raw.close()
    report["connections"] -= 1
    return report


def left_of_lease(server: ServerProcess, key: str, **options: Any) -> float:
    # `next` would end in a StopIteration, which never arrives out of a thread that asyncio waits for.
    [entry] = [entry for entry in stats(server, **options)["locks"] if entry["key"] == key]
    return float(entry["lease_expires_in_s"])


def wait_renewed(server: ServerProcess, key: str, times: int = 1, **options: Any) -> None:
    """Wait until the server has renewed a lock so often. Its lease is one that does not end meanwhile.

    A test of what goes on during a lease makes this long, and with `renew_ratio` the time until the
    renewals short: that is true on a busy machine too.
    """
    for _ in range(times):
        seen = [left_of_lease(server, key, **options)]

        def is_renewed(seen: list[float] = seen) -> bool:
            seen.append(left_of_lease(server, key, **options))
            return seen[-1] > seen[-2]

        eventually(is_renewed)


async def renewed(server: ServerProcess, key: str, times: int = 1, **options: Any) -> None:
    """The same, and the event loop goes on meanwhile."""
    await asyncio.to_thread(wait_renewed, server, key, times, **options)


def waiters(server: ServerProcess, key: str) -> int:
    """Return how many wait for a key."""
    report = stats(server)
    return sum(e["waiters"] for e in report["locks"] + report["semaphores"] if e["key"] == key)


def is_free(server: ServerProcess, key: str) -> bool:
    """Try the lock from elsewhere and give it back at once."""
    raw = server.connect()
    try:
        line = raw.ask("l", key, 0)
        if line == "timeout":
            return False
        assert raw.ask("r", key, line.split()[1]) == "ok"
        return True
    finally:
        raw.close()


def command(text: str, *args: object, fresh: bool = False) -> list[str]:
    """Return what runs a program that a test has written.

    Args:
        text: it; its arguments are in `sys.argv` as usual.
        fresh: in a process in which nothing has been imported before.
    """
    run = ["-c"] if fresh else ["-m", "tests.dflockd.program"]
    return [sys.executable, *run, text, *map(str, args)]


def run_strictly(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own, with all warnings and checks that Python has."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def but_slow_steps(stderr: str) -> str:
    """Return what a program has said, but for steps that asyncio, in its debug mode, finds slow."""
    lines = stderr.splitlines(keepends=True)
    return "".join(
        line for line in lines if not re.match(r"Executing <.* took \d+\.\d+ seconds$", line)
    )


class Script:
    """A Python program in a process of its own, spoken to line by line."""

    def __init__(self, text: str, *args: object, fresh: bool = False) -> None:
        self.process = forkserver.start(
            command(text, *args, fresh=fresh),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(self.process.stdout.readline()))
        reader.start()
        reader.join(PATIENCE)
        if reader.is_alive():
            self.process.kill()
            reader.join()
            raise AssertionError("the program printed nothing in time")
        return lines[0].rstrip("\n")

    def say(self, line: str = "") -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def make_certificate(directory: Path, name: str = "server") -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1; return its path and that of its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    arguments = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    arguments += ["-nodes", "-days", "2"]
    arguments += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    arguments += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
    return certificate, key
