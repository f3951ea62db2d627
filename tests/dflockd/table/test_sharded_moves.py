"""What goes with a shard from server to server, and that nothing is left behind."""

from __future__ import annotations

import pytest

from dflockd.table import HoldRecord, Limits, Peer, ShardTable, Snapshot, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.table.sharded import LAPSED, RESUME_TIMEOUT
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    How,
    Moved,
    Recovering,
    Release,
    Renew,
    Renewed,
    Status,
    Wait,
    fence_from_token,
)
from tests.dflockd.table.sharded_support import (
    AWAY,
    FOR_LONG,
    LOCK,
    ask,
    assert_empty,
    forget_all,
    hand_over,
    resume,
    table_of,
    take,
    tickets_of,
    two_shards,
    wait_for,
)


def test_a_hold_goes_with_its_shard_and_its_lease_begins_anew() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder = old.connect()
    token = take(old, holder, b"a", lease=10)
    snapshot = old.freeze(0, 0)
    assert old.drop(0, AWAY) == ([], {holder.id})
    assert_empty(old)
    new.open(0, 2 << 40)
    new.load(0, snapshot, 100)
    peer = new.connect()
    assert ask(new, peer, Acquire(LOCK, b"a", 1, 0, 10), 109.9) is Status.TIMEOUT
    assert ask(new, peer, Renew(LOCK, b"a", token, 10), 109.9) == Renewed(10)
    assert ask(new, peer, Release(LOCK, b"a", token), 110) is Status.OK
    again = take(new, peer, b"a", now=110)
    assert fence_from_token(again) > max(fence_from_token(token), 2 << 40)
    forget_all(new)


def test_a_peer_with_something_else_here_is_kept() -> None:
    table = table_of()
    holder, waiter, placed = table.connect(), table.connect(), table.connect()
    take(table, holder, b"a")
    take(table, holder, b"1a")
    take(table, waiter, b"b")
    ask(table, waiter, Acquire(LOCK, b"1a", 1, 9, 10))
    take(table, placed, b"c")
    ask(table, placed, Enqueue(LOCK, b"1a", 1, 10))
    table.freeze(0, 0)
    assert table.drop(0, AWAY) == ([], set())
    assert len(holder.holds) == 1


def test_positions_keep_their_order_and_newcomers_stand_behind() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder = old.connect()
    token = take(old, holder, b"a", lease=10)
    waiters = [wait_for(old, b"a") for _ in range(3)]
    tickets = tickets_of(hand_over(old, new, 0))
    assert list(tickets) == [waiter.id for waiter in waiters]
    assert_empty(old)
    newcomer = wait_for(new, b"a")
    third, _ = resume(new, tickets[waiters[2].id], b"a", 0.1)
    first, _ = resume(new, tickets[waiters[0].id], b"a", 0.2)
    ((_, done), (number, granted)) = new.handle(newcomer_free(new), Release(LOCK, b"a", token), 0.3)
    assert done is Status.OK
    assert number == first.id
    # The second has not come yet: it is waited for, and then not any more.
    assert isinstance(granted, Granted)
    assert new.handle(newcomer_free(new), Release(LOCK, b"a", granted.token), 0.4)[1:] == []
    assert new.advance(RESUME_TIMEOUT - 0.1) == []
    ((number, granted),) = new.advance(RESUME_TIMEOUT)
    assert number == third.id
    assert isinstance(granted, Granted)
    effects = new.handle(newcomer_free(new), Release(LOCK, b"a", granted.token), 3)
    assert [number for number, _ in effects[1:]] == [newcomer.id]
    forget_all(new)


def newcomer_free(table: ShardTable) -> Peer:
    return table.connect()


def test_a_position_that_comes_when_it_is_its_turn_is_granted_at_once() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    token = take(old, old.connect(), b"a", lease=10)
    waiter = wait_for(old, b"a")
    tickets = tickets_of(hand_over(old, new, 0))
    new.handle(new.connect(), Release(LOCK, b"a", token), 0.1)
    behind = wait_for(new, b"a", now=0.1)
    peer, effects = resume(new, tickets[waiter.id], b"a", 0.2)
    assert [(number, type(reply)) for number, reply in effects] == [(peer.id, Granted)]
    assert behind.waiting is not None
    forget_all(new)


