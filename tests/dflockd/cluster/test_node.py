"""A node over a store that answers at once: batches, records that are odd, drains, conditions."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from unittest import mock

import pytest

from dflockd.cluster import handover
from dflockd.cluster.claims import EPOCH_SHIFT
from dflockd.cluster.handover import HAND_OVER_TIMEOUT, MAX_HANDED
from dflockd.cluster.leader import SETTLE
from dflockd.cluster.node import LEAVE_TIMEOUT, MAX_TRANSACTIONS, Node
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.transactions import BATCH, Kind, Transaction
from dflockd.cluster.view import MAX_EPOCH
from dflockd.shards import Delete, Event, Loaded, Outcome, Put, RevisionIs, ShardRecord, ValueIs
from dflockd.shards.memory import KeySpace
from dflockd.shards.values import format_shard_value, parse_shard_value
from dflockd.table import Limits, Peer
from dflockd.wire import (
    Acquire,
    Granted,
    Moved,
    Rate,
    Recovering,
    Renew,
    Renewed,
    Reply,
    Request,
    Space,
    Status,
    fence_from_token,
)

KEY = b"shard#0/a"
WALL = 1_700_000_000 * 10**9


class Cluster:
    """Nodes and their store. Nothing takes time but what `pass_` lets pass."""

    def __init__(self, *addresses: str, num_shards: int = 4, wall: int = WALL) -> None:
        self.store = KeySpace(history=1 << 20)
        self.store.txn([], [Put("/p.secret", b"secret")])
        self.parameters = ClusterParameters(num_shards=num_shards, serving_lease=3, max_lease=4)
        self.now = 1000.0
        self.nodes: dict[str, Node] = {}
        self.transactions: list[Transaction] = []
        self.unanswered: set[Kind] = set()
        """The next transaction of each of these kinds is carried out, and nobody is told so."""
        self.refused: set[Kind] = set()
        """Calls of these kinds are not carried out."""
        self.most_under_way = 0
        self._wall = wall
        self._told: dict[str, int] = {}
        for address in addresses:
            self.start(address)
        self.pass_(SETTLE + 0.1)

    def start(self, address: str) -> Node:
        node = self.nodes[address] = Node(
            address,
            Limits(default_lease=4, max_lease=4, max_locks=1 << 20),
            b"secret",
            self.parameters,
            prefix="/p",
            wall=lambda: self._wall,
        )
        loaded = self.store.load("/p/")
        self._told[address] = loaded.revision
        node.loaded(loaded, self.now)
        assert node.next_deadline() > self.now
        node.enlist(f"{address} at {self.now}", self.store.grant(3, self.now).id, self.now)
        self.settle()
        return node

    def kill(self, address: str) -> None:
        """End a server, and its lease with it."""
        self.store.revoke(self.nodes.pop(address).membership.lease)
        self.settle()

    def settle(self) -> None:
        """Deliver everything there is."""
        busy = True
        while busy:
            busy = False
            for address, node in list(self.nodes.items()):
                changes = self.store.since("/p/", self._told[address] + 1)
                self._told[address] = self.store.revision
                for events in changes:
                    node.changed(events, self.now)
                effects, _, transactions = node.output()
                assert effects == [] or changes or transactions
                self.most_under_way = max(self.most_under_way, len(transactions))
                for transaction in transactions:
                    self.transactions.append(transaction)
                    if transaction.kind in self.refused:
                        node.answered(transaction, None, self.now)
                        continue
                    outcome: Outcome | None = self.store.txn(
                        transaction.compares, transaction.operations
                    )
                    if transaction.kind in self.unanswered:
                        self.unanswered.remove(transaction.kind)
                        outcome = None
                    node.answered(transaction, outcome, self.now)
                busy = busy or bool(changes or transactions)

    def pass_(self, seconds: float, step: float = 0.25) -> None:
        """Let time pass; all that live keep their leases."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for node in self.nodes.values():
                self.store.keep_alive(node.membership.lease, self.now)
                node.advance(self.now)
                assert node.next_deadline() > self.now
            self.settle()

    def record(self, shard: int) -> ShardRecord:
        return parse_shard_value(
            self.store.load(f"/p/shard/{shard}").records[f"/p/shard/{shard}"].value
        )

    def write(self, shard: int, record: ShardRecord | str) -> None:
        text = record if isinstance(record, str) else format_shard_value(record)
        self.store.txn([], [Put(f"/p/shard/{shard}", text.encode())])
        self.settle()

    def move(self, shard: int, address: str) -> None:
        self.write(shard, self.record(shard)._replace(target=address))

    def serving(self) -> dict[str, set[int]]:
        return {
            address: {s for s, group in node.table.groups.items() if not group.frozen}
            for address, node in self.nodes.items()
        }

    def ask(self, address: str, request: Request, peer: Peer | None = None) -> Reply:
        table = self.nodes[address].table
        ((_, reply),) = table.handle(peer or table.connect(), request, self.now)
        return reply

    def take(self, address: str, key: bytes = KEY, peer: Peer | None = None) -> bytes:
        reply = self.ask(address, Acquire(Space.LOCK, key, 1, 0, 4), peer)
        assert isinstance(reply, Granted)
        return reply.token

    def renew(self, address: str, token: bytes, key: bytes = KEY) -> Reply:
        return self.ask(address, Renew(Space.LOCK, key, token, 4))


