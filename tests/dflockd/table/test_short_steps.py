"""No step of the table is long, whatever others hold or wait for, and no rule is weaker for that."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dflockd.table import Effect, Limits, LockTable, Peer, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.wire import (
    Acquire,
    Aged,
    DrawAge,
    Enqueue,
    Granted,
    How,
    Owner,
    Release,
    Renew,
    Renewed,
    Request,
    Reserve,
    Space,
    Stats,
    Status,
    Superseded,
    TimedOut,
    Wait,
)
from tests.dflockd.table.turns_support import ask

LOCK = Space.LOCK
MANY = 3 * STEP


def table_of(**limits: int) -> LockTable:
    return LockTable(Limits(max_locks=10 * STEP, **limits), TokenIssuer(b"secret", 0))


def take_many(table: LockTable, peer: Peer, lease: int = 10) -> list[bytes]:
    tokens = []
    for number in range(MANY):
        reply = ask(table, peer, Acquire(LOCK, b"%d" % number, 1, 0, lease))
        assert isinstance(reply, Granted)
        tokens.append(reply.token)
    return tokens


def rest(table: LockTable, now: float) -> list[list[Effect]]:
    """All further steps that are due now."""
    steps = []
    while (deadline := table.next_deadline()) is not None and deadline <= now:
        steps.append(table.advance(now))
    return steps


def test_the_end_of_a_big_connection_takes_small_steps() -> None:
    table = table_of()
    big, other = table.connect(), table.connect()
    tokens = take_many(table, big)
    waiters = [table.connect() for _ in range(MANY)]
    for number, waiter in enumerate(waiters):
        assert ask(table, waiter, Acquire(LOCK, b"%d" % number, 1, 9, 10)) is None
    first = table.disconnect(big, 1.0, clean=True)
    assert [number for number, _ in first] == [waiter.id for waiter in waiters[:STEP]]
    # What is not free yet is held, and can still be renewed or released by whoever has the token.
    last = b"%d" % (MANY - 1)
    assert ask(table, other, Acquire(LOCK, last, 1, 0, 10), 1.0) is Status.TIMEOUT
    assert ask(table, other, Renew(LOCK, last, tokens[-1], 10), 1.0) == Renewed(10)
    assert table.backlog
    assert table.next_deadline() == 1.0
    steps = rest(table, 1.0)
    assert all(len(step) <= STEP for step in steps)
    granted = [number for step in [first, *steps] for number, _ in step]
    assert granted == [waiter.id for waiter in waiters[:-1]]
    assert list(other.holds) == [table._partition.spaces[LOCK][last].holds[MANY]]


def test_all_are_sent_home_in_small_steps() -> None:
    table = table_of()
    holder, much = table.connect(), table.connect()
    tokens = take_many(table, holder)
    for number in range(MANY):
        assert ask(table, much, Enqueue(LOCK, b"%d" % number, 1, 10)) is Status.QUEUED
    waiters = [table.connect() for _ in range(MANY)]
    for number, waiter in enumerate(waiters):
        assert ask(table, waiter, Acquire(LOCK, b"%d" % number, 1, 9, 10)) is None
    # Nobody has heard of the first.
    assert ask(table, holder, Release(LOCK, b"0", tokens[0])) is Status.OK
    steps = [table.drain(1.0)]
    assert ask(table, holder, Acquire(LOCK, b"new", 1, 9, 10), 1.0) is Status.DRAINING
    steps += rest(table, 1.0)
    assert all(len(step) <= STEP for step in steps)
    sent = [effect for step in steps for effect in step]
    assert sent == [(waiter.id, Status.DRAINING) for waiter in waiters]
    assert not much.holds
    assert table.counts.waiting == 0
    assert len(table) == MANY - 1


def test_many_who_are_older_are_sent_away_in_small_steps_and_none_of_them_is_served() -> None:
    table = table_of()
    holder, peer = table.connect(), table.connect()
    reply = ask(table, holder, Acquire(LOCK, b"k", 1, 0, 10))
    assert isinstance(reply, Granted)
    waiters = [table.connect() for _ in range(MANY)]
    for number, waiter in enumerate(waiters):
        old = Acquire(LOCK, b"k", 1, 9, 10, owner=Owner(b"%d" % number, 0, 1))
        assert ask(table, waiter, old) is None
    assert isinstance(ask(table, peer, DrawAge(b"k")), Aged)
    newest = Acquire(LOCK, b"k", 1, 9, 10, owner=Owner(b"newest", 0, 2), label=b"newest")
    steps = [table.handle(peer, newest, 1.0)]
    released = table.handle(holder, Release(LOCK, b"k", reply.token), 1.0)
    assert released[0] == (holder.id, Status.OK)
    steps += [released[1:], *rest(table, 1.0)]
    assert all(len(step) <= STEP + 1 for step in steps)
    [granted] = [effect for step in steps for effect in step if effect[0] == peer.id]
    assert isinstance(granted[1], Granted)
    told = [effect for step in steps for effect in step if effect[0] != peer.id]
    assert told == [(waiter.id, Superseded(2, b"newest")) for waiter in waiters]
    assert table.counts.ousted == MANY


Ask = Callable[[bytes, bytes], Request]
LATE: dict[str, Ask] = {
    "renew": lambda key, token: Renew(LOCK, key, token, 10),
    "confirm": lambda key, token: Renew(LOCK, key, token, 10, How.CONFIRM),
    "release": lambda key, token: Release(LOCK, key, token),
    "detach": lambda key, token: Renew(LOCK, key, token, 10, How.DETACH),
}


@pytest.mark.parametrize("name", LATE)
def test_when_many_leases_end_at_once_none_is_revived(name: str) -> None:
    table = table_of()
    peer = table.connect()
    tokens = take_many(table, peer)
    assert table.advance(10.0) == []
    assert len(table) == MANY - STEP
    key = b"%d" % (MANY - 1)
    answer = Status.LEASE_EXPIRED if name in ("confirm", "detach") else Status.ERROR
    assert ask(table, peer, LATE[name](key, tokens[-1]), 10.0) is answer
    assert key not in table._partition.spaces[LOCK]
    assert all(len(step) <= STEP for step in rest(table, 10.0))
    assert len(table) == 0
    assert table.counts.expired == MANY


def test_when_many_leases_end_at_once_a_lock_is_free_to_who_asks() -> None:
    table = table_of()
    peer, other = table.connect(), table.connect()
    take_many(table, peer)
    table.advance(10.0)
    last = b"%d" % (MANY - 1)
    assert isinstance(ask(table, other, Acquire(LOCK, last, 1, 0, 10), 10.0), Granted)


def test_when_many_leases_end_at_once_no_wait_gets_a_dead_token() -> None:
    table = table_of()
    peer = table.connect()
    for number in range(MANY):
        ask(table, peer, Enqueue(LOCK, b"%d" % number, 1, 10))
    table.advance(10.0)
    assert ask(table, peer, Wait(LOCK, b"%d" % (MANY - 1), 5), 10.0) is Status.NOT_ENQUEUED


def reserve(table: LockTable, peer: Peer, limit: int, away: int, hold: int) -> bytes:
    ask(table, peer, Enqueue(LOCK, b"k", limit, 10))
    reply = ask(table, peer, Wait(LOCK, b"k", 0, reserve=Reserve(away, hold)))
    assert isinstance(reply, TimedOut)
    return reply.ticket


def test_many_who_are_away_are_passed_in_small_steps() -> None:
    table = table_of()
    holder, peer, waiter = table.connect(), table.connect(), table.connect()
    reply = ask(table, holder, Acquire(LOCK, b"k", 1, 0, 10))
    assert isinstance(reply, Granted)
    tickets = [reserve(table, peer, 1, away=60_000, hold=0) for _ in range(MANY)]
    assert ask(table, waiter, Acquire(LOCK, b"k", 1, 9, 10)) is None
    released = table.handle(holder, Release(LOCK, b"k", reply.token), 1.0)
    assert released == [(holder.id, Status.OK)]
    newcomer = table.connect()
    assert ask(table, newcomer, Acquire(LOCK, b"k", 1, 0, 10), 1.0) is Status.TIMEOUT
    granted = [number for step in rest(table, 1.0) for number, _ in step]
    assert granted == [waiter.id]
    # All that were passed are ahead of newcomers again, in the order in which they came at first.
    for ticket in random.Random(1).sample(tickets, MANY):
        request = Enqueue(LOCK, b"k", 1, 10, ticket=ticket)
        assert ask(table, table.connect(), request, 2.0) is Status.QUEUED
    queue = table._partition.spaces[LOCK][b"k"].waiters
    assert queue is not None
    assert [each.ticket for each in queue] == tickets
    assert queue.present == len(queue) == MANY


# Limits.


def test_one_connection_holds_so_many_locks() -> None:
    table = table_of(max_holds=2)
    peer = table.connect()
    tokens = [ask(table, peer, Acquire(LOCK, b"%d" % n, 1, 0, 10)) for n in range(2)]
    assert ask(table, peer, Acquire(LOCK, b"2", 1, 0, 10)) is Status.MAX_HOLDS
    assert ask(table, peer, Acquire(LOCK, b"0", 1, 9, 10)) is Status.MAX_HOLDS
    assert ask(table, peer, Enqueue(LOCK, b"2", 1, 10)) is Status.MAX_HOLDS
    assert len(table) == 2
    assert table.counts.full == 3
    other = table.connect()
    assert isinstance(ask(table, other, Acquire(LOCK, b"2", 1, 0, 10)), Granted)
    assert isinstance(tokens[0], Granted)
    assert ask(table, peer, Release(LOCK, b"0", tokens[0].token)) is Status.OK
    assert isinstance(ask(table, peer, Acquire(LOCK, b"3", 1, 0, 10)), Granted)


def test_what_comes_back_is_never_too_much() -> None:
    table = LockTable(Limits(max_holds=1), TokenIssuer(b"secret", 0), kept=True)
    holders = [table.connect() for _ in range(3)]
    granted = [
        ask(table, holder, Acquire(LOCK, b"%d" % n, 1, 0, 10)) for n, holder in enumerate(holders)
    ]
    kept = [hold.kept() for hold in table.changes or ()]
    table = LockTable(Limits(max_holds=1), TokenIssuer(b"secret", 3))
    table.restore(kept[:2], 1.0)
    table.recover(11.0)
    peer = table.connect()
    for number, reply in enumerate(granted):
        assert isinstance(reply, Granted)
        assert ask(table, peer, Renew(LOCK, b"%d" % number, reply.token, 10), 1.0) == Renewed(10)
    assert len(peer.holds) == 3


def test_a_report_stops_at_so_many_keys() -> None:
    table = LockTable(Limits(max_locks=1100), TokenIssuer(b"secret", 0))
    peer = table.connect()
    for number in range(1100):
        assert isinstance(ask(table, peer, Acquire(LOCK, b"%d" % number, 1, 0, 10)), Granted)
    reply = ask(table, peer, Stats())
    assert b'"omitted":100,' in reply.json  # type: ignore[union-attr]


def test_one_connection_enqueues_so_often() -> None:
    table = table_of(max_holds=2)
    holder, peer = table.connect(), table.connect()
    for number in range(2):
        ask(table, holder, Acquire(LOCK, b"%d" % number, 1, 0, 10))
        assert ask(table, peer, Enqueue(LOCK, b"%d" % number, 1, 10)) is Status.QUEUED
    assert ask(table, peer, Enqueue(LOCK, b"2", 1, 10)) is Status.MAX_HOLDS
    assert isinstance(ask(table, peer, Acquire(LOCK, b"2", 1, 0, 10)), Granted)


def test_one_key_has_so_many_holders() -> None:
    table = table_of(max_holds=2)
    for _ in range(2):
        assert isinstance(ask(table, table.connect(), Acquire(LOCK, b"k", 5, 0, 10)), Granted)
    peer = table.connect()
    assert ask(table, peer, Acquire(LOCK, b"k", 5, 9, 10)) is Status.MAX_HOLDS
    assert ask(table, peer, Enqueue(LOCK, b"k", 5, 10)) is Status.MAX_HOLDS


def test_who_comes_to_a_key_with_no_more_slots_than_one_may_hold_waits() -> None:
    table = table_of(max_holds=2)
    for _ in range(2):
        assert isinstance(ask(table, table.connect(), Acquire(LOCK, b"k", 2, 0, 10)), Granted)
    assert ask(table, table.connect(), Acquire(LOCK, b"k", 2, 9, 10)) is None
    back = (Enqueue(LOCK, b"k", 2, 10), Acquire(LOCK, b"k", 2, 9, 10))
    for again in back:
        peer = table.connect()
        assert ask(table, peer, Enqueue(LOCK, b"k", 2, 10)) is Status.QUEUED
        kept = ask(table, peer, Wait(LOCK, b"k", 0, reserve=Reserve(9000, 0)))
        assert isinstance(kept, TimedOut)
        by_ticket = again._replace(ticket=kept.ticket)
        assert ask(table, peer, by_ticket) in (None, Status.QUEUED)
