"""What is handed over with a shard, as bytes."""

from __future__ import annotations

import json
import zlib
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.cluster import snapshot as snapshots
from dflockd.shards import format_shard_value, parse_shard_value
from dflockd.shards.values import ShardRecord
from dflockd.table import HoldRecord, ReservedPosition, Snapshot, WaiterRecord
from dflockd.table.pauses import NEVER, PauseRecord
from dflockd.table.rates import RateRecord
from dflockd.wire import MAX_LIMIT, MAX_RATE, FairGroup, Space
from tests.dflockd.cluster.view_support import owners

texts = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp")), min_size=1)

keys = texts.map(str.encode)


def with_owner(record: Any, owner: tuple[bytes, int]) -> Any:
    return record._replace(owner=owner[0], attempt=owner[1])


kept = st.builds(
    HoldRecord,
    space=st.sampled_from(Space),
    key=keys,
    limit=st.integers(0, 5),
    fence=st.integers(0, (1 << 64) - 1),
    lease=st.floats(0.1, 60),
    deadline=st.floats(2000, 2060),
    since=st.floats(0, 2000),
    label=texts.map(str.encode),
    detached=st.booleans(),
    owner=st.just(b""),
    attempt=st.just(0),
    group=st.just(b"") | keys,
    places=st.integers(0, MAX_RATE),
    weight=st.integers(1, MAX_LIMIT),
)

reservations = st.builds(
    ReservedPosition, due=st.floats(1900, 2060), hold=st.floats(0, 60), until=st.floats(1990, 2200)
)

waiters = st.builds(
    WaiterRecord,
    space=st.sampled_from(Space),
    key=keys,
    limit=st.integers(1, 5),
    ticket=st.just(b"abc123"),
    lease=st.integers(1, 60),
    since=st.floats(0, 2000),
    label=texts.map(str.encode),
    reservation=st.none() | reservations,
    owner=st.just(b""),
    attempt=st.just(0),
    group=st.none() | st.builds(FairGroup, keys, st.integers(0, 5), st.integers(1, MAX_LIMIT)),
)


def without_times(waiter: WaiterRecord) -> WaiterRecord:
    return waiter._replace(since=0, reservation=None)


@given(
    holds=st.lists(st.builds(with_owner, kept, owners)),
    waiting=st.lists(st.builds(with_owner, waiters, owners)),
    ahead=st.floats(-5000, 5000),
)
def test_a_snapshot_is_read_as_it_was_written_by_another_clock(holds, waiting, ahead):  # type: ignore[no-untyped-def]
    now, there = 2000.0, 2000.0 + ahead
    text = snapshots.dump(Snapshot(holds, waiting), 7, now)
    loaded = snapshots.load(text, 7, there)
    for before, after in zip(holds, loaded.holds, strict=True):
        lease = before.deadline - now if before.detached else before.lease
        assert after.lease == pytest.approx(lease, abs=0.0011)
        assert after.since - there == pytest.approx(before.since - now, abs=0.0011)
        same = ("space", "key", "limit", "fence", "label", "detached", "owner", "attempt")
        assert (before.group, before.weight) == (after.group, after.weight)
        assert before.places == after.places
        assert all(getattr(before, name) == getattr(after, name) for name in same)
    assert list(map(without_times, loaded.waiters)) == list(map(without_times, waiting))
    for waiter, read in zip(waiting, loaded.waiters, strict=True):
        assert read.since - there == pytest.approx(waiter.since - now, abs=0.0011)
        if waiter.reservation is None:
            assert read.reservation is None
        else:
            was = waiter.reservation
            due, hold, until = read.reservation
            assert ReservedPosition(due - there, hold, until - there) == pytest.approx(
                ReservedPosition(was.due - now, was.hold, was.until - now), abs=0.0011
            )


def packed(document: object) -> bytes:
    return zlib.compress(json.dumps(document).encode())


