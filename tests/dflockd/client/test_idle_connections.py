"""Connections that no lock uses are few, and not for long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dflockd.client_support import Client, make_certificate, until
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer
from tests.dflockd.scripted_server import ScriptedServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")

MOST_IDLE = 64
"""Idle connections of a process, wherever they go."""
MOST_TO_ONE = 16
"""Idle connections to one server."""
OLDEST = 60.0
"""Seconds after which an idle connection is closed; it may be looked at a little later."""

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    with contextlib.ExitStack() as stack:
        servers = [ScriptedServer() for _ in range(8)]
        for server in servers:
            stack.callback(server.stop)
        yield servers


def connected(servers: list[ScriptedServer]) -> int:
    return sum(server.accepted - len(server.ended) for server in servers)


async def test_they_are_capped_in_all(client: Client, servers: list[ScriptedServer]) -> None:
    locks = [client.lock(f"key-{n}", server) for server in servers for n in range(MOST_TO_ONE)]
    await asyncio.gather(*(lock.acquire() for lock in locks))
    assert connected(servers) == len(locks) == 128
    await asyncio.gather(*(lock.release() for lock in locks))
    await until(lambda: connected(servers) <= MOST_IDLE)
    # They are of use: what is asked next needs no new one.
    accepted = [server.accepted for server in servers]
    again = [client.lock("key", server) for server in servers]
    for lock in again:
        assert await lock.acquire() is True
    for lock in again:
        assert await lock.release() is True
    anew = sum(server.accepted for server in servers) - sum(accepted)
    assert anew < len(servers), "none was left where it is used"


async def test_those_that_are_used_are_not_counted(
    client: Client, servers: list[ScriptedServer]
) -> None:
    locks = [client.lock(f"key-{n}", server) for server in servers for n in range(MOST_TO_ONE)]
    await asyncio.gather(*(lock.acquire() for lock in locks))
    assert all(lock.held for lock in locks)
    assert connected(servers) == len(locks) > MOST_IDLE
    assert await asyncio.gather(*(lock.release() for lock in locks)) == [True] * len(locks)


@pytest.mark.soak
async def test_they_are_not_kept_for_long(client: Client, servers: list[ScriptedServer]) -> None:
    idle, used = servers[:2]
    locks = [client.lock(f"key-{n}", idle) for n in range(5)]
    await asyncio.gather(*(lock.acquire() for lock in locks))
    await asyncio.gather(*(lock.release() for lock in locks))
    released = time.monotonic()
    held = client.lock("held", idle)  # that one is not idle
    assert await held.acquire() is True
    while len(idle.ended) < 4:
        assert time.monotonic() < released + OLDEST * 1.5, f"{idle.accepted} of them stay"
        async with client.lock("key", used):
            pass
        await asyncio.sleep(0.5)
    assert time.monotonic() > released + OLDEST / 4, "they are of no use like this"
    assert held.held
    assert used.accepted == 1, "one that is used again and again is not old"
    assert await held.release() is True


# With an `ssl_context` for every call, each of them has connections of its own.


@pytest.fixture
def tls(start: StartServer, tmp_path: Path) -> tuple[ServerProcess, Path]:
    certificate, private = make_certificate(tmp_path)
    server = start("--tls-cert", str(certificate), "--tls-key", str(private))
    assert server.port
    return server, certificate


CALLS = 60

PROGRAM = """
import asyncio, gc, os, ssl, sys, time, weakref
face, port, cafile, calls = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
contexts = weakref.WeakSet()

def lock():
    from dflockd import client, sync_client
    module = client if face == "asyncio" else sync_client
    context = ssl.create_default_context(cafile=cafile)
    contexts.add(context)
    return module.DistributedLock("key", servers=[("127.0.0.1", port)], ssl_context=context)

def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))

def blocking():
    for _ in range(calls):
        with lock():
            pass

async def on_the_loop():
    for _ in range(calls):
        async with lock():
            pass
    await asyncio.sleep(0.5)  # TLS says farewell
    return descriptors(), len(contexts)

with asyncio.Runner() as runner:
    runner.get_loop()
    before = descriptors()
    if face == "asyncio":
        after, kept = runner.run(on_the_loop())
    else:
        blocking()
        # Those that were held for so long that they were watched are let go of a moment later.
        ends = time.monotonic() + 5
        while len(contexts) > 8 and time.monotonic() < ends:
            time.sleep(0.05)
        after, kept = descriptors(), len(contexts)
print(before, after, kept)
"""


@needs_openssl
@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_a_context_for_every_call(tls: tuple[ServerProcess, Path], face: str) -> None:
    """Nobody can ask for such a connection again, so that it is of no use to anybody."""
    server, certificate = tls
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, face, str(server.port), str(certificate), str(CALLS)],
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    before, after, kept = map(int, run.stdout.split())
    assert after - before <= MOST_TO_ONE, f"{CALLS} calls: from {before} to {after} descriptors"
    assert kept <= MOST_TO_ONE, f"{kept} of {CALLS} contexts are kept"


@needs_openssl
async def test_a_context_that_is_kept_is_worth_a_connection(
    client: Client, tls: tuple[ServerProcess, Path]
) -> None:
    server, certificate = tls
    context = ssl.create_default_context(cafile=str(certificate))
    for _ in range(5):
        async with client.lock("key", server, ssl_context=context):
            pass
        gc.collect()
    raw = server.connect(context=context)
    assert '"connections":2' in raw.ask("stats").replace(" ", ""), (
        "this one, and one for five calls"
    )
    raw.close()
