"""A node over a store that answers at once: conditions, records that are odd, what is refused."""

from __future__ import annotations

import logging
import math

import pytest

from dflockd.cluster.leader import SETTLE
from dflockd.cluster.node import LEAVE_TIMEOUT, Node
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.transactions import Kind
from dflockd.cluster.view import MAX_EPOCH
from dflockd.shards import Event, Loaded, Outcome, Put, Record, RevisionIs, ShardRecord, ValueIs
from dflockd.table import Limits
from dflockd.wire import Acquire, Moved, Recovering, Renewed, Space, Status, fence_from_token
from tests.dflockd.cluster.nodes import KEY, WALL, Cluster, of_kind


def test_what_transactions_require() -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.kill("a:1")
    cluster.pass_(SETTLE + 1)
    b = cluster.nodes["b:1"]
    entry = ValueIs("/p/nodes/b:1", cluster.store.load("/p/nodes/").records["/p/nodes/b:1"].value)
    claims = of_kind(cluster.transactions, Kind.CLAIM)
    assert all(
        entry in transaction.compares
        for transaction in claims
        if transaction.tenures[0].record.current == "b:1"
    )
    taken_over = claims[-1]
    assert RevisionIs("/p/nodes/a:1", 0) in taken_over.compares
    for tenure in taken_over.tenures:
        assert RevisionIs(f"/p/shard/{tenure.shard}", tenure.compared) in taken_over.compares
        assert tenure.record.epoch == tenure.former.epoch + 1
        assert tenure.record.clean is None
    b.leave(cluster.now)
    cluster.pass_(LEAVE_TIMEOUT)
    (release,) = of_kind(cluster.transactions, Kind.RELEASE)
    assert entry in release.compares
    for tenure in release.tenures:
        assert RevisionIs(f"/p/shard/{tenure.shard}", tenure.compared) in release.compares
    for transaction in of_kind(cluster.transactions, Kind.HEARTBEAT):
        assert isinstance(transaction.compares[0], ValueIs)


@pytest.mark.parametrize("text", ["b:1,a:1,f=e:x", "a:1,a:1,f=e:99999999"])
def test_a_record_that_cannot_be_read_is_left_alone_and_its_shard_dropped(text: str) -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.write(0, text)
    cluster.pass_(SETTLE + 1)
    assert cluster.store.load("/p/shard/0").records["/p/shard/0"].value.decode() == text
    assert cluster.serving() == {"a:1": {2}, "b:1": {1, 3}}
    cluster.write(0, "b:1,,f=e:5000")
    assert cluster.serving()["b:1"] == {0, 1, 3}
    assert cluster.record(0).epoch > 5000


def test_a_shard_has_no_epoch_after_the_last(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("a:1")
    cluster.write(0, ShardRecord("a:1", "", (f"e:{MAX_EPOCH}",)))
    cluster.write(1, ShardRecord("a:1", "", (f"e:{MAX_EPOCH - 1}",)))
    assert "/p/shard/0 has had its last epoch" in caplog.text
    assert cluster.serving() == {"a:1": {1, 2, 3}}
    cluster.pass_(cluster.parameters.grace)
    token = cluster.take("a:1", b"shard#1/a")
    assert fence_from_token(token) >> 40 == MAX_EPOCH


def test_a_pinned_shard_waits_for_its_server_or_for_somebody_to_move_it() -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.write(0, cluster.record(0).with_flag("pinned"))
    cluster.kill("a:1")
    cluster.pass_(SETTLE + 1)
    assert cluster.serving() == {"b:1": {1, 2, 3}}
    assert cluster.ask("b:1", Acquire(Space.LOCK, KEY, 1, 0, 4)) == Recovering(100)
    cluster.write(0, cluster.record(0).without_flag("pinned"))
    cluster.pass_(SETTLE + 1)
    assert cluster.serving() == {"b:1": {0, 1, 2, 3}}


def test_a_shard_that_is_moved_to_nobody_gets_another_server() -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.move(0, "gone:1")
    cluster.pass_(SETTLE + 1)
    assert cluster.record(0).current in ("a:1", "b:1")


def test_two_servers_that_both_lead_do_no_harm() -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.start("c:1")
    b = cluster.nodes["b:1"]
    b.view.see("/p/nodes/a:1", None, 1 << 40)  # it takes itself for the first
    b.leader.look(cluster.now)
    token = cluster.take("a:1")
    cluster.pass_(3 * SETTLE)
    served = [shard for shards in cluster.serving().values() for shard in shards]
    assert sorted(served) == [0, 1, 2, 3]
    homes = [node for node in cluster.nodes if 0 in cluster.serving()[node]]
    assert cluster.renew(homes[0], token) in (Renewed(4), Status.ERROR)


def test_the_address_alone_gives_no_right_to_anything() -> None:
    cluster = Cluster("a:1")
    token = cluster.take("a:1")
    cluster.kill("a:1")
    cluster.start("a:1")
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, KEY, 1, 0, 4)), Recovering)
    cluster.pass_(3.2)
    assert cluster.renew("a:1", token) == Renewed(4)


