"""Weights: how many slots of a key a run takes, up to all."""

from __future__ import annotations

import random
from collections import deque

import pytest

from dflockd.cluster import snapshot as snapshots
from dflockd.storage.records import decode, encode_rate
from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.table.rates import RateRecord
from dflockd.wire import (
    ALL,
    Acquire,
    Enqueue,
    FairGroup,
    Granted,
    Hello,
    Moved,
    Next,
    Rate,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Space,
    Status,
    Wait,
)
from tests.dflockd.table.rates_support import LEASE, Site
from tests.dflockd.table.rules_support import inspected
from tests.dflockd.table.sharded_support import AWAY, FOR_LONG
from tests.dflockd.table.sharded_support import ask as ask_of
from tests.dflockd.table.sharded_support import table_of as shard_table

LOCK = Space.LOCK


class Key:
    """A key of which clients want shares; who has what, by name."""

    def __init__(self, limit: int, table: LockTable | None = None) -> None:
        self.limit = limit
        self.table = LockTable(Limits(), TokenIssuer(b"secret", 0)) if table is None else table
        self.now = 0.0
        self.names: dict[int, str] = {}
        self.tokens: dict[str, bytes] = {}
        self.weights: dict[str, int] = {}
        self.order: list[str] = []

    def come(
        self,
        name: str,
        weight: int = 1,
        *,
        timeout: int = 1000,
        group: bytes = b"",
        most: int = 0,
    ) -> Reply | None:
        """Somebody comes; return the answer if there is one at once."""
        peer = self.table.connect()
        self.names[peer.id], self.weights[name] = name, weight
        share = FairGroup(group, most, weight) if group or weight > 1 else None
        request = Acquire(LOCK, b"k", self.limit, timeout, 3600, group=share)
        effects = self.table.handle(peer, request, self.now)
        self.hear(effects)
        return next((reply for number, reply in effects if number == peer.id), None)

    def end(self, name: str) -> None:
        release = Release(LOCK, b"k", self.tokens.pop(name))
        self.hear(self.table.handle(self.table.connect(), release, self.now))

    def hear(self, effects: list[tuple[int, Reply]]) -> None:
        for number, reply in effects:
            if isinstance(reply, Granted):
                self.order.append(self.names[number])
                self.tokens[self.names[number]] = reply.token
        used = sum(self.weights[name] for name in self.tokens)
        assert used <= self.limit or len(self.tokens) == 1

    def granted(self) -> list[str]:
        order, self.order = self.order, []
        return order


def test_who_takes_much_waits_in_its_turn_and_is_not_passed() -> None:
    key = Key(10)
    for name, weight in (("a", 6), ("b", 3), ("c", 5), ("d", 1), ("e", 1)):
        key.come(name, weight)
    assert key.granted() == ["a", "b"]
    assert key.come("f", timeout=0) is Status.TIMEOUT, "there is a free slot, for others"
    key.end("b")
    assert key.granted() == []
    key.end("a")
    assert key.granted() == ["c", "d", "e"]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starves(seed: int) -> None:
    """In the order of their arrival, whatever they take: each waits for those before it alone."""
    dice = random.Random(seed)
    key, arrived = Key(10), deque[str]()
    for number in range(400):
        name = f"{number}"
        key.come(name, dice.choice([1, 1, 1, 1, 2, 5, 10, ALL]))
        arrived.append(name)
        while key.tokens and dice.random() < 0.6:
            key.end(dice.choice([*key.tokens]))
        for granted in key.granted():
            assert granted == arrived.popleft()
    while key.tokens:
        key.end(next(iter(key.tokens)))
        for granted in key.granted():
            assert granted == arrived.popleft()
    assert not arrived
    assert len(key.table) == 0


