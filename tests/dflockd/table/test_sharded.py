"""A table whose shards come and go: what goes with them, and that nothing is left behind."""

from __future__ import annotations

import pytest

from dflockd.cluster import snapshot as snapshots
from dflockd.table import Effect, HoldRecord, Limits, Peer, ShardTable, Snapshot, TokenIssuer
from dflockd.table.reservations import RESERVED_LATE
from dflockd.table.sharded import FROZEN, LAPSED, RESUME_TIMEOUT
from dflockd.table.states import QUEUED, TRANSITIONS, WAITING
from dflockd.wire import (
    Acquire,
    Aged,
    Detach,
    DrawAge,
    Enqueue,
    Enqueued,
    Granted,
    Listen,
    MapReport,
    Moved,
    Owner,
    OwnerConflict,
    Recovering,
    Refusal,
    Release,
    Renew,
    Renewed,
    Reply,
    Report,
    Request,
    Reserve,
    Resume,
    Shards,
    Space,
    Status,
    Superseded,
    TimedOut,
    Wait,
    fence_from_token,
)

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE
AWAY = Moved(1, 7, b"other:1")
FOR_LONG = 1e9


class Two:
    """Keys that begin with ``1`` are in shard 1, all others in shard 0."""

    def shard_of(self, key: bytes) -> int:
        return int(key.startswith(b"1"))

    def refer(self, shard: int) -> Refusal:
        return AWAY

    def report(self, now: float) -> MapReport:
        return MapReport(b"%d" % now, Report(b"{}"), Report(b'{"zlib":""}'))


def table_of(serving_lease: float = FOR_LONG, *shards: int, **limits: int) -> ShardTable:
    table = ShardTable(Limits(**limits), TokenIssuer(b"secret", 0), Two())
    table.serve_until(serving_lease, 0)
    for shard in shards or (0, 1):
        table.open(shard, 1 << 40)
    return table


def ask(table: ShardTable, peer: Peer, request: Request, now: float = 0) -> Reply | None:
    replies = [reply for number, reply in table.handle(peer, request, now) if number == peer.id]
    return replies[-1] if replies else None


def take(table: ShardTable, peer: Peer, key: bytes, lease: int = 10, now: float = 0) -> bytes:
    reply = ask(table, peer, Acquire(LOCK, key, 1, 0, lease), now)
    assert isinstance(reply, Granted)
    return reply.token


def wait_for(table: ShardTable, key: bytes, *, timeout: int = 60, now: float = 0) -> Peer:
    peer = table.connect()
    assert ask(table, peer, Acquire(LOCK, key, 1, timeout, 10), now) is None
    return peer


def hand_over(old: ShardTable, new: ShardTable, shard: int, now: float = 0) -> list[Effect]:
    snapshot = old.freeze(shard, now)
    effects, _ = old.drop(shard, AWAY)
    new.open(shard, 2 << 40)
    new.load(shard, snapshot, now)
    return effects


def tickets_of(effects: list[Effect]) -> dict[int, bytes]:
    found = {}
    for number, reply in effects:
        assert isinstance(reply, Moved)
        found[number] = reply.ticket
    return found


def resume(
    table: ShardTable, ticket: bytes, key: bytes, now: float = 0
) -> tuple[Peer, list[Effect]]:
    peer = table.connect()
    assert ask(table, peer, Resume(ticket), now) is Status.OK
    return peer, table.handle(peer, Acquire(LOCK, key, 1, 60, 10), now)


def assert_empty(table: ShardTable) -> None:
    assert len(table) == 0
    assert not table._withheld
    assert not any(group.reserved for group in table.each_group())
    assert len(table.deadlines) == 0
    assert all(not any(group.spaces) for group in table.groups.values())
    for peer in table._peers.values():
        assert (peer.holds, peer.enqueued, peer.waiting) == ({}, {}, None)


