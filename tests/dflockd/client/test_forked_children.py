"""Forks: locks are the parent's, connections are not shared, and the child can lock on its own."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests import forkserver
from tests.dflockd.client_support import Script, command, is_free, stats, wait_renewed, waiters
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

# The parent holds "held" and has a place in the queue of "queued"; a thread or task of it waits for
# "awaited", and there are idle connections. On SIGUSR1 it releases what it holds. The child
# evaluates what it is told.
FORKING = """
import asyncio, gc, os, signal, sys, threading, time
if sys.argv[1] == "sync":
    from dflockd import sync_client
else:
    from dflockd import client  # alone: its forks must be noticed, too

options = {"servers": [("127.0.0.1", int(sys.argv[2]))], "lease_ttl_s": 600, "renew_ratio": 0.001}
own = None

def child_goes_on(names):
    from dflockd import sync_client
    names["new"] = lambda key, seconds=10: sync_client.DistributedLock(key, seconds, **options)
    for line in sys.stdin:
        try:
            exec("answer = " + line, names)
            print(names["answer"], flush=True)
        except BaseException as exc:
            print(repr(exc), flush=True)
    os._exit(0)

def blocking():
    # Blocked in every thread and waited for: a handler could come before the wait begins.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    lock = sync_client.DistributedLock("held", **options)
    idle = [sync_client.DistributedLock(f"idle-{n}", **options) for n in range(3)]
    place = sync_client.DistributedLock("queued", **options)
    awaited = sync_client.DistributedLock("awaited", None, **options)
    for each in (lock, *idle):
        each.acquire()
    for each in idle:
        each.release()
    place.enqueue()
    threading.Thread(target=awaited.acquire, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    child = os.fork()
    if child == 0:
        names = {"lock": lock, "place": place}
        lock = place = idle = each = None
        child_goes_on(names)
    print(child, flush=True)
    while True:
        signal.sigwait({signal.SIGUSR1})
        print("parent", lock.held, lock.release(), flush=True)

async def not_blocking():
    lock = client.DistributedLock("held", **options)
    idle = [client.DistributedLock(f"idle-{n}", **options) for n in range(3)]
    place = client.DistributedLock("queued", **options)
    awaited = client.DistributedLock("awaited", None, **options)
    for each in (lock, *idle):
        await each.acquire()
    for each in idle:
        await each.release()
    await place.enqueue()
    waiting = asyncio.create_task(awaited.acquire())
    await asyncio.sleep(0)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    child = os.fork()
    if child == 0:
        names = {"lock": lock, "place": place}
        lock = place = idle = each = None
        child_goes_on(names)
    print(child, flush=True)
    await told.wait()
    print("parent", lock.held, await lock.release(), flush=True)
    await waiting

if sys.argv[1] == "sync":
    blocking()
else:
    asyncio.run(not_blocking())
"""


class Forked:
    """A parent and its child, who outlives it."""

    def __init__(self, client: str, server: ServerProcess) -> None:
        self.script = Script(FORKING, client, server.port)
        assert self.script.line() == "ready"
        eventually(lambda: waiters(server, "queued") == waiters(server, "awaited") == 1)
        self.script.say()
        self.child = int(self.script.line())

    def in_child(self, expression: str) -> str:
        self.script.say(expression)
        return self.script.line()

    def release_in_parent(self) -> str:
        self.script.process.send_signal(signal.SIGUSR1)
        return self.script.line()

    def kill_parent(self) -> None:
        self.script.process.kill()
        self.script.process.wait(PATIENCE)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    raw = server.connect()
    for key in ("queued", "awaited"):
        raw.lock(key, "0 600")
    yield server
    server.end()


@pytest.fixture(params=["sync", "asyncio"])
def forked(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Forked]:
    forked = Forked(request.param, server)
    yield forked
    forked.script.close()  # the child ends with its input


def test_the_child_does_not_hold(forked: Forked, server: ServerProcess) -> None:
    assert forked.in_child("lock.held") == "False"
    assert forked.in_child("(lock.token, lock.lease)") == "(None, 0)"
    assert forked.in_child("lock").endswith(", free>")
    if "asyncio" not in forked.script.process.args[3]:  # type: ignore[index]
        assert forked.in_child("lock.renew()") == "False"
        assert forked.in_child("lock.release()") == "False"
        assert "NotEnqueuedError" in forked.in_child("place.wait()")
        assert "NotEnqueuedError" in forked.in_child("place.release() or place.wait()")
    assert not is_free(server, "held")
    wait_renewed(server, "held")  # by the parent
    assert not is_free(server, "held")
    assert waiters(server, "queued") == waiters(server, "awaited") == 1
    assert forked.release_in_parent() == "parent True True"
    assert is_free(server, "held")


def test_the_parent_ends_and_the_child_lives(forked: Forked, server: ServerProcess) -> None:
    """No copy of a connection is left to keep the parent's locks."""
    assert stats(server)["connections"] >= 5
    forked.kill_parent()
    eventually(lambda: is_free(server, "held"))  # sooner than any lease ends
    eventually(lambda: waiters(server, "queued") == waiters(server, "awaited") == 0)
    eventually(lambda: stats(server)["connections"] == 1)  # the one of this test
    assert forked.in_child("1 + 1") == "2", "the child lives"


def test_the_child_locks_on_its_own(forked: Forked, server: ServerProcess) -> None:
    assert forked.in_child("[(o := new('own')).acquire(), o.held]") == "[True, True]"
    assert not is_free(server, "own")
    assert forked.in_child("new('held', 0).acquire()") == "False"
    # What the child has of the parent's objects goes away, and takes nothing of the child's along.
    assert forked.in_child("globals().update(lock=None, place=None)") == "None"
    assert forked.in_child("__import__('gc').collect() >= 0") == "True"
    wait_renewed(server, "own")  # by the child
    assert forked.in_child("[o.held, o.renew(), o.release()]") == "[True, True, True]"
    assert forked.in_child("[o.acquire() and o.release() for _ in range(20)].count(True)") == "20"
    assert is_free(server, "own")
    assert not is_free(server, "held")
    assert forked.release_in_parent() == "parent True True"
    assert forked.in_child("[(h := new('held')).acquire(), h.held]") == "[True, True]"
    os.kill(forked.child, signal.SIGKILL)
    eventually(lambda: is_free(server, "held"))


def test_the_end_of_the_child_costs_the_parent_nothing(
    forked: Forked, server: ServerProcess
) -> None:
    assert forked.in_child("[(o := new('own')).acquire(), o.held]") == "[True, True]"
    os.kill(forked.child, signal.SIGKILL)
    eventually(lambda: is_free(server, "own"))
    time.sleep(0.2)
    assert not is_free(server, "held")
    assert waiters(server, "queued") == waiters(server, "awaited") == 1
    assert forked.release_in_parent() == "parent True True"


def test_the_child_uses_the_objects_of_the_parent(server: ServerProcess) -> None:
    forked = Forked("sync", server)
    try:
        assert forked.release_in_parent() == "parent True True"
        assert forked.in_child("[lock.acquire(), lock.held]") == "[True, True]"
        assert not is_free(server, "held")
        assert forked.in_child("lock.release()") == "True"
        assert forked.in_child("place.enqueue()") == "queued"
        assert waiters(server, "queued") == 2
    finally:
        forked.script.close()


FORKING_WITH_THREADS = """
import os, sys, threading, time, warnings
from dflockd.sync_client import DistributedLock

warnings.simplefilter("ignore")
options = {"servers": [("127.0.0.1", int(sys.argv[1]))], "acquire_timeout_s": 30}
ended = threading.Event()
rounds = 0
failed = []

def work(number):
    global rounds
    try:
        while not ended.is_set():
            with DistributedLock(f"key-{number % 2}", **options) as lock:
                assert lock.held
            rounds += 1
    except BaseException as exc:
        failed.append(exc)
        raise

threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
children = 0
lost = []
with DistributedLock("main", lease_ttl_s=1, on_lost=lost.append, **options) as held:
    for n in range(40):
        child = os.fork()
        if child == 0:
            try:
                assert not held.held
                for m in range(3):
                    with DistributedLock(f"key-{m % 2}", **options) as lock:
                        assert lock.held
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        children += status == 0
    assert held.held and not lost
    ended.set()
for thread in threads:
    thread.join()
print(children, rounds > 40, failed)
"""


def test_forks_beside_busy_threads(server: ServerProcess) -> None:
    """Whatever the other threads have in their hands at the fork, the child gets on."""
    result = forkserver.run(command(FORKING_WITH_THREADS, server.port), timeout=60)
    assert result.stderr == ""
    assert re.fullmatch(r"40 True \[\]\n", result.stdout)
    eventually(lambda: stats(server)["connections"] == 1)
