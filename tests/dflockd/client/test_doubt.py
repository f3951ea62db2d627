"""What a lock says of itself while its connection is gone: it is not held, and not lost either.

Nobody may believe in a lock that the server has given to somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from dflockd import clock, errors
from tests.dflockd.client.doubts import LEASE, Doubt, in_doubt, sever, stays_quiet
from tests.dflockd.client_support import Calls, Client, Time, soon, until
from tests.dflockd.proxy import Through
from tests.dflockd.raw_server import ServerProcess, StartServer
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.fixture(scope="module")
def patient_server() -> Iterator[ServerProcess]:
    """One that lets the locks of broken connections wait for a renewal."""
    server = ServerProcess("--orphan-ttl", "30")
    yield server
    server.end()


@pytest.fixture
def doubt(client: Client, patient_server: ServerProcess, through: Through, key: str) -> Doubt:
    return Doubt(client, patient_server, through(patient_server), key)


# The server has given it to somebody else.


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_two_do_not_hold_it(
    client: Client, server: ServerProcess, through: Through, key: str, how: str
) -> None:
    """The connection breaks and no other can be made: long before the lease ends it is not held."""
    proxy = through(server)
    lost = Calls()
    lock = client.lock(key, proxy, lease_ttl_s=LEASE, on_lost=lost)
    await lock.acquire()
    token, fence = lock.token, lock.fence
    await stays_quiet()
    if how == "refused":
        await asyncio.to_thread(proxy.close)
    else:
        sever(proxy)
    other = client.lock(key, server, acquire_timeout_s=LEASE)
    assert await soon(other.acquire()) is True, "the server frees it with its connection"
    await until(lambda: not lock.held)
    for _ in range(20):
        assert other.held
        assert not lock.held, "two hold it"
        await asyncio.sleep(0.01)
    assert lock.state == "doubtful"
    assert "doubtful" in repr(lock)
    assert (lock.token, lock.fence) == (token, fence)
    assert not lost.locks, "nobody has said that it is gone"
    assert await soon(lock.release()) is False
    assert lock.state == "free"
    assert other.held
    await other.release()


async def test_certain_from_the_first_instant(
    client: Client, server: ServerProcess, through: Through, key: str
) -> None:
    """The connection ends before anybody watches it, and `check` does not wait for that."""
    proxy = through(server)
    lost = Calls()
    lock = client.lock(key, proxy, lease_ttl_s=LEASE, on_lost=lost)
    other = client.lock(key, server, acquire_timeout_s=LEASE)
    await lock.acquire()
    assert await lock.check() is None, "nothing has come"
    proxy.cut(reset=False)
    assert await soon(other.acquire()) is True, "the server frees it with its connection"
    with pytest.raises(errors.LockLostError):
        await soon(lock.check())
    assert lock.state == "lost"
    await lost.first()
    assert len(lost.locks) == 1
    assert await soon(lock.release()) is False
    assert other.held
    await other.release()


async def test_the_doubt_ends_with_the_lease(
    client: Client, server: ServerProcess, through: Through, key: str, clients_time: Time
) -> None:
    proxy = through(server)
    lost = Calls()
    lock = client.lock(key, proxy, lease_ttl_s=LEASE, on_lost=lost)
    asked = clock.now()
    await lock.acquire()
    granted = clock.now()
    fence = lock.fence
    await stays_quiet()
    sever(proxy)
    await in_doubt(lock)
    checking = asyncio.ensure_future(lock.check())
    clients_time.go_on_from(asked + 0.75 * LEASE)
    await asyncio.sleep(0.3)
    assert not checking.done(), "as long as there is hope"
    clients_time.go_on_from(granted + LEASE)
    with pytest.raises(errors.LockLostError) as caught:
        await soon(checking)
    assert isinstance(caught.value, errors.DflockdError)
    assert caught.value.key == key
    await lost.first()
    assert (lock.state, lock.held, lock.token, lock.lease) == ("lost", False, None, 0)
    assert lock.fence == fence
    proxy.pass_on()
    await asyncio.sleep(0.3)
    assert lock.state == "lost"
    assert len(lost.locks) == 1
    assert await soon(lock.release()) is False
    assert lock.state == "free"


async def test_the_doubt_ends_well(doubt: Doubt) -> None:
    lock = await doubt.begin()
    token, fence = lock.token, lock.fence
    checking = [asyncio.ensure_future(lock.check()) for _ in range(3)]
    done, _ = await asyncio.wait(checking, timeout=0.3)
    assert not done, "in doubt nobody can say"
    assert (lock.state, lock.token, lock.fence) == ("doubtful", token, fence)
    doubt.proxy.pass_on()
    assert await soon(asyncio.gather(*checking)) == [None] * 3
    assert (lock.state, lock.held, lock.token, lock.fence) == ("held", True, token, fence)
    assert not doubt.is_free()
    assert not doubt.lost.locks
    assert await lock.release() is True
    assert doubt.is_free()


async def test_the_doubt_ends_in_a_refusal(
    client: Client, server: ServerProcess, through: Through, key: str
) -> None:
    """Long before the lease ends the server can be asked, and has it no more."""
    doubt = Doubt(client, server, through(server), key)
    lock = await doubt.begin()
    checking = asyncio.ensure_future(lock.check())
    await asyncio.sleep(0.1)
    doubt.proxy.pass_on()
    with pytest.raises(errors.LockLostError):
        await soon(checking)
    await doubt.lost.first()
    assert lock.state == "lost"
    assert len(doubt.lost.locks) == 1


async def test_a_server_with_a_memory_is_restarted(
    client: Client, start: StartServer, tmp_path: Any, key: str
) -> None:
    """Who asks `check` before and after does not notice."""
    flags = ("--state-dir", str(tmp_path))
    server = start(*flags)
    lost = Calls()
    lock = client.lock(key, server, lease_ttl_s=LEASE, on_lost=lost)
    await lock.acquire()
    await stays_quiet()
    port = server.port
    server.end()
    await in_doubt(lock)
    checking = asyncio.ensure_future(lock.check())
    start("--port", str(port), *flags)
    assert await soon(checking) is None
    assert lock.held
    assert not lost.locks
    assert await lock.release() is True


async def test_a_body_is_not_interrupted(doubt: Doubt) -> None:
    async with doubt.lock as lock:
        await stays_quiet()
        sever(doubt.proxy)
        await in_doubt(lock)
        await asyncio.sleep(0.2)
        doubt.proxy.pass_on()
        await until(lambda: lock.held)
        assert await lock.check() is None
    assert doubt.is_free()
    assert not doubt.lost.locks


# What one can do meanwhile.


async def test_released_in_doubt(doubt: Doubt) -> None:
    """It ends in time, and the lock is given back once the server can be reached."""
    lock = await doubt.begin()
    with Pace() as pace:
        await soon(lock.release())
    assert pace.seconds < 4
    assert (lock.state, lock.token) == ("free", None)
    assert not doubt.is_free()
    doubt.proxy.pass_on()
    await until(doubt.is_free)
    assert not doubt.lost.locks
    assert await soon(lock.acquire()) is True
    assert await lock.release() is True


async def test_renewed_in_doubt(doubt: Doubt) -> None:
    lock = await doubt.begin()
    renewing = asyncio.ensure_future(lock.renew(30))
    await asyncio.sleep(0.2)
    doubt.proxy.pass_on()
    assert await soon(renewing) is True
    assert (lock.state, lock.held, lock.lease) == ("held", True, 30)
    assert await lock.release() is True
    assert doubt.is_free()


async def test_detached_in_doubt(doubt: Doubt) -> None:
    lock = await doubt.begin()
    token = lock.token
    detaching = asyncio.ensure_future(lock.detach(60))
    await asyncio.sleep(0.2)
    doubt.proxy.pass_on()
    assert await soon(detaching) == token
    assert (lock.state, lock.held) == ("free", False)
    assert not doubt.is_free()
    assert await lock.adopt(token) is True
    assert lock.state == "held"
    assert await lock.release() is True


async def test_a_second_owner_is_refused_in_doubt(doubt: Doubt) -> None:
    """It is not held, but it is not free either."""
    lock = await doubt.begin()
    for attempt in (lock.acquire, lock.enqueue, lock.__aenter__):
        with pytest.raises(errors.AlreadyHeldError):
            await soon(attempt())
    assert lock.state == "doubtful"
    doubt.proxy.pass_on()
    await until(lambda: lock.held)
    assert await lock.release() is True
