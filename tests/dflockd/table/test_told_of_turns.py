"""Who wants to be told of the turn is granted nothing, and is told once its process asks."""

from __future__ import annotations

import json

import pytest

from dflockd.table import LockTable
from dflockd.table.limits import STEP
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


def test_nobody_is_told_whose_process_does_not_ask(table: LockTable) -> None:
    """And nobody waits for them: others have the lock meanwhile."""
    peer, ticket = blocked(table)
    assert table.next_deadline() == 60
    holder, granted = lock(table)
    assert isinstance(granted, Granted)
    asking, nothing = asks(table, peer)
    assert nothing is None
    effects = table.handle(holder, Release(LOCK, b"k", granted.token), 1.0)
    assert effects == [(holder.id, Status.OK), (asking.id, YourTurn(ticket))]
    assert peer.waiting is not None
    # Its slot is for nobody else now.
    assert lock(table, 1.0, timeout=0)[1] is Status.TIMEOUT
    assert table.next_deadline() == 1.0 + HOLD


def test_whoever_has_the_ticket_is_the_first_holder(table: LockTable) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Wait(LOCK, b"k", 60)) is None
    assert not peer.holds
    other = table.connect()
    granted = table.handle(other, Acquire(LOCK, b"k", 1, 60, 600, ticket=ticket), 1.0)
    assert kinds(granted) == [(peer.id, Status), (other.id, Granted)]
    assert granted[0][1] is Status.NOT_ENQUEUED
    assert not peer.enqueued
    assert table.disconnect(peer, 1.0, clean=True) == []
    assert other.holds
    # A ticket is good for once.
    assert take_up(table, ticket, 2.0, timeout=0) is Status.TIMEOUT


def test_who_says_nothing_delays_others_by_no_more_than_was_said(table: LockTable) -> None:
    peer, ticket = told(table)
    waiter, _ = lock(table, 1.0)
    assert table.advance(HOLD - 0.001) == []
    assert kinds(table.advance(HOLD)) == [(waiter.id, Granted)]
    # It is ahead of all that came later, and is not told again: its ticket may be on its way.
    later, _ = lock(table, 3.0)
    assert asks(table, peer, 3.0)[1] is None
    assert take_up(table, ticket, 3.0) is None
    (release,) = [Release(LOCK, b"k", token.token) for token in waiter.holds]
    effects = table.handle(waiter, release, 4.0)
    assert kinds(effects)[1][1] is Granted
    assert effects[1][0] > later.id


# The connection that asks.


# Where it could have had a turn.


# Time.


# Who asks.


# At one instant.


# Limits, and what people see.


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


def test_keys_that_were_free_take_turns(table: LockTable) -> None:
    """Each process starts with where it could have had one longest."""
    tickets = []
    for key in (b"a", b"b", b"a", b"b", b"c"):
        reply = want(table, limit=9, who=process(table, b"here"), key=key)[1]
        tickets.append(ticket_of(reply))
    asking = process(table, b"here")
    order = [tickets.index(ask(table, asking, Next()).ticket) for _ in range(5)]  # type: ignore[attr-defined]
    assert order == [0, 1, 4, 2, 3]
    assert ask(table, asking, Next()) is None
    assert not table.connections.processes[b"here"].starved


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
