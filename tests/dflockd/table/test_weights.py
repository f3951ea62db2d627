"""Weights: how many slots of a key a run takes, up to all."""

from __future__ import annotations

import random
from collections import deque

import pytest

from dflockd.cluster import snapshot as snapshots
from dflockd.storage.records import decode, encode_rate
from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.table.rates import AT_ONCE, RateRecord
from dflockd.wire import (
    ALL,
    Acquire,
    Enqueue,
    FairGroup,
    Granted,
    Hello,
    How,
    Moved,
    Next,
    Queued,
    Rate,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Space,
    Status,
    Wait,
    YourTurn,
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
        self.peers: dict[str, Peer] = {}
        self.tokens: dict[str, bytes] = {}
        self.weights: dict[str, int] = {}
        self.order: list[str] = []

    def come(
        self,
        name: str,
        weight: int = 1,
        *,
        timeout: int = 1000,
        limit: int = 0,
        group: bytes = b"",
        most: int = 0,
    ) -> Reply | None:
        """Somebody comes; return the answer if there is one at once."""
        peer = self.peers[name] = self.table.connect()
        self.names[peer.id], self.weights[name] = name, weight
        share = FairGroup(group, most, weight) if group or weight > 1 else None
        request = Acquire(LOCK, b"k", limit or self.limit, timeout, 3600, group=share)
        effects = self.table.handle(peer, request, self.now)
        self.hear(effects)
        return next((reply for number, reply in effects if number == peer.id), None)

    def end(self, name: str) -> None:
        release = Release(LOCK, b"k", self.tokens.pop(name))
        self.hear(self.table.handle(self.table.connect(), release, self.now))

    def leave(self, name: str) -> None:
        self.tokens.pop(name, None)
        self.hear(self.table.disconnect(self.peers[name], self.now, clean=True))

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


@pytest.mark.parametrize("limit", [2, 5, 100, ALL])
def test_all_is_alone_whatever_limit_others_give(limit: int) -> None:
    key = Key(5)
    key.come("all", ALL)
    key.limit = ALL
    for number, weight in enumerate((1, 2, ALL)):
        assert key.come(f"{number}", weight, timeout=0, limit=limit) is Status.TIMEOUT
    key.come("waits", limit=limit)
    assert key.granted() == ["all"]
    key.end("all")
    assert key.granted() == ["waits"]


def test_a_weight_above_the_limit_takes_the_whole_key_and_counts_as_it_is() -> None:
    key = Key(3)
    key.come("much", 7)
    assert key.granted() == ["much"]
    key.limit = 10
    for name, weight in (("a", 2), ("b", 2), ("c", 1)):
        key.come(name, weight)
    assert key.granted() == ["a"], "7 and 2 of 10"
    key.end("much")
    assert key.granted() == ["b", "c"]


@pytest.mark.parametrize("how", ["in time", "its connection ends"])
def test_those_behind_go_on_when_the_first_gives_up(how: str) -> None:
    key = Key(5)
    key.come("a", 3)
    key.come("much", 4, timeout=10)
    key.come("b")
    key.come("c")
    assert key.granted() == ["a"]
    if how == "in time":
        key.now = 10.0
        key.hear(key.table.advance(key.now))
    else:
        key.leave("much")
    assert key.granted() == ["b", "c"]


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


def test_a_group_takes_no_more_than_its_limit_and_others_do_not_wait_for_it() -> None:
    key = Key(10)
    key.come("a1", 3, group=b"a", most=4)
    key.come("a2", 2, group=b"a", most=4)
    key.come("a3", 1, group=b"a", most=4)
    key.come("b1", 5, group=b"b")
    assert key.granted() == ["a1", "b1"], "not a3, which is behind a2"
    key.come("a4", 9, group=b"a", most=4)
    key.end("a1")
    assert key.granted() == ["a2", "a3"]
    key.end("a2")
    assert key.granted() == []
    key.end("b1")
    assert key.granted() == [], "more than the group may ever have: all of that"
    key.end("a3")
    assert key.granted() == ["a4"]


def test_the_group_whose_turn_it_is_waits_and_all_with_it() -> None:
    key = Key(4)
    key.come("a", 3, group=b"a")
    key.come("b", 2, group=b"b")
    key.come("c", 1, group=b"c")
    assert key.granted() == ["a"]
    key.end("a")
    assert key.granted() == ["b", "c"]


def test_a_run_takes_as_many_places_of_a_rate() -> None:
    site = Site()
    rate = Rate(10, 1000)

    def take(weight: int, timeout: int = 0) -> Reply | None:
        share = FairGroup(b"", 0, weight) if weight > 1 else None
        peer = site.table.connect()
        reply = site.ask(peer, Acquire(LOCK, b"k", ALL, timeout, LEASE, rate, group=share))
        if isinstance(reply, Granted):
            assert site.ask(peer, Release(LOCK, b"k", reply.token)) is Status.OK  # so it has begun
        assert reply is None or isinstance(reply, Granted | Status)
        return reply

    assert [type(take(weight)) for weight in (4, 5)] == [Granted, Granted]
    assert take(2) is Status.TIMEOUT
    site.go_to(100.5)
    assert isinstance(take(1), Granted)
    assert take(ALL, 60) is None
    assert take(1) is Status.TIMEOUT
    site.go_to(101.4)
    assert site.granted() == [], "nine are free, and one is not"
    assert take(1) is Status.TIMEOUT, "it waits behind"
    site.go_to(101.501)
    assert len(site.granted()) == 1


@pytest.mark.parametrize("runs", [1, 32, 33, 100, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 5])
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
    assert sum(len(each.times) for each in read if isinstance(each, RateRecord)) == runs
    again = Site()
    again.table.restore([], again.now, [each for each in read if isinstance(each, RateRecord)])
    assert again.ask(again.table.connect(), request) is Status.TIMEOUT
    site.go_to(site.now + 1.001)
    assert isinstance(site.ask(site.table.connect(), request), Granted)


def test_a_weight_outlives_the_table() -> None:
    before = Key(5)
    before.come("a", 2, group=b"g", most=3)
    before.come("b", 3)
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
    """Two keys with ten slots each; a process that wants turns, and others behind it."""

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

    def take(
        self, key: bytes, weight: int, timeout: int = 0, group: FairGroup | None = None
    ) -> Peer:
        """Somebody comes; if there is no time to wait, it has its slots at once."""
        peer = self.table.connect()
        share = (group or FairGroup(b""))._replace(weight=weight)
        reply = self.ask(Acquire(LOCK, key, 10, timeout, 600, group=share), peer)
        assert reply is None if timeout else isinstance(reply, Granted)
        return peer

    def want(
        self, peer: Peer, key: bytes, weight: int, group: FairGroup | None = None
    ) -> Reply | None:
        """The process wants to hear of its turn."""
        share = (group or FairGroup(b""))._replace(weight=weight)
        return self.ask(Enqueue(LOCK, key, 10, 600, turn=1000, group=share), peer)

    def rest(self) -> list[int]:
        """All further steps that are due; return who has its slots then."""
        granted: list[int] = []
        while (due := self.table.next_deadline()) is not None and due <= 1.0:
            granted += [
                number for number, reply in self.table.advance(1.0) if isinstance(reply, Granted)
            ]
        return granted


GROUP = FairGroup(b"g", 6)


@pytest.mark.parametrize("group", [None, GROUP], ids=["slots", "group"])
@pytest.mark.parametrize("how", ["it ends", "it hears of another turn"])
def test_others_go_on_when_the_process_before_them_asks_no_more(
    how: str, group: FairGroup | None
) -> None:
    line = Line()
    one, other, asking = line.peers
    line.take(b"a", 5, group=group)
    line.want(one, b"a", 8, group)
    assert line.ask(Next(), asking) is None
    behind = line.take(b"a", 1, 60, group)
    assert line.rest() == []
    if how == "it ends":
        assert line.table.disconnect(asking, 1.0, clean=True) == []
    else:
        effects = line.table.handle(other, Enqueue(LOCK, b"b", 10, 600, turn=1000), 1.0)
        assert [type(reply) for _, reply in effects] == [Queued, YourTurn]
    assert line.rest() == [behind.id]
    # Its position is before all that come later: it has its turn once that fits.
    assert line.ask(Next(), line.greet()) is None
    assert line.rest() == []
    light = Acquire(LOCK, b"a", 10, 0, 600, group=group)
    assert line.ask(light) is Status.TIMEOUT


def test_a_place_of_a_rate_is_for_others_when_the_process_before_them_asks_no_more() -> None:
    line = Line()
    one, _, asking = line.peers
    rate = Rate(3, 60_000)
    assert isinstance(line.ask(Acquire(LOCK, b"a", 10, 0, 600, rate)), Granted)
    share = FairGroup(b"", 0, 3)
    line.ask(Enqueue(LOCK, b"a", 10, 600, rate, turn=1000, group=share), one)
    assert line.ask(Next(), asking) is None
    behind = line.table.connect()
    assert line.ask(Acquire(LOCK, b"a", 10, 60, 600, rate), behind) is None
    assert line.rest() == []
    line.table.disconnect(asking, 1.0, clean=True)
    assert line.rest() == [behind.id]


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
    assert line.rest() == []
    assert line.table.disconnect(asking, 1.0, clean=True) == []
    steps = []
    while line.table.backlog:
        steps.append([number for number, _ in line.table.advance(1.0)])
    assert [len(step) for step in steps] == [STEP, STEP, STEP]
    assert [number for step in steps for number in step] == behind
    assert not line.table.connections.processes[b"here"].behind


def test_nothing_is_noted_of_a_process_once_it_waits_no_more() -> None:
    line = Line()
    one, _, asking = line.peers
    line.take(b"a", 5)
    line.want(one, b"a", 8)
    assert line.ask(Next(), asking) is None
    light = line.take(b"a", 1, 60)
    process = line.table.connections.processes[b"here"]
    assert [entry.key for entry in process.behind.values()] == [b"a"]
    granted = line.table.disconnect(one, 1.0, clean=True)
    assert [number for number, _ in granted] == [light.id]
    assert not process.behind
    assert not line.table.backlog


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


def test_a_newcomer_without_a_group_has_the_turn_that_comes_before_that_of_who_waits() -> None:
    """Its group has somebody in line who cannot start, and so a turn: the one behind needs more."""
    line = Line()
    one, _, _ = line.peers
    line.take(b"a", 5)
    line.want(one, b"a", 8)
    line.take(b"a", 8, 60, FairGroup(b"g"))
    newcomer = line.table.connect()
    effects = line.table.handle(newcomer, Acquire(LOCK, b"a", 10, 60, 600), 1.0)
    assert [(number, type(reply)) for number, reply in effects] == [(newcomer.id, Granted)]


def test_who_has_its_places_of_a_rate_is_not_passed_while_it_waits_for_slots() -> None:
    """Not by those either who need no place."""
    site = Site()
    rate = Rate(5, 1000)
    holder, heavy, *others = (site.table.connect() for _ in range(5))
    reply = site.ask(holder, Acquire(LOCK, b"k", 5, 0, LEASE))
    assert isinstance(reply, Granted)
    share = FairGroup(b"", 0, 5)
    assert site.ask(heavy, Acquire(LOCK, b"k", 5, 60, LEASE, rate, group=share)) is None
    assert site.ask(others[0], Acquire(LOCK, b"k", 5, 0, LEASE)) is Status.TIMEOUT
    assert site.ask(others[1], Enqueue(LOCK, b"k", 5, LEASE)) is Status.QUEUED
    two = FairGroup(b"g", 0, 2)
    assert site.ask(others[2], Acquire(LOCK, b"k", 5, 0, LEASE, group=two)) is Status.TIMEOUT
    site.ask(holder, Release(LOCK, b"k", reply.token))
    assert site.granted() == [heavy.id]


def test_the_first_of_a_group_goes_on_once_the_rate_has_its_place() -> None:
    """Behind it is one who needs no place, and more slots than the group may have."""
    site = Site()
    rate = Rate(1, 1000)
    holder, *others = (site.table.connect() for _ in range(3))
    group = FairGroup(b"g", 3)
    reply = site.ask(holder, Acquire(LOCK, b"k", 9, 0, LEASE, rate, group=group))
    assert isinstance(reply, Granted)
    site.ask(holder, Renew(LOCK, b"k", reply.token, LEASE, How.BEGUN))
    assert site.ask(others[0], Acquire(LOCK, b"k", 9, 60, LEASE, rate, group=group)) is None
    heavy = group._replace(weight=3)
    assert site.ask(others[1], Acquire(LOCK, b"k", 9, 60, LEASE, group=heavy)) is None
    site.go_to(site.now + 1.01)
    assert site.granted() == [others[0].id]


def test_the_first_of_a_group_goes_on_once_its_process_asks() -> None:
    """Behind it is one who needs more slots than the group may have."""
    line = Line()
    group = FairGroup(b"g", 3)
    one, other, _ = line.peers
    line.take(b"a", 1, 0, group)
    reply = line.want(one, b"a", 1, group)
    assert isinstance(reply, Queued)
    line.take(b"a", 3, 60, group)
    assert line.ask(Next(), other) is None
    assert line.table.advance(1.0) == [(other.id, YourTurn(reply.ticket))]
