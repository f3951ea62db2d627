"""Whatever interrupts a client, at whatever moment, nothing is left behind.

A signal's exception, `cancel`, a cancelled task, a forgotten object; and many threads at once.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from dflockd import client, errors, sync_client
from dflockd.client import connection, process, reactor
from dflockd.client.reactor import Reactor, Task
from tests.dflockd.client.interruptions import Cancelled, Interrupted
from tests.dflockd.client_support import (
    Calls,
    Proxy,
    is_free,
    renewed,
    soon,
    stats,
    until,
    wait_renewed,
    waiters,
)
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually, granted

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.end()


@pytest.fixture
def options(server: ServerProcess) -> dict[str, Any]:
    return {"servers": [("127.0.0.1", server.port)], "lease_ttl_s": 600}


# A signal's exception.

INTERRUPTED = """
import logging, random, signal, socket, sys, threading, time
from dflockd.sync_client import DistributedLock

port, rounds = int(sys.argv[1]), int(sys.argv[2])
options = {"servers": [("127.0.0.1", port)], "acquire_timeout_s": 60, "lease_ttl_s": 600}
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

def ignored(what):
    # One that comes just where an object is deleted interrupts nothing.
    if what.exc_type is not Interrupt:
        sys.__unraisablehook__(what)

sys.unraisablehook = ignored

class Raw:
    def __init__(self):
        self.sock = socket.create_connection(("127.0.0.1", port), 60)
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
        token = rival.ask("l", 30)[1]
        timer = threading.Timer(random.uniform(0, 0.001), rival.ask, ("r", token))
        timer.start()
        interrupted += interrupt(function, 0.0025)
        timer.join()
    else:
        interrupted += interrupt(function, 0.001)
    reply = raw.ask("l", 30)  # no lease ends so soon
    assert reply[0] == "ok", f"{where}: leaked"
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


class Scene:
    """A lock with what stands around it, to be interrupted in what it does.

    The methods that begin with ``do_`` do it; each is the same with either client.
    """

    def __init__(self, server: ServerProcess, key: str, lock: Any, rival: Any) -> None:
        self.server = server
        self.key = key
        self.lock = lock
        self.rival = rival
        self.token: str | None = None
        """The rival's."""
        self.detached: str | None = None
        self.is_taken = False
        """Whether the lock was taken from its holder, or will be, who may not know yet."""

    def hold(self) -> None:
        """Let the rival have the lock."""
        self.token = self.rival.lock(self.key, "0 600")

    def unhold(self) -> None:
        token, self.token = self.token, None
        if token is not None:
            assert self.rival.ask("r", self.key, token) == "ok"


def block(scene: Scene) -> None:
    with scene.lock:
        pass


def anew(scene: Scene) -> None:
    """On a new connection to a server that has a name."""
    process.close_idle_connections()
    with scene.lock:
        pass


def calls(scene: Scene) -> None:
    assert scene.lock.acquire() is True
    assert scene.lock.release() is True


def phases(scene: Scene) -> None:
    assert scene.lock.enqueue() == "acquired"
    assert scene.lock.wait() is True
    assert scene.lock.release() is True


def queue(scene: Scene) -> None:
    assert scene.lock.enqueue() == "queued"
    scene.unhold()
    assert scene.lock.wait() is True
    assert scene.lock.release() is True


def leaving(scene: Scene) -> None:
    assert scene.lock.enqueue() == "queued"
    assert scene.lock.release() is False


def waiting_in_vain(scene: Scene) -> None:
    assert scene.lock.enqueue() == "queued"
    assert scene.lock.wait(0) is False


def in_vain(scene: Scene) -> None:
    assert scene.lock.acquire() is False


def conflict(scene: Scene) -> None:
    """The same run holds it: that is an answer in order, on a connection that stays."""
    with pytest.raises(errors.OwnerConflictError):
        scene.lock.acquire()
    with pytest.raises(errors.OwnerConflictError):
        scene.lock.enqueue()


def renewal_(scene: Scene) -> None:
    assert scene.lock.acquire() is True
    assert scene.lock.renew() is True
    scene.lock.check()
    assert scene.lock.release() is True


def gone(scene: Scene) -> None:
    assert scene.lock.acquire() is True
    assert scene.rival.ask("r", scene.key, scene.lock.token) == "ok"
    scene.is_taken = True
    assert scene.lock.renew() is False
    assert scene.lock.release() is False


