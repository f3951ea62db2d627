"""What a server knows of the store, the parameters, the leader's decisions, and what is handed over."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.claims import opens_at_once
from dflockd.cluster.leader import BATCH, SETTLE, Leader
from dflockd.cluster.parameters import ClusterParameters, ParametersError
from dflockd.cluster.view import NOT_YET, REPORT_INTERVAL, View
from dflockd.shards import Loaded, Put, Record, format_shard_value, parse_shard_value
from dflockd.shards.memory import KeySpace
from dflockd.shards.values import ShardRecord
from dflockd.table import HoldRecord, Reservation, Snapshot, WaiterRecord
from dflockd.wire import InGroup, Moved, Space, decode_map
from dflockd.wire.messages import MAX_ATTEMPT

LEASE = 7
"""Of the store, by which the entries of servers live."""


def view_of(num_shards: int = 4, **nodes: int) -> View:
    view = View("/p", num_shards)
    for name, revision in nodes.items():
        see_node(view, f"{name}:1", revision)
    return view


def see_node(view: View, name: str, revision: int, lease: int = LEASE) -> object:
    value = name.partition(":")[0].encode()
    return view.see(f"/p/nodes/{name}", Record(value, revision, lease), revision)


def see_shard(view: View, shard: int, text: str, revision: int) -> object:
    return view.see(f"/p/shard/{shard}", Record(text.encode(), revision), revision)


def lead(view: View, leader: Leader, now: float, revision: int) -> int:
    """Carry out what the leader wants, until it wants nothing; return in how many transactions."""
    transactions = 0
    while (transaction := leader.due(now)) is not None:
        transactions += 1
        assert len(transaction.operations) <= BATCH
        for put in transaction.operations:
            assert isinstance(put, Put)
            view.see(put.key, Record(put.value, revision + transactions), revision + transactions)
        leader.answered(True, now)
    return transactions


# The view.

changes = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["a:1,", "b:1,a:1,f=e:3", "", None])), max_size=20
)


@given(changes=changes, order=st.randoms(use_true_random=False), repeats=st.integers(0, 5))
def test_whatever_comes_late_or_twice_the_newest_is_known(changes, order, repeats):  # type: ignore[no-untyped-def]
    told = [(shard, text, revision) for revision, (shard, text) in enumerate(changes, start=1)]
    in_order, mixed = view_of(), view_of()
    shuffled = told + told[:repeats]
    order.shuffle(shuffled)
    for view, events in ((in_order, told), (mixed, shuffled)):
        for shard, text, revision in events:
            record = None if text is None else Record(text.encode(), revision)
            view.see(f"/p/shard/{shard}", record, revision)
    there = [shard for shard in range(4) if in_order.revisions[shard]]
    assert [mixed.records[shard] for shard in there] == [in_order.records[s] for s in there]
    assert mixed.epochs == in_order.epochs
    assert mixed.revisions == in_order.revisions


def test_what_is_not_newer_is_no_news() -> None:
    view = view_of(a=5)
    assert see_shard(view, 0, "a:1,", 7) == 0
    assert see_shard(view, 0, "b:1,", 7) is None
    assert see_shard(view, 0, "b:1,", 6) is None
    assert view.see("/p/nodes/a:1", None, 4) is None
    assert see_node(view, "a:1", 8) is None
    assert view.see("/p/nodes/a:1", Record(b"another", 9, LEASE), 9) == "nodes"
    assert view.records[0].target == "a:1"


def test_a_record_that_was_deleted_is_not_that_of_a_new_shard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = view_of(a=1)
    for shard in range(3):
        see_shard(view, shard, "a:1,a:1,f=e:7", 2)
    for shard in range(3):
        view.see(f"/p/shard/{shard}", None, 3)
    assert view.records[:3] == [ShardRecord("", "a:1", ("e:7",))] * 3
    assert [view.is_lost(shard) for shard in range(4)] == [True, True, True, False]
    assert view.revisions[:3] == [0] * 3
    assert not any(opens_at_once(record) for record in view.records[:3])
    assert opens_at_once(view.records[3])
    assert caplog.text.count("/p/shard/") == 1, "said once of all that are deleted at a time"
    # Somebody who has not seen it writes as if nobody had served the shard.
    see_shard(view, 0, "b:1,", 4)
    see_shard(view, 1, "b:1,,f=e:5,f=clean:5", 4)
    assert view.records[:2] == [ShardRecord("b:1", "", ("e:7",)), ShardRecord("b:1", "", ("e:7",))]
    # And what was there before it was deleted is told late.
    see_shard(view, 2, "a:1,a:1,f=e:9", 2)
    view.see("/p/shard/3", None, 5)
    see_shard(view, 3, "a:1,a:1,f=e:2", 4)
    assert view.epochs == [7, 7, 9, 2]
    assert view.records[3] == ShardRecord("", "", ("e:2",))


def test_a_load_tells_what_has_vanished() -> None:
    view = view_of(a=5, b=6)
    see_shard(view, 1, "a:1,a:1", 7)
    loaded = Loaded({"/p/nodes/b:1": Record(b"b", 6, LEASE)}, 10)
    for key, record, revision in view.differences(loaded):
        view.see(key, record, revision)
    assert list(view.nodes) == ["b:1"]
    assert view.records[1] == ShardRecord()
    assert see_shard(view, 1, "a:1,a:1", 8) is None


@pytest.mark.parametrize("text", ["a:1,a:1,f=e:x", "a:1,a:1,f=e:16777216", "a:1,a:1,f=clean:1_0"])
def test_a_record_that_cannot_be_read_is_left_alone(text: str) -> None:
    view = view_of(a=1)
    assert see_shard(view, 0, text, 2) == 0
    assert view.unreadable == {0}
    assert see_shard(view, 0, "a:1,a:1,f=e:16777215", 3) == 0
    assert view.unreadable == set()


@pytest.mark.parametrize(
    "key", ["shard/4", "shard/01", "shard/-1", "shard/x", "shard/", "nodes/", "nodes/a,b", "x/0"]
)
def test_keys_that_mean_nothing_are_ignored(key: str) -> None:
    view = view_of(a=1)
    assert view.see(f"/p/{key}", Record(b"a:1,", 9), 9) is None
    assert view.leader == "a:1"


def test_an_entry_without_a_lease_neither_leads_nor_gets_shards() -> None:
    view = view_of(a=1, b=2)
    assert see_node(view, "0", 3, lease=0) == "nodes"
    assert view.leader == "a:1"
    assert view.candidates == {"a:1", "b:1"}
    see_shard(view, 0, "0,0,f=e:3", 4)
    assert view.refer(0, "a:1") is NOT_YET
    assert reported(view)["servers"] == ["a:1", "b:1"]
    # Its name is taken: no claim of its shards can succeed, so that none is tried.
    assert not view.roster.is_gone("0")
    assert view.see("/p/nodes/0", None, 5) == "nodes"
    assert view.roster.is_gone("0")


def test_a_load_tells_that_a_stranger_has_vanished() -> None:
    view = view_of(a=1)
    see_node(view, "0", 3, lease=0)
    for key, record, revision in view.differences(Loaded({}, 10)):
        view.see(key, record, revision)
    assert view.roster.is_gone("0")
    assert view.roster.is_gone("a:1")


def test_a_server_that_takes_the_place_of_a_stranger_is_one() -> None:
    view = view_of()
    see_node(view, "a:1", 1, lease=0)
    assert view.leader is None
    assert see_node(view, "a:1", 2) == "nodes"
    assert view.leader == "a:1"


def test_it_refers_to_the_server_that_has_a_shard_or_is_to_have_it() -> None:
    view = view_of(a=1, b=2)
    see_shard(view, 0, "b:1,a:1,f=e:3", 3)
    assert view.refer(0, "c:1") == Moved(0, 3, b"a:1")
    assert view.refer(0, "a:1") is NOT_YET
    see_shard(view, 0, "b:1,,f=e:3", 4)
    assert view.refer(0, "a:1") == Moved(0, 3, b"b:1")
    assert view.refer(0, "b:1") is NOT_YET
    see_shard(view, 0, "gone:1,gone:1,f=e:3", 5)
    assert view.refer(0, "a:1") is NOT_YET
    assert reported(view) == {
        "num_shards": 4,
        "servers": ["a:1", "b:1"],
        "shards": [-1, -1, -1, -1],
        "epochs": [3, 0, 0, 0],
    }


# The map that clients are given.


def reported(view: View, now: float = 0.0) -> dict[str, Any]:
    """What the map says, its version aside."""
    document, _ = decode_map(view.report(now).plain)
    del document["version"]
    return document


def test_the_map_is_made_once_for_each_change() -> None:
    view = view_of(a=1, b=2)
    report = view.report(0)
    assert view.report(0) is report
    assert view.report(1e6) is report
    see_shard(view, 0, "b:1,,f=e:3", 3)
    assert reported(view, 1e6)["shards"] == [1, -1, -1, -1]
    assert view.report(2e6) is view.report(1e6)
    assert view.report(2e6).version != report.version
    see_node(view, "c:1", 4)
    assert reported(view, 3e6)["servers"] == ["a:1", "b:1", "c:1"]
    view.see("/p/nodes/a:1", None, 5)
    assert reported(view, 4e6)["servers"] == ["b:1", "c:1"]
    assert reported(view, 4e6)["shards"] == [0, -1, -1, -1]


@pytest.mark.parametrize(
    ("key", "record"),
    [
        ("nodes/a:1", Record(b"a", 9, LEASE)),  # a sign of life
        ("leaving/a:1", Record(b"a", 9, LEASE)),
        ("nodes/c:1", None),
        ("nodes/a,b", Record(b"x", 9)),
        ("shard/0", Record(b"a:1,", 3)),
        ("shard/7", Record(b"a:1,", 9)),
        ("else/0", Record(b"a:1,", 9)),
    ],
)
def test_what_is_no_news_is_no_reason_to_make_the_map(key: str, record: Record | None) -> None:
    view = view_of(a=1, b=2)
    see_shard(view, 0, "b:1,", 3)
    report = view.report(0)
    view.see(f"/p/{key}", record, record.revision if record else 9)
    assert view.report(1e6) is report


def test_while_much_changes_the_map_may_be_a_little_old() -> None:
    view = view_of(a=1)
    view.report(10)
    see_shard(view, 0, "a:1,", 2)
    just_before, then = 10 + REPORT_INTERVAL * 0.99, 10 + REPORT_INTERVAL
    assert reported(view, just_before)["shards"][0] == -1
    assert reported(view, then)["shards"][0] == 0
    see_shard(view, 1, "a:1,", 3)
    assert reported(view, then)["shards"][1] == -1
    assert reported(view, then + REPORT_INTERVAL)["shards"][1] == 0


# Changes of shards 0 to 2 and servers a and b, as in the store.
whatever_changes = st.lists(
    st.tuples(
        st.sampled_from(["shard/0", "shard/2"]), st.sampled_from(["a:1,", "b:1,a:1,f=e:3", None])
    )
    | st.tuples(
        st.sampled_from(["nodes/a:1", "nodes/b:1", "leaving/a:1"]),
        st.sampled_from(["x", "without", None]),
    ),
    max_size=12,
)


@given(changes=whatever_changes, asked=st.lists(st.booleans(), min_size=12, max_size=12))
def test_whenever_it_is_asked_for_the_map_is_that_of_another_server(changes, asked):  # type: ignore[no-untyped-def]
    views = [view_of(), view_of()]
    for revision, ((key, text), asks) in enumerate(zip(changes, asked, strict=False), start=1):
        lease = LEASE if key.startswith("nodes") and text != "without" else 0
        record = None if text is None else Record(text.encode(), revision, lease)
        for view in views:
            view.see(f"/p/{key}", record, revision)
        if asks:
            views[0].report(revision)
    one, other = (view.report(100) for view in views)
    assert one == other
    servers = sorted(views[0].nodes)
    owners = [record.current or record.target for record in views[0].records]
    assert decode_map(one.packed)[0] == {
        "num_shards": 4,
        "servers": servers,
        "shards": [
            servers.index(o) if o in servers else _second(views[0], s, servers)
            for s, o in enumerate(owners)
        ],
        "epochs": views[0].epochs,
    }


def _second(view: View, shard: int, servers: list[str]) -> int:
    """The server that is to have a shard, where the one that has it is gone."""
    target = view.records[shard].target
    return servers.index(target) if target in servers else -1


# The leader.


def test_the_first_mapping_waits_for_servers_that_are_still_to_come() -> None:
    view = view_of(8, a=1)
    leader = Leader(view, "a:1")
    leader.joined(0)
    assert leader.due(SETTLE - 0.1) is None
    see_node(view, "b:1", 2)
    leader.joined(1.5)
    assert leader.due(SETTLE + 0.1) is None
    assert leader.next_deadline() == 1.5 + SETTLE
    assert lead(view, leader, 1.5 + SETTLE, 10) == 1
    assert [record.target for record in view.records] == ["a:1", "b:1"] * 4
    assert leader.next_deadline() is None


def test_only_the_smallest_address_leads_but_two_do_no_harm() -> None:
    store = KeySpace()
    views = [view_of(4, a=1, b=2), view_of(4, b=2)]  # the second has not heard of the first
    transactions = []
    for view, address in zip(views, ("a:1", "b:1"), strict=True):
        leader = Leader(view, address)
        leader.joined(0)
        transactions.append(leader.due(SETTLE))
    assert all(transactions)
    outcomes = [
        store.txn(transaction.compares, transaction.operations)
        for transaction in transactions
        if transaction
    ]
    assert [outcome.succeeded for outcome in outcomes] == [True, False]
    follower = Leader(views[0], "b:1")
    follower.joined(0)
    assert follower.due(SETTLE) is None


def test_shards_of_servers_that_are_gone_or_leave_go_to_the_others_and_pinned_ones_stay() -> None:
    view = view_of(200, a=1, b=2, c=3)
    leader = Leader(view, "a:1")
    leader.joined(0)
    assert lead(view, leader, SETTLE, 10) == -(-200 // BATCH)
    see_shard(view, 2, format_shard_value(view.records[2].with_flag("pinned")), 50)
    view.see("/p/nodes/c:1", None, 51)
    view.see("/p/leaving/b:1", Record(b"b", 52), 52)
    leader.look(100)
    lead(view, leader, 100, 60)
    assert {record.target for shard, record in enumerate(view.records) if shard != 2} == {"a:1"}
    assert view.records[2].target == "c:1"


def test_who_begins_to_leave_is_given_no_more_of_what_was_decided_before() -> None:
    view = view_of(400, a=1, b=2, c=3)
    leader = Leader(view, "a:1")
    leader.joined(0)
    assert leader.due(SETTLE) is not None
    leader.answered(True, SETTLE)
    view.see("/p/leaving/b:1", Record(b"b", 4), 4)
    leader.look(SETTLE)
    transaction = leader.due(SETTLE)
    assert transaction is not None
    assert len(transaction.operations) == BATCH
    assert not any(
        put.value.startswith(b"b:1") for put in transaction.operations if isinstance(put, Put)
    )


def test_each_of_many_servers_is_given_its_shards_together() -> None:
    view = view_of(8192, **{f"s{number:02}": 1 + number for number in range(100)})
    leader = Leader(view, "s00:1")
    leader.joined(0)
    told: Counter[str] = Counter()
    while (transaction := leader.due(SETTLE)) is not None:
        puts = [put for put in transaction.operations if isinstance(put, Put)]
        targets = {put.value.partition(b",")[0].decode() for put in puts}
        told.update(targets)
        for put in puts:
            view.see(put.key, Record(put.value, 500), 500)
        leader.answered(True, SETTLE)
    assert told.total() < 500, "one by one they would be told 6,400 times"
    assert set(told.values()) <= {3, 4, 5}, "and all of them have something to do"


def test_with_nobody_to_take_shards_they_stay() -> None:
    view = view_of(a=1)
    view.see("/p/leaving/a:1", Record(b"a", 2), 2)
    leader = Leader(view, "a:1", balances=True)
    leader.joined(0)
    assert leader.due(SETTLE) is None


def test_balancing_is_only_done_where_it_was_asked_for() -> None:
    for balances in (False, True):
        view = view_of(100, a=1, b=2)
        for shard in range(100):
            see_shard(view, shard, "a:1,a:1,f=e:1", 10 + shard)
        leader = Leader(view, "a:1", balances=balances)
        leader.joined(0)
        for second in range(200):
            lead(view, leader, 10.0 + second, 1000 + 100 * second)
            for shard, record in enumerate(view.records):
                moved = format_shard_value(record._replace(current=record.target))
                see_shard(view, shard, moved, 1050 + 100 * second)
        moved_shards = sum(record.target == "b:1" for record in view.records)
        assert (moved_shards >= 40) is balances


def test_who_balances_waits_as_long_for_servers_that_are_gone() -> None:
    view = view_of(8, a=1)
    for shard in range(8):
        see_shard(view, shard, f"{'ab'[shard % 2]}:1,{'a:1' if shard % 2 == 0 else ''},f=e:1", 10)
    leader = Leader(view, "a:1", balances=True)
    leader.settle(5)
    assert leader.due(5) is None
    assert leader.due(5 + SETTLE - 0.1) is None
    view.see("/p/nodes/b:1", Record(b"b", 20, 1), 20)
    assert leader.due(5 + SETTLE) is None
    assert [record.target for record in view.records] == ["a:1", "b:1"] * 4


def test_nothing_is_balanced_while_a_server_may_come_back() -> None:
    view = view_of(8, a=1, b=2)
    for shard in range(8):
        see_shard(view, shard, "a:1,a:1,f=e:1" if shard < 6 else "c:1,c:1,f=e:1", 10)
    leader = Leader(view, "a:1", balances=True)
    leader.settle(5)
    assert leader.due(5 + SETTLE - 0.1) is None
    assert leader.due(5 + SETTLE) is not None


def test_what_nobody_knows_the_end_of_is_decided_again() -> None:
    view = view_of(a=1)
    leader = Leader(view, "a:1")
    leader.joined(0)
    assert leader.due(SETTLE) is not None
    assert leader.due(SETTLE) is None
    leader.answered(None, SETTLE)
    again = leader.next_deadline()
    assert again is not None
    assert again > SETTLE
    assert leader.due(again) is not None


# The parameters.


def test_parameters_agree_with_themselves_and_with_nothing_else() -> None:
    parameters = ClusterParameters(num_shards=64, serving_lease=3, max_lease=4)
    parameters.check(parameters.dump())
    parameters.check(b'{"num_shards": 64, "promise": 3, "max_lease": 4}')  # as 0.1 writes it
    with pytest.raises(
        ParametersError, match="--cluster-max-lease-ttl is 4 here and 60 in the cluster"
    ):
        parameters.check(ClusterParameters(num_shards=64, serving_lease=3).dump())
    for broken in (b"", b"[]", b"\xff", b"{}", b'{"num_shards": 64}', b"null"):
        with pytest.raises(ParametersError, match="cannot be read"):
            parameters.check(broken)


@given(
    serving_lease=st.integers(1, 100), lease=st.integers(1, 10_000), drift=st.floats(-0.01, 0.01)
)
def test_a_grace_outlasts_every_lease_from_before(
    serving_lease: int, lease: int, drift: float
) -> None:
    parameters = ClusterParameters(serving_lease=serving_lease, max_lease=lease)
    # All on true clocks: the longest that a former server and a holder may take, the shortest grace.
    assert parameters.grace / 1.01 > (serving_lease + lease) / 0.99
    assert lease * parameters.stretch / 1.01 > lease / (1 - abs(drift))


# What is handed over.

texts = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp")), min_size=1)
keys = texts.map(str.encode)
times = st.floats(0, 1e6).map(lambda t: round(t, 3))
owners = st.just((b"", 0)) | st.tuples(
    st.from_regex(rb"[!-~]{1,64}", fullmatch=True), st.integers(0, MAX_ATTEMPT)
)


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
    group=st.none() | st.builds(InGroup, keys, st.integers(0, 5)),
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
    waiter = waiter._replace(group=InGroup(b"two", 3))
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
        b'{"epoch":6,"holds":[],"places":[]}',
    ],
)
def test_a_snapshot_that_is_none_or_of_another_epoch_is_refused(text: bytes) -> None:
    with pytest.raises(snapshots.BadSnapshotError):
        snapshots.load(text, 7, 0.0)


def test_what_a_leader_writes_can_be_read() -> None:
    record = ShardRecord("a:1", "b:1", ("pinned", "e:3", "other"))
    assert parse_shard_value(format_shard_value(record)) == record
