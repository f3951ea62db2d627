"""Who was told of a turn at a server that hands its shard over."""

from __future__ import annotations

import pytest

from dflockd.table import Effect, Peer, ShardTable
from dflockd.table.reservations import RESERVED_LATE
from dflockd.table.sharded import FROZEN, LAPSED
from dflockd.wire import (
    Acquire,
    Enqueue,
    Granted,
    Moved,
    Owner,
    OwnerConflict,
    Pass,
    Release,
    Reply,
    Space,
    Status,
    Wait,
    YourTurn,
)
from tests.dflockd.table.sharded_support import (
    FOR_LONG,
    ask,
    assert_empty,
    forget_all,
    hand_over,
    queue_of,
    table_of,
    take,
    tickets_of,
    wait_for,
)

LOCK = Space.LOCK
HOLD = 4.0


def want(
    table: ShardTable, now: float = 0, ticket: bytes = b"", owner: Owner | None = None
) -> tuple[Peer, Reply | None]:
    peer = table.connect()
    request = Enqueue(*(LOCK, b"a", 1, 60), owner=owner, ticket=ticket, turn=int(HOLD * 1000))
    return peer, ask(table, peer, request, now)


def told(table: ShardTable, now: float = 0, owner: Owner | None = None) -> tuple[Peer, bytes]:
    peer, reply = want(table, now, owner=owner)
    assert isinstance(reply, YourTurn)
    return peer, reply.ticket


def take_up(table: ShardTable, ticket: bytes, now: float, timeout: int = 60) -> list[Effect]:
    peer = table.connect()
    return table.handle(peer, Acquire(LOCK, b"a", 1, timeout, 60, ticket=ticket), now)


@pytest.fixture
def tables() -> tuple[ShardTable, ShardTable]:
    return table_of(), table_of(FOR_LONG, 1)


def test_a_slot_is_set_aside_at_the_next_server_for_what_is_left(
    tables: tuple[ShardTable, ShardTable],
) -> None:
    old, new = tables
    peer, ticket = told(old)
    assert hand_over(old, new, 0, 1) == []
    assert_empty(old)
    assert queue_of(new) == [ticket]
    waiter = wait_for(new, b"a", now=1)
    assert new.advance(HOLD - 0.001) == []
    assert [number for number, _ in new.advance(HOLD)] == [waiter.id]
    reply = ask(old, peer, Wait(LOCK, b"a", 5), 5)
    assert isinstance(reply, Moved)
    assert reply.ticket == ticket
    forget_all(new)


def test_whoever_has_the_ticket_takes_it_up_there(tables: tuple[ShardTable, ShardTable]) -> None:
    old, new = tables
    _, ticket = told(old, owner=Owner(b"run", 2))
    hand_over(old, new, 0, 1)
    run = new.connect()
    request = Acquire(LOCK, b"a", 1, 9, 60, owner=Owner(b"run", 2))
    assert ask(new, run, request, 1) == OwnerConflict(b"waiting", 2)
    ((number, reply),) = new.handle(run, request._replace(ticket=ticket, timeout=0), 1)
    assert (number, type(reply)) == (run.id, Granted)
    forget_all(new)


@pytest.mark.parametrize("free", [False, True])
def test_who_passed_is_ahead_there_and_nobody_waits_for_them(
    tables: tuple[ShardTable, ShardTable], free: bool
) -> None:
    old, new = tables
    peer, ticket = told(old)
    ask(old, peer, Pass(b"a", ticket))
    token = b"" if free else take(old, old.connect(), b"a", lease=600)
    hand_over(old, new, 0, 1)
    if free:
        token = take(new, new.connect(), b"a", lease=600, now=1)
    later = wait_for(new, b"a", now=1)
    reply = ask(old, peer, Wait(LOCK, b"a", 5), 2)
    assert isinstance(reply, Moved)
    there, again = want(new, 2, reply.ticket)
    assert again is Status.QUEUED
    assert ask(new, there, Wait(LOCK, b"a", 60), 2) is None
    effects = new.handle(new.connect(), Release(LOCK, b"a", token), 3)
    assert effects[1:] == [(there.id, YourTurn(ticket))]
    assert [number for number, _ in new.advance(3 + HOLD)] == [later.id]
    forget_all(new)