def regained(scene: Scene) -> None:
    assert scene.lock.acquire() is True
    assert scene.rival.ask("r", scene.key, scene.lock.token) == "ok"
    scene.is_taken = True
    assert scene.lock.renew() is False
    scene.is_taken = False
    assert scene.lock.acquire() is True
    assert scene.lock.release() is True


def detaching(scene: Scene) -> None:
    assert scene.lock.acquire() is True
    scene.detached = scene.lock.detach()
    assert scene.detached is not None


def adopting(scene: Scene) -> None:
    token, scene.token = scene.token, None
    scene.detached = token
    assert scene.lock.adopt(token) is True
    scene.detached = None
    assert scene.lock.release() is True


def broken(scene: Scene) -> None:
    """Release where the connection has just broken."""
    assert scene.lock.acquire() is True
    scene.is_taken = True
    scene.lock._session.lease.link._sock.shutdown(socket.SHUT_RDWR)
    scene.lock.release()


# The others run with the soak tests: each instruction takes some milliseconds.
QUICK = {"block", "calls", "queue", "conflict", "detaching"}

SCENES = {
    each.__name__: each
    for each in (
        *(block, anew, calls, phases, queue, leaving, waiting_in_vain, in_vain, conflict),
        *(renewal_, gone, regained, detaching, adopting, broken),
    )
}
BUSY = {"queue", "leaving", "waiting_in_vain", "in_vain", "conflict", "adopting"}
"""Where somebody else holds the lock at first."""


FREED = 30
"""Seconds to wait for what is free at once; no lease ends so soon."""


def told(exc: BaseException) -> str:
    return "".join(traceback.format_exception(exc))


def functions_in(exc: BaseException) -> list[str]:
    """Return which of the client's functions were interrupted."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return [code.co_name for code in frames if "dflockd/client" in code.co_filename]


NOT_BEGUN = (
    *([], ["__exit__"], ["__exit__", "release"], ["release"], ["renew"], ["detach"], ["wait"]),
    *(["check"], ["token"], ["held"], ["__aexit__"], ["__aexit__", "release"]),
)
"""Where nothing was done yet of what was to be done."""


def may_stand(functions: list[str]) -> bool:
    """Whether what was there before the interruption may be there still."""
    return (
        functions in NOT_BEGUN
        or functions[0] in ("renew", "check", "token")
        # It was held before.
        or (functions[0] == "wait" and "_run" not in functions)
    )


def check_after(scene: Scene, exc: BaseException) -> None:
    """Nothing is left behind, or the object says truly what is, and both can be used again."""
    lock, server, key = scene.lock, scene.server, scene.key
    functions = functions_in(exc)
    state = lock.state
    if state in ("held", "queued", "asking", "doubtful"):
        assert state in ("held", "queued"), told(exc)
        assert may_stand(functions), told(exc)
        if state == "queued" and scene.token is not None:
            assert waiters(server, key) == 1
        else:
            assert not is_free(server, key) or scene.is_taken
        assert lock.release() is (state == "held") or scene.is_taken, told(exc)
    scene.unhold()
    detached, scene.detached = scene.detached, None
    if detached is not None:
        # Whoever has the token can end it.
        scene.rival.ask("r", key, detached)
    reply = scene.rival.ask("l", key, FREED)
    assert reply != "timeout", told(exc)
    assert scene.rival.ask("r", key, granted(reply)) == "ok"
    assert not lock.held
    assert lock.acquire() is True, told(exc)
    assert lock.release() is True, told(exc)
    # The connections that are left have no answers waiting in them.
    for _ in range(2):
        with sync_client.DistributedLock(key, FREED, servers=[("127.0.0.1", server.port)]):
            pass
    assert lock.state == "free"
    # Of this thread: the reactor may be about to connect for somebody who has gone.
    assert threading.get_ident() not in connection._making


def connections(server: ServerProcess) -> int:
    """Return how many stay when nobody uses them."""
    process.close_idle_connections()
    process.current().reactor.call(int)  # it forgets what is over when it wakes
    gc.collect()
    return int(stats(server)["connections"])


# A connection on which nothing stands may be left to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "how",
    [how if how in QUICK else pytest.param(how, marks=pytest.mark.soak) for how in SCENES],
)
def test_a_signal_at_every_instruction(
    server: ServerProcess, options: dict[str, Any], key: str, how: str
) -> None:
    """The lock is free though the object and the traceback are still there."""
    before = connections(server)
    rival = server.connect()
    lost = Calls()
    if how == "anew":
        options["servers"] = [("localhost", server.port)]
    if how in ("in_vain", "waiting_in_vain"):
        options |= {"acquire_timeout_s": 0}
    if how == "conflict":
        options |= {"owner": ("run", 0), "label": "me"}
        assert rival.ask("owner", "_", "run 0") == "ok"
    for number in itertools.count(1):
        lost.locks.clear()
        lock = sync_client.DistributedLock(key, on_lost=lost, **options)
        scene = Scene(server, key, lock, rival)
        if how in BUSY:
            scene.hold()
        with Interrupted(number) as interrupted:
            exc = interrupted.call(lambda scene=scene: SCENES[how](scene))  # type: ignore[misc]
        if exc is None:
            # It has ended before; or what was interrupted is nobody's, a callback of a weak reference.
            scene.unhold()
            if scene.detached is not None:
                assert rival.ask("r", key, scene.detached) == "ok"
            if interrupted.count < number:
                break
            continue
        state = lock.state
        if how not in ("gone", "regained", "renewal_"):
            assert not lost.locks
        elif state == "lost" and "lose" not in functions_in(exc):
            assert lost.locks == [lock], told(exc)
        lock.acquire_timeout_s = 2
        check_after(scene, exc)
    assert number > 100
    rival.close()
    del lock, scene, exc
    eventually(lambda: connections(server) <= before)


STARTING = """
import _thread, sys, threading, time
from dflockd.sync_client import DistributedLock

