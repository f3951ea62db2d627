"""Locks that go with their shard from node to node: in a hand-over, and after a crash."""

from __future__ import annotations

import pytest

from dflockd.cluster import handover
from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.leader import SETTLE
from dflockd.cluster.transactions import Kind
from dflockd.shards import Delete, Put
from dflockd.wire import (
    Acquire,
    Granted,
    Moved,
    Recovering,
    Renewed,
    Space,
    Status,
    fence_from_token,
)
from tests.dflockd.cluster.nodes import KEY, Cluster, of_kind


def test_a_lock_goes_with_its_shard_at_once() -> None:
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    cluster.move(0, "b:1")
    reply = cluster.renew("a:1", token)
    assert isinstance(reply, Moved)
    assert reply.server == b"b:1"
    assert cluster.renew("b:1", token) == Renewed(4)
    assert cluster.ask("b:1", Acquire(Space.LOCK, KEY, 1, 0, 4)) is Status.TIMEOUT
    assert "clean" not in str(cluster.record(0))
    assert fence_from_token(cluster.take("b:1", b"shard#0/b")) > fence_from_token(token)


def test_more_locks_than_fit_into_one_transaction_go_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "PART", 130)
    cluster = Cluster("a:1", "b:1", num_shards=8)
    tokens = {}
    for shard in range(0, 8, 2):
        for number in range(5):
            key = b"shard#%d/%d" % (shard, number)
            tokens[key] = cluster.take("a:1", key)
    del cluster.transactions[:]
    cluster.nodes["a:1"].leave(cluster.now)
    cluster.settle()
    releases = of_kind(cluster.transactions, Kind.RELEASE)
    assert len(releases) == 4
    assert all(cluster.renew("b:1", token, key) == Renewed(4) for key, token in tokens.items())


def in_parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, dict[bytes, bytes]]:
    """A cluster one shard of which does not fit into a transaction, and the tokens of its locks."""
    monkeypatch.setattr(handover, "PART", 50)
    cluster = Cluster("a:1", "b:1", "c:1")
    keys = [b"shard#0/%d" % number for number in range(20)]
    return cluster, {key: cluster.take("a:1", key) for key in keys}


def goes_on(cluster: Cluster, address: str, tokens: dict[bytes, bytes]) -> None:
    """All locks are there, and others are granted at once."""
    assert all(cluster.renew(address, token, key) == Renewed(4) for key, token in tokens.items())
    assert cluster.ask(address, Acquire(Space.LOCK, b"shard#0/7", 1, 0, 4)) is Status.TIMEOUT
    free = b"shard#0/free-" + address.encode()
    assert isinstance(cluster.ask(address, Acquire(Space.LOCK, free, 1, 0, 4)), Granted)


def test_what_does_not_fit_into_one_transaction_goes_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, tokens = in_parts(monkeypatch)
    del cluster.transactions[:]
    cluster.move(0, "b:1")
    written = of_kind(cluster.transactions, Kind.RELEASE)
    assert len(written) > 3
    assert len(of_kind(cluster.transactions, Kind.READ)) == len(written) - 1
    goes_on(cluster, "b:1", tokens)
    assert "parts" not in str(cluster.record(0))
    assert not cluster.store.load("/p.handoff/").records


@pytest.mark.parametrize("kind", [Kind.RELEASE, Kind.READ, Kind.CLAIM, Kind.TIDY])
def test_parts_arrive_though_an_answer_got_lost(
    monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    cluster, tokens = in_parts(monkeypatch)
    cluster.unanswered = {kind}
    cluster.move(0, "b:1")
    cluster.pass_(1)
    assert not cluster.unanswered
    goes_on(cluster, "b:1", tokens)
    assert not cluster.store.load("/p.handoff/").records


def test_a_server_that_ends_while_it_reads_parts_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, tokens = in_parts(monkeypatch)
    cluster.refused = {Kind.READ}
    cluster.move(0, "b:1")
    assert cluster.record(0).current == ""
    cluster.nodes["b:1"].advance(cluster.now + 0.3)  # it has read some, say
    cluster.refused = set()
    cluster.kill("b:1")
    cluster.pass_(SETTLE + 0.5)
    goes_on(cluster, cluster.record(0).current, tokens)


def test_parts_of_a_hand_over_that_was_given_up_are_not_mixed_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, tokens = in_parts(monkeypatch)
    cluster.refused = {Kind.RELEASE}
    cluster.move(0, "b:1")
    (late,) = of_kind(cluster.transactions, Kind.RELEASE)
    cluster.refused = set()
    cluster.move(0, "a:1")
    goes_on(cluster, "a:1", tokens)
    tokens[b"shard#0/more"] = cluster.take("a:1", b"shard#0/more")
    cluster.move(0, "b:1")
    cluster.pass_(1)
    assert not cluster.store.txn(late.compares, late.operations).succeeded
    goes_on(cluster, "b:1", tokens)


def test_a_part_that_was_deleted_by_hand_is_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, tokens = in_parts(monkeypatch)
    cluster.refused = {Kind.READ}
    cluster.move(0, "b:1")
    cluster.store.txn([], [Delete("/p.handoff/0/2")])
    cluster.refused = set()
    cluster.pass_(1)
    assert "it was deleted" in caplog.text
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, b"shard#0/b", 1, 0, 4)), Recovering)
    cluster.pass_(3.2)
    assert cluster.renew("b:1", tokens[b"shard#0/1"], b"shard#0/1") == Renewed(4)