def forget_all(table: ShardTable) -> None:
    for peer in list(table._peers.values()):
        table.disconnect(peer, 1e6, clean=True)
    table.advance(2e6)
    assert not table._peers
    assert_empty(table)


# Shards that are here, or not.


def test_the_map_is_sent_to_who_has_not_got_it() -> None:
    table = table_of()
    peer = table.connect()
    whole, packed = Report(b"{}"), Report(b'{"zlib":""}')
    assert ask(table, peer, Shards(), 5) == whole
    assert ask(table, peer, Shards(b"4"), 5) == whole
    assert ask(table, peer, Shards(b"4", packed=True), 5) == packed
    assert ask(table, peer, Shards(b"5", packed=True), 5) is Status.OK
    assert ask(table, peer, Shards(b"5"), 6) == whole


def test_a_shard_that_is_not_here_is_referred_to_its_server() -> None:
    table = table_of(FOR_LONG, 0)
    peer = table.connect()
    for request in (
        Acquire(LOCK, b"1", 1, 0, None),
        Enqueue(LOCK, b"1", 1, None),
        Renew(LOCK, b"1", b"0" * 32, None),
        Release(LOCK, b"1", b"0" * 32),
        Detach(LOCK, b"1", b"0" * 32, None),
        Wait(LOCK, b"1", 0),
    ):
        assert ask(table, peer, request) == AWAY
    assert_empty(table)


def test_nothing_is_granted_or_renewed_without_a_promise_and_everything_due_with_the_next() -> None:
    table = table_of(5)
    holder = table.connect()
    token = take(table, holder, b"a", lease=20)
    waiter, other = wait_for(table, b"a"), table.connect()
    assert ask(table, holder, Renew(LOCK, b"a", token, 20), 5) is LAPSED
    assert ask(table, other, Acquire(LOCK, b"b", 1, 9, 10), 5) is LAPSED
    assert ask(table, other, Enqueue(LOCK, b"b", 1, 10), 5) is LAPSED
    assert table.handle(holder, Release(LOCK, b"a", token), 6) == [(holder.id, Status.OK)]
    # A serving lease that has passed already when it is heard of is none.
    assert table.serve_until(6.5, 7) == []
    ((number, reply),) = table.serve_until(12, 8)
    assert number == waiter.id
    assert isinstance(reply, Granted)
    assert table.serve_until(13, 9) == []
    forget_all(table)


def test_a_grant_by_enqueue_is_taken_up_only_within_a_promise() -> None:
    table = table_of(5)
    peer = table.connect()
    assert isinstance(ask(table, peer, Enqueue(LOCK, b"a", 1, 10)), Enqueued)
    assert ask(table, peer, Wait(LOCK, b"a", 5), 6) is LAPSED
    table.serve_until(20, 7)
    assert isinstance(ask(table, peer, Wait(LOCK, b"a", 5), 8), Granted)


def test_withheld_grants_are_forgotten_with_those_who_waited() -> None:
    table = table_of(5)
    holder = table.connect()
    token = take(table, holder, b"a", lease=20)
    waiter = wait_for(table, b"a", timeout=3)
    ask(table, holder, Release(LOCK, b"a", token), 2.9)
    assert ask(table, waiter, Release(LOCK, b"a", token), 2.95) is Status.ERROR  # its grant is out
    table = table_of(1)
    token = take(table, holder := table.connect(), b"a", lease=20)
    waiter = wait_for(table, b"a", timeout=3)
    ask(table, holder, Release(LOCK, b"a", token), 2)
    assert table._withheld
    assert table.advance(3) == [(waiter.id, Status.TIMEOUT)]
    assert_empty(table)
    assert table.serve_until(10, 4) == []


