"""Locks whose server fails: kept where that is safe, lost in time where it is not."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest

from dflockd import errors
from dflockd.client import operations
from tests.dflockd.client.loss.support import LEASE, Held, end_leases
from tests.dflockd.client_support import Client, Time, is_free, renewed, soon, until, waiters
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_the_server_is_killed(
    clients: list[Client], doomed: ServerProcess, clients_time: Time
) -> None:
    holds = [await Held.take(client, doomed, lease_ttl_s=LEASE) for client in clients]
    doomed.process.kill()
    await end_leases(clients_time, [], holds)
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    for client in clients:
        with pytest.raises(errors.UnreachableError):
            await soon(client.lock("key", doomed).acquire())


async def test_the_server_is_killed_and_the_lock_released(
    client: Client, doomed: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    hold = await Held.take(client, doomed)
    doomed.process.kill()
    doomed.process.wait(PATIENCE)
    with caplog.at_level(logging.WARNING, "dflockd.client"):
        assert await soon(hold.lock.release()) is False
    assert "could not be released" in caplog.text
    assert not hold.lock.held
    assert not hold.calls.locks


async def test_an_outage_has_one_warning(
    client: Client, doomed: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    holds = [Held(client, doomed, suffix) for suffix in "abc"]
    for hold in holds:
        assert await soon(hold.lock.acquire())
    doomed.process.kill()
    doomed.process.wait(PATIENCE)
    with caplog.at_level(logging.INFO, "dflockd.client"):
        for hold in holds:
            assert await soon(hold.lock.release()) is False
    lines = [line for line in caplog.records if "could not be released" in line.getMessage()]
    assert [line.levelno for line in lines] == [logging.WARNING, logging.INFO, logging.INFO]


async def test_renewing_where_the_server_is_gone(
    client: Client, doomed: ServerProcess, clients_time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "REPLY_PATIENCE", 1.0)
    hold = await Held.take(client, doomed, lease_ttl_s=LEASE)
    doomed.process.kill()
    doomed.process.wait(PATIENCE)
    with pytest.raises(errors.UnreachableError, match=f":{doomed.port}"):
        await soon(hold.lock.renew())
    assert hold.lock.state == "doubtful"  # its lease is not over: the server may come back
    await end_leases(clients_time, [], [hold])
    await hold.stays_lost()


async def test_the_server_is_restarted(clients: list[Client], start: StartServer) -> None:
    """Its locks were in memory: they are lost, long before their leases end."""
    server = start()
    holds = [await Held.take(client, server) for client in clients]
    port = server.port
    server.end()
    server = start("--port", str(port))
    assert server.port == port
    await asyncio.gather(*(hold.lost_at_once() for hold in holds))
    for hold in holds:
        assert await soon(hold.lock.acquire()) is True
        assert await hold.lock.release() is True


async def test_a_waiter_whose_server_ends(client: Client, doomed: ServerProcess) -> None:
    raw = doomed.connect()
    raw.lock("key")
    waiting = asyncio.ensure_future(client.lock("key", doomed).acquire())
    await until(lambda: waiters(doomed, "key") == 1)
    doomed.process.kill()
    with pytest.raises(errors.UnreachableError, match=f":{doomed.port}"):
        await soon(waiting)


async def test_the_server_stops_for_longer_than_the_lease(
    clients: list[Client], doomed: ServerProcess, clients_time: Time
) -> None:
    holds = [await Held.take(client, doomed, lease_ttl_s=LEASE) for client in clients]
    doomed.suspend()
    await end_leases(clients_time, holds)
    # What it answers now to the renewals that it finds is too late.
    doomed.signal(signal.SIGCONT)
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    for hold in holds:
        await until(lambda key=hold.key: is_free(doomed, key))  # type: ignore[misc]
        assert await soon(hold.lock.acquire()) is True
        await hold.lock.release()


async def test_the_server_stops_for_less_than_the_lease(
    clients: list[Client], doomed: ServerProcess
) -> None:
    options = {"lease_ttl_s": LEASE, "renew_ratio": 0.5 / LEASE}
    holds = [await Held.take(client, doomed, **options) for client in clients]
    doomed.suspend()
    await asyncio.gather(*(hold.kept_for(1.4) for hold in holds))  # renewals are due
    doomed.signal(signal.SIGCONT)
    await asyncio.gather(*(renewed(doomed, hold.key) for hold in holds))
    await asyncio.gather(*(hold.kept_for(0.2) for hold in holds))
    for hold in holds:
        assert await hold.lock.release() is True
