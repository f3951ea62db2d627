"""Semaphores, with both clients."""

from __future__ import annotations

import asyncio
import itertools
import json
from functools import partial
from typing import Any

import pytest

from dflockd import errors
from tests.dflockd.client_support import Client, renewed, soon, stats
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
    assert [entry for entry in stats(server)["locks"] if entry["key"] == key] == []


async def test_it_is_the_lock_of_its_key_and_the_latest_limit_counts(
    client: Client, server: ServerProcess, key: str
) -> None:
    """1, 3, 2: in order of arrival, never more than the larger, and nobody loses what he has."""

    async def queue(limit: int) -> tuple[Any, str]:
        kind = client.lock if limit == 1 else partial(client.semaphore, limit=limit)
        lock = kind(key, server=server)
        return lock, await lock.enqueue()

    async def is_served(lock: Any) -> bool:
        return bool(await soon(lock.wait()))

    (first, got), (second, waits) = await queue(1), await queue(1)
    assert (got, waits) == ("acquired", "queued")
    third, got = await queue(3)
    assert await is_served(second)
    fourth, waits = await queue(3)
    fifth, _ = await queue(2)
    assert (got, waits) == ("acquired", "queued")
    for lock in (first, second, third):
        assert await lock.renew()
    assert await first.release()
    report = json.loads(server.connect().ask("i", key).removeprefix("ok "))
    assert (len(report["holders"]), len(report["waiters"]), report["limit"]) == (2, 2, 2)
    assert await second.release()
    assert await is_served(fourth)
    assert await third.release()
    assert await is_served(fifth)
    assert await client.lock(key, server, acquire_timeout_s=0).acquire() is False
    for lock in (fourth, fifth):
        assert await lock.release()


async def test_limits_change_under_load(
    clients: list[Client], server: ServerProcess, key: str
) -> None:
    """As in a roll-out, with workers of both kinds: nobody is refused, and all in order."""
    limits = [1] * 10 + [3] * 20 + [2] * 20
    holders: set[int] = set()
    served: list[tuple[int, int]] = []

    async def hold(number: int, lock: Any, answer: str) -> None:
        if answer == "queued":
            assert await soon(lock.wait(None))
        holders.add(number)
        assert len(holders) <= 3
        served.append((lock.fence, number))
        await asyncio.sleep(0.01)
        assert lock.held
        holders.discard(number)
        assert await lock.release()

    holding = []
    for number, (limit, client) in enumerate(zip(limits, itertools.cycle(clients), strict=False)):
        lock = client.lock(key, server) if limit == 1 else client.semaphore(key, limit, server)
        answer = await lock.enqueue()
        holding.append(asyncio.create_task(hold(number, lock, answer)))
    await soon(asyncio.gather(*holding))
    assert [number for _, number in sorted(served)] == list(range(len(limits)))


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