def test_who_waits_is_sent_away_and_a_position_by_enqueue_stays() -> None:
    table = table_of(5)
    token = take(table, table.connect(), b"a", lease=60)
    waiter, placed = wait_for(table, b"a"), table.connect()
    assert ask(table, placed, Enqueue(LOCK, b"a", 1, 10)) is Status.QUEUED
    assert ask(table, placed, Wait(LOCK, b"a", 60), 1) is None
    assert placed.waiting is not None
    assert placed.waiting.state == WAITING
    assert QUEUED in TRANSITIONS[WAITING]
    assert table.send_away() == [(waiter.id, LAPSED), (placed.id, LAPSED)]
    assert placed.enqueued[LOCK, b"a"].state == QUEUED
    assert ask(table, placed, Wait(LOCK, b"a", 60), 6) is LAPSED
    table.serve_until(20, 7)
    assert ask(table, placed, Wait(LOCK, b"a", 60), 8) is None
    effects = table.handle(table.connect(), Release(LOCK, b"a", token), 9)
    assert [number for number, _ in effects[1:]] == [placed.id]
    forget_all(table)


def test_while_frozen_nothing_changes_and_thawed_it_goes_on() -> None:
    table = table_of()
    holder = table.connect()
    token = take(table, holder, b"a", lease=10)
    waiter = wait_for(table, b"a")
    table.freeze(0, 0)
    for request in (
        Renew(LOCK, b"a", token, 10),
        Release(LOCK, b"a", token),
        Acquire(LOCK, b"b", 1, 0, 10),
    ):
        assert ask(table, holder, request, 1) is FROZEN
    assert isinstance(ask(table, holder, Acquire(LOCK, b"1", 1, 0, 10), 1), Granted)
    assert table.advance(11) == []  # the lease has ended, and the grant waits
    ((number, reply),) = table.thaw(0, 12)
    assert (number, type(reply)) == (waiter.id, Granted)


def test_a_shard_opens_when_its_former_server_must_have_stopped_and_grants_after_the_grace() -> (
    None
):
    old, new = table_of(), table_of(FOR_LONG, 1)
    token = take(old, old.connect(), b"a")
    new.open(0, 2 << 40, opens_at=3.0, recovers_until=12.0)
    peer = new.connect()
    assert ask(new, peer, Renew(LOCK, b"a", token, 10), 2) == Recovering(1000)
    assert ask(new, peer, Acquire(LOCK, b"b", 1, 0, 10), 2) == Recovering(1000)
    assert ask(new, peer, Renew(LOCK, b"a", token, 20), 3) == Renewed(20)
    assert ask(new, peer, Acquire(LOCK, b"b", 1, 0, 10), 11) == Recovering(1000)
    assert isinstance(ask(new, peer, Acquire(LOCK, b"b", 1, 0, 10), 12), Granted)
    assert ask(new, new.connect(), Acquire(LOCK, b"a", 1, 0, 10), 13) is Status.TIMEOUT
    forget_all(new)


def test_of_two_that_come_back_the_later_grant_counts() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    peer = old.connect()
    first = take(old, peer, b"a")
    ask(old, peer, Release(LOCK, b"a", first))
    second = take(old, peer, b"a")
    new.open(0, 2 << 40, opens_at=0.0, recovers_until=12.0)
    one, other = new.connect(), new.connect()
    assert ask(new, one, Renew(LOCK, b"a", first, 10)) == Renewed(10)
    assert ask(new, other, Renew(LOCK, b"a", second, 10)) == Renewed(10)
    assert ask(new, one, Renew(LOCK, b"a", first, 10)) is Status.ERROR
    assert not one.holds


def test_leases_are_longer_than_they_are_said_to_be() -> None:
    table = ShardTable(Limits(), TokenIssuer(b"secret", 0), Two(), stretch=1.5)
    table.serve_until(FOR_LONG, 0)
    table.open(0, 0)
    holder = table.connect()
    token = take(table, holder, b"a", lease=10)
    assert table.next_deadline() == 15
    assert ask(table, holder, Renew(LOCK, b"a", token, 4), 1) == Renewed(4)
    assert table.next_deadline() == 7


