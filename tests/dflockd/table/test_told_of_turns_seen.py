"""Those who wait to be told: limits, what people and journals see, and how long each step takes."""

from __future__ import annotations

import json
import random

import pytest

from dflockd.table import Effect, LockTable, Peer
from dflockd.table.limits import STEP
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    Inspect,
    Pass,
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
    blocked,
    calls,
    hold,
    kinds,
    lock,
    run,
    table_of,
    take_up,
    told,
    want,
)

# Limits, and what people see.


def test_who_was_told_counts_as_a_waiter() -> None:
    table = table_of(max_waiters=2)
    peer, ticket = told(table)
    for has_passed in (False, True):
        if has_passed:
            ask(table, peer, Pass(b"k", ticket))
            hold(table)
        waiter, _ = lock(table)
        assert waiter.waiting is not None
        assert lock(table)[1] is Status.MAX_WAITERS
        assert want(table)[1] is Status.MAX_WAITERS
        table.disconnect(waiter, 0.0, clean=True)


def test_whoever_wants_to_be_told_is_a_waiter_at_a_free_key_too() -> None:
    table = table_of(max_waiters=1)
    peer, ticket = told(table)
    ask(table, peer, Pass(b"k", ticket))
    assert want(table)[1] is Status.MAX_WAITERS
    assert isinstance(lock(table)[1], Granted)


def test_one_connection_is_told_so_often() -> None:
    table = table_of(max_holds=2)
    peer = table.connect()
    for key in (b"a", b"b"):
        assert isinstance(ask(table, peer, Enqueue(LOCK, key, 1, 60, turn=1000)), YourTurn)
    assert ask(table, peer, Enqueue(LOCK, b"c", 1, 60)) is Status.MAX_HOLDS


def test_one_key_has_so_many_holders_and_who_will_be() -> None:
    table = table_of(max_holds=2)
    replies = [want(table, limit=5)[1] for _ in range(3)]
    assert replies[2] is Status.MAX_HOLDS
    assert isinstance(replies[1], YourTurn)
    child = table.connect()
    assert ask(table, child, Acquire(LOCK, b"k", 5, 0, 60)) is Status.MAX_HOLDS
    effects = table.handle(child, Acquire(LOCK, b"k", 5, 0, 60, ticket=replies[1].ticket), 0.0)
    assert kinds(effects) == [(child.id, Granted)]
    assert isinstance(replies[0], YourTurn)
    child = table.connect()
    assert isinstance(
        ask(table, child, Enqueue(LOCK, b"k", 5, 60, ticket=replies[0].ticket)), Enqueued
    )


@pytest.mark.parametrize("has_passed", [False, True])
def test_people_see_it(table: LockTable, has_passed: bool) -> None:
    peer, reply = want(table, who=run(table, 3))
    assert isinstance(reply, YourTurn)
    if has_passed:
        ask(table, peer, Pass(b"k", reply.ticket))
        hold(table)
    lock(table)
    report = ask(table, table.connect(), Inspect(LOCK, b"k"))
    assert isinstance(report, Report)
    rows = json.loads(report.json)["waiters"]
    shown = [(row["owner"], row["attempt"], row["told"], row["away"]) for row in rows]
    assert shown == [("run", 3, True, False), ("", 0, False, False)]
    stats = ask(table, peer, Stats())
    assert isinstance(stats, Report)
    assert json.loads(stats.json)["locks"][0]["waiters"] == 2
    assert table.counts.waiting == 2


def test_a_journal_hears_of_it_when_it_is_held(table: LockTable) -> None:
    peer, ticket = told(table)
    ask(table, peer, Pass(b"k", ticket))
    assert ask(table, peer, Wait(LOCK, b"k", 60)) == YourTurn(ticket)
    table.advance(HOLD)
    assert table.changes == []
    take_up(table, ticket, HOLD)
    assert table.changes is not None
    assert len(table.changes) == 1