HOLD = [0, "a", 1, 7, 4, 0, 0, "", False, "", 0, 0, 0, "", 1]
PAUSE = ["a", "me", "a reason", 1.5, None]
WAITER = [0, "a", 1, "t", 4, 0, "", None, "", 0, 0, None]


def test_what_is_refused_below_would_be_read() -> None:
    loaded = snapshots.load(packed([7, [HOLD], [WAITER], [], [], [PAUSE], None]), 7, 0.0)
    assert (len(loaded.holds), len(loaded.waiters), len(loaded.pauses)) == (1, 1, 1)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", packed({}), packed([]), packed(None), packed([7]), packed([7, [], []])),
        packed([7, [], [], [], [], [], None])[:-1],
        zlib.compress(b"[" * 100_000),
        packed([6, [], [], [], [], [], None]),
        packed([7, 7, [], [], [], [], None]),
        *(
            packed([7, [[*HOLD[:3], fence, *HOLD[4:]]], [], [], [], [], None])
            for fence in ("7", -1, 1.5, None, True, 1 << 64)
        ),
        packed([7, [], [], [], [], [PAUSE[:-1]], None]),
        packed([7, [], [], [], [], [[*PAUSE[:-1], "soon"]], None]),
        packed([7, [HOLD[:-1]], [], [], [], [], None]),
        packed([7, [[*HOLD[:2], "1", *HOLD[3:]]], [], [], [], [], None]),
        packed([7, [], [[*WAITER[:4], "4", *WAITER[5:]]], [], [], [], None]),
    ],
)
def test_a_snapshot_that_is_none_or_of_another_epoch_is_refused(data: bytes) -> None:
    with pytest.raises(snapshots.BadSnapshotError):
        snapshots.load(data, 7, 0.0)


@given(
    st.lists(st.tuples(st.floats(0, 86_400), st.integers(1, MAX_RATE)), max_size=50).map(sorted),
    st.floats(-5000, 5000),
)
def test_a_beginning_counts_as_long_as_it_did_or_some_milliseconds_longer(
    begun: list[tuple[float, int]], ahead: float
) -> None:
    now, there = 86_400.0, 86_400.0 + ahead
    record = RateRecord(Space.LOCK, b"k", 5, 60.5, 3, tuple(chain.from_iterable(begun)))
    data = snapshots.dump(Snapshot([], [], (), [record], (), now - 7), 7, now)
    [rate], _, since = snapshots.load(data, 7, there)[3:]
    assert rate._replace(begun=()) == record._replace(begun=())
    assert rate.begun[1::2] == record.begun[1::2]
    for time, read in zip(record.begun[::2], rate.begun[::2], strict=True):
        assert -1e-6 < (read - there) - (time - now) < 0.0021
    assert since == pytest.approx(there - 7)


def test_what_a_leader_writes_can_be_read() -> None:
    record = ShardRecord("a:1", "b:1", ("pinned", "e:3", "other"))
    assert parse_shard_value(format_shard_value(record)) == record


@given(
    since=st.floats(0, 2000),
    left=st.floats(0.001, 1e7) | st.just(NEVER),
    ahead=st.floats(-5000, 5000),
    said=st.tuples(keys, texts.map(str.encode), texts.map(str.encode)),
)
def test_a_pause_ends_at_the_same_time_by_another_clock(
    since: float, left: float, ahead: float, said: tuple[bytes, bytes, bytes]
) -> None:
    now, there = 2000.0, 2000.0 + ahead
    snapshot = Snapshot([], [], pauses=[PauseRecord(*said, since, now + left)])
    assert not snapshot.is_empty
    [read] = snapshots.load(snapshots.dump(snapshot, 7, now), 7, there).pauses
    assert read[:3] == said
    assert read.since - there == pytest.approx(since - now, abs=0.0011)
    # Never sooner: what somebody has paused does not begin before they said.
    assert read.until - there == pytest.approx(left, abs=0.0011)