# What goes with a shard.


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
    ask(new, stranger, Resume(ticket))
    assert isinstance(ask(new, stranger, Acquire(LOCK, b"b", 1, 5, 10)), Granted)
    assert [name for group in new.each_group() for name in group.reserved] == [ticket]
    first, _ = resume(new, ticket, b"a")
    second, _ = resume(new, ticket, b"a")
    entry = new.groups[0].spaces[0][b"a"]
    assert [waiting.peer for waiting in entry.waiters or ()] == [first, second]
    assert not any(group.reserved for group in new.each_group())
    forget_all(new)


def test_a_position_that_was_refused_for_now_is_still_there() -> None:
    old, new = table_of(), table_of(5, 1)
    take(old, old.connect(), b"a", lease=10)
    waiter = wait_for(old, b"a")
    ticket = tickets_of(hand_over(old, new, 0, 5))[waiter.id]
    peer, effects = resume(new, ticket, b"a", 5)
    assert effects == [(peer.id, LAPSED)]
    new.serve_until(20, 6)
    ask(new, peer, Resume(ticket), 6)
    assert ask(new, peer, Acquire(LOCK, b"a", 1, 9, 10), 6) is None
    assert not any(group.reserved for group in new.each_group())


def test_positions_that_nobody_had_come_for_move_on_under_their_names() -> None:
    first, second, third = table_of(), table_of(FOR_LONG, 1), table_of(FOR_LONG, 1)
    take(first, first.connect(), b"a", lease=10)
    waiters = [wait_for(first, b"a") for _ in range(2)]
    tickets = tickets_of(hand_over(first, second, 0))
    assert hand_over(second, third, 0) == []
    assert_empty(second)
    peers = [resume(third, tickets[waiter.id], b"a")[0] for waiter in reversed(waiters)]
    entry = third.groups[0].spaces[0][b"a"]
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
        ask(new, peer, Resume(ticket))
        replies[peer] = ask(new, peer, Enqueue(LOCK, b"a", 1, 10))
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
        reply = ask(old, holder, Acquire(SEMAPHORE, b"s", 2, 0, 10))
        assert isinstance(reply, Granted)
        tokens.append(reply.token)
    peers = [old.connect() for _ in range(3)]
    for peer in peers:
        assert ask(old, peer, Enqueue(SEMAPHORE, b"s", 2, 10)) is Status.QUEUED
    for token in tokens:
        ask(old, holder, Release(SEMAPHORE, b"s", token))
    snapshot = old.freeze(0, 0)
    assert snapshot.holds == []
    old.drop(0, AWAY)
    left = [peer.left[SEMAPHORE, b"s"].ticket for peer in peers]
    assert [record.ticket for record in snapshot.waiters] == left
    assert_empty(old)
    new.open(0, 2 << 40)
    new.load(0, snapshot, 0)
    newcomer = new.connect()
    assert ask(new, newcomer, Acquire(SEMAPHORE, b"s", 2, 5, 10)) is None
    assert [n for n, _ in new.advance(RESUME_TIMEOUT)] == [newcomer.id]
    forget_all(new)


def test_a_wait_keeps_its_position_while_nobody_has_the_shard() -> None:
    class Nobody(Two):
        def refer(self, shard: int) -> Refusal:
            return Recovering(100)

    table = ShardTable(Limits(), TokenIssuer(b"secret", 0), Nobody())
    table.serve_until(FOR_LONG, 0)
    table.open(0, 0)
    take(table, table.connect(), b"a")
    peer = table.connect()
    ask(table, peer, Enqueue(LOCK, b"a", 1, 10))
    table.freeze(0, 0)
    table.drop(0, AWAY)
    assert ask(table, peer, Wait(LOCK, b"a", 5)) == Recovering(100)
    table._directory = Two()
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
    assert ask(old, peer, Detach(LOCK, b"a", token, 30)) == Renewed(30)
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


# Places that nobody is at.


