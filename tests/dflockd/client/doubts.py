"""How a lock comes to be in doubt, and how that ends."""

from __future__ import annotations

import asyncio
from typing import Any

from dflockd import client as async_client
from tests.dflockd.client_support import Calls, Client, is_free, until
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess

LEASE = 600
"""Seconds; what is known before they end has not waited for that."""


async def stays_quiet() -> None:
    """Let a lock be held for long enough that its connection is looked at."""
    await asyncio.sleep(0.15)


def sever(proxy: Proxy) -> None:
    """Break the connections that are there; the next ones are made, and nobody answers on them."""
    proxy.withhold()
    proxy.cut(reset=True)


async def in_doubt(lock: Any) -> None:
    await until(lambda: not lock.held)
    assert lock.state == "doubtful"


class Doubt:
    """A lock behind a proxy, of which nobody knows whether it is held once it has begun."""

    def __init__(self, client: Client, server: ServerProcess, proxy: Proxy, key: str) -> None:
        self._server, self._key = server, key
        self.proxy = proxy
        self.lost = Calls()
        self.lock = client.lock(key, proxy, lease_ttl_s=LEASE, on_lost=self.lost)

    async def begin(self) -> Any:
        await self.lock.acquire()
        await stays_quiet()
        sever(self.proxy)
        await in_doubt(self.lock)
        return self.lock

    def is_free(self) -> bool:
        return is_free(self._server, self._key)


async def evict(lock: Any, server: ServerProcess) -> None:
    """Take a lock from its holder; the next renewal tells him."""
    other = async_client.DistributedLock(lock.key, servers=[("127.0.0.1", server.port)])
    assert await other.evict(lock.fence) is True
