"""Positions that nobody is at go with their shard."""

from __future__ import annotations

import pytest

from dflockd.cluster import snapshot as snapshots
from dflockd.table import Peer, ShardTable
from dflockd.table.reservations import RESERVED_LATE
from dflockd.table.sharded import FROZEN, LAPSED
from dflockd.wire import (
    Acquire,
    Aged,
    DrawAge,
    Enqueue,
    Enqueued,
    Granted,
    Listen,
    Moved,
    Owner,
    OwnerConflict,
    Recovering,
    Release,
    Reply,
    Reserve,
    Status,
    Superseded,
    TimedOut,
    Wait,
)
from tests.dflockd.table.sharded_support import (
    AWAY,
    FOR_LONG,
    LOCK,
    ask,
    assert_empty,
    forget_all,
    hand_over,
    queue_of,
    resume,
    table_of,
    take,
    tickets_of,
    wait_for,
)


def go_away(
    table: ShardTable, now: float = 0, *, away: int = 5000, hold: int = 2000, key: bytes = b"a"
) -> bytes:
    """Queue for a lock that is held, leave until `away` has passed; return the name of the position."""
    peer = table.connect()
    assert ask(table, peer, Enqueue(LOCK, key, 1, 10), now) is Status.QUEUED
    kept = ask(table, peer, Wait(LOCK, key, 0, reserve=Reserve(away, hold)), now)
    assert isinstance(kept, TimedOut)
    table.disconnect(peer, now, clean=True)
    return kept.ticket


def come_back(table: ShardTable, ticket: bytes, now: float = 0) -> tuple[Peer, Reply | None]:
    peer = table.connect()
    return peer, ask(table, peer, Enqueue(LOCK, b"a", 1, 10, ticket=ticket), now)


def test_a_kept_position_goes_with_its_shard_and_is_kept_as_long() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    token = take(old, old.connect(), b"a", lease=60)
    early, late = go_away(old, away=9000, hold=4000), go_away(old, away=9000, hold=0)
    hand_over(old, new, 0, 3)
    assert_empty(old)
    assert queue_of(new) == [early, late]
    new.handle(new.connect(), Release(LOCK, b"a", token), 6)
    # Held for the first since then, as it was not yet worth it at the old server.
    assert ask(new, new.connect(), Acquire(LOCK, b"a", 1, 0, 10), 12.9) is Status.TIMEOUT
    assert isinstance(ask(new, new.connect(), Acquire(LOCK, b"a", 1, 60, 60), 13), Granted)
    first, _ = come_back(new, late, 9 + RESERVED_LATE - 0.1)
    assert queue_of(new) == [first]
    gone, _ = come_back(new, early, 9 + RESERVED_LATE)
    assert queue_of(new) == [first, gone]
    assert new.counts.forgotten == 1
    forget_all(new)


def test_a_slot_is_held_at_the_next_server_too() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder = old.connect()
    token = take(old, holder, b"a")
    ticket = go_away(old, away=0, hold=4000)
    ask(old, holder, Release(LOCK, b"a", token), 1)
    hand_over(old, new, 0, 2)
    assert_empty(old)
    assert ask(new, new.connect(), Acquire(LOCK, b"a", 1, 0, 10), 3) is Status.TIMEOUT
    _, reply = come_back(new, ticket, 4)
    assert isinstance(reply, Enqueued)
    forget_all(new)


def test_a_slot_is_held_at_the_next_server_only_for_so_long() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    token = take(old, old.connect(), b"a")
    go_away(old, away=0, hold=4000)
    hand_over(old, new, 0, 1)
    waiter = wait_for(new, b"a", now=1)
    new.handle(new.connect(), Release(LOCK, b"a", token), 2)
    assert new.advance(3.9) == []
    assert [number for number, _ in new.advance(4)] == [waiter.id]
    forget_all(new)


@pytest.mark.parametrize("held", [True, False])
def test_who_was_passed_is_ahead_at_the_next_server_again(held: bool) -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder = old.connect()
    token = take(old, holder, b"a")
    tickets = [go_away(old, away=9000, hold=0) for _ in range(2)]
    if held:
        waiters = [wait_for(old, b"a"), wait_for(old, b"a")]
    ask(old, holder, Release(LOCK, b"a", token))
    moved = tickets_of(hand_over(old, new, 0))
    assert_empty(old)
    assert old.counts.waiting == 0
    if held:
        later, _ = resume(new, moved[waiters[1].id], b"a")
    else:
        # The key is nobody's. A newcomer may have it at once.
        assert len(new) == 0
        assert isinstance(ask(new, new.connect(), Acquire(LOCK, b"a", 1, 0, 60)), Granted)
        later = wait_for(new, b"a")
    second, _ = come_back(new, tickets[1])
    first, _ = come_back(new, tickets[0])
    assert queue_of(new) == [first, second, later]
    forget_all(new)


def test_positions_of_all_kinds_keep_their_order_over_two_moves() -> None:
    first, second, third = table_of(), table_of(FOR_LONG, 1), table_of(FOR_LONG, 1)
    take(first, first.connect(), b"a", lease=60)
    blocked = wait_for(first, b"a")
    away = go_away(first)
    placed = first.connect()
    ask(first, placed, Enqueue(LOCK, b"a", 1, 10))
    moved = tickets_of(hand_over(first, second, 0))
    reply = ask(first, placed, Wait(LOCK, b"a", 5))
    assert isinstance(reply, Moved)
    there, _ = resume(second, moved[blocked.id], b"a")
    names = tickets_of(hand_over(second, third, 0))
    peers = [come_back(third, ticket)[0] for ticket in (reply.ticket, away, names[there.id])]
    assert queue_of(third) == peers[::-1]
    forget_all(third)