def go_away(
    table: ShardTable, now: float = 0, *, away: int = 5000, hold: int = 2000, key: bytes = b"a"
) -> bytes:
    """Queue for a lock that is held, leave until `away` has passed; return the name of the position."""
    peer = table.connect()
    assert ask(table, peer, Enqueue(LOCK, key, 1, 10), now) is Status.QUEUED
    assert ask(table, peer, Reserve(away, hold), now) is Status.OK
    kept = ask(table, peer, Wait(LOCK, key, 0), now)
    assert isinstance(kept, TimedOut)
    table.disconnect(peer, now, clean=True)
    return kept.ticket


def come_back(table: ShardTable, ticket: bytes, now: float = 0) -> tuple[Peer, Reply | None]:
    peer = table.connect()
    assert ask(table, peer, Resume(ticket), now) is Status.OK
    return peer, ask(table, peer, Enqueue(LOCK, b"a", 1, 10), now)


def queue_of(table: ShardTable) -> list[bytes | Peer]:
    """Who is in the queue: the names of positions that nobody is at, and peers."""
    waiters = table.groups[0].spaces[LOCK][b"a"].waiters or ()
    return [waiter.ticket if waiter.reservation else waiter.peer for waiter in waiters]


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
    ask(old, peer, Reserve(5000, 2000))
    assert ask(old, peer, Wait(LOCK, b"a", 1)) is None
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
        ask(table, peer, Reserve(5000, 2000), now)
        reply = ask(table, peer, request, now)
        assert reply is refusal or isinstance(reply, Moved)
        assert peer.reserve is None


def with_age(table: ShardTable, age: int) -> Peer:
    peer = table.connect()
    owner = Owner(b"run-%d" % age, 0, b"here", b"task-%d" % age, age)
    assert ask(table, peer, owner) is Status.OK
    return peer


def test_the_newest_of_a_key_moves_with_its_shard() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    first = take(old, with_age(old, 1), b"a")
    ear = old.connect()
    assert ask(old, ear, Listen(b"a", first)) is None
    release = Release(LOCK, b"a", first)
    assert old.handle(with_age(old, 2), Acquire(LOCK, b"a", 1, 60, 10), 0) == [
        (ear.id, Superseded(2, b"task-2"))
    ]
    assert ask(old, ear, Listen(b"a", first)) == Superseded(2, b"task-2")
    snapshot = snapshots.load(snapshots.dump(old.freeze(0, 0), 7, 0), 7, 0)
    assert ask(old, ear, Listen(b"a", first)) is FROZEN
    old.drop(0, AWAY)
    assert len(old.newest) == 0
    new.open(0, 2 << 40)
    new.load(0, snapshot, 0)
    assert ask(new, new.connect(), Listen(b"a", first)) == Superseded(2, b"task-2")
    assert ask(new, with_age(new, 1), Acquire(LOCK, b"a", 1, 60, 10)) == OwnerConflict(b"held", 0)
    assert ask(new, new.connect(), release) is Status.OK
    refused = ask(new, with_age(new, 1), Acquire(LOCK, b"a", 1, 60, 10))
    assert refused == Superseded(2, b"task-2")
    reply = ask(new, new.connect(), DrawAge(b"a"))
    assert isinstance(reply, Aged)
    assert reply.age > 2 << 40


def test_who_waits_with_an_age_is_superseded_at_the_next_server() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    take(old, old.connect(), b"a")
    older = with_age(old, 1)
    assert ask(old, older, Acquire(LOCK, b"a", 1, 60, 10)) is None
    hand_over(old, new, 0)
    newer = with_age(new, 2)
    assert ask(new, newer, Acquire(LOCK, b"a", 1, 60, 10)) is None
    assert not any(group.reserved for group in new.each_group())


def test_who_listens_is_sent_after_the_lock() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    token = take(old, with_age(old, 1), b"a")
    ear = old.connect()
    assert ask(old, ear, Listen(b"a", token)) is None
    effects = hand_over(old, new, 0)
    assert effects == [(ear.id, AWAY)]
    assert ear.waiting is None
    assert ask(new, new.connect(), Listen(b"a", token)) is None
