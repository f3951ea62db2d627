"""The lock of an object that nobody refers to any more is free."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from dflockd import client, sync_client
from tests.dflockd.client_support import is_free, stats, until, waiters
from tests.dflockd.raw_server import ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.usefixtures("_refcounts_only")
@pytest.mark.parametrize("held_for", [0, 0.2])
@pytest.mark.parametrize("on_lost", [None, print])
def test_a_forgotten_lock_is_freed(
    server: ServerProcess, options: dict[str, Any], key: str, held_for: float, on_lost: Any
) -> None:
    lock = sync_client.DistributedLock(key, on_lost=on_lost, **options)
    assert lock.acquire() is True
    time.sleep(held_for)
    del lock
    eventually(lambda: is_free(server, key))
    with sync_client.DistributedLock(key, **options):
        assert not is_free(server, key)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.usefixtures("_refcounts_only")
def test_a_forgotten_place_is_given_up(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    with sync_client.DistributedLock(key, **options):
        lock = sync_client.DistributedLock(key, **options)
        assert lock.enqueue() == "queued"
        del lock
        eventually(lambda: waiters(server, key) == 0)


@pytest.mark.usefixtures("_refcounts_only")
@pytest.mark.parametrize("on_lost", [None, print])
async def test_a_forgotten_asyncio_lock_is_freed(
    server: ServerProcess, options: dict[str, Any], key: str, on_lost: Any
) -> None:
    before = stats(server)["connections"]
    lock = client.DistributedLock(key, on_lost=on_lost, **options)
    assert await lock.acquire() is True
    other = client.DistributedLock(key, **options)
    assert await other.enqueue() == "queued"
    del other
    await until(lambda: waiters(server, key) == 0)
    del lock
    await until(lambda: is_free(server, key))
    await until(lambda: stats(server)["connections"] == before)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_lock_forgotten_in_a_cycle_is_freed(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    lock = sync_client.DistributedLock(key, **options)
    lock.itself = lock  # type: ignore[attr-defined]
    assert lock.acquire() is True
    del lock
    # Again and again: `gc.collect` does nothing while another thread is collecting.
    eventually(lambda: gc.collect() >= 0 and is_free(server, key))
