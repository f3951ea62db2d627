"""Whatever interrupts a client, at whatever moment, nothing is left behind.

A signal's exception, `cancel`, a cancelled task, a forgotten object; and many threads at once.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import random
import re
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from dflockd import client, errors, sync_client
from dflockd.client import connection, operations
from dflockd.client.reactor import Renewer, Watch
from tests.dflockd.client_support import Calls, Proxy, is_free, soon, stats, until, waiters
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually, granted

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.end()


@pytest.fixture
def options(server: ServerProcess) -> dict[str, Any]:
    return {"servers": [("127.0.0.1", server.port)]}


# A signal's exception.

INTERRUPTED = """
import logging, random, signal, socket, sys, threading, time
from dflockd.sync_client import DistributedLock

port, rounds = int(sys.argv[1]), int(sys.argv[2])
options = {"servers": [("127.0.0.1", port)], "acquire_timeout_s": 5}
logging.disable()  # a renewal that is interrupted says that the lock is lost
print("seed", seed := random.randrange(1 << 32), flush=True)
random.seed(seed)

class Interrupt(BaseException):
    pass

armed = False

def handle(*_):
    global armed
    if armed:
        armed = False
        raise Interrupt

signal.signal(signal.SIGALRM, handle)

class Raw:
    def __init__(self):
        self.sock = socket.create_connection(("127.0.0.1", port), 10)
        self.replies = self.sock.makefile()

    def ask(self, command, argument, key="key"):
        self.sock.sendall(f"{command}\\n{key}\\n{argument}\\n".encode())
        return self.replies.readline().split()

def block():
    with DistributedLock("key", **options) as lock:
        assert lock.held
        time.sleep(random.choice((0, 0.0002)))

def calls():
    lock = DistributedLock("key", **options)
    assert lock.acquire() is True
    try:
        assert lock.held
    finally:
        assert lock.release() is True
        assert not lock.held

def in_vain():
    assert DistributedLock("busy", **options | {"acquire_timeout_s": 0}).acquire() is False

def two_phases():
    lock = DistributedLock("key", **options)
    assert lock.enqueue() == "acquired"
    try:
        assert lock.renew() is True
    finally:
        lock.release()

def contended():
    with DistributedLock("key", **options) as lock:
        assert lock.held

def interrupt(function, longest):
    global armed
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, longest))
        function()
        armed = False
    except Interrupt:
        return True
    return False

raw, rival = Raw(), Raw()
raw.ask("l", "0 600", "busy")
block()  # what is made once, is made
functions = [block, calls, in_vain, two_phases, contended]
interrupted = 0
for n in range(rounds):
    function = functions[n % len(functions)]
    where = f"round {n}, {function.__name__}"
    if function is contended:
        token = rival.ask("l", 3)[1]
        timer = threading.Timer(random.uniform(0, 0.001), rival.ask, ("r", token))
        timer.start()
        interrupted += interrupt(function, 0.0025)
        timer.join()
    else:
        interrupted += interrupt(function, 0.001)
    started = time.monotonic()
    reply = raw.ask("l", 3)
    assert reply[0] == "ok", f"{where}: leaked"
    assert time.monotonic() - started < 1, f"{where}: freed late"
    assert raw.ask("r", reply[1]) == ["ok"]
    # The connections that are left have no answers waiting in them.
    calls()
