"""A flow of packets that vanishes: a firewall has forgotten it, and the next connection works."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from dflockd import errors
from dflockd.wire import Renew
from tests.dflockd.client.silence import GRACE, SLACK
from tests.dflockd.client_support import Calls, Client, is_free, soon, until
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess, StartServer
from tests.dflockd.scripted_server import ScriptedServer, Silence, renewed
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")

KEY = "key"


@pytest.fixture
def proxy(start: StartServer) -> Iterator[Proxy]:
    server = start()
    proxy = Proxy(server.port)
    proxy.server = server  # type: ignore[attr-defined]
    yield proxy
    proxy.close()


def behind(proxy: Proxy) -> ServerProcess:
    server: ServerProcess = proxy.server  # type: ignore[attr-defined]
    return server


async def test_locks_outlive_their_flows(client: Client, proxy: Proxy) -> None:
    """Another connection is tried while there is time, not only when one has broken; and once more."""
    lost = Calls()
    options = {"lease_ttl_s": 20, "renew_ratio": 0.05, "on_lost": lost}
    locks = [client.lock(f"{KEY}-{n}", proxy, **options) for n in range(10)]
    semaphores = [client.semaphore("semaphore", 2, proxy, **options) for _ in range(2)]
    await asyncio.gather(*(lock.acquire() for lock in locks + semaphores))
    fences = [lock.fence for lock in locks + semaphores]
    leases = [lock._session.lease for lock in locks + semaphores]
    for _ in range(2):
        before = proxy.accepted
        proxy.swallow()
        # A renewal under way when the flow vanished may be answered; the one after that is not.
        for _ in range(2):
            ends = [lease.deadline for lease in leases]

            def renewed_again(ends: list[float] = ends) -> bool:
                longer = [lease.deadline > end for lease, end in zip(leases, ends, strict=True)]
                return all(longer) or bool(lost.locks)

            await until(renewed_again)
        assert not lost.locks
        assert proxy.accepted > before, "renewed without a second connection"
        assert all(lock.held for lock in locks + semaphores)
        assert not is_free(behind(proxy), f"{KEY}-0")
    assert [lock.fence for lock in locks + semaphores] == fences
    released = await asyncio.gather(*(lock.release() for lock in locks + semaphores))
    assert released == [True] * 12
    assert is_free(behind(proxy), f"{KEY}-0")


async def test_a_lock_outlives_the_silence_of_its_server(
    client: Client, scripted: ScriptedServer
) -> None:
    """The server answers on the second connection only; on the first it says nothing."""
    lost = Calls()
    lock = client.lock(KEY, scripted, lease_ttl_s=10, renew_ratio=0.05, on_lost=lost)
    assert await lock.acquire() is True
    granted_until = lock._session.lease.deadline
    first = scripted.accepted

    def answer(request: Renew) -> Any:
        number = next(n for n, r in reversed(scripted.requests) if r is request)
        return Silence if number == first else renewed(request)

    scripted.script(Renew, answer)
    await until(lambda: bool(lost.locks) or lock._session.lease.deadline > granted_until)
    assert not lost.locks
    assert lock.held
    assert await lock.release() is True


async def test_renew_over_a_flow_that_has_vanished(client: Client, proxy: Proxy) -> None:
    lock = client.lock(KEY, proxy, lease_ttl_s=600)
    assert await lock.acquire() is True
    proxy.swallow()
    assert await soon(lock.renew()) is True
    assert lock.held
    assert await lock.release() is True


async def test_release_over_a_flow_that_has_vanished(client: Client, proxy: Proxy) -> None:
    """It is left to the background, and somebody else has the lock long before the lease ends."""
    lock = client.lock(KEY, proxy, lease_ttl_s=600)
    assert await lock.acquire() is True
    proxy.swallow()
    with Pace() as pace:
        await soon(lock.release())
    assert pace.seconds < 1 + GRACE + SLACK
    await until(lambda: is_free(behind(proxy), KEY))


@pytest.mark.parametrize("timeout", [0, pytest.param(2, marks=pytest.mark.soak)])
async def test_an_idle_flow_that_has_vanished(client: Client, proxy: Proxy, timeout: float) -> None:
    """The time is kept, and the flow is given up."""
    async with client.lock(KEY, proxy):
        pass
    proxy.swallow()
    lock = client.lock(KEY, proxy, acquire_timeout_s=timeout)
    with Pace() as pace, contextlib.suppress(errors.UnreachableError):
        assert await soon(lock.acquire()) is True, "nobody else has it"
    assert pace.seconds < timeout + GRACE + SLACK
    await lock.release()
    # Whoever comes next does not come across it again.
    async with client.lock(KEY, proxy, acquire_timeout_s=0):
        pass
