"""Nodes that leave, and those that take their shards over."""

from __future__ import annotations

from unittest import mock

import pytest

from dflockd.cluster.handover import HAND_OVER_TIMEOUT, MAX_HANDED
from dflockd.cluster.leader import SETTLE
from dflockd.cluster.node import LEAVE_TIMEOUT, MAX_TRANSACTIONS
from dflockd.cluster.transactions import BATCH
from dflockd.wire import Acquire, Granted, Renewed, Space, Status
from tests.dflockd.cluster.nodes import KEY, Cluster, dirty


def test_many_shards_are_shared_out_and_handed_over_in_batches() -> None:
    cluster = Cluster("a:1", "b:1", num_shards=2048)
    cluster.pass_(1)
    assert [len(shards) for shards in cluster.serving().values()] == [1024, 1024]
    tokens = {
        key: cluster.take("a:1", key) for key in (b"shard#%d/x" % s for s in range(0, 400, 2))
    }
    cluster.nodes["a:1"].leave(cluster.now)
    cluster.pass_(60, step=1.0)
    assert cluster.nodes["a:1"].has_left
    assert len(cluster.serving()["b:1"]) == 2048
    for transaction in cluster.transactions:
        assert len(transaction.tenures) <= BATCH
        assert max(len(transaction.compares), len(transaction.operations)) <= 128
    assert (
        cluster.most_under_way <= MAX_TRANSACTIONS + 2
    )  # a heartbeat and an announcement beside them
    held = [group.spaces[0] for group in cluster.nodes["b:1"].table.partitions.values()]
    assert sum(map(len, held)) <= len(tokens)
    assert not cluster.store.load("/p.handoff/").records


def test_a_lone_server_hands_everything_over_without_anybody_to_take_it() -> None:
    cluster = Cluster("a:1", num_shards=1000)
    token = cluster.take("a:1")
    cluster.nodes["a:1"].leave(cluster.now)
    cluster.settle()
    assert cluster.nodes["a:1"].has_left
    assert not dirty(cluster)
    cluster.kill("a:1")
    cluster.start("a:1")
    cluster.settle()
    assert len(cluster.serving()["a:1"]) == 1000
    assert cluster.renew("a:1", token) == Renewed(4)
    assert cluster.ask("a:1", Acquire(Space.LOCK, KEY, 1, 0, 4)) is Status.TIMEOUT
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, b"shard#1/b", 1, 0, 4)), Granted)


def test_servers_that_leave_together_do_not_wait_for_one_another() -> None:
    cluster = Cluster("a:1", "b:1", "c:1", num_shards=500)
    for node in cluster.nodes.values():
        node.leave(cluster.now)
    cluster.pass_(1.0, step=0.1)
    assert all(node.has_left for node in cluster.nodes.values())
    assert not dirty(cluster)


def test_what_was_given_to_a_server_that_leaves_since_is_not_waited_for() -> None:
    cluster = Cluster("a:1", "b:1", num_shards=500)
    a, b = cluster.nodes.values()
    b.membership.announce = lambda now: None  # type: ignore[method-assign]
    b.leave(cluster.now)
    a.leave(cluster.now)
    cluster.pass_(0.3, step=0.1)
    assert a.handover.queue, "what b has been given is waited for"
    del b.membership.announce  # type: ignore[method-assign]
    cluster.pass_(0.5, step=0.1)
    assert a.has_left
    assert b.has_left
    assert not dirty(cluster)


def test_each_server_that_takes_shards_over_is_given_some_at_a_time() -> None:
    cluster = Cluster("a:1", "b:1", "c:1", "d:1", num_shards=2400)
    for other in ("b:1", "c:1", "d:1"):
        del cluster.nodes[other]  # is alive, and takes nothing
    a = cluster.nodes["a:1"]
    a.leave(cluster.now)
    cluster.settle()
    assert (
        3 * MAX_HANDED <= 600 - len(a.table.partitions) < 3 * MAX_HANDED + MAX_TRANSACTIONS * BATCH
    )
    cluster.pass_(HAND_OVER_TIMEOUT + 0.1, step=0.1)
    assert 600 - len(a.table.partitions) >= 6 * MAX_HANDED


def test_who_leaves_does_not_wait_again_and_again_for_a_server_that_is_dead() -> None:
    cluster = Cluster("a:1", "b:1", "c:1", num_shards=1200)
    del cluster.nodes["c:1"]  # killed, and its entry is there for some time yet
    a, b = cluster.nodes["a:1"], cluster.nodes["b:1"]
    a.leave(cluster.now, 6.0)
    b.leave(cluster.now, 6.0)
    cluster.pass_(2 * HAND_OVER_TIMEOUT, step=0.1)
    assert a.has_left
    assert b.has_left
    assert {cluster.record(shard).current for shard in range(1200)} == {"", "c:1"}
    assert len(dirty(cluster)) == 400


