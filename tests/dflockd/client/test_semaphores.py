"""Semaphores, with both clients."""

from __future__ import annotations

from typing import Any

import pytest

from dflockd import errors
from tests.dflockd.client_support import (
    Client,
    renewed,
    stats,
)
from tests.dflockd.raw_server import ServerProcess

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def test_semaphore(client: Client, server: ServerProcess, key: str) -> None:
    slots = [client.semaphore(key, 3, server, acquire_timeout_s=0) for _ in range(4)]
    assert [await slot.acquire() for slot in slots] == [True, True, True, False]
    assert len({slot.token for slot in slots[:3]}) == 3
    assert slots[0].limit == 3
    assert await slots[1].release() is True
    assert await slots[3].acquire() is True
    assert [await slot.release() for slot in slots] == [True, False, True, True]
    async with client.semaphore(key, 3, server), client.lock(key, server):
        pass  # two namespaces
    assert stats(server)["semaphores"] == []


async def test_semaphore_with_another_limit(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.semaphore(key, 2, server):
        with pytest.raises(errors.LimitMismatchError, match=key):
            await client.semaphore(key, 3, server).acquire()
    async with client.semaphore(key, 3, server):
        pass


async def test_semaphore_is_renewed_and_enqueued(
    client: Client, server: ServerProcess, key: str
) -> None:
    first = client.semaphore(key, 1, server, lease_ttl_s=600, renew_ratio=0.001)
    assert await first.enqueue() == "acquired"
    second = client.semaphore(key, 1, server)
    assert await second.enqueue() == "queued"
    await renewed(server, key)
    assert first.held
    assert await first.renew() is True
    await first.release()
    assert await second.wait() is True
    await second.release()


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None, "2", 1 << 40])
def test_semaphore_with_a_bad_limit(client: Client, limit: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="limit"):
        client.module.DistributedSemaphore("key", limit)