def test_a_wait_that_ends_while_its_shard_is_frozen_keeps_the_name_that_goes_with_it() -> None:
    old = table_of()
    take(old, old.connect(), b"a", lease=60)
    peer = old.connect()
    ask(old, peer, Enqueue(LOCK, b"a", 1, 10))
    assert ask(old, peer, Wait(LOCK, b"a", 1, reserve=Reserve(5000, 2000))) is None
    snapshot = old.freeze(0, 0)
    [(_, kept)] = old.advance(1)
    assert isinstance(kept, TimedOut)
    assert [record.ticket for record in snapshot.waiters] == [kept.ticket]
    old.drop(0, AWAY)
    assert_empty(old)
    assert old.counts.waiting == 0


def test_thawed_it_holds_the_slot_that_it_could_not_hold_while_frozen() -> None:
    table = table_of()
    take(table, table.connect(), b"a", lease=5)
    ticket = go_away(table, away=5000, hold=4000)
    behind = wait_for(table, b"a")
    table.freeze(0, 0)
    assert table.advance(5) == []  # the lease has ended
    assert come_back(table, ticket, 6)[1] is FROZEN
    assert table.thaw(0, 7) == []
    assert table.advance(8.9) == []
    assert [number for number, _ in table.advance(9)] == [behind.id]
    forget_all(table)


def test_a_position_that_is_forgotten_while_frozen_leaves_nothing() -> None:
    table = table_of()
    take(table, table.connect(), b"a", lease=5)
    go_away(table, away=0, hold=4000)
    table.freeze(0, 0)
    table.advance(RESERVED_LATE)
    table.thaw(0, RESERVED_LATE + 1)
    assert_empty(table)


def test_a_keep_for_a_wait_that_is_refused_is_not_for_the_next_one() -> None:
    table = table_of(5)
    for key in (b"a", b"1a"):
        take(table, table.connect(), key, lease=60)
    peer = table.connect()
    for key in (b"a", b"1a"):
        ask(table, peer, Enqueue(LOCK, key, 1, 10))
    for request, refusal, now in (
        (Wait(LOCK, b"a", 0), FROZEN, 1),
        (Wait(LOCK, b"a0", 0), FROZEN, 1),
        (Wait(LOCK, b"a", 0), AWAY, 1),
        (Wait(LOCK, b"1a", 0), LAPSED, 6),
    ):
        if refusal is FROZEN:
            table.freeze(0, 0)
        elif refusal is AWAY:
            table.drop(0, AWAY)
        reply = ask(table, peer, request._replace(reserve=Reserve(5000, 2000)), now)
        assert reply is refusal or isinstance(reply, Moved)
        assert len(table.slots.reservations) == 0


def of_age(age: int, timeout: int = 60) -> Acquire:
    owner = Owner(b"run-%d" % age, 0, age)
    return Acquire(LOCK, b"a", 1, timeout, 10, owner=owner, label=b"task-%d" % age)


def granted(table: ShardTable, request: Acquire) -> bytes:
    reply = ask(table, table.connect(), request)
    assert isinstance(reply, Granted)
    return reply.token


def test_the_newest_of_a_key_moves_with_its_shard() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    first = granted(old, of_age(1, 0))
    ear = old.connect()
    assert ask(old, ear, Listen(b"a", first)) is None
    release = Release(LOCK, b"a", first)
    assert old.handle(old.connect(), of_age(2), 0) == [(ear.id, Superseded(2, b"task-2"))]
    assert ask(old, ear, Listen(b"a", first)) == Superseded(2, b"task-2")
    snapshot = snapshots.load(snapshots.dump(old.freeze(0, 0), 7, 0), 7, 0)
    assert ask(old, ear, Listen(b"a", first)) is FROZEN
    old.drop(0, AWAY)
    assert len(old.newest) == 0
    new.open(0, 2 << 40)
    new.load(0, snapshot, 0)
    assert ask(new, new.connect(), Listen(b"a", first)) == Superseded(2, b"task-2")
    assert ask(new, new.connect(), of_age(1)) == OwnerConflict(b"held", 0)
    assert ask(new, new.connect(), release) is Status.OK
    refused = ask(new, new.connect(), of_age(1))
    assert refused == Superseded(2, b"task-2")
    reply = ask(new, new.connect(), DrawAge(b"a"))
    assert isinstance(reply, Aged)
    assert reply.age > 2 << 40


def test_who_waits_with_an_age_is_superseded_at_the_next_server() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    take(old, old.connect(), b"a")
    assert ask(old, old.connect(), of_age(1)) is None
    hand_over(old, new, 0)
    assert ask(new, new.connect(), of_age(2)) is None
    assert not any(group.reserved for group in new.each_partition())


def test_who_listens_is_sent_after_the_lock() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    token = granted(old, of_age(1, 0))
    ear = old.connect()
    assert ask(old, ear, Listen(b"a", token)) is None
    effects = hand_over(old, new, 0)
    assert effects == [(ear.id, AWAY)]
    assert ear.waiting is None
    assert ask(new, new.connect(), Listen(b"a", token)) is None


def test_who_listens_hears_where_nobody_has_the_lock_yet() -> None:
    table = table_of()
    token = granted(table, of_age(1, 0))
    ear = table.connect()
    assert ask(table, ear, Listen(b"a", token)) is None
    table.freeze(0, 0)
    effects, _ = table.drop(0, Recovering(500))
    assert effects == [(ear.id, Recovering(500))]
