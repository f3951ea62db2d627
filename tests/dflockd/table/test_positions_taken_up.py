"""Positions that somebody comes back to, in time or not."""

from __future__ import annotations

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
from tests.dflockd.table.rules_support import (
    LOCK,
    SEMAPHORE,
    answers,
    inspected,
    recovering,
    reply_to,
    take,
)


def test_a_position_is_found_again_after_the_key_was_nobodys() -> None:
    table, holder, release = held_table()
    ticket = go_away(table, away=5000, hold=1000)
    reply_to(table, holder, release, 1.0)
    assert len(table) == 0
    other = table.connect()
    granted = reply_to(table, other, Acquire(LOCK, b"k", 1, 0, None), 2.0)
    assert isinstance(granted, Granted)
    late = queue_up(table, 3.0)
    back = table.connect()
    assert come_back_as(table, back, ticket, 4.0) is Status.QUEUED
    assert table.handle(back, Wait(LOCK, b"k", 10), 4.0) == []
    effects = table.handle(other, Release(LOCK, b"k", granted.token), 5.0)
    assert answers(effects)[1:] == [(back.id, Granted)]
    assert late.waiting is not None


def test_a_position_is_taken_up_once() -> None:
    table, _, _ = held_table()
    ticket = go_away(table)
    behind = queue_up(table)
    first, second = table.connect(), table.connect()
    for peer in (first, second):
        assert come_back_as(table, peer, ticket, 1.0) is Status.QUEUED
    order = [waiter["conn_id"] for waiter in inspected(table, first, b"k", 1.0)["waiters"]]
    assert order == [first.id, behind.id, second.id]


def test_a_position_is_for_its_key_alone() -> None:
    table, _, _ = held_table()
    ticket = go_away(table)
    take(table, table.connect(), b"l")
    for key in (b"l", b"free"):
        came = come_back(table, ticket, 1.0, key)
        assert came is Status.QUEUED if key == b"l" else isinstance(came, Enqueued)
    semaphore = table.connect()
    assert isinstance(
        reply_to(table, semaphore, Enqueue(SEMAPHORE, b"k", 1, None, ticket=ticket), 1.0), Enqueued
    )
    assert [w["away"] for w in inspected(table, semaphore, b"k", 1.0)["waiters"]] == [True]


@pytest.mark.parametrize("refused", [Acquire(LOCK, b"k", 1, 5, 9999), Enqueue(LOCK, b"k", 1, 9999)])
def test_a_refusal_of_who_shows_a_ticket_spoils_nothing(refused: Acquire | Enqueue) -> None:
    table, _, _ = held_table()
    ticket = go_away(table)
    behind, peer = queue_up(table), table.connect()
    assert reply_to(table, peer, refused._replace(ticket=ticket), 1.0) is Status.ERROR
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 1.0)
    back = table.connect()
    come_back_as(table, back, ticket, 1.0)
    order = [waiter["conn_id"] for waiter in inspected(table, peer, b"k", 1.0)["waiters"]]
    assert order == [back.id, behind.id, peer.id]


def test_a_full_queue_takes_back_whoever_was_in_it() -> None:
    table, _, _ = held_table(max_waiters=2)
    tickets = [go_away(table, away=5000, hold=0) for _ in range(3)]  # they do not fill it
    for _ in range(2):
        queue_up(table)
    newcomer = table.connect()
    assert reply_to(table, newcomer, Enqueue(LOCK, b"k", 1, None)) is Status.MAX_WAITERS
    assert [come_back(table, ticket, 2.0) for ticket in tickets] == [Status.QUEUED] * 3


@pytest.mark.parametrize("timeout", [0, 10])
def test_a_position_is_taken_up_by_an_acquire_as_well(timeout: int) -> None:
    table, holder, release = held_table()
    tickets = [go_away(table, away=1000, hold=2000) for _ in range(2)]
    queue_up(table)
    peers = [table.connect(), table.connect()]
    assert (
        table.handle(peers[0], Acquire(LOCK, b"k", 1, timeout, None, ticket=tickets[0]), 1.0) == []
    )
    told = table.advance(1.0)
    assert told == ([] if timeout else [(peers[0].id, Status.TIMEOUT)])
    table.disconnect(peers[0], 1.0, clean=True)
    reply_to(table, holder, release, 2.0)
    granted = reply_to(
        table, peers[1], Acquire(LOCK, b"k", 1, timeout, None, ticket=tickets[1]), 2.0
    )
    assert isinstance(granted, Granted)


def test_a_position_that_was_taken_up_can_be_kept_again_under_its_name() -> None:
    table, _, _ = held_table()
    ticket = go_away(table)
    peer = table.connect()
    assert come_back_as(table, peer, ticket, 5.0) is Status.QUEUED
    assert reply_to(table, peer, Wait(LOCK, b"k", 0, reserve=Reserve(1000, 1000)), 5.0) == TimedOut(
        ticket
    )
    assert come_back(table, ticket, 6.0) is Status.QUEUED


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