def test_to_take_many_shards_over_is_no_more_work_for_each() -> None:
    cluster = Cluster("a:1", "b:1", num_shards=800)
    leases = cluster.nodes["b:1"].leases
    with mock.patch.object(leases, "silent_at", wraps=leases.silent_at) as asked:
        cluster.kill("a:1")
        cluster.pass_(SETTLE + 0.5)
    assert len(cluster.serving()["b:1"]) == 800
    assert asked.call_count < 10 * 400


def test_who_comes_and_goes_is_no_work_for_those_that_it_does_not_concern() -> None:
    cluster = Cluster("a:1", "b:1", num_shards=1000)
    cluster.start("c:1")
    a, c = cluster.nodes["a:1"], cluster.nodes["c:1"]
    with mock.patch.object(a, "_look_at", wraps=a._look_at) as looked:
        c.leave(cluster.now)
        cluster.settle()
        cluster.kill("c:1")
        cluster.pass_(SETTLE + 0.5)
        assert not looked.call_count
        cluster.kill("b:1")
    assert looked.call_count == 500, "those that it had"


@pytest.mark.parametrize("new", ["0:1", "z:1"])  # the one leads, the other does not
def test_a_server_that_comes_while_the_others_leave_is_given_their_shards(new: str) -> None:
    cluster = Cluster("a:1", "b:1", num_shards=500)
    token = cluster.take("a:1")
    for node in list(cluster.nodes.values()):
        node.leave(cluster.now)
    cluster.pass_(1.0, step=0.1)
    cluster.start(new)
    assert len(cluster.serving()[new]) == 500, "at once: those that leave are not waited for"
    cluster.kill("a:1")
    cluster.kill("b:1")
    assert cluster.renew(new, token) == Renewed(4)
    assert all(
        group.recovers_until is None for group in cluster.nodes[new].table.partitions.values()
    )


def test_who_leaves_after_the_leader_has_left_waits_for_nothing() -> None:
    cluster = Cluster("a:1", "b:1", "c:1", num_shards=30)
    a, b = cluster.nodes["a:1"], cluster.nodes["b:1"]
    a.leader._calling = True  # and is not answered
    b.leave(cluster.now)
    cluster.settle()
    assert not b.has_left
    cluster.kill("a:1")
    assert b.has_left
    assert not [shard for shard in range(30) if cluster.record(shard).target == "b:1"]


def test_a_leader_that_does_nothing_is_not_waited_for_until_the_time_is_up() -> None:
    for timeout, waits in ((None, LEAVE_TIMEOUT), (6.0, LEAVE_TIMEOUT), (1.0, 0.5)):
        cluster = Cluster("a:1", "b:1", num_shards=30)
        cluster.nodes["a:1"].leader._calling = True  # and is not answered
        b = cluster.nodes["b:1"]
        b.leave(cluster.now, timeout)
        cluster.pass_(waits - 0.1, step=0.1)
        assert not b.has_left
        cluster.pass_(0.2, step=0.1)
        assert b.has_left
        records = [cluster.record(shard) for shard in range(30)]
        assert all(r.clean == r.epoch for r in records if r.target == "b:1")


def test_the_last_server_hands_over_to_whoever_comes_next() -> None:
    cluster = Cluster("a:1")
    token = cluster.take("a:1")
    cluster.nodes["a:1"].leave(cluster.now)
    cluster.settle()
    assert cluster.nodes["a:1"].has_left
    cluster.kill("a:1")
    cluster.now += 100
    cluster.start("a:1")
    assert cluster.serving() == {"a:1": {0, 1, 2, 3}}
    assert cluster.renew("a:1", token) == Renewed(4)
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, b"shard#0/b", 1, 0, 4)), Granted)


def test_a_server_that_leaves_gives_its_shards_to_the_others() -> None:
    cluster = Cluster("a:1", "b:1", "c:1", num_shards=9)
    token = cluster.take("a:1")
    cluster.write(3, cluster.record(3).with_flag("pinned"))
    cluster.nodes["a:1"].leave(cluster.now)
    cluster.settle()
    assert cluster.nodes["a:1"].has_left
    assert cluster.record(3)[:2] == ("a:1", "")
    assert cluster.record(3).clean == cluster.record(3).epoch
    home = cluster.record(0).current
    assert home in ("b:1", "c:1")
    assert cluster.renew(home, token) == Renewed(4)
