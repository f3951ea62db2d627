"""How many threads the clients make: a small number, whatever happens to however many locks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dflockd.wire import Renew
from tests.dflockd.client_support import Script
from tests.dflockd.raw_server import ServerProcess
from tests.dflockd.scripted_server import ScriptedCluster, Silence

FEW = 3
"""Threads of a process beyond its own first one: the client's, and what asyncio may need."""

# It counts all the time, from a thread of its own that is not counted.
COUNTING = """
import asyncio, logging, os, sys, threading, time
from dflockd import client, sync_client

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
    end = time.monotonic() + 12
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)

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
    def release():
        for lock in locks[:20]:
            lock.release()
    report(locks, release)

async def not_blocking():
    locks = [client.DistributedLock(f"{face}-{n}", **options) for n in range(number)]
    for lock in locks:
        assert await lock.acquire()
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

faces = pytest.mark.parametrize("face", ["sync", "asyncio"])


@faces
def test_many_locks_and_a_dead_server(start: Callable[..., ServerProcess], face: str) -> None:
    server = start()
    script = Script(COUNTING, face, server.port, 300, 3)
    try:
        assert script.line() == "held 300"
        server.end()
        script.say("wait")
        lost, number, most = script.line().split()
        assert int(most) <= FEW, f"{most} threads with 300 locks"
        assert (lost, number) == ("lost", "300")
    finally:
        script.close()


@faces
def test_many_releases_at_a_dead_server(start: Callable[..., ServerProcess], face: str) -> None:
    """Each is tried again until its lease is over."""
    server = start()
    script = Script(COUNTING, face, server.port, 100, 30)
    try:
        assert script.line() == "held 100"
        server.end()
        script.say("release")
        _, most = script.line().split()
        assert int(most) <= FEW, f"{most} threads with 100 locks, 20 of them released"
    finally:
        script.close()


@faces
def test_many_locks_and_a_restarted_server(
    start: Callable[..., ServerProcess], face: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It remembers them, and all of them are renewed in time by the few."""
    flags = ("--state-dir", str(tmp_path_factory.mktemp("state")))
    server = start(*flags)
    script = Script(COUNTING, face, server.port, 300, 20)
    try:
        assert script.line() == "held 300"
        port = server.port
        server.end()
        start("--port", str(port), *flags).port  # noqa: B018
        for _ in range(200):
            script.say("look")
            _, held, _, lost, most = script.line().split()
            assert lost == "0"
            if held == "300":
                break
            time.sleep(0.05)
        assert held == "300"
        assert int(most) <= FEW, f"{most} threads with 300 locks"
    finally:
        script.close()


@faces
def test_many_locks_in_a_cluster_whose_server_says_nothing(face: str) -> None:
    """Of each of them somebody asks whether another server is in charge by now."""
    cluster = ScriptedCluster()
    for server in cluster.servers:
        server.script(Renew, Silence)
    script = Script(COUNTING, face, cluster.seeds, 40, 4)
    try:
        assert script.line() == "held 40"
        script.say("wait")
        lost, number, most = script.line().split()
        assert int(most) <= FEW, f"{most} threads with 40 locks"
        assert (lost, number) == ("lost", "40")
    finally:
        script.close()
        cluster.stop()
