"""Both stores, by the same cases: what the one in memory does is what etcd does."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflockd.errors import InvalidArgumentError
from dflockd.shards import (
    CompactedError,
    Delete,
    Event,
    Get,
    KeySpace,
    LeaseGoneError,
    MemoryStore,
    Put,
    Record,
    Registration,
    RevisionIs,
    StoreError,
    ValueIs,
)

PATIENCE = 30
GONE = 999_999


async def put(store, key, value=b"v", lease=0):
    """Put a key and return the revision that it has now."""
    return (await store.txn([], [Put(key, value, lease)])).revision


async def get(store, key):
    return (await store.txn([], [Get(key)])).records.get(key)


async def take(changes, count):
    """The next events, as many as that, however they are grouped."""
    events = []
    async with asyncio.timeout(PATIENCE):
        while len(events) < count:
            events += await anext(changes)
    return events


# keys


async def test_a_key_has_a_value_and_the_revision_of_its_latest_change(store, prefix):
    first = await put(store, f"{prefix}/a", b"1")
    second = await put(store, f"{prefix}/a", b"2")
    assert second == first + 1
    assert await get(store, f"{prefix}/a") == Record(b"2", second)
    assert await get(store, f"{prefix}/b") is None


async def test_a_prefix_loads_its_keys_and_no_others(store, prefix):
    for key in ("a/1", "a/2", "a", "b/1", "a0"):
        last = await put(store, f"{prefix}/{key}", key.encode())
    loaded = await store.get_prefix(f"{prefix}/a/")
    assert list(loaded.records) == [f"{prefix}/a/1", f"{prefix}/a/2"]
    assert loaded.records[f"{prefix}/a/2"].value == b"a/2"
    assert loaded.revision == last
    assert (await store.get_prefix(f"{prefix}/none/")).records == {}


async def test_a_revision_counts_changes_not_operations(store, prefix):
    before = await put(store, f"{prefix}/a")
    outcome = await store.txn([], [Put(f"{prefix}/{n}", b"") for n in range(5)])
    assert outcome.revision == before + 1
    loaded = await store.get_prefix(f"{prefix}/")
    assert [record.revision for record in loaded.records.values()] == [before + 1] * 5 + [before]
    # Reading, and deleting what is not there, changes nothing.
    outcome = await store.txn([], [Delete(f"{prefix}/none"), Get(f"{prefix}/a")])
    assert outcome.revision == before + 1


# transactions


async def test_a_key_is_made_only_once(store, prefix):
    absent = [RevisionIs(f"{prefix}/a", 0)]
    assert (await store.txn(absent, [Put(f"{prefix}/a", b"1")])).succeeded
    assert not (await store.txn(absent, [Put(f"{prefix}/a", b"2")])).succeeded
    assert (await get(store, f"{prefix}/a")).value == b"1"


async def test_a_key_is_changed_only_at_the_revision_that_was_seen(store, prefix):
    seen = await put(store, f"{prefix}/a", b"1")
    assert (
        await store.txn([RevisionIs(f"{prefix}/a", seen)], [Put(f"{prefix}/a", b"2")])
    ).succeeded
    late = await store.txn([RevisionIs(f"{prefix}/a", seen)], [Put(f"{prefix}/a", b"3")])
    assert not late.succeeded
    assert (await get(store, f"{prefix}/a")).value == b"2"


async def test_a_value_is_compared_and_a_key_that_is_missing_has_none(store, prefix):
    await put(store, f"{prefix}/a", b"")
    holds = [(f"{prefix}/a", b""), (f"{prefix}/a", b"x"), (f"{prefix}/b", b"")]
    outcomes = [await store.txn([ValueIs(key, value)], []) for key, value in holds]
    assert [outcome.succeeded for outcome in outcomes] == [True, False, False]


async def test_all_conditions_must_hold_or_nothing_happens(store, prefix):
    seen = await put(store, f"{prefix}/a", b"1")
    compares = [RevisionIs(f"{prefix}/a", seen), ValueIs(f"{prefix}/me", b"alive")]
    operations = [Put(f"{prefix}/a", b"2"), Put(f"{prefix}/b", b"2")]
    outcome = await store.txn(compares, operations)
    assert not outcome.succeeded
    assert outcome.revision == seen
    # It says how things are, so that the caller can decide again.
    assert outcome.records == {f"{prefix}/a": Record(b"1", seen)}
    assert await get(store, f"{prefix}/b") is None


async def test_a_transaction_reads_after_what_it_wrote_before(store, prefix):
    await put(store, f"{prefix}/old", b"o")
    outcome = await store.txn(
        [],
        [
            Put(f"{prefix}/a", b"1"),
            Get(f"{prefix}/a"),
            Get(f"{prefix}/old"),
            Delete(f"{prefix}/old"),
            Get(f"{prefix}/none"),
        ],
    )
    assert {key: record.value for key, record in outcome.records.items()} == {
        f"{prefix}/a": b"1",
        f"{prefix}/old": b"o",
    }
    assert await get(store, f"{prefix}/old") is None


async def test_128_operations_are_carried_out_and_129_are_refused(store, prefix):
    puts = [Put(f"{prefix}/{n}", b"") for n in range(129)]
    compares = [RevisionIs(key, 0) for key, *_ in puts]
    for few, many in [(compares[:1], puts), (compares, puts[:1])]:
        with pytest.raises(InvalidArgumentError, match=r"has 129 .* it may have 128"):
            await store.txn(few, many)
    assert (await store.get_prefix(f"{prefix}/")).records == {}
    assert (await store.txn(compares[:128], puts[:128])).succeeded
    assert len((await store.get_prefix(f"{prefix}/")).records) == 128


async def test_a_key_is_not_written_twice_in_a_transaction(store, prefix):
    for second in (Put(f"{prefix}/a", b"2"), Delete(f"{prefix}/a")):
        with pytest.raises(InvalidArgumentError, match="twice"):
            await store.txn([], [Put(f"{prefix}/a", b"1"), second])


keys = st.sampled_from(["a", "b", "c", "d/1", "d/2"])
values = st.sampled_from([b"", b"x", b"y"])
steps = st.lists(
    st.tuples(
        st.lists(st.tuples(keys, st.one_of(values, st.integers(0, 6))), max_size=2),
        st.lists(
            st.one_of(
                st.builds(Put, keys, values, st.just(0)),
                st.builds(Delete, keys),
                st.builds(Get, keys),
            ),
            max_size=4,
        ),
    ),
    max_size=8,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(history=steps)
async def test_the_store_in_memory_answers_as_etcd_does(etcd_store, history):
    """Any transactions, one after the other: the same outcomes, the same keys, the same changes."""
    prefix = f"/twin-{id(history)}/"
    for key in (await etcd_store.get_prefix(prefix)).records:
        await etcd_store.txn([], [Delete(key)])
    base = (await etcd_store.get_prefix(prefix)).revision
    memory = KeySpace()
    shift = base - memory.revision

    def shifted(records):
        return {
            key: record._replace(revision=record.revision - shift)
            for key, record in records.items()
        }

    for conditions, operations in history:
        outcomes = []
        for txn, offset in ((memory.txn, 0), (etcd_store.txn, shift)):
            compares = [
                ValueIs(prefix + key, expected)
                if isinstance(expected, bytes)
                else RevisionIs(prefix + key, expected and expected + offset)
                for key, expected in conditions
            ]
            named = [operation._replace(key=prefix + operation.key) for operation in operations]
            try:
                outcome = txn(compares, named)
                outcomes.append(await outcome if txn == etcd_store.txn else outcome)
            except InvalidArgumentError as exc:
                outcomes.append(exc)
        ours, theirs = outcomes
        if isinstance(ours, InvalidArgumentError):
            assert isinstance(theirs, InvalidArgumentError)
            continue
        assert ours.succeeded == theirs.succeeded
        assert ours.revision == theirs.revision - shift
        assert ours.records == shifted(theirs.records)
    loaded = await etcd_store.get_prefix(prefix)
    assert memory.load(prefix).records == shifted(loaded.records)
    expected = [event for events in memory.since(prefix, 2) for event in events]
    async with contextlib.aclosing(etcd_store.watch(prefix, base + 1)) as changes:
        for ours, theirs in zip(expected, await take(changes, len(expected)), strict=True):
            assert (ours.key, ours.revision) == (theirs.key, theirs.revision - shift)
            assert (ours.record is None) == (theirs.record is None)


async def test_changes_that_are_forgotten_are_an_error(prefix):
    store = MemoryStore(history=3)
    for n in range(5):
        await put(store, f"{prefix}/{n}")
    with pytest.raises(CompactedError, match="load again"):
        await take(store.watch(f"{prefix}/", 2), 1)
    # A watch that stays in touch never asks for them, though most changes are not its own.
    async with contextlib.aclosing(store.watch("/mine/", 6)) as changes:
        waiting = asyncio.ensure_future(take(changes, 1))
        for n in range(5):
            await put(store, f"{prefix}/{n}")
            await asyncio.sleep(0)
        await put(store, "/mine/a")
        assert [event.key for event in await waiting] == ["/mine/a"]


# leases


async def test_keys_end_with_their_lease(store, prefix):
    lease = await store.grant_lease(60)
    assert lease.ttl >= 60
    await store.txn([], [Put(f"{prefix}/{n}", b"", lease.id) for n in range(3)])
    kept = await put(store, f"{prefix}/2")
    await store.keep_alive(lease.id)
    assert (await get(store, f"{prefix}/0")).lease == lease.id
    await store.revoke_lease(lease.id)
    # The last one was put again, without the lease. The others were deleted in one change.
    loaded = await store.get_prefix(f"{prefix}/")
    assert list(loaded.records) == [f"{prefix}/2"]
    assert loaded.revision == kept + 1


async def test_a_lease_that_has_ended_is_an_error(store, prefix):
    for call in (
        store.keep_alive(GONE),
        store.revoke_lease(GONE),
        put(store, f"{prefix}/a", b"", GONE),
    ):
        with pytest.raises(LeaseGoneError):
            await call
    assert await get(store, f"{prefix}/a") is None


@pytest.mark.parametrize("ttl", [0, -1, 1.5, True])
async def test_a_lease_has_whole_seconds(store, ttl):
    with pytest.raises(InvalidArgumentError, match="ttl is"):
        await store.grant_lease(ttl)


async def test_in_memory_leases_end_by_the_clock_that_was_given(prefix):
    now = 100.0
    store = MemoryStore(clock=lambda: now)
    for name, wake in (("a", store.expire), ("b", None)):
        lease = await store.grant_lease(10)
        revision = await put(store, f"{prefix}/{name}", b"", lease.id)
        now += 9
        await store.keep_alive(lease.id)
        now += 9.9
        assert await get(store, f"{prefix}/{name}")
        waiting = asyncio.ensure_future(take(store.watch(f"{prefix}/", revision + 1), 1))
        await asyncio.sleep(0)
        now += 0.2
        if wake:
            wake()
        else:
            with pytest.raises(LeaseGoneError):
                await store.keep_alive(lease.id)
        async with asyncio.timeout(5):
            assert await waiting == [Event(f"{prefix}/{name}", revision + 1, None)]


# registration


async def test_a_registration_is_there_until_it_ends(store, prefix):
    mine = Registration(store, f"{prefix}/nodes/a", "mine", ttl=60)
    assert not await mine.heartbeat()
    assert await mine.register()
    assert (await get(store, f"{prefix}/nodes/a")).value == b"mine"
    assert await mine.heartbeat()
    assert (await store.txn([mine.condition], [])).succeeded
    await mine.end()
    assert await get(store, f"{prefix}/nodes/a") is None
    assert not await mine.heartbeat()
    assert not (await store.txn([mine.condition], [])).succeeded


async def test_two_processes_of_one_name_do_not_both_register(store, prefix):
    mine = Registration(store, f"{prefix}/nodes/a", "mine", ttl=60)
    other = Registration(store, f"{prefix}/nodes/a", "other", ttl=60)
    assert await mine.register()
    assert not await other.register()
    assert not await other.register()
    await other.end()
    assert await mine.heartbeat()
    await mine.end()
    assert await other.register()


async def test_a_registration_whose_answer_was_lost_is_made_again(store, prefix):
    mine = Registration(store, f"{prefix}/nodes/a", "mine", ttl=60)
    assert await mine.register()
    assert await mine.register()


async def test_a_heartbeat_without_its_key_says_so_and_does_not_bring_it_back(store, prefix):
    mine = Registration(store, f"{prefix}/nodes/a", "mine", ttl=60)
    await mine.register()
    await put(store, f"{prefix}/nodes/a", b"other")
    assert not await mine.heartbeat()
    assert (await get(store, f"{prefix}/nodes/a")).value == b"other"
    assert not await mine.heartbeat()


async def test_every_heartbeat_gives_a_registration_its_full_time(prefix):
    now = 100.0
    store = MemoryStore(clock=lambda: now)
    mine = Registration(store, f"{prefix}/nodes/a", "mine", ttl=10)
    await mine.register()
    for _ in range(3):
        now += 9
        assert await mine.heartbeat()
    now += 11
    assert not await mine.heartbeat()


async def test_heartbeats_keep_a_registration_and_without_them_it_ends(etcd_store, prefix):
    store = etcd_store
    mine = Registration(store, f"{prefix}/nodes/a", "mine", ttl=1)
    await mine.register()
    revision = (await store.get_prefix(prefix)).revision
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 1.2:
        assert await mine.heartbeat()
        await asyncio.sleep(0.05)
    async with contextlib.aclosing(store.watch(f"{prefix}/", revision + 1)) as changes:
        while (await take(changes, 1))[-1].record is not None:
            pass
    assert not await mine.heartbeat()


async def test_a_closed_store_can_be_closed_again(store):
    await store.close()
    await store.close()


def test_store_errors_are_one_kind():
    assert issubclass(CompactedError, StoreError)
    assert issubclass(LeaseGoneError, StoreError)