signal.setitimer(signal.ITIMER_REAL, 0)
print(interrupted)
"""


def test_a_signal_at_any_moment(server: ServerProcess) -> None:
    rounds = 1500
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(server.port), str(rounds)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert int(result.stdout.split()[-1]) > rounds / 5, "too few were hit"


class Interrupt(BaseException):
    """What a signal handler raises, or a time limit."""


def lines_of_the_client() -> set[str]:
    return {sync_client.__file__, connection.__file__, operations.__file__}


def interrupted_at(number: int, call: Callable[[], object]) -> Interrupt | None:
    """Make a call and raise in it before the given line of the client that it comes to."""
    files, count = lines_of_the_client(), 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        # A signal's exception comes where something is called or begins, not on the way out.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not re.match(r'\s*return( \w+| "\w+")?$', text):
            count += 1
            if count == number:
                raise Interrupt
        return trace

    # Coverage traces as well.
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt as exc:
        return exc
    finally:
        sys.settrace(before)
    return None


def was_about_to_release(exc: BaseException) -> bool:
    """Whether it came on the way into a release: that one was never tried."""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename != __file__]
    return names in (["__exit__"], ["__exit__", "release"], ["release"])


# A connection on which nothing stands may be left to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("how", ["block", "calls", "phases", "renewal", "in_vain"])
def test_an_exception_before_any_line(
    server: ServerProcess, options: dict[str, Any], key: str, how: str
) -> None:
    """The lock is free though the object and the traceback are still there."""
    raw = server.connect()

    def block() -> None:
        with lock:
            pass

    def calls() -> None:
        if lock.acquire():
            lock.release()

    def phases() -> None:
        lock.enqueue()
        lock.release()

    def renewal() -> None:
        with lock:
            lock.renew()

    def in_vain() -> None:
        assert lock.acquire() is False

    token = raw.lock(f"{key}-busy", "0 600")
    if how == "in_vain":
        options |= {"acquire_timeout_s": 0}
    call = {f.__name__: f for f in (block, calls, phases, renewal, in_vain)}[how]
    name = f"{key}-busy" if how == "in_vain" else key
    number = 0
    while True:
        number += 1
        lock = sync_client.DistributedLock(name, **options)
        exc = interrupted_at(number, call)
        if exc is None:
            break
        if lock.held:
            assert was_about_to_release(exc)
            assert lock.release() is True
        started = time.monotonic()
        reply = raw.ask("l", key, 2)
        assert reply != "timeout", "".join(traceback.format_exception(exc))
        assert raw.ask("r", key, granted(reply)) == "ok"
        assert time.monotonic() - started < 0.5
        assert not lock.held
        assert lock.release() is False
        # The connections that are left have no answers waiting in them.
        with sync_client.DistributedLock(key, **options):
            pass
    assert number > 20
    assert raw.ask("r", f"{key}-busy", token) == "ok"


STARTING = """
import sys, threading, time
from dflockd.sync_client import DistributedLock

options = {"servers": [("127.0.0.1", int(sys.argv[1]))], "lease_ttl_s": 1}
start = threading.Thread.start

def interrupted(thread):
    threading.Thread.start = start
    if sys.argv[2] == "after":
        start(thread)
    raise KeyboardInterrupt

threading.Thread.start = interrupted
lock = DistributedLock("starting-" + sys.argv[2], **options)
try:
    lock.acquire()
except KeyboardInterrupt:
    print(lock.held)
with lock:
    time.sleep(1.3)
    print(lock.held, [thread.name for thread in threading.enumerate()])
"""


async def test_a_signal_while_the_renewal_thread_starts(server: ServerProcess) -> None:
    """The next lock starts it then, and there is still one."""

    async def check(when: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STARTING, str(server.port), when),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await soon(process.communicate())
        assert err == b""
        assert out == b"False\nTrue ['MainThread', 'dflockd-renewal']\n"

    await asyncio.gather(check("before"), check("after"))


# cancel()


@pytest.mark.parametrize("how", ["acquire", "wait"])
def test_cancel_from_another_thread(
    server: ServerProcess, options: dict[str, Any], key: str, how: str
) -> None:
    token = server.connect().lock(key)
    lock = sync_client.DistributedLock(key, acquire_timeout_s=None, **options)
    if how == "wait":
        assert lock.enqueue() == "queued"
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            getattr(lock, how)()
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: waiters(server, key) == 1)
    lock.cancel()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert isinstance(caught[0], errors.AcquireCancelledError)
    assert (caught[0].key, caught[0].server) == (key, f"127.0.0.1:{server.port}")
    eventually(lambda: waiters(server, key) == 0)
    assert server.connect().ask("r", key, token) == "ok"
    with pytest.raises(errors.AcquireCancelledError):
        lock.acquire()  # never undone
    assert is_free(server, key)


def test_cancel_before_acquire(server: ServerProcess, options: dict[str, Any], key: str) -> None:
    lock = sync_client.DistributedLock(key, **options)
    lock.cancel()
    for attempt in (lock.acquire, lock.enqueue, lock.__enter__):
        with pytest.raises(errors.AcquireCancelledError):
            attempt()
    assert is_free(server, key)


def test_cancel_of_a_held_lock(server: ServerProcess, options: dict[str, Any], key: str) -> None:
    with sync_client.DistributedLock(key, **options) as lock:
        lock.cancel()
        assert lock.held
        assert lock.renew() is True
        assert not is_free(server, key)
    assert is_free(server, key)


def test_cancel_from_a_signal_handler(server: ServerProcess, key: str) -> None:
    text = """
import signal, sys, time
from dflockd import errors
from dflockd.sync_client import DistributedLock

lock = DistributedLock(sys.argv[2], None, servers=[("127.0.0.1", int(sys.argv[1]))])
signal.signal(signal.SIGALRM, lambda *_: lock.cancel())
signal.setitimer(signal.ITIMER_REAL, 0.3)
started = time.monotonic()
try:
    lock.acquire()
except errors.AcquireCancelledError as exc:
    print(exc, "after", round(time.monotonic() - started))
