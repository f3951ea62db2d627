"""Watches of either store: what changed since, and what changes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from dflockd.shards import Delete, Event, LeaseGoneError, Loaded, MemoryStore, Put, Record, follow
from tests.dflockd.shards.test_store import PATIENCE, put, take


async def test_a_watch_tells_what_changed_since_and_what_changes(store, prefix):
    await put(store, f"{prefix}/a", b"before")
    first = await put(store, f"{prefix}/a", b"1")
    await put(store, f"{prefix}-other", b"no")
    async with contextlib.aclosing(store.watch(f"{prefix}/", first)) as changes:
        assert await take(changes, 1) == [Event(f"{prefix}/a", first, Record(b"1", first))]
        waiting = asyncio.ensure_future(take(changes, 2))
        await put(store, f"{prefix}-other", b"no")
        second = await put(store, f"{prefix}/b", b"2")
        third = (await store.txn([], [Delete(f"{prefix}/a")])).revision
        assert await waiting == [
            Event(f"{prefix}/b", second, Record(b"2", second)),
            Event(f"{prefix}/a", third, None),
        ]


async def test_one_shard_of_many_is_watched_on_its_own(store, prefix):
    await store.txn([], [Put(f"{prefix}/shard/{n}", b"a,") for n in range(64)])
    revision = (await store.get_prefix(f"{prefix}/shard/")).revision
    async with contextlib.aclosing(store.watch(f"{prefix}/shard/", revision + 1)) as changes:
        changed = await put(store, f"{prefix}/shard/7", b"b,")
        event = Event(f"{prefix}/shard/7", changed, Record(b"b,", changed))
        assert await take(changes, 1) == [event]


async def test_changes_of_one_transaction_come_together(store, prefix):
    revision = (await store.txn([], [Put(f"{prefix}/{n}", b"") for n in range(64)])).revision
    async with contextlib.aclosing(store.watch(f"{prefix}/", revision)) as changes:
        async with asyncio.timeout(PATIENCE):
            assert len(await anext(changes)) == 64


async def test_watches_do_not_take_from_one_another(store, prefix):
    revision = await put(store, f"{prefix}/a")
    async with (
        contextlib.aclosing(store.watch(f"{prefix}/", revision)) as one,
        contextlib.aclosing(store.watch(f"{prefix}/", revision)) as other,
    ):
        assert await take(one, 1) == await take(other, 1)


async def test_a_follower_that_missed_too_much_loads_again(prefix):
    store = MemoryStore(history=3)
    async with contextlib.aclosing(follow(store, f"{prefix}/")) as steps:
        assert (await anext(steps)).records == {}
        for n in range(5):
            await put(store, f"{prefix}/{n}")
        assert len((await anext(steps)).records) == 5


async def test_following_begins_with_everything(store, prefix):
    await put(store, f"{prefix}/a", b"1")
    async with contextlib.aclosing(follow(store, f"{prefix}/")) as steps, asyncio.timeout(PATIENCE):
        loaded = await anext(steps)
        assert isinstance(loaded, Loaded)
        assert {key: record.value for key, record in loaded.records.items()} == {
            f"{prefix}/a": b"1"
        }
        await put(store, f"{prefix}/b", b"2")
        assert [event.key for event in await anext(steps)] == [f"{prefix}/b"]


async def test_a_lease_ends_by_itself_and_whoever_watches_sees_it(prefix):
    store = MemoryStore()  # of etcd: the last test of registrations
    short, long = await store.grant_lease(1), await store.grant_lease(60)
    await put(store, f"{prefix}/short", b"", short.id)
    revision = await put(store, f"{prefix}/long", b"", long.id)
    async with contextlib.aclosing(store.watch(f"{prefix}/", revision + 1)) as changes:
        (event,) = await take(changes, 1)
    assert (event.key, event.record) == (f"{prefix}/short", None)
    assert list((await store.get_prefix(f"{prefix}/")).records) == [f"{prefix}/long"]
    with pytest.raises(LeaseGoneError):
        await store.keep_alive(short.id)