@pytest.mark.parametrize("runs", [1, 100, 1_000_000])
def test_all_places_of_a_large_rate_are_noted_and_free_together(runs: int) -> None:
    site = Site()
    rate = Rate(runs, 1000)
    peer = site.table.connect()
    share = FairGroup(b"", 0, ALL)
    request = Acquire(LOCK, b"k", 7, 0, LEASE, rate, group=share)
    reply = site.ask(peer, request)
    assert isinstance(reply, Granted)
    assert site.ask(peer, Release(LOCK, b"k", reply.token)) is Status.OK
    known = site.table.rate_of(LOCK, b"k")
    assert known is not None
    assert known.free(site.now) == 0
    records = known.kept(site.now)
    data = b"".join(encode_rate(record, 0) for record in records)
    read, end = decode(data, 0, len(data), 0)
    assert end == len(data)
    [record] = [each for each in read if isinstance(each, RateRecord)]
    assert record.begun == (site.now, runs), "one beginning, however many places it takes"
    again = Site()
    again.table.restore([], again.now, [record])
    assert again.ask(again.table.connect(), request) is Status.TIMEOUT
    site.go_to(site.now + 1.001)
    assert isinstance(site.ask(site.table.connect(), request), Granted)


def test_a_weight_outlives_the_table() -> None:
    before = Key(5)
    before.come("a", 2, group=b"g", most=3)
    before.come("b", 3)
    before.come("c", ALL)
    waiting = inspected(before.table, before.table.connect(), b"k", 0.0)["waiters"]
    assert [each["weight"] for each in waiting] == ["all"]
    [entry] = before.table.each_partition()
    kept = [hold.kept() for hold in entry.spaces[LOCK][b"k"].holds.values()]
    assert [(each.group, each.weight) for each in kept] == [(b"g", 2), (b"", 3)]
    after = Key(5, LockTable(Limits(), TokenIssuer(b"secret", 0)))
    after.table.restore(kept, 0.0)
    assert after.come("c", timeout=0) is Status.TIMEOUT
    report = inspected(after.table, after.table.connect(), b"k", 0.0)
    assert report["used"] == 5
    assert [(each["group"], each["weight"]) for each in report["holders"]] == [("g", 2), ("", 3)]
    renew = Renew(LOCK, b"k", before.tokens["b"], None)
    peer = after.table.connect()
    assert after.table.handle(peer, renew, 0.0) == [(peer.id, Renewed(33))]
    assert after.table.handle(peer, Release(LOCK, b"k", before.tokens["b"]), 0.0)
    assert isinstance(after.come("d", 3, timeout=0), Granted)


def test_a_holder_brings_its_weight_back() -> None:
    before = Key(5)
    before.come("all", ALL)
    table = LockTable(Limits(), TokenIssuer(b"secret", 1000))
    table.recover(10.0)
    peer = table.connect()
    renew = Renew(LOCK, b"k", before.tokens["all"], 60, group=FairGroup(b"", 0, ALL))
    assert table.handle(peer, renew, 1.0) == [(peer.id, Renewed(60))]
    after = Key(5, table)
    after.now = 11.0
    assert after.come("a", timeout=0) is Status.TIMEOUT
    assert inspected(table, peer, b"k", 11.0)["used"] == 5


def test_a_shard_takes_weights_along_and_the_first_is_still_not_passed() -> None:
    old, new = shard_table(), shard_table(FOR_LONG, 1)

    def request(weight: int, ticket: bytes = b"") -> Acquire:
        share = FairGroup(b"", 0, weight) if weight > 1 and not ticket else None
        return Acquire(LOCK, b"a", 10, 600, 600, group=share, ticket=ticket)

    holder = old.connect()
    reply = ask_of(old, holder, request(6))
    assert isinstance(reply, Granted)
    waits = [old.connect() for _ in range(2)]
    for peer, weight in zip(waits, (7, 1), strict=True):
        assert ask_of(old, peer, request(weight)) is None
    text = snapshots.dump(old.freeze(0, 0), 7, 0)
    effects, _ = old.drop(0, AWAY)
    new.open(0, 2 << 40)
    new.load(0, snapshots.load(text, 7, 0), 0)
    tickets = {number: moved.ticket for number, moved in effects if isinstance(moved, Moved)}
    heavy, light = (tickets[peer.id] for peer in waits)
    one, other = new.connect(), new.connect()
    assert ask_of(new, other, request(1, light)) is None, "four are free, for the first"
    assert ask_of(new, one, request(7, heavy)) is None
    told = new.handle(new.connect(), Release(LOCK, b"a", reply.token), 0)
    assert [number for number, each in told if isinstance(each, Granted)] == [one.id, other.id]
    assert inspected(new, new.connect(), b"a", 0)["used"] == 8