def test_nobody_comes_for_it(tables: tuple[ShardTable, ShardTable]) -> None:
    old, new = tables
    _, ticket = told(old)
    hand_over(old, new, 0, 1)
    assert new.advance(HOLD + 1) == []
    assert new.partitions[0].reserved
    new.advance(1.1 + RESERVED_LATE)
    assert not new.partitions[0].reserved
    assert take_up(new, ticket, 80, timeout=0)[0][1].__class__ is Granted
    forget_all(new)


def test_who_waits_to_be_told_is_sent_on_and_told_there(
    tables: tuple[ShardTable, ShardTable],
) -> None:
    old, new = tables
    token = take(old, old.connect(), b"a", lease=600)
    peer, _ = want(old)
    assert ask(old, peer, Wait(LOCK, b"a", 60)) is None
    moved = tickets_of(hand_over(old, new, 0))
    there, _ = want(new, 0, moved[peer.id])
    assert ask(new, there, Wait(LOCK, b"a", 60)) is None
    effects = new.handle(new.connect(), Release(LOCK, b"a", token), 1)
    assert effects[1:] == [(there.id, YourTurn(moved[peer.id]))]
    forget_all(new)


@pytest.mark.parametrize("was_told", [False, True])
def test_who_waits_again_once_the_shard_has_come_back_is_told_still(
    tables: tuple[ShardTable, ShardTable], was_told: bool
) -> None:
    old, new = tables
    if not was_told:
        token = take(old, old.connect(), b"a", lease=600)
    peer, _ = want(old)
    hand_over(old, new, 0)
    snapshot = new.freeze(0, 1)
    new.drop(0, Moved(0, 3, b"old:1"))
    old.open(0, 3 << 40)
    old.load(0, snapshot, 1)
    if not was_told:
        assert ask(old, peer, Wait(LOCK, b"a", 60), 1.5) is None
        ((_, _), (number, reply)) = old.handle(old.connect(), Release(LOCK, b"a", token), 1.5)
        assert number == peer.id
    else:
        reply = ask(old, peer, Wait(LOCK, b"a", 60), 1.5)
    assert isinstance(reply, YourTurn)
    assert not peer.holds
    forget_all(old)


def test_while_frozen_nothing_changes_and_thawed_it_goes_on(
    tables: tuple[ShardTable, ShardTable],
) -> None:
    table, _ = tables
    peer, ticket = told(table)
    waiter, _ = want(table)
    assert ask(table, waiter, Wait(LOCK, b"a", 60)) is None
    table.freeze(0, 1)
    for request in (Wait(LOCK, b"a", 9), Pass(b"a", ticket)):
        assert ask(table, peer, request, 1) is FROZEN
    assert [reply for _, reply in take_up(table, ticket, 1)] == [FROZEN]
    assert table.advance(HOLD) == []
    ((number, reply),) = table.thaw(0, HOLD + 1)
    assert (number, type(reply)) == (waiter.id, YourTurn)
    # Its ticket is what it was, whether or not the shard was about to go.
    ask(table, waiter, Pass(b"a", reply.ticket), HOLD + 1)
    assert ask(table, peer, Wait(LOCK, b"a", 9), HOLD + 1) == YourTurn(ticket)
    forget_all(table)


def test_nobody_is_told_without_a_promise() -> None:
    table = table_of(5)
    token = take(table, table.connect(), b"a", lease=600)
    peer, _ = want(table)
    assert ask(table, peer, Wait(LOCK, b"a", 60)) is None
    released = table.handle(table.connect(), Release(LOCK, b"a", token), 6)
    assert [reply for _, reply in released] == [Status.OK]
    other, reply = want(table, 6)
    assert reply is LAPSED
    ((number, reply),) = table.serve_until(20, 7)
    assert (number, type(reply)) == (peer.id, YourTurn)
    assert not other.enqueued
    forget_all(table)


def test_the_end_of_the_connection_while_nobody_serves_leaves_nothing() -> None:
    table = table_of(5)
    peer, _ = told(table)
    waiter = wait_for(table, b"a")
    assert table.disconnect(peer, 6, clean=True) == []
    assert [number for number, _ in table.serve_until(20, 7)] == [waiter.id]
    forget_all(table)