options = {"servers": [("127.0.0.1", int(sys.argv[1]))], "lease_ttl_s": 600, "renew_ratio": 0.001}
start = _thread.start_new_thread

def interrupted(*args):
    _thread.start_new_thread = start
    if sys.argv[2] == "after":
        start(*args)
    raise KeyboardInterrupt

_thread.start_new_thread = interrupted
lock = DistributedLock("starting-" + sys.argv[2], **options)
try:
    lock.acquire()
except KeyboardInterrupt:
    print(lock.held)
with lock:
    sys.stdin.readline()
    print(lock.held, _thread._count())  # without the main thread
"""


async def test_a_signal_while_the_renewal_thread_starts(server: ServerProcess) -> None:
    """The next lock starts it then, and there is still one."""

    async def check(when: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STARTING, str(server.port), when),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        await until(lambda: not is_free(server, f"starting-{when}"))
        await renewed(server, f"starting-{when}")
        out, err = await soon(process.communicate(b"\n"))
        assert err == b""
        assert out == b"False\nTrue 1\n"

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
        raw.lock(key, FREED)
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
        token = raw.lock(key, FREED)
        assert raw.ask("r", key, token) == "ok"

    cancelled = 0
    for number in range(400):
        function = (in_block, in_calls, in_phases, in_time)[number % 4]
        token = raw.lock(key, FREED) if contended else ""
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


async def async_block(scene: Scene) -> None:
    async with scene.lock:
        pass


async def async_phases(scene: Scene) -> None:
    assert await scene.lock.enqueue() == "acquired"
    assert await scene.lock.wait() is True
    assert await scene.lock.release() is True


async def async_queue(scene: Scene) -> None:
    assert await scene.lock.enqueue() == "queued"
    scene.unhold()
    assert await scene.lock.wait() is True
    assert await scene.lock.release() is True


async def async_waiting_in_vain(scene: Scene) -> None:
    assert await scene.lock.enqueue() == "queued"
    assert await scene.lock.wait(0.1) is False


async def async_in_vain(scene: Scene) -> None:
    scene.lock.acquire_timeout_s = 0.1
    assert await scene.lock.acquire() is False


async def async_renewal(scene: Scene) -> None:
    assert await scene.lock.acquire() is True
    assert await scene.lock.renew() is True
    await scene.lock.check()
    assert await scene.lock.release() is True


async def async_detaching(scene: Scene) -> None:
    assert await scene.lock.acquire() is True
    scene.detached = await scene.lock.detach()


async def async_adopting(scene: Scene) -> None:
    scene.detached, scene.token = scene.token, None
    assert scene.detached is not None
    assert await scene.lock.adopt(scene.detached) is True
    scene.detached = None
    assert await scene.lock.release() is True


async def async_broken(scene: Scene) -> None:
    assert await scene.lock.acquire() is True
    scene.is_taken = True
    scene.lock._session.lease.link._sock.shutdown(socket.SHUT_RDWR)
    await scene.lock.release()


ASYNC_SCENES = {
    each.__name__.removeprefix("async_"): each
    for each in (
        *(async_block, async_phases, async_queue, async_waiting_in_vain, async_in_vain),
        *(async_renewal, async_detaching, async_adopting, async_broken),
    )
}


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("localhost", marks=pytest.mark.soak)])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("how", ASYNC_SCENES)
async def test_a_task_cancelled_wherever_it_waits(
    server: ServerProcess, key: str, how: str, is_late: bool, host: str
) -> None:
    """Each connection is new; the name of one is to be looked up."""
    before = connections(server)
    rival = server.connect()
    lost = Calls()
    for number in itertools.count(1):
        lock = client.DistributedLock(key, servers=[(host, server.port)], on_lost=lost)
        scene = Scene(server, key, lock, rival)
        if how in BUSY:
            scene.hold()
        process.close_idle_connections()
        cancelled = Cancelled(ASYNC_SCENES[how](scene), number, is_late=is_late)
        try:
            await soon(cancelled)
        except asyncio.CancelledError as exc:
            await asyncio.sleep(0)  # who is told of a loss is told on the loop
            assert lock.state == "lost" if lost.locks else lock.state == "free"
            assert len(lost.locks) == (lock.state == "lost")
            lost.locks.clear()
            # Another client, with which it is easier to see what is there.
            other = sync_client.DistributedLock(key, 2, servers=[("127.0.0.1", server.port)])
            scene.lock = other
            check_after(scene, exc)
            lock.acquire_timeout_s = 2
            assert await lock.acquire() is True
            assert await lock.release() is True
        else:
            scene.unhold()
            if scene.detached is not None:
                assert rival.ask("r", key, scene.detached) == "ok"
            if cancelled.count < number:
                break
    assert number > 2
    rival.close()
    await until(lambda: connections(server) <= before)


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
    assert lock.state == "lost"
    await lost.first()
    assert lost.locks == [lock]
    await until(lambda: is_free(server, key))


async def test_a_release_cancelled_while_a_renewal_is_under_way(
    server: ServerProcess, key: str
) -> None:
    proxy = Proxy(server.port)
    try:
        options = {"lease_ttl_s": 600, "renew_ratio": 0.001}
        lock = client.DistributedLock(key, servers=[("127.0.0.1", proxy.port)], **options)
        await lock.acquire()
        proxy.withhold_replies()
        await renewed(server, key)
        releasing = asyncio.create_task(lock.release())
        await asyncio.sleep(0.05)
        assert not releasing.done()
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(releasing)
        assert not lock.held
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


def test_the_reactor_leaves_released_connections_alone(
    options: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not hear what they have to say, though it knows their descriptor still."""
    seen = []
    select_green = reactor.select_green

    def noted(*args: Any) -> Any:
        found = select_green(*args)
        seen.extend(each.data for each, _ in found if each.data and not each.data.ended)
        return found

    lock = sync_client.DistributedLock(key, **options)
    with lock:
        time.sleep(0.35)  # it is being looked at now
    monkeypatch.setattr(reactor, "select_green", noted)
    for _ in range(50):
        with lock:
            pass
    assert not seen


def test_one_thread_renews_a_hundred_locks(
    server: ServerProcess, options: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = Reactor._step

    def counted(self: Reactor, task: Task, outcome: object) -> None:
        nonlocal steps
        steps += 1
        step(self, task, outcome)

    monkeypatch.setattr(Reactor, "_step", counted)
    threads = threading.active_count()
    lost = Calls()
    began = time.monotonic()
    locks = [
        sync_client.DistributedLock(
            f"{key}-{number}", renew_ratio=0.2 / 600, on_lost=lost, **options
        )
        for number in range(100)
    ]
    for lock in locks:
        assert lock.acquire() is True
    for lock in locks[:1] + locks[-1:]:
        wait_renewed(server, lock.key, 7)
    assert all(lock.held for lock in locks)
    assert threading.active_count() <= threads + 1
    # Each is renewed five times a second, or a little more often, in two steps each time: it is due,
    # and it is answered. The thread does not do more and more for it.
    assert 2 * 14 < steps < 200 * (2 + (time.monotonic() - began) / 0.18)
    assert [lock.release() for lock in locks] == [True] * 100
    assert not lost.locks
