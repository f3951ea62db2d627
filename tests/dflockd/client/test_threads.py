"""How many threads the clients make: a small number, whatever happens to however many locks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from dflockd.wire import Renew
from tests.dflockd.client_support import Script
from tests.dflockd.raw_server import StartServer, eventually
from tests.dflockd.scripted_server import ScriptedCluster, Silence

FEW = 3
"""Threads of a process beyond its own first one: the client's, and what asyncio may need."""

# It counts all the time, from a thread of its own that is not counted.
COUNTING = """
import asyncio, logging, os, sys, threading, time
from dflockd import client, sync_client
from dflockd.client.process import current

logging.disable()
face, number = sys.argv[1], int(sys.argv[3])
where = sys.argv[2] if "//" in sys.argv[2] else [("127.0.0.1", int(sys.argv[2]))]
options = {"servers": where, "lease_ttl_s": int(sys.argv[4])}
lost = []
options["on_lost"] = lost.append
most = 0

def count():
    global most
    while True:
        most = max(most, len(os.listdir("/proc/self/task")) - 2)
        time.sleep(0.002)

threading.Thread(target=count, daemon=True).start()

def wait(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)

def is_under_way():
    # Until the client's thread says that it runs, each lock starts one, which ends at once.
    return current().reactor._thread

def report(locks, release=None):
    print("held", [lock.held for lock in locks].count(True), flush=True)
    for line in sys.stdin:
        if line == "look\\n":
            held = [lock.held for lock in locks].count(True)
            print("held", held, "lost", len(lost), most, flush=True)
        elif line == "wait\\n":
            wait(lambda: len(lost) == number)
            print("lost", len(lost), most, flush=True)
        elif line == "release\\n":
            release()
            print("released", most, flush=True)

def blocking():
    locks = [sync_client.DistributedLock(f"{face}-{n}", **options) for n in range(number)]
    for lock in locks:
        assert lock.acquire()
        wait(is_under_way)
    def release():
        for lock in locks[:20]:
            lock.release()
    report(locks, release)

async def not_blocking():
    locks = [client.DistributedLock(f"{face}-{n}", **options) for n in range(number)]
    for lock in locks:
        assert await lock.acquire()
        wait(is_under_way)
    loop = asyncio.get_running_loop()
    def release():
        async def all_of_them():
            for lock in locks[:20]:
                await lock.release()
        asyncio.run_coroutine_threadsafe(all_of_them(), loop).result()
    await asyncio.to_thread(report, locks, release)

if face == "sync":
    blocking()
else:
    asyncio.run(not_blocking())
"""

Counting = Callable[..., list[Script]]


@pytest.fixture
def counting() -> Iterator[Counting]:
    """Start a program with each of the two clients; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(where: object, number: int, lease: int) -> list[Script]:
            scripts = [Script(COUNTING, face, where, number, lease) for face in ("sync", "asyncio")]
            for script in scripts:
                stack.callback(script.close)
            for script in scripts:
                assert script.line() == f"held {number}"
            return scripts

        yield start


def all_are_lost(scripts: list[Script], number: int) -> None:
    """Check that the locks are lost with their leases, with few threads."""
    for script in scripts:
        script.say("wait")
    for script in scripts:
        lost, told, most = script.line().split()
        assert int(most) <= FEW, f"{most} threads with {number} locks"
        assert (lost, told) == ("lost", str(number))


def test_many_locks_and_a_dead_server(start: StartServer, counting: Counting) -> None:
    server = start()
    scripts = counting(server.port, 300, 4)
    server.end()
    all_are_lost(scripts, 300)


def test_many_releases_at_a_dead_server(start: StartServer, counting: Counting) -> None:
    """Each is tried again until its lease is over."""
    server = start()
    scripts = counting(server.port, 100, 30)
    server.end()
    for script in scripts:
        script.say("release")
    for script in scripts:
        _, most = script.line().split()
        assert int(most) <= FEW, f"{most} threads with 100 locks, 20 of them released"


def test_many_locks_and_a_restarted_server(
    start: StartServer, counting: Counting, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It remembers them, and all of them are renewed in time by the few."""
    flags = ("--state-dir", str(tmp_path_factory.mktemp("state")))
    server = start(*flags)
    scripts = counting(server.port, 300, 20)
    port = server.port
    server.end()
    start("--port", str(port), *flags).port  # noqa: B018
    for script in scripts:

        def are_held(script: Script = script) -> bool:
            script.say("look")
            _, held, _, lost, most = script.line().split()
            assert lost == "0"
            assert int(most) <= FEW, f"{most} threads with 300 locks"
            return held == "300"

        eventually(are_held)


def test_many_locks_in_a_cluster_whose_server_says_nothing(counting: Counting) -> None:
    """Of each of them somebody asks whether another server is in charge by now."""
    cluster = ScriptedCluster()
    for server in cluster.servers:
        server.script(Renew, Silence)
    try:
        all_are_lost(counting(cluster.seeds, 40, 4), 40)
    finally:
        cluster.stop()
