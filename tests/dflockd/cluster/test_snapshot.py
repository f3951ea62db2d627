"""What is handed over with a shard, as bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.cluster import snapshot as snapshots
from dflockd.shards import format_shard_value, parse_shard_value
from dflockd.shards.values import ShardRecord
from dflockd.table import HoldRecord, Reservation, Snapshot, WaiterRecord
from dflockd.wire import FairGroup, Space
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
)

reservations = st.builds(
    Reservation, due=st.floats(1900, 2060), hold=st.floats(0, 60), until=st.floats(1990, 2200)
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
    group=st.none() | st.builds(FairGroup, keys, st.integers(0, 5)),
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
        assert after.lease == pytest.approx(lease, abs=1e-6)
        assert after.since - there == pytest.approx(before.since - now, abs=1e-6)
        same = ("space", "key", "limit", "fence", "label", "detached", "owner", "attempt")
        assert before.group == after.group
        assert all(getattr(before, name) == getattr(after, name) for name in same)
    assert list(map(without_times, loaded.waiters)) == list(map(without_times, waiting))
    for waiter, read in zip(waiting, loaded.waiters, strict=True):
        assert read.since - there == pytest.approx(waiter.since - now, abs=1e-6)
        if waiter.reservation is None:
            assert read.reservation is None
        else:
            was = waiter.reservation
            due, hold, until = read.reservation
            assert Reservation(due - there, hold, until - there) == pytest.approx(
                Reservation(was.due - now, was.hold, was.until - now),
                abs=1e-6,
            )


def test_servers_of_0_1_read_a_snapshot_and_theirs_is_read() -> None:
    hold = HoldRecord(Space.LOCK, b"k", 1, 7, 5.0, 2005.0, 1999.0, b"x", owner=b"run", attempt=3)
    hold = hold._replace(group=b"one")
    waiter = WaiterRecord(Space.LOCK, b"k", 1, b"t1", 5, 1999.0, b"x", None, b"run", 4)
    waiter = waiter._replace(group=FairGroup(b"two", 3))
    document = json.loads(snapshots.dump(Snapshot([hold], [waiter]), 7, 2000.0))
    # They take the fields of these by position, and look at no other key.
    assert document["holds"] == [[0, "k", 1, 7, 5.0, 1.0, "x", 0]]
    assert document["places"] == [[0, "k", 1, "t1", 5, 1.0, "x", None]]
    theirs = {name: document[name] for name in ("epoch", "holds", "places")}
    loaded = snapshots.load(json.dumps(theirs).encode(), 7, 2000.0)
    bare = hold._replace(owner=b"", attempt=0, group=b"")
    assert loaded[:2] == ([bare], [WaiterRecord(*waiter[:8])])


@pytest.mark.parametrize(
    "text",
    [
        b'{"epoch":7,"holds":[],"places":[],"hold_owners":[[0,"a",1]]}',
        b'{"epoch":7,"holds":[],"places":[],"place_owners":[[0]]}',
        b'{"epoch":7,"holds":[],"places":[],"hold_groups":[[0,"a"]]}',
        b'{"epoch":7,"holds":[],"places":[],"place_groups":[["a"]]}',
        *(b"", b"{}", b"[]", b"null", b"\xff", b'{"epoch":7}'),
        b'{"epoch":7,"holds":[[1]],"places":[]}',
        b'{"epoch":7,"holds":[],"places":7}',
        *(
            b'{"epoch":7,"holds":[[0,"a",1,%b,4,0,"",0]],"places":[]}' % fence
            for fence in (b'"7"', b"-1", b"1.5", b"null", b"true", b"18446744073709551616")
        ),
        b'{"epoch":7,"holds":[[0,"a","1",7,4,0,"",0]],"places":[]}',
        b'{"epoch":7,"holds":[],"places":[[0,"a",1,"t","4",0,"",null]]}',
        b'{"epoch":6,"holds":[],"places":[]}',
    ],
)
def test_a_snapshot_that_is_none_or_of_another_epoch_is_refused(text: bytes) -> None:
    with pytest.raises(snapshots.BadSnapshotError):
        snapshots.load(text, 7, 0.0)


def test_what_a_leader_writes_can_be_read() -> None:
    record = ShardRecord("a:1", "b:1", ("pinned", "e:3", "other"))
    assert parse_shard_value(format_shard_value(record)) == record
