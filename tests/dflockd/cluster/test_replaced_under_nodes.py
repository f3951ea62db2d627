"""Nodes whose store was wiped or restored: what they refuse, and what they tell one another."""

from __future__ import annotations

import pytest

from dflockd.cluster.claims import EPOCH_SHIFT
from dflockd.cluster.leader import SETTLE
from dflockd.cluster.node import Node
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.transactions import Kind
from dflockd.shards import Delete, Put
from dflockd.table import Limits
from dflockd.wire import Acquire, Granted, Rate, Recovering, Space, Status
from tests.dflockd.cluster.nodes import KEY, WALL, Cluster


def test_in_a_store_that_was_replaced_nothing_is_granted_whatever_is_answered_later() -> None:
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    node = cluster.nodes["a:1"]
    cluster.pass_(1.0)
    node.advance(cluster.now + 1.0)
    late = [
        transaction
        for transaction in node.output().transactions
        if transaction.kind is Kind.HEARTBEAT
    ]
    node.replaced("revision 1", cluster.now)
    assert "restored from a backup: revision 1" in node.trouble
    assert not node.leases.lasts(cluster.now)
    for transaction in late:
        node.answered(
            transaction,
            cluster.store.txn(transaction.compares, transaction.operations),
            cluster.now,
        )
    node.loaded(cluster.store.load("/p/"), cluster.now)
    node.enlist("another life", 7, cluster.now)
    node.advance(cluster.now + 5)
    assert late
    assert node.output().transactions == []
    assert not node.may_serve(cluster.now)
    assert isinstance(cluster.renew("a:1", token), Recovering)
    assert node.leases.over_at == cluster.now + cluster.parameters.grace


def test_servers_are_told_what_a_store_that_was_replaced_does_not_know() -> None:
    cluster = Cluster("a:1", "b:1", wall=0)
    cluster.move(0, "b:1")
    cluster.pass_(1)
    epoch = cluster.record(0).epoch
    node = cluster.nodes["a:1"]
    node.replaced("revision 1", cluster.now)
    puts = {put.key: put.value for put in node.closing(1, cluster.now) if isinstance(put, Put)}
    assert puts == {"/p.closed": b"a:1", "/p/floor/a:1": b"%d" % (epoch + 1000)}
    # Who has not served for long has nothing to say of locks.
    late = node.leases.hopeless_at + 1
    assert [put.key for put in node.closing(1, late)] == ["/p/floor/a:1"]

    fresh = Cluster(wall=0)
    fresh.store.txn([], [Put(key, value) for key, value in puts.items()])
    fresh.start("c:1")
    fresh.pass_(SETTLE + 3)
    assert fresh.serving() == {"c:1": set()}
    fresh.store.txn([], [Delete("/p.closed")])
    fresh.pass_(4)
    assert fresh.serving() == {"c:1": {0, 1, 2, 3}}
    assert fresh.record(0).epoch == epoch + 1000


@pytest.mark.parametrize("record", ["", "a:1,,f=e:5,f=clean:5"], ids=["wiped", "restored"])
def test_a_store_that_was_replaced_knows_of_no_run_that_counts_for_a_rate(record: str) -> None:
    cluster = Cluster(wall=0)
    cluster.store.txn([], [Put("/p/floor/b:1", b"1000")])
    if record:
        cluster.store.txn([], [Put(f"/p/shard/{n}", record.encode()) for n in range(4)])
    cluster.start("a:1")
    cluster.pass_(SETTLE + 0.1)
    assert cluster.serving() == {"a:1": {0, 1, 2, 3}}
    cluster.take("a:1", b"shard#0/without")
    rated = Acquire(Space.LOCK, KEY, 1, 0, 4, Rate(1, 20_000))
    assert cluster.ask("a:1", rated) is Status.TIMEOUT
    cluster.pass_(20)
    # From then on it is as any other shard.
    cluster.move(1, "gone:1")
    cluster.pass_(SETTLE + 0.1)
    for key in (KEY, b"shard#1/a"):
        assert isinstance(cluster.ask("a:1", rated._replace(key=key)), Granted)


def test_fences_grow_on_from_what_a_server_says_that_knows_of_no_shard() -> None:
    parameters = ClusterParameters(num_shards=4, serving_lease=3, max_lease=4)
    limits = Limits(default_lease=4, max_lease=4)
    node = Node("a:1", limits, b"secret", parameters, prefix="/p", wall=lambda: WALL)
    node.replaced("it was wiped", 1000.0)
    (floor,) = node.closing(1, 1000.0)
    assert isinstance(floor, Put)
    assert floor.key == "/p/floor/a:1"
    assert int(floor.value) > (WALL >> EPOCH_SHIFT) + 100


def set_back(cluster: Cluster, key: str) -> None:
    """Have a key as it is, at the revision that it had first; others have written meanwhile."""
    record = cluster.store.load(key).records[key]
    cluster.store._records[key] = record._replace(revision=1)
    cluster.store.txn([], [Put("/p/else", b"x")])


def test_a_server_whose_latest_sign_of_life_is_lost_notices_that_the_store_was_restored() -> None:
    """Though the store has had as many changes since as it had lost."""
    cluster = Cluster("a:1", "b:1")
    cluster.pass_(2)
    set_back(cluster, "/p/nodes/a:1")
    cluster.pass_(2)
    assert "/p/nodes/a:1 is older than it was" in cluster.nodes["a:1"].trouble
    assert not cluster.nodes["a:1"].may_serve(cluster.now)
    assert cluster.nodes["b:1"].may_serve(cluster.now)


def test_a_server_whose_claim_is_lost_notices_it_by_the_next_hand_over() -> None:
    cluster = Cluster("a:1", "b:1")
    set_back(cluster, "/p/shard/0")
    node = cluster.nodes["a:1"]
    node.leave(cluster.now)
    cluster.settle()
    assert "/p/shard/0 is older than it was" in node.trouble
    assert not node.may_serve(cluster.now)


def test_those_that_were_there_before_learn_it_from_whoever_has_noticed_and_others_do_not() -> None:
    cluster = Cluster("a:1", "b:1")
    node = cluster.nodes["a:1"]
    node.replaced("revision 1", cluster.now)
    lease = cluster.store.grant(20, cluster.now).id
    cluster.store.txn([], node.closing(lease, cluster.now))
    del cluster.nodes["a:1"]
    late = cluster.start("c:1")
    cluster.pass_(2)
    assert "a:1 says so" in cluster.nodes["b:1"].trouble
    assert not cluster.nodes["b:1"].may_serve(cluster.now)
    assert late.may_serve(cluster.now)
    cluster.store.revoke(lease)
    cluster.pass_(2)
    # Of the next time it is one that was there before.
    cluster.store.txn([], [Put("/p.closed", b"d:1")])
    cluster.pass_(2)
    assert "d:1 says so" in late.trouble
