"""What the leader decides, and the parameters of a cluster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.cluster.leader import BATCH, SETTLE, Leader
from dflockd.cluster.parameters import ClusterParameters, ParametersError
from dflockd.cluster.view import View
from dflockd.shards import Put, Record, format_shard_value
from dflockd.shards.memory import KeySpace
from tests.dflockd.cluster.view_support import see_node, see_shard, view_of


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
    view.see("/p/nodes/b:1", Record(b"dflockd/b", 20, 1), 20)
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
    with pytest.raises(
        ParametersError, match="--cluster-max-lease-ttl is 4 here and 60 in the cluster"
    ):
        parameters.check(ClusterParameters(num_shards=64, serving_lease=3).dump())
    for broken in (b"", b"[]", b"\xff", b"{}", b'{"num_shards": 64}', b"null", b"[" * 100_000):
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


times = st.floats(0, 1e6).map(lambda t: round(t, 3))
