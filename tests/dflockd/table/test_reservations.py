"""Positions in a queue that outlive a wait, and slots that are held for those who are away."""

from __future__ import annotations

import itertools

import pytest

from dflockd.table.reservations import RESERVED_LATE
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    Release,
    Renew,
    Reserve,
    Status,
    TimedOut,
    Wait,
)
from tests.dflockd.table.reservations_support import (
    come_back,
    come_back_as,
    go_away,
    held_table,
    queue_up,
)
from tests.dflockd.table.rules_support import LOCK, answers, inspected, recovering, reply_to, take


def test_a_position_is_kept_when_the_wait_for_it_ends_later_too() -> None:
    table, _, _ = held_table()
    peer = table.connect()
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 0.0)
    assert table.handle(peer, Wait(LOCK, b"k", 3, reserve=Reserve(5000, 2000)), 0.0) == []
    [(number, kept)] = table.advance(3.0)
    assert (number, type(kept)) == (peer.id, TimedOut)
    assert peer.waiting is None
    # Its connection has left the queue: it may join once more, and wait for that.
    assert reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 3.0) is Status.QUEUED
    assert [w["away"] for w in inspected(table, peer, b"k", 3.0)["waiters"]] == [True, False]


@pytest.mark.parametrize(("away", "hold"), [(3_600_001, 0), (0, 3_600_001)])
def test_nobody_is_expected_later_than_a_lease_can_last(away: int, hold: int) -> None:
    table, _, _ = held_table()
    peer, longest = table.connect(), Reserve(3_600_000, 3_600_000)
    acquire, enqueue = Acquire(LOCK, b"k", 1, 0, None), Enqueue(LOCK, b"k", 1, None)
    for reserve, is_kept in ((Reserve(away, hold), False), (longest, True)):
        reply = reply_to(table, peer, acquire._replace(reserve=reserve))
        assert isinstance(reply, TimedOut) is is_kept
        reply_to(table, peer, enqueue)
        reply = reply_to(table, peer, Wait(LOCK, b"k", 0, reserve))
        assert isinstance(reply, TimedOut) is is_kept
    assert table.counts.kept == 2


def test_not_all_positions_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflockd.table.reservations.MAX_RESERVED", 1)
    table, _, _ = held_table()
    ticket = go_away(table)
    for number in range(2):
        peer = table.connect()
        reply_to(table, peer, Enqueue(LOCK, b"k", 1, None))
        gone = reply_to(table, peer, Wait(LOCK, b"k", 0, reserve=Reserve(5000, 2000)))
        assert isinstance(gone, TimedOut) if number else gone is Status.TIMEOUT
        assert come_back(table, ticket, 0.0) is Status.QUEUED


def test_a_slot_is_held_once_and_for_so_long() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=5000, hold=2000)
    behind, last = queue_up(table), queue_up(table)
    reply_to(table, holder, release, 4.0)
    assert table.advance(6.99) == []
    [(number, granted)] = table.advance(7.0)
    assert number == behind.id
    assert isinstance(granted, Granted)
    # When the next slot is free it is held for nobody.
    effects = table.handle(behind, Release(LOCK, b"k", granted.token), 8.0)
    assert answers(effects)[1:] == [(last.id, Granted)]
    assert come_back(table, ticket, 8.5) is Status.QUEUED


