"""Whatever a signal interrupts, at whatever moment, nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dflockd import sync_client
from dflockd.client import process
from tests import forkserver
from tests.dflockd.client.interruptions import Interrupted, Reached
from tests.dflockd.client.scenes import (
    BUSY,
    Scene,
    adopting,
    check_after,
    conflict,
    connections,
    functions_in,
    in_vain,
    leaving,
    queue,
    waiting_in_vain,
)
from tests.dflockd.client_support import Calls, command, is_free, renewed, soon, until
from tests.dflockd.raw_server import ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")

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
    rounds = 800
    result = forkserver.run(command(INTERRUPTED, server.port, rounds), timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    # How many calls are over before their signal comes is up to the machine.
    assert int(result.stdout.split()[-1]) > rounds / 20, "too few were hit"


def test_a_handler_may_raise_what_a_broken_connection_raises(server: ServerProcess) -> None:
    """As one does that bounds a block of code: the wait ends with that, and is not begun anew."""

    def too_late(*_: object) -> None:
        raise TimeoutError("the handler's")

    def waits() -> bool:
        return sys._current_frames()[this].f_code.co_name in ("_hear", "_ready")

    def interrupt() -> None:
        # Where it still sends, an error of the system can only be that of the connection.
        eventually(lambda: bool(held.inspect()["waiters"]) and waits())
        os.kill(os.getpid(), signal.SIGUSR1)

    this = threading.get_ident()
    options: Any = {"servers": [("127.0.0.1", server.port)]}
    with ExitStack() as stack:  # leaves connections that are asked on at once, one for each below
        for name in ("holds", "waits", "looks"):
            stack.enter_context(sync_client.DistributedLock(name, 0, 600, **options))
    before = signal.signal(signal.SIGUSR1, too_late)
    try:
        with sync_client.DistributedLock("key", 0, 600, **options) as held:
            threading.Thread(target=interrupt).start()
            lock = sync_client.DistributedLock("key", 10, 600, **options)
            with pytest.raises(TimeoutError, match="the handler's"):
                lock.acquire()
        assert lock.state == "free"
    finally:
        signal.signal(signal.SIGUSR1, before)


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


@pytest.fixture
def _no_log() -> Iterator[None]:
    """An exception in the middle of `logging` leaves the lock of a handler to this thread for good."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


# A connection on which nothing stands may be left to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_no_log")
@pytest.mark.parametrize(
    "how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.soak) for how in SCENES]
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

    def new_scene() -> Scene:
        lost.locks.clear()
        lock = sync_client.DistributedLock(key, on_lost=lost, **options)
        scene = Scene(server, key, lock, rival, " owner=run attempt=0" if how == "conflict" else "")
        if how in BUSY:
            scene.hold()
        return scene

    def clear_up(scene: Scene) -> None:
        scene.unhold()
        if scene.detached is not None:
            assert rival.ask("r", key, scene.detached) == "ok"

    for _ in range(2):  # after the first time, what is made once is there
        scene, reached = new_scene(), Reached()
        reached.call(lambda scene=scene: SCENES[how](scene))  # type: ignore[misc]
        clear_up(scene)
        with sync_client.DistributedLock(key, servers=options["servers"]):
            pass  # an idle connection is there, as after each of the others
    came = 0
    for point in reached.points:
        scene = new_scene()
        with Interrupted(point) as interrupted:
            exc = interrupted.call(lambda scene=scene: SCENES[how](scene))  # type: ignore[misc]
        came += interrupted.has_come
        if exc is None:
            # It has ended before; or what was interrupted is nobody's, a callback of a weak reference.
            clear_up(scene)
            continue
        lock, state = scene.lock, scene.lock.state
        if how not in ("gone", "regained", "renewal_"):
            assert not lost.locks
        elif state == "lost" and "lose" not in functions_in(exc):
            eventually(lambda lock=lock: lost.locks == [lock])  # type: ignore[misc]
        lock.acquire_timeout_s = 2
        check_after(scene, exc)
    assert came > 100
    # Not each call goes exactly the same way: one waits where another finds its answer.
    assert came > 0.6 * len(reached.points)
    rival.close()
    del lock, scene, exc, new_scene, clear_up
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
    print(lock.held, flush=True)
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
        assert process.stdout is not None
        assert await soon(process.stdout.readline()) == b"False\n"  # the first grant is given back
        await until(lambda: not is_free(server, f"starting-{when}"))
        await renewed(server, f"starting-{when}")
        out, err = await soon(process.communicate(b"\n"))
        assert err == b""
        assert out == b"True 1\n"

    await asyncio.gather(check("before"), check("after"))