def test_a_position_is_taken_up_once_and_for_its_own_key_only() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    take(old, old.connect(), b"a", lease=10)
    waiter = wait_for(old, b"a")
    ticket = tickets_of(hand_over(old, new, 0))[waiter.id]
    stranger = new.connect()
    assert isinstance(ask(new, stranger, Acquire(LOCK, b"b", 1, 5, 10, ticket=ticket)), Granted)
    assert [name for group in new.each_partition() for name in group.reserved] == [ticket]
    first, _ = resume(new, ticket, b"a")
    second, _ = resume(new, ticket, b"a")
    entry = new.partitions[0].spaces[0][b"a"]
    assert [waiting.peer for waiting in entry.waiters or ()] == [first, second]
    assert not any(group.reserved for group in new.each_partition())
    forget_all(new)


def test_a_position_that_was_refused_for_now_is_still_there() -> None:
    old, new = table_of(), table_of(5, 1)
    take(old, old.connect(), b"a", lease=10)
    waiter = wait_for(old, b"a")
    ticket = tickets_of(hand_over(old, new, 0, 5))[waiter.id]
    peer, effects = resume(new, ticket, b"a", 5)
    assert effects == [(peer.id, LAPSED)]
    new.serve_until(20, 6)
    assert ask(new, peer, Acquire(LOCK, b"a", 1, 9, 10, ticket=ticket), 6) is None
    assert not any(group.reserved for group in new.each_partition())


def test_positions_that_nobody_had_come_for_move_on_under_their_names() -> None:
    first, second, third = table_of(), table_of(FOR_LONG, 1), table_of(FOR_LONG, 1)
    take(first, first.connect(), b"a", lease=10)
    waiters = [wait_for(first, b"a") for _ in range(2)]
    tickets = tickets_of(hand_over(first, second, 0))
    assert hand_over(second, third, 0) == []
    assert_empty(second)
    peers = [resume(third, tickets[waiter.id], b"a")[0] for waiter in reversed(waiters)]
    entry = third.partitions[0].spaces[0][b"a"]
    assert [waiting.peer for waiting in entry.waiters or ()] == peers[::-1]


def test_positions_by_enqueue_move_also_before_and_after_they_were_granted() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder, granted, queued = old.connect(), old.connect(), old.connect()
    token = take(old, holder, b"a")
    for peer in (granted, queued):
        assert ask(old, peer, Enqueue(LOCK, b"a", 1, 10)) is Status.QUEUED
    ask(old, holder, Release(LOCK, b"a", token))  # granted to the first, who does not know yet
    assert hand_over(old, new, 0) == []
    assert_empty(old)
    moved = [ask(old, peer, Wait(LOCK, b"a", 5)) for peer in (granted, queued)]
    tickets = [reply.ticket for reply in moved if isinstance(reply, Moved)]
    assert len(set(tickets)) == 2
    there = [new.connect(), new.connect()]
    replies = {}
    for peer, ticket in reversed(list(zip(there, tickets, strict=True))):
        replies[peer] = ask(new, peer, Enqueue(LOCK, b"a", 1, 10, ticket=ticket))
    assert replies[there[1]] is Status.QUEUED
    assert isinstance(replies[there[0]], Enqueued)
    assert isinstance(ask(new, there[0], Wait(LOCK, b"a", 5)), Granted)
    assert ask(new, there[1], Wait(LOCK, b"a", 5)) is None
    assert (granted.left, queued.left) == ({}, {})
    forget_all(new)
    forget_all(old)


def test_semaphore_grants_that_nobody_was_told_of_move_in_their_order() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder = old.connect()
    tokens = []
    for _ in range(2):
        reply = ask(old, holder, Acquire(LOCK, b"s", 2, 0, 10))
        assert isinstance(reply, Granted)
        tokens.append(reply.token)
    peers = [old.connect() for _ in range(3)]
    for peer in peers:
        assert ask(old, peer, Enqueue(LOCK, b"s", 2, 10)) is Status.QUEUED
    for token in tokens:
        ask(old, holder, Release(LOCK, b"s", token))
    snapshot = old.freeze(0, 0)
    assert snapshot.holds == []
    old.drop(0, AWAY)
    left = [peer.left[LOCK, b"s"].ticket for peer in peers]
    assert [record.ticket for record in snapshot.waiters] == left
    assert_empty(old)
    new.open(0, 2 << 40)
    new.load(0, snapshot, 0)
    newcomer = new.connect()
    assert ask(new, newcomer, Acquire(LOCK, b"s", 2, 5, 10)) is None
    assert [n for n, _ in new.advance(RESUME_TIMEOUT)] == [newcomer.id]
    forget_all(new)


