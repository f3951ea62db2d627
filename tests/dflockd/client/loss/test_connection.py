"""Locks whose network fails: kept where that is safe, lost in time where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from dflockd.client import renewal
from tests.dflockd.client.loss.support import LEASE, Held, end_leases
from tests.dflockd.client_support import Client, Time, is_free, soon, stats, until, waiters
from tests.dflockd.proxy import Proxy, Through
from tests.dflockd.raw_server import ServerProcess, StartServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.fixture(scope="module")
def patient_server() -> Iterator[ServerProcess]:
    """One that lets the locks of broken connections wait for a renewal."""
    server = ServerProcess("--orphan-ttl", "5")
    yield server
    server.end()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_reset_connection_is_replaced(
    client: Client, patient_server: ServerProcess, through: Through, times: int
) -> None:
    proxy = through(patient_server)
    hold = await Held.take(client, proxy)
    token = hold.lock.token

    def owner() -> int:
        return int(stats(patient_server)["locks"][0]["owner_conn_id"])

    for number in range(times):
        before = owner()
        proxy.cut(reset=True)
        await until(lambda n=number: proxy.accepted == n + 2)  # type: ignore[misc]
        await until(lambda before=before: owner() not in (before, 0))  # type: ignore[misc]
        # The server has taken the renewal; its answer ends the doubt.
        await soon(hold.lock.check())
        assert hold.lock.held
        assert not is_free(patient_server, hold.key)
    assert hold.lock.token == token
    assert not hold.calls.locks
    assert await hold.lock.release() is True
    assert is_free(patient_server, hold.key)


@pytest.mark.parametrize("where", ["read_renewal", "follow"])
async def test_a_lock_is_lost_with_whatever_renews_it(
    client: Client,
    patient_server: ServerProcess,
    through: Through,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """A bug there is told of at once. Until the end of its lease the lock was said to be held."""
    proxy = through(patient_server)
    hold = await Held.take(client, proxy)
    assert await hold.lock.renew()  # from here on it is looked after
    monkeypatch.setattr(renewal, where, Mock(side_effect=RuntimeError("a bug")))
    if where == "read_renewal":
        assert await soon(hold.lock.renew()) is False
    else:
        proxy.cut(reset=True)
    await hold.lost_at_once()


async def test_an_ended_connection_is_a_lost_lock(
    clients: list[Client], server: ServerProcess, through: Through
) -> None:
    """Without a grace period the server has given it to the next, however long the lease is."""
    proxies = [through(server) for _ in clients]
    holds = [await Held.take(client, proxy) for client, proxy in zip(clients, proxies, strict=True)]
    others = [client.lock(hold.key, server) for client, hold in zip(clients, holds, strict=True)]
    waiting = [asyncio.ensure_future(other.acquire()) for other in others]
    await until(lambda: all(waiters(server, hold.key) == 1 for hold in holds))
    for reset, proxy in zip((False, True), proxies, strict=True):
        proxy.cut(reset=reset)
    await asyncio.gather(*(hold.lost_at_once() for hold in holds))
    assert await soon(asyncio.gather(*waiting)) == [True, True]
    for other in others:
        await other.release()


async def test_many_cuts_lose_a_lock_once(
    clients: list[Client], server: ServerProcess, through: Through
) -> None:
    proxy = through(server)
    holds = [await Held.take(client, proxy) for client in clients]
    for _ in range(20):
        proxy.cut(reset=False)
        await asyncio.sleep(0.01)
    await asyncio.gather(*(hold.lost_at_once() for hold in holds))


async def test_nothing_gets_through(
    clients: list[Client], server: ServerProcess, through: Through, clients_time: Time
) -> None:
    proxy = through(server)
    holds = [await Held.take(client, proxy, lease_ttl_s=LEASE) for client in clients]
    proxy.withhold()
    await end_leases(clients_time, holds)
    proxy.pass_on()
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    await until(lambda: stats(server)["locks"] == [])


async def test_answers_that_come_after_the_lease(
    clients: list[Client], patient_server: ServerProcess, through: Through, clients_time: Time
) -> None:
    """The server has renewed the lock, but said so too late: it stays lost, and is given back."""
    steady, broken = through(patient_server), through(patient_server)
    holds = [
        await Held.take(client, proxy, suffix=str(number), lease_ttl_s=LEASE)
        for number, proxy in enumerate((steady, broken))
        for client in clients
    ]
    await asyncio.sleep(0.15)
    steady.withhold_replies()
    broken.withhold_replies()
    broken.cut(reset=True)
    await end_leases(clients_time, holds[: len(clients)], holds[len(clients) :])
    steady.pass_on()
    broken.pass_on()
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    await until(lambda: stats(patient_server)["locks"] == [])
    await until(lambda: stats(patient_server)["connections"] == 0)


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_lock_with_a_broken_connection_is_released(
    client: Client, start: StartServer, noticed: bool
) -> None:
    """The server would wait for a renewal; it hears on another connection that none will come."""
    server = start("--orphan-ttl", "30")
    proxy = Proxy(server.port)
    hold = await Held.take(client, proxy)
    proxy.cut(reset=True)
    if noticed:
        # Whoever reaches out now gets no answer yet.
        proxy.withhold_replies()
        await until(lambda: proxy.accepted == 2)
        releasing = asyncio.ensure_future(hold.lock.release())
        await asyncio.sleep(0.05)
        proxy.pass_on()
        await soon(releasing)  # False if the end of that attempt has released it already
    else:
        assert await soon(hold.lock.release()) is True
    await until(lambda: is_free(server, hold.key))
    proxy.close()
