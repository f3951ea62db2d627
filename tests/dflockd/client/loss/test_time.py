"""Locks of a process that stands still, or whose callbacks and loops fail."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dflockd import clock
from tests.dflockd.client.loss.support import LEASE
from tests.dflockd.client_support import (
    Calls,
    Client,
    Script,
    Time,
    is_free,
    soon,
    until,
    wait_renewed,
    waiters,
)
from tests.dflockd.proxy import Through
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_a_callback_that_fails(
    clients: list[Client], doomed: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_lock: Any) -> None:
        raise ZeroDivisionError

    locks = [
        client.lock(f"{client.name}-{n}", doomed, on_lost=fail) for client in clients for n in "ab"
    ]
    for lock in locks:
        await lock.acquire()
    await asyncio.sleep(0.15)
    with caplog.at_level(logging.WARNING, "dflockd.client"):
        doomed.process.kill()
        raw = ServerProcess("--port", str(doomed.port))
        try:
            await until(lambda: caplog.text.count("on_lost of lock") == len(locks))
        finally:
            raw.end()
    assert not any(lock.held for lock in locks)


async def test_an_event_loop_that_stands_still(
    clients: list[Client], server: ServerProcess
) -> None:
    """A blocking call costs no lock, however long it is: the loop does not renew it."""
    lost = Calls()
    lock = clients[1].lock("key", server, lease_ttl_s=LEASE, renew_ratio=0.5 / LEASE, on_lost=lost)
    await lock.acquire()
    wait_renewed(server, "key")
    assert lock.held
    assert not is_free(server, "key")
    assert await lock.release() is True
    await asyncio.sleep(0)
    assert not lost.locks


def test_an_event_loop_that_is_closed(
    clients: list[Client], doomed: ServerProcess, clients_time: Time
) -> None:
    """Its locks go on, and if one is lost the client's own thread says so."""
    lost = Calls()
    threads = []
    lock = clients[1].lock(
        "key",
        doomed,
        lease_ttl_s=LEASE,
        renew_ratio=0.5 / LEASE,
        on_lost=lambda _: [lost(_), threads.append(threading.get_ident())],
    )
    assert asyncio.run(lock.acquire()) is True
    wait_renewed(doomed, "key")
    assert lock.held
    assert not is_free(doomed, "key")
    doomed.process.kill()
    eventually(lambda: lock.state == "doubtful")
    clients_time.go_on_from(clock.now() + LEASE)
    eventually(lambda: bool(threads))
    assert threads != [threading.get_ident()]
    assert lost.locks == [lock]
    assert lock.state == "lost"


HOLDER = """
import asyncio, sys, threading
from dflockd import client, sync_client

lost = []
options = {
    "servers": [("127.0.0.1", int(sys.argv[2]))],
    "lease_ttl_s": 3,
    "acquire_timeout_s": 600,
    "on_lost": lost.append,
}
name = sys.argv[1]

def answer(lock):
    print("granted", lock.held, lock.fence, flush=True)
    for _ in sys.stdin:
        print(lock.held, len(lost), flush=True)

async def main():
    lock = client.DistributedLock("key-asyncio", **options)
    await lock.acquire()
    await asyncio.to_thread(answer, lock)

if name == "sync":
    lock = sync_client.DistributedLock("key-sync", **options)
    lock.acquire()
    answer(lock)
else:
    asyncio.run(main())
"""


@pytest.fixture
def holders(clients: list[Client], server: ServerProcess) -> Iterator[list[Script]]:
    """Two programs that hold a lock with a lease of three seconds, one with each client."""
    scripts = [Script(HOLDER, client.name, server.port) for client in clients]
    yield scripts
    for script in scripts:
        script.process.send_signal(signal.SIGCONT)
        script.close()


async def test_this_process_stops_for_longer_than_the_lease(
    clients: list[Client], server: ServerProcess, holders: list[Script]
) -> None:
    keys = [f"key-{client.name}" for client in clients]
    for script in holders:
        assert script.line().startswith("granted True")
        script.process.send_signal(signal.SIGSTOP)
    raw = server.connect()
    for key in keys:
        raw.lock(key, 600)  # granted once the lease has ended
    for script in holders:
        script.say()
        script.process.send_signal(signal.SIGCONT)
        # The first thing that it does: its own threads may not have run yet.
        assert script.line().startswith("False")
    for script in holders:
        end = time.monotonic() + PATIENCE
        told = ""
        while told != "False 1":
            assert time.monotonic() < end, told
            script.say()
            told = script.line()
            assert told in ("False 0", "False 1")
    raw.close()


async def test_a_grant_that_comes_while_this_process_is_stopped(
    clients: list[Client], server: ServerProcess
) -> None:
    """It is not believed: the lease has ended, and somebody else has the lock."""
    raw = server.connect()
    keys = [f"key-{client.name}" for client in clients]
    tokens = [raw.lock(key, "0 600") for key in keys]
    scripts = [Script(HOLDER, client.name, server.port) for client in clients]
    try:
        for key, token, script in zip(keys, tokens, scripts, strict=True):
            await until(lambda key=key: waiters(server, key) == 1)  # type: ignore[misc]
            script.process.send_signal(signal.SIGSTOP)
            assert raw.ask("r", key, token) == "ok"
            await until(lambda key=key: waiters(server, key) == 0)  # type: ignore[misc]
        tokens = [raw.lock(key, "600 600") for key in keys]  # granted once that lease has ended
        for key, token, script in zip(keys, tokens, scripts, strict=True):
            script.process.send_signal(signal.SIGCONT)
            # It does not take the grant up, but goes back to waiting.
            await until(lambda key=key: waiters(server, key) == 1)  # type: ignore[misc]
            assert raw.ask("r", key, token) == "ok"
            granted, held, fence = script.line().split()
            assert (granted, held) == ("granted", "True")
            assert int(fence) > int(token[:16], 16)
            assert not is_free(server, key)
    finally:
        raw.close()
        for script in scripts:
            script.process.send_signal(signal.SIGCONT)
            script.close()


@pytest.mark.parametrize("how", ["renew", "check", "detach"])
async def test_who_comes_during_a_rescue_waits_for_its_end(
    client: Client, start: StartServer, through: Through, how: str
) -> None:
    server = start("--orphan-ttl", "30", "--orphan-ttl-covers", "all")
    proxy = through(server)
    lock = client.lock("slow", proxy)
    assert await lock.acquire()
    token, fence = lock.token, lock.fence
    proxy.withhold_replies()
    proxy.cut(reset=True)
    await until(lambda: lock.state == "doubtful")
    assert (lock.held, lock.token, lock.fence) == (False, token, fence)
    await until(lambda: proxy.accepted == 2)
    coming = asyncio.ensure_future(getattr(lock, how)())
    await asyncio.sleep(0.3)
    assert not coming.done()
    proxy.pass_on()
    assert await soon(coming) == {"renew": True, "check": None, "detach": token}[how]
    assert lock.held == (how != "detach")
    assert await lock.release() == (how != "detach")
    assert proxy.accepted == 2