def test_a_server_that_serves_again_goes_on_behind_who_was_sent_away() -> None:
    table = shard_table(10.0)
    holder, first, second = (table.connect() for _ in range(3))
    share = FairGroup(b"", 0, 5)
    assert isinstance(ask_of(table, holder, Acquire(LOCK, b"a", 5, 0, 600)), Granted)
    assert ask_of(table, first, Acquire(LOCK, b"a", 5, 600, 600, group=share)) is None
    assert ask_of(table, second, Enqueue(LOCK, b"a", 5, 600)) is Status.QUEUED
    assert [number for number, _ in table.send_away(11.0)] == [first.id]
    table.serve_until(1000.0, 20.0)
    assert isinstance(ask_of(table, second, Wait(LOCK, b"a", 0), 20.0), Granted)


# Behind a process that asks whose turn it is.


class Line:
    """Keys with ten slots each; a process that wants turns, and others behind it."""

    def __init__(self, table: LockTable | None = None) -> None:
        if table is None:
            table = LockTable(Limits(max_locks=10_000), TokenIssuer(b"secret", 0))
        self.table = table
        self.peers = [self.greet() for _ in range(3)]
        """All of one process."""

    def greet(self) -> Peer:
        peer = self.table.connect()
        assert self.table.greet(peer, Hello(b"here", b"0.1.0"))
        return peer

    def ask(self, request: Request, peer: Peer | None = None) -> Reply | None:
        peer = peer or self.table.connect()
        replies = [each for number, each in self.table.handle(peer, request, 1.0)]
        assert len(replies) <= 1
        return replies[0] if replies else None

    def take(self, key: bytes, weight: int, timeout: int = 0) -> Peer:
        """Somebody comes; if there is no time to wait, it has its slots at once."""
        peer = self.table.connect()
        share = FairGroup(b"", 0, weight)
        reply = self.ask(Acquire(LOCK, key, 10, timeout, 600, group=share), peer)
        assert reply is None if timeout else isinstance(reply, Granted)
        return peer

    def want(self, peer: Peer, key: bytes, weight: int) -> Reply | None:
        """The process wants to hear of its turn."""
        share = FairGroup(b"", 0, weight)
        return self.ask(Enqueue(LOCK, key, 10, 600, turn=1000, group=share), peer)


def test_those_behind_a_process_at_many_keys_go_on_in_small_steps() -> None:
    line = Line()
    one, _, asking = line.peers
    many = 3 * STEP
    assert line.ask(Next(), asking) is None
    behind = []
    for number in range(many):
        key = b"%d" % number
        line.take(key, 5)
        line.want(one, key, 8)
        behind.append(line.take(key, 1, 60).id)
    assert not line.table.backlog
    assert line.table.disconnect(asking, 1.0, clean=True) == []
    steps = []
    while line.table.backlog:
        steps.append([number for number, _ in line.table.advance(1.0)])
    assert [len(step) for step in steps] == [STEP, STEP, STEP]
    assert [number for step in steps for number in step] == behind
    assert not line.table.connections.processes[b"here"].behind


def test_others_go_on_behind_who_was_sent_away_once_their_server_serves_again() -> None:
    table = shard_table(10.0)
    line = Line(table)
    one, _, asking = line.peers
    line.take(b"a", 5)
    line.want(one, b"a", 8)
    assert line.ask(Next(), asking) is None
    second = table.connect()
    assert line.ask(Enqueue(LOCK, b"a", 10, 600), second) is Status.QUEUED
    assert [number for number, _ in table.send_away(11.0)] == [asking.id]
    while table.backlog:
        assert table.advance(11.0) == []
    table.serve_until(1000.0, 20.0)
    assert isinstance(ask_of(table, second, Wait(LOCK, b"a", 0), 20.0), Granted)
