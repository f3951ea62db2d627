"""Positions in a queue that outlive a wait, and slots that are held for those who are away."""

from __future__ import annotations

import itertools

import pytest

from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    Release,
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
from tests.dflockd.table.rules_support import (
    LOCK,
    answers,
    inspected,
    reply_to,
    table_of,
)


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


def test_keep_changes_nothing_about_a_wait_that_is_granted() -> None:
    table, holder, release = held_table()
    peer = table.connect()
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 0.0)
    assert table.handle(peer, Wait(LOCK, b"k", 3, reserve=Reserve(5000, 2000)), 0.0) == []
    assert answers(table.handle(holder, release, 1.0)) == [(holder.id, Status), (peer.id, Granted)]
    assert table.counts.kept == 0


def test_a_position_is_not_kept_when_its_connection_ends() -> None:
    table, holder, release = held_table()
    peer = table.connect()
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 0.0)
    table.handle(peer, Wait(LOCK, b"k", 3, reserve=Reserve(5000, 2000)), 0.0)
    table.disconnect(peer, 1.0, clean=True)
    reply_to(table, holder, release, 2.0)
    assert len(table) == 0


@pytest.mark.parametrize(("away", "hold"), [(3_600_001, 0), (0, 3_600_001)])
def test_nobody_is_expected_later_than_a_lease_can_last(away: int, hold: int) -> None:
    table, _, _ = held_table()
    peer, longest = table.connect(), Reserve(3_600_000, 3_600_000)
    for _ in range(2):  # whether it waits already or not
        too_long = Acquire(LOCK, b"k", 1, 0, None, reserve=Reserve(away, hold))
        assert reply_to(table, peer, too_long) is Status.ERROR
        assert isinstance(reply_to(table, peer, too_long._replace(reserve=longest)), TimedOut)
        reply_to(table, peer, Enqueue(LOCK, b"k", 1, None))
        assert reply_to(table, peer, Wait(LOCK, b"k", 0, Reserve(away, hold))) is Status.ERROR
        assert isinstance(reply_to(table, peer, Wait(LOCK, b"k", 0, longest)), TimedOut)


def test_a_slot_that_is_held_for_a_later_one_is_not_kept_from_who_came_before() -> None:
    table = table_of()
    peers = [table.connect() for _ in range(6)]
    tokens = []
    for peer in peers[:2]:
        ((_, reply),) = table.handle(peer, Acquire(LOCK, b"k", 2, 0, 30), 0.0)
        assert isinstance(reply, Granted)
        tokens.append(reply.token)
    tickets = []
    for peer, away in zip(peers[2:4], (9000, 500), strict=True):
        reply_to(table, peer, Enqueue(LOCK, b"k", 2, 30), 0.0)
        reply = reply_to(table, peer, Wait(LOCK, b"k", 0, reserve=Reserve(away, 3000)), 0.0)
        assert isinstance(reply, TimedOut)
        tickets.append(reply.ticket)
    # The first is passed, for the second a slot is held; then the first comes back after all.
    reply_to(table, peers[0], Release(LOCK, b"k", tokens[0]), 1.0)
    ((number, reply),) = table.handle(peers[4], Enqueue(LOCK, b"k", 2, 30, ticket=tickets[0]), 1.0)
    assert (number, type(reply)) == (peers[4].id, Enqueued)


def test_whoever_comes_back_in_time_finds_a_slot() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=5000, hold=2000)
    behind = queue_up(table)
    # 1.5 s before it is due, which is less than the 2 s for which a slot is held.
    assert table.handle(holder, release, 3.5) == [(holder.id, Status.OK)]
    assert table.advance(5.4) == []
    assert isinstance(come_back(table, ticket, 5.4), Enqueued)
    assert behind.waiting is not None


def test_who_is_overdue_has_a_slot_held_as_well() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=1000, hold=2000)
    behind = queue_up(table)
    assert table.handle(holder, release, 2.0) == [(holder.id, Status.OK)]
    assert isinstance(come_back(table, ticket, 2.9), Enqueued)
    assert behind.waiting is not None


def test_a_slot_is_not_held_for_who_is_overdue_by_more_than_that() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=1000, hold=2000)
    behind = queue_up(table)
    effects = table.handle(holder, release, 3.0)
    assert answers(effects) == [(holder.id, Status), (behind.id, Granted)]
    assert come_back(table, ticket, 4.0) is Status.QUEUED


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


@pytest.mark.parametrize(("away", "hold"), [(5000, 2000), (0, 0), (5000, 5000)])
def test_a_slot_is_not_held_for_who_would_come_too_late(away: int, hold: int) -> None:
    table, holder, release = held_table()
    go_away(table, away=away, hold=hold)
    behind = queue_up(table)
    effects = table.handle(holder, release, 0.0)
    assert answers(effects) == [(holder.id, Status), (behind.id, Granted)]


def test_a_newcomer_may_have_what_is_not_held() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=5000, hold=2000)
    reply_to(table, holder, release, 0.0)
    newcomer = table.connect()
    granted = reply_to(table, newcomer, Acquire(LOCK, b"k", 1, 0, None), 1.0)
    assert isinstance(granted, Granted)
    assert come_back(table, ticket, 5.0) is Status.QUEUED


def test_a_newcomer_may_not_have_what_is_held() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=5000, hold=2000)
    reply_to(table, holder, release, 4.0)
    newcomer = table.connect()
    assert reply_to(table, newcomer, Acquire(LOCK, b"k", 1, 0, None), 4.5) is Status.TIMEOUT
    assert reply_to(table, newcomer, Enqueue(LOCK, b"k", 1, None), 4.5) is Status.QUEUED
    assert isinstance(come_back(table, ticket, 5.0), Enqueued)


def test_of_two_slots_one_is_held_and_the_other_is_free() -> None:
    table = table_of()
    one, two = table.connect(), table.connect()
    take_two = Acquire(LOCK, b"s", 2, 0, 100)
    tokens = []
    for _ in range(2):
        granted = reply_to(table, one, take_two, 0.0)
        assert isinstance(granted, Granted)
        tokens.append(granted.token)
    reply_to(table, two, Enqueue(LOCK, b"s", 2, None), 0.0)
    kept = reply_to(table, two, Wait(LOCK, b"s", 0, reserve=Reserve(0, 5000)), 0.0)
    for token in tokens:
        reply_to(table, one, Release(LOCK, b"s", token), 1.0)
    assert isinstance(reply_to(table, one, take_two, 2.0), Granted)
    assert reply_to(table, one, take_two, 2.0) is Status.TIMEOUT
    assert isinstance(kept, TimedOut)
    back = take_two._replace(ticket=kept.ticket)
    assert isinstance(reply_to(table, two, back, 2.0), Granted)


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
