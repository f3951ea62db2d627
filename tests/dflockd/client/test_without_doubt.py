"""The states of a lock where nothing is in doubt, and what waits for no doubt to end."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from dflockd import errors
from tests.dflockd.client.doubts import LEASE, evict, sever, stays_quiet
from tests.dflockd.client_support import Calls, Client, soon, until, waiters
from tests.dflockd.proxy import Through
from tests.dflockd.raw_server import ServerProcess, StartServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_the_states_of_a_quiet_life(client: Client, server: ServerProcess, key: str) -> None:
    raw = server.connect()
    lock = client.lock(key, server)
    assert (lock.held, lock.state) == (False, "free")
    token = raw.lock(key, "0 600")
    waiting = asyncio.ensure_future(lock.acquire())
    await until(lambda: waiters(server, key) == 1)
    assert (lock.held, lock.state) == (False, "asking")
    assert raw.ask("r", key, token) == "ok"
    assert await soon(waiting) is True
    assert (lock.held, lock.state) == (True, "held")
    assert await lock.release() is True
    assert (lock.held, lock.state) == (False, "free")
    token = raw.lock(key, "0 600")
    assert await lock.enqueue() == "queued"
    assert (lock.held, lock.state) == (False, "queued")
    assert raw.ask("r", key, token) == "ok"
    assert await lock.wait() is True
    assert (lock.held, lock.state) == (True, "held")
    assert await lock.detach()
    assert (lock.held, lock.state) == (False, "free")
    raw.close()


async def test_check_without_doubt(client: Client, server: ServerProcess, key: str) -> None:
    lost = Calls()
    lock = client.lock(key, server, lease_ttl_s=LEASE, renew_ratio=0.2 / LEASE, on_lost=lost)
    with pytest.raises(errors.LockLostError, match=key):
        await soon(lock.check())
    await lock.acquire()
    assert await soon(lock.check()) is None
    await evict(lock, server)
    await lost.first()
    assert (lock.held, lock.state) == (False, "lost")
    with pytest.raises(errors.LockLostError):
        await soon(lock.check())
    await lock.release()
    with pytest.raises(errors.LockLostError):
        await soon(lock.check())
    assert len(lost.locks) == 1


async def test_no_check_waits_on_the_clients_own_thread(
    client: Client, server: ServerProcess, through: Through, key: str
) -> None:
    """Another lock is in doubt while `on_lost` runs: nobody could end that doubt."""
    if client.name == "asyncio":
        pytest.skip("there `on_lost` runs on the event loop")
    proxy = through(server)
    told: list[BaseException | None] = []
    doubtful = client.lock(f"{key}-2", proxy, lease_ttl_s=LEASE)

    def on_lost(lost: Any) -> None:
        for lock in (lost, doubtful.lock):
            try:
                lock.check()
            except BaseException as exc:
                told.append(exc)
            else:
                told.append(None)

    lock = client.lock(key, server, lease_ttl_s=LEASE, renew_ratio=0.5 / LEASE, on_lost=on_lost)
    await doubtful.acquire()
    await lock.acquire()
    await stays_quiet()
    sever(proxy)
    await until(lambda: not doubtful.held)
    await evict(lock, server)
    await until(lambda: len(told) == 2)
    assert [type(exc) for exc in told] == [errors.LockLostError] * 2
    assert doubtful.state == "doubtful"


async def test_a_server_that_says_nothing_is_no_doubt(
    client: Client, start: StartServer, key: str
) -> None:
    """Nothing was heard: the lease alone counts."""
    server = start()
    lost = Calls()
    options = {"lease_ttl_s": LEASE, "renew_ratio": 0.5 / LEASE}
    lock = client.lock(key, server, on_lost=lost, **options)
    await lock.acquire()
    server.suspend()
    for _ in range(120):  # for longer than until a renewal
        assert lock.held
        await asyncio.sleep(0.01)
    server.signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    assert lock.held
    assert await soon(lock.check()) is None
    assert not lost.locks
    assert await lock.release() is True