@pytest.mark.parametrize("has_passed", [False, True])
def test_a_drain_ends_it(table: LockTable, has_passed: bool) -> None:
    peer, ticket = told(table)
    waiter, _ = lock(table)
    if has_passed:
        ask(table, peer, Pass(b"k", ticket))
    assert table.drain(1.0) == ([] if has_passed else [(waiter.id, Status.DRAINING)])
    for request in (Wait(LOCK, b"k", 60), Pass(b"k", ticket)):
        assert ask(table, peer, request, 1.0) is Status.DRAINING
    assert take_up(table, ticket, 1.0) is Status.DRAINING
    assert (table.counts.waiting, len(table)) == (0, int(has_passed))
    assert table.disconnect(peer, 1.0, clean=True) == []


MANY = 8000


def with_many(count: int) -> dict[str, int]:
    """The calls of each step at a key for which so many wait, all of whom were told and have passed."""
    table = table_of(max_holds=2 * MANY)
    holder, release = hold(table)
    peers = [blocked(table) for _ in range(count)]
    found = {"release": calls(lambda: table.handle(holder, release, 0.0))}
    tickets = [next(iter(peers[0].enqueued.values())).ticket]
    for peer in peers[:-1]:
        ((_, _), (_, reply)) = table.handle(peer, Pass(b"k", tickets[-1]), 0.0)
        assert isinstance(reply, YourTurn)
        tickets.append(reply.ticket)
    last = Pass(b"k", tickets[-1])
    found["pass last"] = calls(lambda: table.handle(peers[-1], last, 0.0))
    middle, behind = count // 2, table.connect()
    wait = Wait(LOCK, b"k", 60)
    found["come back"] = calls(lambda: table.handle(peers[middle], wait, 0.0))
    found["newcomer"] = calls(lambda: table.handle(behind, Acquire(LOCK, b"k", 1, 60, 60), 0.0))
    for peer in (*peers[:middle], *peers[middle + 1 :]):
        assert ask(table, peer, wait) is None
    found["pass"] = calls(lambda: table.handle(peers[middle], Pass(b"k", tickets[middle]), 0.0))
    found["time"] = calls(lambda: table.advance(HOLD))
    found["end"] = calls(lambda: table.disconnect(peers[middle], HOLD, clean=True))
    found["list"] = calls(lambda: table.handle(behind, Inspect(LOCK, b"k"), HOLD))
    return found


# Steps.


def test_nothing_takes_longer_the_more_were_told() -> None:
    few, many = with_many(2000), with_many(MANY)
    assert set(few) == set(many)
    for step, count in many.items():
        assert count <= few[step] + 10, (step, few, many)


def test_many_slots_at_once_are_told_in_small_steps() -> None:
    table = table_of(max_holds=2 * MANY)
    big = table.connect()
    for _ in range(MANY):
        ask(table, big, Acquire(LOCK, b"k", MANY, 0, 600))
    peers = []
    for _ in range(MANY):
        peer, _ = want(table, limit=MANY)
        ask(table, peer, Wait(LOCK, b"k", 60))
        peers.append(peer)
    steps = [table.disconnect(big, 1.0, clean=True)]
    while (deadline := table.next_deadline()) is not None and deadline <= 1.0:
        steps.append(table.advance(1.0))
    assert all(len(step) <= STEP for step in steps)
    assert [number for step in steps for number, _ in step] == [peer.id for peer in peers]
    # And so is the end of all of that.
    waiter = table.connect()
    ask(table, waiter, Acquire(LOCK, b"k", MANY, 60, 60), 1.0)
    steps = [table.advance(1.0 + HOLD)]
    while (deadline := table.next_deadline()) is not None and deadline <= 1.0 + HOLD:
        steps.append(table.advance(1.0 + HOLD))
    assert len(steps) == MANY // STEP
    assert kinds(steps[0]) == [(waiter.id, Granted)]


def test_the_end_of_a_connection_that_was_told_much_takes_small_steps() -> None:
    table = table_of()
    big = table.connect()
    waiters = []
    for number in range(3 * STEP):
        key = b"%d" % number
        assert isinstance(ask(table, big, Enqueue(LOCK, key, 1, 60, turn=60000)), YourTurn)
        waiters.append(table.connect())
        ask(table, waiters[-1], Acquire(LOCK, key, 1, 60, 60))
    steps = [table.disconnect(big, 1.0, clean=True)]
    while (deadline := table.next_deadline()) is not None and deadline <= 1.0:
        steps.append(table.advance(1.0))
    assert [len(step) for step in steps if step] == [STEP] * 3
    assert [number for step in steps for number, _ in step] == [peer.id for peer in waiters]


