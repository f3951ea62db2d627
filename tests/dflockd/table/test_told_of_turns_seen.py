"""Those who wait to be told: limits, what people and journals see, and how long each step takes."""

from __future__ import annotations

import json
import random

import pytest

from dflockd.table import Effect, LockTable, Peer
from dflockd.table.limits import STEP
from dflockd.table.state import Entry
from dflockd.wire import (
    Acquire,
    Enqueue,
    FairGroup,
    Granted,
    Inspect,
    Next,
    Pass,
    Queued,
    Release,
    Report,
    Request,
    Stats,
    Status,
    Wait,
    YourTurn,
)
from tests.dflockd.table.turns_support import (
    HOLD,
    LOCK,
    ask,
    asks,
    blocked,
    calls,
    hold,
    kinds,
    lock,
    process,
    run,
    table_of,
    take_up,
    ticket_of,
    told,
    want,
)

# Limits, and what people see.


def test_who_waits_to_be_told_counts_as_a_waiter() -> None:
    table = table_of(max_waiters=2)
    peer, _ = want(table)
    for is_told in (False, True):
        if is_told:
            asks(table, peer)
        waiter, _ = want(table)
        assert want(table)[1] is Status.MAX_WAITERS
        table.disconnect(waiter, 0.0, clean=True)
    assert lock(table)[0].waiting is not None


def test_one_connection_has_so_many_positions() -> None:
    table = table_of(max_holds=2)
    peer = process(table)
    for key in (b"a", b"b"):
        assert isinstance(ask(table, peer, Enqueue(LOCK, key, 1, 60, turn=1000)), Queued)
    assert ask(table, peer, Enqueue(LOCK, b"c", 1, 60)) is Status.MAX_HOLDS


def test_one_key_has_so_many_holders_and_who_will_be() -> None:
    table = table_of(max_holds=2)
    tickets = [ticket_of(want(table, limit=5, who=process(table, b"here"))[1]) for _ in range(2)]
    asking = process(table, b"here")
    assert [ask(table, asking, Next()) for _ in range(2)] == [*map(YourTurn, tickets)]
    assert want(table, limit=5)[1] is Status.MAX_HOLDS
    child = table.connect()
    assert ask(table, child, Acquire(LOCK, b"k", 5, 0, 60)) is Status.MAX_HOLDS
    for ticket in reversed(tickets):
        child = table.connect()
        effects = table.handle(child, Acquire(LOCK, b"k", 5, 0, 60, ticket=ticket), 0.0)
        assert kinds(effects) == [(child.id, Granted)]


@pytest.mark.parametrize("is_told", [False, True])
def test_people_see_it(table: LockTable, is_told: bool) -> None:
    peer, _ = want(table, who=run(table, 3))
    if is_told:
        asks(table, peer)
    else:
        hold(table)
    lock(table)
    report = ask(table, table.connect(), Inspect(LOCK, b"k"))
    assert isinstance(report, Report)
    rows = json.loads(report.json)["waiters"]
    shown = [(row["owner"], row["attempt"], row["told"], row["away"]) for row in rows]
    assert shown == [("run", 3, is_told, False), ("", 0, False, False)]
    stats = ask(table, peer, Stats())
    assert isinstance(stats, Report)
    assert json.loads(stats.json)["locks"][0]["waiters"] == 2
    assert table.counts.waiting == 2


def test_a_journal_hears_of_it_when_it_is_held(table: LockTable) -> None:
    _, ticket = told(table)
    table.advance(HOLD)
    assert table.changes == []
    take_up(table, ticket, HOLD)
    assert table.changes is not None
    assert len(table.changes) == 1


@pytest.mark.parametrize("is_told", [False, True])
def test_a_drain_ends_it(table: LockTable, is_told: bool) -> None:
    peer, ticket = blocked(table)
    asking = process(table, peer.instance)
    waiter = hold(table)[0] if not is_told else None
    ask(table, asking, Next())
    if is_told:
        waiter, _ = lock(table)
    assert waiter is not None
    answered = {peer.id, waiter.id} if is_told else {peer.id, asking.id}
    assert sorted(table.drain(1.0)) == [(each, Status.DRAINING) for each in sorted(answered)]
    for request in (Wait(LOCK, b"k", 60), Next(), Pass(b"k", ticket)):
        assert ask(table, peer, request, 1.0) is Status.DRAINING
    assert take_up(table, ticket, 1.0) is Status.DRAINING
    assert (table.counts.waiting, len(table)) == (0, int(not is_told))
    assert table.disconnect(peer, 1.0, clean=True) == []


MANY = 8000


