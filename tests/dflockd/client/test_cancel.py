"""`cancel()` ends one acquire or none, from any thread and from a signal handler."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from dflockd import client, errors, sync_client
from tests.dflockd.client.scenes import FREED
from tests.dflockd.client_support import Calls, is_free, soon, until, waiters
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")


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


@pytest.mark.parametrize("how", ["acquire", "wait"])
async def test_cancel_of_a_task_that_waits(
    server: ServerProcess, options: dict[str, Any], key: str, how: str
) -> None:
    """From its own event loop, and from any thread."""
    token = server.connect().lock(key)
    for cancelling in (lambda lock: lock.cancel(), lambda lock: asyncio.to_thread(lock.cancel)):
        lock = client.DistributedLock(key, acquire_timeout_s=None, **options)
        if how == "wait":
            assert await lock.enqueue() == "queued"
        waiting = asyncio.ensure_future(getattr(lock, how)())
        await until(lambda: waiters(server, key) == 1)
        await asyncio.sleep(0.05)
        cancelled = cancelling(lock)
        if cancelled is not None:
            await cancelled
        with pytest.raises(errors.AcquireCancelledError):
            await soon(waiting)
        await until(lambda: waiters(server, key) == 0)
        with pytest.raises(errors.AcquireCancelledError):
            await lock.acquire()  # never undone
    assert server.connect().ask("r", key, token) == "ok"
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
import signal, sys
from dflockd import errors
from dflockd.sync_client import DistributedLock

lock = DistributedLock(sys.argv[2], None, servers=[("127.0.0.1", int(sys.argv[1]))])
signal.signal(signal.SIGALRM, lambda *_: lock.cancel())
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    lock.acquire()
except errors.AcquireCancelledError as exc:
    print(exc)
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
    assert result.stdout == f"waiting for lock {where} was cancelled\n"


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