def test_a_newcomer_may_not_have_what_is_held() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=5000, hold=2000)
    reply_to(table, holder, release, 4.0)
    newcomer = table.connect()
    assert reply_to(table, newcomer, Acquire(LOCK, b"k", 1, 0, None), 4.5) is Status.TIMEOUT
    assert reply_to(table, newcomer, Enqueue(LOCK, b"k", 1, None), 4.5) is Status.QUEUED
    assert isinstance(come_back(table, ticket, 5.0), Enqueued)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_whoever_was_passed_is_still_ahead_of_all_that_came_later(order: tuple[int, ...]) -> None:
    table, holder, release = held_table()
    tickets = [go_away(table, away=5000, hold=1000) for _ in range(3)]
    behind, last = queue_up(table), queue_up(table)
    [_, (number, granted)] = table.handle(holder, release, 1.0)
    assert number == behind.id
    assert isinstance(granted, Granted)
    back = {ticket: table.connect() for ticket in tickets}
    for ticket in (tickets[number] for number in order):
        assert come_back_as(table, back[ticket], ticket, 2.0) is Status.QUEUED
    waiters = [waiter["conn_id"] for waiter in inspected(table, last, b"k", 2.0)["waiters"]]
    assert waiters == [*(back[ticket].id for ticket in tickets), last.id]


@pytest.mark.parametrize("passed", [True, False])
def test_a_position_is_forgotten_some_time_after_somebody_was_expected(passed: bool) -> None:
    table, holder, release = held_table()
    ticket, other = go_away(table, away=5000, hold=0), go_away(table, away=5000, hold=0)
    if passed:
        reply_to(table, holder, release, 1.0)
        take(table, holder, b"k", 1000)
    until = 5.0 + RESERVED_LATE
    back, newcomer = table.connect(), queue_up(table, until - 1)
    assert come_back_as(table, back, ticket, until - 0.1) is Status.QUEUED
    late = table.connect()
    assert come_back_as(table, late, other, until) is Status.QUEUED
    order = [waiter["conn_id"] for waiter in inspected(table, late, b"k", until)["waiters"]]
    assert order == [back.id, newcomer.id, late.id]
    assert (table.counts.kept, table.counts.forgotten) == (2, 1)


def test_a_slot_is_held_no_longer_than_the_position_is_known() -> None:
    table, holder, release = held_table()
    go_away(table, away=0, hold=1000 * int(RESERVED_LATE))
    behind = queue_up(table, timeout=1000)
    reply_to(table, holder, release, RESERVED_LATE - 1)
    assert answers(table.advance(RESERVED_LATE)) == [(behind.id, Granted)]
    assert table.counts.forgotten == 1


def test_nothing_is_left_of_positions_that_nobody_comes_back_to() -> None:
    table, holder, release = held_table()
    for hold in (0, 2000):
        for away in (3000, 5000):
            go_away(table, away=away, hold=hold)
    reply_to(table, holder, release, 4.0)
    table.disconnect(holder, 4.0, clean=True)
    for now in (4.9, 6.9):  # a slot is held for one after another
        table.advance(now)
        assert len(table) == 1
        table.advance(now + 0.1)
    assert len(table) == 0
    table.advance(5.0 + RESERVED_LATE)
    assert not table._partition.reserved
    assert table.next_deadline() is None
    assert (table.counts.waiting, table.counts.forgotten) == (0, 4)


def test_a_kept_position_shows_who_had_it() -> None:
    table, _, _ = held_table()
    peer = table.connect()
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None, label=b"task 7"), 1.0)
    reply_to(table, peer, Wait(LOCK, b"k", 0, reserve=Reserve(5000, 0)), 2.0)
    table.disconnect(peer, 2.0, clean=True)
    other = table.connect()
    [waiter] = inspected(table, other, b"k", 3.0)["waiters"]
    assert waiter == {
        "label": "task 7",
        "owner": "",
        "attempt": 0,
        "group": "",
        "conn_id": 0,
        "waited_s": 2.0,
        "away": True,
        "told": False,
    }


def test_the_name_of_a_position_is_no_token() -> None:
    # Who waits may not say after a crash that it was the holder.
    before, _, _ = held_table()
    ticket = go_away(before)
    table, peer, _ = recovering()
    assert reply_to(table, peer, Renew(LOCK, b"k", ticket, 30)) is Status.ERROR
    assert reply_to(table, peer, Release(LOCK, b"k", ticket)) is Status.ERROR