def test_after_a_crash_holders_come_back_and_others_wait() -> None:
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    cluster.kill("a:1")
    cluster.pass_(SETTLE + 1.2)
    assert cluster.record(0)[:2] == ("b:1", "b:1")
    assert cluster.renew("b:1", token) == Renewed(4)
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, b"shard#0/b", 1, 0, 4)), Recovering)
    cluster.pass_(cluster.parameters.grace)
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, b"shard#0/b", 1, 0, 4)), Granted)


def test_what_was_handed_over_is_deleted_once_it_has_arrived() -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.take("a:1")
    cluster.move(0, "b:1")
    (claim,) = [c for c in of_kind(cluster.transactions, Kind.CLAIM) if c.tenures[0].former.clean]
    assert not any(isinstance(operation, Delete) for operation in claim.operations)
    (tidy,) = of_kind(cluster.transactions, Kind.TIDY)
    assert list(tidy.operations) == [Delete("/p.handoff/0")]
    assert not cluster.store.load("/p.handoff/").records
    assert claim.tenures[0].record.clean is None
    assert cluster.record(0).clean is None


def test_what_was_handed_over_is_taken_in_though_the_claim_was_not_answered() -> None:
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    cluster.unanswered = {Kind.CLAIM}
    cluster.move(0, "b:1")
    cluster.pass_(1)
    assert not cluster.unanswered
    assert cluster.renew("b:1", token) == Renewed(4)
    assert cluster.ask("b:1", Acquire(Space.LOCK, KEY, 1, 0, 4)) is Status.TIMEOUT
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, b"shard#0/b", 1, 0, 4)), Granted)
    assert not cluster.store.load("/p.handoff/").records


def test_it_goes_on_clean_if_the_shard_is_to_leave_again_before_the_claim_is_answered() -> None:
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    cluster.unanswered = {Kind.CLAIM}
    cluster.move(0, "b:1")
    cluster.move(0, "a:1")
    cluster.pass_(1)
    assert cluster.renew("a:1", token) == Renewed(4)
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, b"shard#0/b", 1, 0, 4)), Granted)


def test_new_shards_are_served_at_once_though_their_claim_was_not_answered() -> None:
    cluster = Cluster()
    cluster.unanswered = {Kind.CLAIM}
    cluster.start("a:1")
    cluster.pass_(SETTLE + 1)
    assert not cluster.unanswered
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, KEY, 1, 0, 4)), Granted)


def test_what_was_handed_over_is_deleted_though_the_answer_got_lost() -> None:
    cluster = Cluster("a:1", "b:1")
    cluster.take("a:1")
    cluster.take("a:1", b"shard#2/a")
    cluster.unanswered = {Kind.TIDY}
    cluster.move(0, "b:1")
    cluster.move(2, "b:1")
    cluster.pass_(1)
    assert not cluster.unanswered
    assert not cluster.store.load("/p.handoff/").records
    assert len(of_kind(cluster.transactions, Kind.TIDY)) in (2, 3)


def test_what_another_epoch_handed_over_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    node = cluster.nodes.pop("b:1")
    cluster.move(0, "b:1")
    (key,) = cluster.store.load("/p.handoff/").records
    text = cluster.store.load(key).records[key].value
    loaded = snapshots.load(text, cluster.record(0).epoch, cluster.now)
    cluster.store.txn([], [Put(key, snapshots.dump(loaded, 1, cluster.now))])
    cluster.nodes["b:1"] = node
    cluster.settle()
    assert "it is of epoch 1" in caplog.text
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, KEY, 1, 0, 4)), Recovering)
    cluster.pass_(3.2)
    assert cluster.renew("b:1", token) == Renewed(4)


def test_locks_that_were_handed_over_and_deleted_by_hand_are_brought_back_by_their_holders() -> (
    None
):
    cluster = Cluster("a:1")
    token = cluster.take("a:1")
    cluster.nodes["a:1"].leave(cluster.now)
    cluster.settle()
    cluster.kill("a:1")
    records = [cluster.record(shard) for shard in range(4)]
    assert [record.parts for record in records] == [1, 0, 0, 0]
    cluster.store.txn([], [Delete("/p.handoff/0")])
    cluster.start("a:1")
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, KEY, 1, 0, 4)), Recovering)
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, b"shard#1/b", 1, 0, 4)), Granted)
    cluster.pass_(3.2)
    assert cluster.renew("a:1", token) == Renewed(4)
    assert "parts" not in str(cluster.record(0))