def with_many(count: int, *, grouped: bool) -> dict[str, int]:
    """The calls of each step at a key for which so many wait, of two processes and many groups."""
    table = table_of(max_holds=2 * MANY)
    holder, release = hold(table)
    peers = []
    for number in range(count):
        peer = process(table, b"%d" % (number % 2))
        group = FairGroup(b"%d" % (number // 2)) if grouped else None
        request = Enqueue(LOCK, b"k", 1, 60, group=group, turn=int(HOLD * 1000))
        ticket = ticket_of(ask(table, peer, request))
        ask(table, peer, Wait(LOCK, b"k", 60))
        peers.append((peer, ticket))
    asking = process(table, b"1")
    found = {"release": calls(lambda: table.handle(holder, release, 0.0))}
    found["next"] = calls(lambda: table.handle(asking, Next(), 0.0))
    assert asking.told is not None
    ticket = asking.told.ticket
    found["pass"] = calls(lambda: table.handle(holder, Pass(b"k", ticket), 0.0))
    found["next again"] = calls(lambda: table.handle(asking, Next(), 0.0))
    found["newcomer"] = calls(lambda: lock(table))
    found["time"] = calls(lambda: table.advance(HOLD))
    middle, _ = peers[count // 2]
    found["end"] = calls(lambda: table.disconnect(middle, HOLD, clean=True))
    last = peers[-1][1]
    found["take up"] = calls(lambda: take_up(table, last, HOLD))
    if not grouped:  # all groups have to be looked at to say who is in which place
        found["list"] = calls(lambda: table.handle(holder, Inspect(LOCK, b"k"), HOLD))
    return found


# Steps.


@pytest.mark.parametrize("grouped", [False, True])
def test_nothing_takes_longer_the_more_wait(grouped: bool) -> None:
    few, many = with_many(2000, grouped=grouped), with_many(MANY, grouped=grouped)
    assert set(few) == set(many)
    for step, count in many.items():
        assert count <= few[step] + 20, (step, few, many)


def test_many_free_keys_are_looked_at_in_small_steps() -> None:
    """Where a process could have had a turn, and somebody else has had it."""
    table = table_of()
    waiting = [
        want(table, who=process(table, b"here"), key=b"%d" % number)[0]
        for number in range(3 * STEP)
    ]
    for number in range(3 * STEP - 1):
        ask(table, table.connect(), Acquire(LOCK, b"%d" % number, 1, 0, 60))
    asking = process(table, b"here")
    assert ask(table, asking, Next()) is None
    steps = 1
    while asking.waiting is not None:
        assert table.next_deadline() == 0.0
        steps += 1
        effects = table.advance(0.0)
    assert steps == 3
    assert kinds(effects) == [(asking.id, YourTurn)]
    assert len(waiting) == 3 * STEP


# Any mixture of those who are ready and those who are not.


@pytest.mark.parametrize("seed", range(30))
def test_those_who_are_ready_are_served_in_their_order(seed: int) -> None:
    Race(random.Random(seed)).run()


class Race:
    """Waiters of one lock or semaphore, of some processes that ask now and then."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.limit = dice.choice([1, 1, 2, 3])
        self.table = table_of()
        self.now = 0.0
        self.asking = [process(self.table, b"%d" % number) for number in range(3)]
        self.tickets: dict[bytes, bytes] = {}
        """Of those who were told and have not answered, and their processes."""
        self.holders: list[tuple[Peer, bytes]] = []
        self.come = self.served = 0

    def run(self) -> None:
        for _ in range(600):
            self.step()
            self.check()
        for _ in range(5000):
            if self.served == self.come:
                return
            self.step(comes=False)
            self.check()
        raise AssertionError("somebody is left")

    def step(self, *, comes: bool = True) -> None:
        dice = self.dice
        idle = [peer for peer in self.asking if peer.waiting is None]
        if comes and dice.random() < 0.3 and self.come - self.served < 60:
            self.come += 1
            name = b"%d" % dice.randrange(3)
            request = Enqueue(LOCK, b"k", self.limit, 600, turn=int(HOLD * 1000))
            self.do(process(self.table, name), request)
        elif self.tickets and dice.random() < 0.6:
            self.answer(dice.choice(list(self.tickets)))
        elif idle and dice.random() < 0.5:
            self.do(dice.choice(idle), Next())
        elif self.holders and dice.random() < 0.5:
            peer, token = self.holders.pop(dice.randrange(len(self.holders)))
            self.do(peer, Release(LOCK, b"k", token))
        else:
            self.now += dice.choice([0.1, 0.5, 1.0])
            self.hear(self.table.advance(self.now))

    def answer(self, ticket: bytes) -> None:
        """The position is taken up, in time or not; or it could not be used."""
        del self.tickets[ticket]
        slot = self.table.connect()
        if self.dice.random() < 0.4:
            self.do(slot, Pass(b"k", ticket))
        else:
            self.served += 1
            self.do(slot, Acquire(LOCK, b"k", self.limit, 600, 3600, ticket=ticket))

    def do(self, peer: Peer, request: Request) -> None:
        self.hear(self.table.handle(peer, request, self.now))

    def hear(self, effects: list[Effect]) -> None:
        for number, reply in effects:
            if isinstance(reply, YourTurn):
                waiter = self.table._partition.reserved[reply.ticket]
                assert waiter.peer.instance == self.table.connections.peers[number].instance
                self.tickets[reply.ticket] = waiter.peer.instance
                assert waiter.process is not None
                row = waiter.entry.queue().rows.get(waiter.process)
                first = None if row is None else row.head()
                assert first is None or waiter.number < first.number, "told before who is ahead"
            elif isinstance(reply, Granted):
                self.holders.append((self.table.connections.peers[number], reply.token))

    def check(self) -> None:
        entry = self.table.find(LOCK, b"k")
        if not isinstance(entry, Entry) or entry.waiters is None:
            return
        queue = entry.waiters
        free = self.limit - len(entry.holds) - len(queue.told)
        assert free >= 0
        assert not free or queue.next() is None, "somebody was forgotten"