"""
    server.connect().lock(key)
    result = subprocess.run(
        [sys.executable, "-c", text, str(server.port), key],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.stderr == ""
    where = f"{key!r} on 127.0.0.1:{server.port}"
    assert result.stdout == f"waiting for lock {where} was cancelled after 0\n"


def test_cancel_at_any_moment(server: ServerProcess, options: dict[str, Any], key: str) -> None:
    """It ends one acquire or none, and never another lock that uses the connection later."""
    ended = threading.Event()
    others = 0
    lost = Calls()

    def others_lock() -> None:
        nonlocal others
        while not ended.is_set():
            lock = sync_client.DistributedLock(f"{key}-other", on_lost=lost, **options)
            assert lock.acquire() is True
            assert lock.release() is True
            others += 1

    def cancel(lock: sync_client.DistributedLock, pause: float) -> None:
        time.sleep(pause)
        lock.cancel()

    failed: list[BaseException] = []

    def watched() -> None:
        try:
            others_lock()
        except BaseException as exc:
            failed.append(exc)

    bystander = threading.Thread(target=watched)
    bystander.start()
    cancelled = 0
    for number in range(300):
        lock = sync_client.DistributedLock(key, on_lost=lost, **options)
        canceller = threading.Thread(target=cancel, args=(lock, random.uniform(0, 0.0008)))
        canceller.start()
        try:
            if number % 3 == 0:
                assert lock.enqueue() == "acquired"
            else:
                assert lock.acquire() is True
            assert lock.release() is True
        except errors.AcquireCancelledError:
            cancelled += 1
            assert not lock.held
        canceller.join(PATIENCE)
        raw = server.connect()
        raw.lock(key, 3)
        raw.close()
    ended.set()
    bystander.join(PATIENCE)
    assert not failed
    assert others > 50
    assert cancelled > 10
    assert not lost.locks


# Cancelled tasks.


async def in_block(lock: client.DistributedLock) -> None:
    async with lock:
        assert lock.held
        await asyncio.sleep(random.choice((0, 0.0003)))


async def in_calls(lock: client.DistributedLock) -> None:
    assert await lock.acquire() is True
    try:
        assert await lock.renew() is True
    finally:
        await lock.release()


async def in_phases(lock: client.DistributedLock) -> None:
    try:
        await lock.enqueue()
        assert await lock.wait() is True
    finally:
        await lock.release()


async def in_time(lock: client.DistributedLock) -> None:
    try:
        async with asyncio.timeout(random.uniform(0, 0.001)):
            await in_block(lock)
    except TimeoutError:
        raise asyncio.CancelledError from None


@pytest.mark.parametrize("contended", [False, True])
async def test_a_task_cancelled_at_any_moment(
    server: ServerProcess, options: dict[str, Any], key: str, contended: bool
) -> None:
    raw = server.connect()

    def check() -> None:
        started = time.monotonic()
        token = raw.lock(key, 3)
        assert time.monotonic() - started < 1
        assert raw.ask("r", key, token) == "ok"

    cancelled = 0
    for number in range(400):
        function = (in_block, in_calls, in_phases, in_time)[number % 4]
        token = raw.lock(key, 3) if contended else ""
        task = asyncio.create_task(function(client.DistributedLock(key, **options)))
        if contended:
            await asyncio.sleep(random.uniform(0, 0.001))
            assert raw.ask("r", key, token) == "ok"
        await asyncio.sleep(random.uniform(0, 0.001))
        task.cancel()
        try:
            await soon(task)
        except asyncio.CancelledError:
            cancelled += 1
        await asyncio.to_thread(check)
        # The connections that are left have no answers waiting in them.
        lock = client.DistributedLock(key, **options)
        assert await lock.acquire() is True
        assert await lock.release() is True
    assert cancelled > 80


async def test_a_cancelled_wait_leaves_the_queue(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    async with client.DistributedLock(key, **options):
        for _ in range(3):
            waiting = asyncio.create_task(client.DistributedLock(key, **options).acquire())
            await until(lambda: waiters(server, key) == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: waiters(server, key) == 0)


async def test_a_cancelled_renewal(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    """The lock ends, and says so."""
    lost = Calls()
    lock = client.DistributedLock(key, on_lost=lost, **options)
    await lock.acquire()
    renewing = asyncio.create_task(lock.renew())
    await asyncio.sleep(0)
    renewing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await renewing
    assert not lock.held
    assert lost.locks == [lock]
    await until(lambda: is_free(server, key))


async def test_a_release_cancelled_while_a_renewal_is_under_way(
    server: ServerProcess, key: str
) -> None:
    proxy = Proxy(server.port)
    try:
        options = {"lease_ttl_s": 20, "renew_ratio": 0.02}
        lock = client.DistributedLock(key, servers=[("127.0.0.1", proxy.port)], **options)
        await lock.acquire()
        proxy.withhold_replies()
        await asyncio.sleep(0.6)  # the renewal is sent meanwhile
        releasing = asyncio.create_task(lock.release())
        await asyncio.sleep(0.05)
        assert not releasing.done()
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(releasing)
        assert not lock.held
        async with asyncio.timeout(1):
            await until(lambda: is_free(server, key))
    finally:
        proxy.close()


# Objects that nobody refers to any more.


@pytest.fixture
def _refcounts_only() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.usefixtures("_refcounts_only")
@pytest.mark.parametrize("held_for", [0, 0.2])
@pytest.mark.parametrize("on_lost", [None, print])
def test_a_forgotten_lock_is_freed(
    server: ServerProcess, options: dict[str, Any], key: str, held_for: float, on_lost: Any
) -> None:
    lock = sync_client.DistributedLock(key, on_lost=on_lost, **options)
    assert lock.acquire() is True
    time.sleep(held_for)
    del lock
    eventually(lambda: is_free(server, key))
    with sync_client.DistributedLock(key, **options):
        assert not is_free(server, key)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.usefixtures("_refcounts_only")
def test_a_forgotten_place_is_given_up(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    with sync_client.DistributedLock(key, **options):
        lock = sync_client.DistributedLock(key, **options)
        assert lock.enqueue() == "queued"
        del lock
        eventually(lambda: waiters(server, key) == 0)


@pytest.mark.usefixtures("_refcounts_only")
@pytest.mark.parametrize("on_lost", [None, print])
async def test_a_forgotten_asyncio_lock_is_freed(
    server: ServerProcess, options: dict[str, Any], key: str, on_lost: Any
) -> None:
    before = stats(server)["connections"]
    lock = client.DistributedLock(key, on_lost=on_lost, **options)
    assert await lock.acquire() is True
    other = client.DistributedLock(key, **options)
    assert await other.enqueue() == "queued"
    del other
    await until(lambda: waiters(server, key) == 0)
    del lock
    await until(lambda: is_free(server, key))
    await until(lambda: stats(server)["connections"] == before)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_lock_forgotten_in_a_cycle_is_freed(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    lock = sync_client.DistributedLock(key, **options)
    lock.itself = lock  # type: ignore[attr-defined]
    assert lock.acquire() is True
    del lock
    gc.collect()
    eventually(lambda: is_free(server, key))


# Many at once.


def test_threads_exclude_one_another(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    keys = [f"{key}-{number}" for number in range(3)]
    before = stats(server)["connections"]
    counters = dict.fromkeys(keys, 0)
    inside = dict.fromkeys(keys, 0)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        order = random.Random(seed)
        try:
            for _ in range(200):
                name = order.choice(keys)
                with sync_client.DistributedLock(name, acquire_timeout_s=60, **options) as lock:
                    inside[name] += 1
                    assert inside[name] == 1
                    value = counters[name]
                    time.sleep(0)  # lets another thread run
                    counters[name] = value + 1
                    assert lock.held
                    inside[name] -= 1
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert sum(counters.values()) == 8 * 200
    assert all(is_free(server, name) for name in keys)
    assert stats(server)["connections"] <= before + 8


def test_the_renewal_thread_leaves_released_connections_alone(
    options: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    readable = Renewer._readable

    def noted(renewer: Renewer, event: selectors.SelectorKey) -> None:
        if event.data is not None:
            seen.append(event)
        readable(renewer, event)

    lock = sync_client.DistributedLock(key, **options)
    with lock:
        time.sleep(0.15)  # it is being looked at now
    monkeypatch.setattr(Renewer, "_readable", noted)
    for _ in range(50):
        with lock:
            pass
    assert not seen


def test_one_thread_renews_a_hundred_locks(
    server: ServerProcess, options: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = Renewer._step

    def counted(renewer: Renewer, watch: Watch) -> object:
        nonlocal steps
        steps += 1
        return step(renewer, watch)

    monkeypatch.setattr(Renewer, "_step", counted)
    lost = Calls()
    locks = [
        sync_client.DistributedLock(
            f"{key}-{number}", lease_ttl_s=1, renew_ratio=0.2, on_lost=lost, **options
        )
        for number in range(100)
    ]
    for lock in locks:
        assert lock.acquire() is True
    end = time.monotonic() + 3
    while time.monotonic() < end:
        assert all(lock.held for lock in locks)
        time.sleep(0.05)
    named = [thread.name for thread in threading.enumerate()]
    assert named.count("dflockd-renewal") == 1
    assert "dflockd-rescue" not in named
    # Each has been renewed some 16 times, and the thread does not do more and more for it.
    assert 100 * 13 < steps < 100 * 22
    assert [lock.release() for lock in locks] == [True] * 100
    assert not lost.locks
