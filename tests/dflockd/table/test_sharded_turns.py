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
    Next,
    Owner,
    OwnerConflict,
    Pass,
    Queued,
    Release,
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
from tests.dflockd.table.turns_support import process

LOCK = Space.LOCK
HOLD = 4.0


def want(
    table: ShardTable, now: float = 0, ticket: bytes = b"", owner: Owner | None = None
) -> tuple[Peer, bytes]:
    """Somebody who waits to be told, blocked, and the ticket."""
    peer = process(table, b"here")
    request = Enqueue(*(LOCK, b"a", 1, 60), owner=owner, ticket=ticket, turn=int(HOLD * 1000))
    reply = ask(table, peer, request, now)
    assert isinstance(reply, Queued)
    assert ask(table, peer, Wait(LOCK, b"a", 60), now) is None
    return peer, reply.ticket


def asking(table: ShardTable, now: float = 0) -> Peer:
    """Where the process asks whose turn it is, and hears of nobody's yet."""
    peer = process(table, b"here")
    assert ask(table, peer, Next(), now) is None
    return peer


def told(table: ShardTable, now: float = 0, owner: Owner | None = None) -> tuple[Peer, bytes]:
    peer, ticket = want(table, now, owner=owner)
    assert ask(table, process(table, b"here"), Next(), now) == YourTurn(ticket)
    return peer, ticket


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
    assert tickets_of(hand_over(old, new, 0, 1)) == {peer.id: ticket}
    assert_empty(old)
    assert queue_of(new) == [ticket]
    waiter = wait_for(new, b"a", now=1)
    assert new.advance(HOLD - 0.001) == []
    assert [number for number, _ in new.advance(HOLD)] == [waiter.id]
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


def test_who_waits_for_its_turn_is_ahead_there_of_who_comes_later(
    tables: tuple[ShardTable, ShardTable],
) -> None:
    old, new = tables
    _, ticket = want(old)
    token = take(old, old.connect(), b"a", lease=600)
    hand_over(old, new, 0, 1)
    later = wait_for(new, b"a", now=1.2)
    _, again = want(new, 1.5, ticket)
    there = asking(new, 1.5)
    effects = new.handle(new.connect(), Release(LOCK, b"a", token), 3)
    assert effects[1:] == [(there.id, YourTurn(again))]
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
    peer, ticket = want(old)
    here = asking(old)
    assert tickets_of(hand_over(old, new, 0)) == {peer.id: ticket}
    assert here.waiting is not None, "it is about all keys"
    _, again = want(new, 0, ticket)
    there = asking(new)
    effects = new.handle(new.connect(), Release(LOCK, b"a", token), 1)
    assert effects[1:] == [(there.id, YourTurn(again))]
    forget_all(new)
    forget_all(old)


def test_who_waits_again_once_the_shard_has_come_back_is_told_still(
    tables: tuple[ShardTable, ShardTable],
) -> None:
    old, new = tables
    token = take(old, old.connect(), b"a", lease=600)
    peer = process(old, b"here")
    queued = ask(old, peer, Enqueue(LOCK, b"a", 1, 60, turn=int(HOLD * 1000)))
    hand_over(old, new, 0)
    snapshot = new.freeze(0, 1)
    new.drop(0, Moved(0, 3, b"old:1"))
    old.open(0, 3 << 40)
    old.load(0, snapshot, 1)
    assert ask(old, peer, Wait(LOCK, b"a", 60), 1.5) is None
    there = asking(old, 1.5)
    effects = old.handle(old.connect(), Release(LOCK, b"a", token), 1.5)
    assert isinstance(queued, Queued)
    assert effects[1:] == [(there.id, YourTurn(queued.ticket))]
    assert not peer.holds
    forget_all(old)


def test_while_frozen_nothing_changes_and_thawed_it_goes_on(
    tables: tuple[ShardTable, ShardTable],
) -> None:
    table, _ = tables
    peer, ticket = told(table)
    _, second = want(table)
    there = asking(table)
    table.freeze(0, 1)
    assert ask(table, table.connect(), Pass(b"a", ticket), 1) is FROZEN
    assert [reply for _, reply in take_up(table, ticket, 1)] == [FROZEN]
    assert table.advance(HOLD) == []
    # Its tickets are what they were, whether or not the shard was about to go.
    assert table.thaw(0, HOLD + 1) == [(there.id, YourTurn(second))]
    assert ask(table, table.connect(), Pass(b"a", ticket), HOLD + 1) is Status.OK
    assert peer.waiting is not None
    forget_all(table)


def test_nobody_is_told_without_a_promise() -> None:
    table = table_of(5)
    token = take(table, table.connect(), b"a", lease=600)
    _, ticket = want(table)
    there = asking(table)
    released = table.handle(table.connect(), Release(LOCK, b"a", token), 6)
    assert [reply for _, reply in released] == [Status.OK]
    late = Enqueue(LOCK, b"a", 1, 60, turn=1000)
    assert ask(table, process(table), late, 6) is LAPSED
    assert table.serve_until(20, 7) == [(there.id, YourTurn(ticket))]
    forget_all(table)


def test_who_is_sent_away_for_lack_of_a_promise_keeps_its_position() -> None:
    table = table_of(5)
    token = take(table, table.connect(), b"a", lease=600)
    peer, ticket = want(table)
    there = asking(table)
    assert table.send_away(6) == [(peer.id, LAPSED), (there.id, LAPSED)]
    table.serve_until(20, 7)
    table.handle(table.connect(), Release(LOCK, b"a", token), 7)
    assert ask(table, process(table, b"here"), Next(), 7) == YourTurn(ticket)
    forget_all(table)


def test_the_end_of_the_connection_while_nobody_serves_leaves_nothing() -> None:
    table = table_of(5)
    peer, _ = told(table)
    waiter = wait_for(table, b"a")
    assert table.disconnect(peer, 6, clean=True) == []
    assert [number for number, _ in table.serve_until(20, 7)] == [waiter.id]
    forget_all(table)