def of_kind(transactions: Iterable[Transaction], kind: Kind) -> list[Transaction]:
    return [transaction for transaction in transactions if transaction.kind is kind]


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
    held = [group.spaces[0] for group in cluster.nodes["b:1"].table.groups.values()]
    assert sum(map(len, held)) <= len(tokens)
    assert not cluster.store.load("/p.handoff/").records


def dirty(cluster: Cluster) -> list[int]:
    """The shards whose next server would have to wait for holders."""
    records = map(cluster.record, range(cluster.parameters.num_shards))
    return [shard for shard, r in enumerate(records) if r.current or r.clean != r.epoch]


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
    assert 3 * MAX_HANDED <= 600 - len(a.table.groups) < 3 * MAX_HANDED + MAX_TRANSACTIONS * BATCH
    cluster.pass_(HAND_OVER_TIMEOUT + 0.1, step=0.1)
    assert 600 - len(a.table.groups) >= 6 * MAX_HANDED


def test_who_leaves_does_not_wait_again_and_again_for_a_server_that_is_dead() -> None:
    cluster = Cluster("a:1", "b:1", "c:1", num_shards=750)
    del cluster.nodes["c:1"]  # killed, and its entry is there for some time yet
    a, b = cluster.nodes["a:1"], cluster.nodes["b:1"]
    a.leave(cluster.now, 6.0)
    b.leave(cluster.now, 6.0)
    cluster.pass_(2 * HAND_OVER_TIMEOUT, step=0.1)
    assert a.has_left
    assert b.has_left
    assert {cluster.record(shard).current for shard in range(750)} == {"", "c:1"}
    assert len(dirty(cluster)) == 250


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
    assert all(group.recovers_until is None for group in cluster.nodes[new].table.groups.values())


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
    monkeypatch.setattr(handover, "MAX_SNAPSHOT", 300)
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


def test_a_shard_with_too_many_locks_is_recovered_by_their_holders(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handover, "MAX_SNAPSHOT", 50)
    cluster = Cluster("a:1", "b:1")
    token = cluster.take("a:1")
    cluster.move(0, "b:1")
    assert "shard 0 has too many locks to hand them over" in caplog.text
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, KEY, 1, 0, 4)), Recovering)
    cluster.pass_(3.2)
    assert cluster.renew("b:1", token) == Renewed(4)
    cluster.pass_(5.5)
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, b"shard#0/b", 1, 0, 4)), Granted)


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
    old = text.replace(b'"epoch":%d' % cluster.record(0).epoch, b'"epoch":1')
    cluster.store.txn([], [Put(key, old)])
    cluster.nodes["b:1"] = node
    cluster.settle()
    assert "it is of epoch 1" in caplog.text
    assert isinstance(cluster.ask("b:1", Acquire(Space.LOCK, KEY, 1, 0, 4)), Recovering)
    cluster.pass_(3.2)
    assert cluster.renew("b:1", token) == Renewed(4)


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


def test_locks_that_were_handed_over_and_deleted_by_hand_are_brought_back_by_their_holders() -> (
    None
):
    cluster = Cluster("a:1")
    token = cluster.take("a:1")
    cluster.nodes["a:1"].leave(cluster.now)
    cluster.settle()
    cluster.kill("a:1")
    records = [cluster.record(shard) for shard in range(4)]
    assert [r.kept is not None and r.kept == r.epoch for r in records] == [
        True,
        False,
        False,
        False,
    ]
    cluster.store.txn([], [Delete("/p.handoff/0")])
    cluster.start("a:1")
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, KEY, 1, 0, 4)), Recovering)
    assert isinstance(cluster.ask("a:1", Acquire(Space.LOCK, b"shard#1/b", 1, 0, 4)), Granted)
    cluster.pass_(3.2)
    assert cluster.renew("a:1", token) == Renewed(4)
    assert "kept" not in str(cluster.record(0))