def test_a_server_that_was_taken_for_dead_goes_on_with_what_nobody_took() -> None:
    cluster = Cluster("a:1", "b:1", num_shards=4)
    tokens = [cluster.take("a:1", b"shard#%d/a" % shard) for shard in (0, 2)]
    a = cluster.nodes["a:1"]
    cluster.store.revoke(a.membership.lease)
    cluster.move(2, "b:1")
    cluster.now += 1.2
    a.advance(cluster.now)
    cluster.settle()
    assert a.membership.wants_lease
    assert a.next_deadline() > cluster.now
    assert isinstance(cluster.renew("a:1", tokens[0]), Recovering)
    a.enlist("again", cluster.store.grant(3, cluster.now).id, cluster.now)
    cluster.settle()
    assert cluster.renew("a:1", tokens[0]) == Renewed(4)
    assert isinstance(cluster.renew("a:1", tokens[1], b"shard#2/a"), Moved)


def test_without_a_lease_or_an_answer_there_is_nothing_to_wake_up_for() -> None:
    node = Node("a:1", Limits(), b"s", ClusterParameters(), prefix="/p", wall=lambda: WALL)
    assert node.next_deadline() == math.inf
    node.loaded(Loaded({}, 1), 0)
    assert node.next_deadline() == math.inf
    node.enlist("x", 1, 0)
    (transaction,) = node.output().transactions
    assert node.next_deadline() == math.inf
    node.answered(transaction, None, 2)
    assert 2 < node.next_deadline() < 3
    node.advance(3)
    (transaction,) = node.output().transactions
    node.answered(transaction, Outcome(True, 5, {}), 3)
    # Its leases begin when they are asked for, not when they are given.
    assert node.leases.until == transaction.made + node.parameters.serving_lease


def test_strange_keys_do_not_stop_a_node(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = Cluster("a:1")
    for key in ("nodes/", "nodes/a,b", "nodes/ x", "shard/4", "shard/00", "leaving/", "other"):
        cluster.store.txn([], [Put(f"/p/{key}", b"\xff")])
    cluster.start("b:1")
    cluster.kill("b:1")
    cluster.pass_(SETTLE + 1)
    assert cluster.serving() == {"a:1": {0, 1, 2, 3}}


def test_events_in_pieces_or_again_change_nothing() -> None:
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    everything = [event for events in cluster.store.since("/p/", 1) for event in events]
    for node in cluster.nodes.values():
        for event in reversed(everything):
            assert isinstance(event, Event)
            node.changed([event], cluster.now)
    cluster.settle()
    assert cluster.renew("a:1", token) == Renewed(4)
    assert cluster.serving() == {"a:1": {0, 2}, "b:1": {1, 3}}


# What people read.


def test_a_record_tells_until_when_its_shard_recovers() -> None:
    cluster = Cluster("a:1", "b:1")
    assert [cluster.record(shard).recovers for shard in range(4)] == [0] * 4
    cluster.kill("a:1")
    cluster.pass_(SETTLE + 0.1)
    until = math.ceil(WALL / 1e9 + cluster.parameters.grace)
    assert [cluster.record(shard).recovers for shard in range(4)] == [until, 0] * 2
    cluster.start("c:1")
    cluster.move(0, "c:1")  # dirty: the next server waits again
    assert cluster.record(0).recovers == until
    cluster.pass_(cluster.parameters.grace + 1)
    cluster.move(2, "c:1")  # and of this one all locks are known
    assert cluster.record(2).current == "c:1"
    assert cluster.record(2).recovers == 0


@pytest.mark.parametrize("kind", [Kind.TIDY, Kind.ASSIGN])
def test_what_is_refused_for_ever_is_tried_seldom_and_holds_up_nothing_else(kind: Kind) -> None:
    cluster = Cluster("a:1", "b:1", "c:1")
    cluster.refused.add(kind)
    cluster.take("a:1")
    cluster.move(0, "b:1")
    cluster.pass_(5)
    cluster.kill("c:1")
    cluster.transactions.clear()
    cluster.pass_(60)
    assert 20 < len(of_kind(cluster.transactions, kind)) < 60
    cluster.move(0, "a:1")
    cluster.pass_(1)
    assert cluster.record(0).current == "a:1"


def test_while_signs_of_life_are_refused_nothing_else_is_asked() -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.refused |= set(Kind)
    for node in cluster.nodes.values():
        cluster.pass_(0)
        node.leave(cluster.now)
    cluster.pass_(10)
    cluster.transactions.clear()
    cluster.pass_(60)
    assert {transaction.kind for transaction in cluster.transactions} <= {
        Kind.HEARTBEAT,
        Kind.ENLIST,
    }
    assert 20 < len(cluster.transactions) < 60 * len(cluster.nodes)
    cluster.refused.clear()
    cluster.pass_(4)
    assert all(node.leases.lasts(cluster.now) for node in cluster.nodes.values())


def test_shards_of_a_server_that_was_not_known_are_not_claimed_once_it_is() -> None:
    """Each claim would be refused, and the pauses after that hold up those that are for the taking."""
    cluster = Cluster("b:1", num_shards=400)
    node = cluster.nodes["b:1"]
    revision = cluster.store.revision
    value = b"b:1,a:1,f=e:9999999"
    shards = [Record(value, revision + 1 + shard) for shard in range(400)]
    moved = [Event(f"/p/shard/{n}", record.revision, record) for n, record in enumerate(shards)]
    node.changed(moved, cluster.now)
    assert node.claims.queue
    entry = Record(b"dflockd/a", revision + 500, 7)
    node.changed([Event("/p/nodes/a:1", entry.revision, entry)], cluster.now)
    assert not node.claims.queue