# Any mixture of those who are ready and those who are not.


@pytest.mark.parametrize("seed", range(30))
def test_those_who_are_ready_are_served_in_their_order(seed: int) -> None:
    Race(random.Random(seed)).run()


class Race:
    """Waiters of one semaphore, each of which is ready only now and then."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.limit = dice.choice([1, 1, 2, 3])
        self.table = table_of()
        self.now = 0.0
        self.peers: dict[int, Peer] = {}
        self.tickets: dict[int, bytes] = {}  # of those who were told and have not answered
        self.passed: list[int] = []
        self.told_at: dict[int, float] = {}
        self.holders: list[tuple[Peer, bytes]] = []
        self.served: set[int] = set()
        self.aside: set[int] = set()  # those with a slot, before the step

    def run(self) -> None:
        for _ in range(600):
            self.step()
            self.check()
        while len(self.served) < len(self.peers):
            self.step(comes=False)
            self.check()

    def step(self, *, comes: bool = True) -> None:
        dice, before = self.dice, len(self.peers)
        if comes and dice.random() < 0.3 and before < 60:
            self.come()
        elif self.tickets and dice.random() < 0.6:
            self.answer(dice.choice(list(self.tickets)))
        elif self.passed and dice.random() < 0.5:
            number = self.passed.pop(dice.randrange(len(self.passed)))
            self.do(self.peers[number], Wait(LOCK, b"k", 600))
        elif self.holders and dice.random() < 0.5:
            peer, token = self.holders.pop(dice.randrange(len(self.holders)))
            self.do(peer, Release(LOCK, b"k", token))
        else:
            self.now += dice.choice([0.1, 0.5, 1.0])
            self.hear(self.table.advance(self.now))

    def come(self) -> None:
        peer, reply = want(self.table, self.now, self.limit)
        self.peers[peer.id] = peer
        if isinstance(reply, YourTurn):
            self.hear([(peer.id, reply)])
        else:
            self.do(peer, Wait(LOCK, b"k", 600))

    def answer(self, number: int) -> None:
        """A ready one takes its position up, in time or not; else others go first."""
        ticket, is_in_time = self.tickets.pop(number), self.now < self.told_at[number] + HOLD
        if self.dice.random() < 0.4:
            self.passed.append(number)
            if self.dice.random() < 0.7:
                self.do(self.peers[number], Pass(b"k", ticket))
            return
        slot = self.table.connect()
        effects = self.table.handle(
            slot, Acquire(LOCK, b"k", self.limit, 600, 3600, ticket=ticket), self.now
        )
        granted = [reply for peer, reply in effects if peer == slot.id]
        assert granted or not is_in_time, "told, in time, and refused"
        self.served.add(number)
        self.hear(effects, {slot.id: slot})

    def do(self, peer: Peer, request: Request) -> None:
        self.hear(self.table.handle(peer, request, self.now))

    def hear(self, effects: list[Effect], slots: dict[int, Peer] | None = None) -> None:
        for number, reply in effects:
            if isinstance(reply, YourTurn) and number in self.aside:
                self.tickets[number] = reply.ticket
            elif isinstance(reply, YourTurn):
                waiting = [n for n, peer in self.peers.items() if peer.waiting is not None]
                assert number < min(waiting, default=number + 1), "told before who waits ahead"
                self.tickets[number], self.told_at[number] = reply.ticket, self.now
            elif isinstance(reply, Granted):
                peer = self.table.connections.peers[number]
                assert number not in self.peers, "granted who was to be told"
                self.holders.append((peer, reply.token))

    def check(self) -> None:
        entry = self.table._partition.spaces[LOCK].get(b"k")
        self.aside = set()
        if entry is None or entry.waiters is None:
            return
        self.aside = {waiter.peer.id for waiter in entry.waiters.told}
        aside = len(entry.waiters.told)
        assert len(entry.holds) + aside <= self.limit
        wanting = len(entry.waiters.line) + len(entry.waiters.returned)
        assert not wanting or len(entry.holds) + aside == self.limit, "somebody was forgotten"