def test_a_wait_keeps_its_position_while_nobody_has_the_shard() -> None:
    shards = two_shards(Recovering(100))
    table = ShardTable(Limits(), TokenIssuer(b"secret", 0), shards)
    table.serve_until(FOR_LONG, 0)
    table.open(0, 0)
    take(table, table.connect(), b"a")
    peer = table.connect()
    ask(table, peer, Enqueue(LOCK, b"a", 1, 10))
    table.freeze(0, 0)
    table.drop(0, AWAY)
    assert ask(table, peer, Wait(LOCK, b"a", 5)) == Recovering(100)
    shards.elsewhere = AWAY
    reply = ask(table, peer, Wait(LOCK, b"a", 5))
    assert isinstance(reply, Moved)
    assert reply.ticket


def test_a_wait_goes_on_when_its_shard_has_come_back() -> None:
    here, there = table_of(), table_of(FOR_LONG, 1)
    holder = here.connect()
    token = take(here, holder, b"a")
    peer = here.connect()
    ask(here, peer, Enqueue(LOCK, b"a", 1, 10))
    hand_over(here, there, 0)
    hand_over(there, here, 0)
    assert ask(here, peer, Wait(LOCK, b"a", 5)) is None
    ((_, done), (number, reply)) = here.handle(here.connect(), Release(LOCK, b"a", token), 1)
    assert (done, number, type(reply)) == (Status.OK, peer.id, Granted)
    forget_all(here)


def test_a_detached_hold_goes_for_as_long_as_it_is_left() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    peer = old.connect()
    token = take(old, peer, b"a")
    assert ask(old, peer, Renew(LOCK, b"a", token, 30, How.DETACH)) == Renewed(30)
    snapshot = old.freeze(0, 0)
    (hold,) = snapshot.holds
    assert hold.detached
    assert old.drop(0, AWAY) == ([], set())
    new.open(0, 2 << 40)
    new.load(0, Snapshot([hold._replace(lease=12.0)], []), 0)
    assert ask(new, new.connect(), Acquire(LOCK, b"a", 1, 0, 10), 11.9) is Status.TIMEOUT
    assert isinstance(ask(new, new.connect(), Acquire(LOCK, b"a", 1, 0, 10), 12.1), Granted)


def test_max_locks_counts_over_all_shards_and_what_comes_with_one_always_fits() -> None:
    table = table_of(max_locks=2)
    peer = table.connect()
    take(table, peer, b"a")
    take(table, peer, b"1a")
    assert ask(table, peer, Acquire(LOCK, b"1b", 1, 0, 10)) is Status.MAX_LOCKS
    table.freeze(1, 0)
    table.drop(1, AWAY)
    table.open(1, 2 << 40)
    holds = [HoldRecord(LOCK, b"1%d" % n, 1, n, 10, 10, 0, b"") for n in range(3)]
    table.load(1, Snapshot(holds, []), 0)
    assert len(table) == 4
    assert ask(table, peer, Acquire(LOCK, b"b", 1, 0, 10)) is Status.MAX_LOCKS
    forget_all(table)


@pytest.mark.parametrize("silent", [True, False])
def test_the_end_of_a_connection_in_a_frozen_shard_spoils_nothing(silent: bool) -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder = old.connect()
    token = take(old, holder, b"a")
    waiter = wait_for(old, b"a")
    snapshot = old.freeze(0, 0)
    assert old.disconnect(holder, 1, clean=not silent, silent=silent) == []
    assert old.disconnect(waiter, 1, clean=True) == []
    old.drop(0, AWAY)
    assert_empty(old)
    new.open(0, 2 << 40)
    new.load(0, snapshot, 1)
    assert ask(new, new.connect(), Renew(LOCK, b"a", token, 10), 2) == Renewed(10)
    forget_all(new)


def test_what_a_big_connection_had_that_has_just_ended_stays_behind() -> None:
    """It has been granted more than one step frees, and knows of none of it."""
    table = table_of(max_locks=2 * STEP)
    holder, peer = table.connect(), table.connect()
    for number in range(STEP + 1):
        key = b"k%d" % number
        token = take(table, holder, key)
        assert ask(table, peer, Enqueue(LOCK, key, 1, 10)) is Status.QUEUED
        assert ask(table, holder, Release(LOCK, key, token)) is Status.OK
    assert table.disconnect(peer, 0, clean=True) == []
    assert len(table), "what is left for the next step"
    snapshot = table.freeze(0, 0)
    assert (snapshot.holds, snapshot.waiters) == ([], [])
