"""Single rules of the lock table, each with the history that once broke it."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from dflockd.table import Effect, HoldRecord, Limits, LockTable, Peer, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.table.reservations import RESERVED_LATE
from dflockd.wire import (
    Acquire,
    Detach,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    Inspect,
    Label,
    Recovering,
    Release,
    Renew,
    Renewed,
    Request,
    Reserve,
    Resume,
    Space,
    StableRef,
    Stats,
    Status,
    TimedOut,
    Wait,
    fence_from_token,
)

LOCK = Space.LOCK
SEMAPHORE = Space.SEMAPHORE


def table_of(**limits: int) -> LockTable:
    return LockTable(Limits(**limits), TokenIssuer(b"secret", 0))


def take(table: LockTable, peer: Peer, key: bytes, lease: int | None = None) -> bytes:
    ((_, reply),) = table.handle(peer, Acquire(LOCK, key, 1, 0, lease), 0.0)
    assert isinstance(reply, Granted)
    return reply.token


def answers(effects: list[Effect]) -> list[tuple[int, type]]:
    return [(peer, type(reply)) for peer, reply in effects]


def test_d4_release_at_the_instant_of_a_timeout_loses_no_grant() -> None:
    # D4: the grant was recorded, the waiter was told "timeout", and nobody held the lock.
    table = table_of()
    holder, waiter, other = table.connect(), table.connect(), table.connect()
    token = take(table, holder, b"k")
    assert table.handle(waiter, Acquire(LOCK, b"k", 1, 5, None), 0.0) == []
    effects = table.handle(holder, Release(LOCK, b"k", token), 5.0)
    assert effects == [(waiter.id, Status.TIMEOUT), (holder.id, Status.OK)]
    assert waiter.waiting is None
    assert not waiter.holds
    ((_, reply),) = table.handle(other, Acquire(LOCK, b"k", 1, 0, None), 5.0)
    assert isinstance(reply, Granted)


def test_d4_timeout_at_the_instant_of_a_release_loses_no_grant() -> None:
    table = table_of()
    holder, waiter = table.connect(), table.connect()
    token = take(table, holder, b"k")
    table.handle(waiter, Acquire(LOCK, b"k", 1, 5, None), 0.0)
    effects = table.handle(holder, Release(LOCK, b"k", token), 4.999)
    assert answers(effects) == [(holder.id, Status), (waiter.id, Granted)]
    assert table.advance(5.0) == []
    assert len(waiter.holds) == 1


@pytest.mark.parametrize("lease", [4, 5, 6])
def test_d4_expiry_near_a_timeout_leaves_one_owner_or_none(lease: int) -> None:
    table = table_of()
    holder, waiter = table.connect(), table.connect()
    take(table, holder, b"k", lease)
    table.handle(waiter, Acquire(LOCK, b"k", 1, 5, 30), 0.0)
    effects = [*table.advance(4.0), *table.advance(5.0), *table.advance(6.0)]
    ((peer, reply),) = effects
    assert peer == waiter.id
    assert isinstance(reply, Granted) == (len(waiter.holds) == 1) == (len(table) == 1)


def test_d5_what_falls_due_with_the_end_of_a_peer_is_not_for_that_peer() -> None:
    # A grant to a peer that is gone would, without auto-release, be lost for its whole lease.
    table = LockTable(Limits(auto_release=False), TokenIssuer(b"secret", 0))
    holder, dead, alive = table.connect(), table.connect(), table.connect()
    take(table, holder, b"k", 5)
    table.handle(dead, Acquire(LOCK, b"k", 1, 30, None), 0.0)
    table.handle(alive, Acquire(LOCK, b"k", 1, 30, None), 0.0)
    assert answers(table.disconnect(dead, 5.0, clean=False)) == [(alive.id, Granted)]


@pytest.mark.parametrize("timeout", [3, 5])
def test_d5_an_ended_peer_is_told_nothing(timeout: int) -> None:
    table = table_of()
    holder, dead = table.connect(), table.connect()
    take(table, holder, b"k", 5)
    table.handle(dead, Acquire(LOCK, b"k", 1, timeout, None), 0.0)
    assert table.disconnect(dead, 5.0, clean=True) == []
    assert len(table) == 0


def test_d6_work_does_not_grow_with_the_number_of_waiters() -> None:
    # D6: each timeout rebuilt the queue; 20,000 of them would be 200 million steps.
    table = table_of()
    take(table, table.connect(), b"k")
    for _ in range(20_000):
        table.handle(table.connect(), Acquire(LOCK, b"k", 1, 5, None), 0.0)
    begun = time.process_time()
    steps = []
    while (deadline := table.next_deadline()) is not None and deadline <= 5.0:
        steps.append(len(table.advance(5.0)))
    assert sum(steps) == 20_000
    assert max(steps) <= STEP
    assert time.process_time() - begun < 2


def test_stale_wait_never_gets_a_dead_token() -> None:
    # 0.5.0 answered a late `w` with the token of a lease that had ended.
    table = table_of()
    holder, late, third = table.connect(), table.connect(), table.connect()
    token = take(table, holder, b"k")
    assert table.handle(late, Enqueue(LOCK, b"k", 1, 2), 0.0) == [(late.id, Status.QUEUED)]
    assert table.handle(holder, Release(LOCK, b"k", token), 1.0) == [(holder.id, Status.OK)]
    assert table.advance(3.0) == []
    take(table, third, b"k")
    assert table.handle(late, Wait(LOCK, b"k", 10), 3.0) == [(late.id, Status.NOT_ENQUEUED)]
    # And the position is free again: no endless error_already_enqueued.
    assert table.handle(late, Enqueue(LOCK, b"k", 1, 2), 3.0) == [(late.id, Status.QUEUED)]


@pytest.mark.parametrize("end", ["release", "release by another", "expiry", "wait"])
def test_enqueue_works_again_after_every_end_of_a_position(end: str) -> None:
    table = table_of()
    peer, other = table.connect(), table.connect()
    ((_, reply),) = table.handle(peer, Enqueue(LOCK, b"k", 1, 5), 0.0)
    assert isinstance(reply, Enqueued)
    again = Enqueue(LOCK, b"k", 1, 5)
    assert table.handle(peer, again, 1.0) == [(peer.id, Status.ALREADY_ENQUEUED)]
    if end == "expiry":
        table.advance(5.0)
    else:
        request: Request = Release(LOCK, b"k", reply.token)
        if end == "wait":
            request = Wait(LOCK, b"k", 0)
        table.handle(other if "another" in end else peer, request, 1.0)
    ((_, reply2),) = table.handle(peer, again, 5.0)
    # A holder that enqueues again queues behind itself.
    assert isinstance(reply2, Enqueued) if end != "wait" else reply2 is Status.QUEUED


def test_wait_starts_the_lease_anew() -> None:
    table = table_of()
    peer = table.connect()
    ((_, reply),) = table.handle(peer, Enqueue(LOCK, b"k", 1, 5), 0.0)
    assert isinstance(reply, Enqueued)
    assert table.handle(peer, Wait(LOCK, b"k", 0), 4.0) == [(peer.id, Granted(reply.token, 5))]
    assert table.next_deadline() == 9.0


def test_renewal_sets_the_default_lease_and_takes_over() -> None:
    table = table_of(default_lease=7)
    first, second = table.connect(), table.connect()
    token = take(table, first, b"k", 30)
    renew = Renew(LOCK, b"k", token, None)
    assert table.handle(second, renew, 1.0) == [(second.id, Renewed(7))]
    assert table.next_deadline() == 8.0
    table.disconnect(first, 2.0, clean=True)
    assert len(table) == 1
    table.disconnect(second, 2.0, clean=True)
    assert len(table) == 0


def test_d19_two_tables_share_nothing() -> None:
    one, two = table_of(), table_of()
    take(one, one.connect(), b"k")
    take(two, two.connect(), b"k")
    assert len(one) == len(two) == 1


def test_d28_the_end_of_a_connection_frees_all_it_had() -> None:
    # D28: cleanup awaited a lock and could be cut short. Here it is one synchronous step.
    table = table_of()
    busy, next_ = table.connect(), table.connect()
    for number in range(100):
        take(table, busy, b"held%d" % number)
        table.handle(next_, Enqueue(LOCK, b"held%d" % number, 1, None), 0.0)
        take(table, next_, b"other%d" % number)
        table.handle(busy, Enqueue(LOCK, b"other%d" % number, 1, None), 0.0)
    assert table.disconnect(busy, 1.0, clean=False) == []
    assert len(next_.holds) == 200
    table.disconnect(next_, 1.0, clean=False)
    assert len(table) == 0
    assert table.next_deadline() is None


def test_fences_end_instead_of_starting_again() -> None:
    issuer = TokenIssuer(b"secret", 2**64 - 2)
    token = issuer.issue(LOCK, b"k")
    fence = issuer.fence
    assert fence == fence_from_token(token) == 2**64 - 1
    with pytest.raises(OverflowError):
        issuer.issue(LOCK, b"k")


def test_tokens_differ_by_secret_key_and_space() -> None:
    made = {
        TokenIssuer(secret, 0).issue(space, key)
        for secret in (b"a", b"b")
        for space in Space
        for key in (b"k", b"l")
    }
    assert len(made) == 8


@pytest.mark.parametrize("letter", ["k", "é", "\x01"])
def test_stats_of_many_keys_fit_into_what_clients_read(letter):
    table = LockTable(Limits(max_locks=10_000), TokenIssuer(b"secret", 1))
    peer = table.connect()
    for number in range(10_000):
        key = f"{number}:".ljust(250, letter).encode()[:250].decode("utf-8", "ignore").encode()
        table.handle(peer, Acquire(Space.LOCK, key, 1, 0, None), 0.0)

    [(_, reply)] = table.handle(peer, Stats(), 1.0)

    report = json.loads(reply.json)
    assert len(reply.json) < 1 << 20
    assert report["locks"][0]["key"].startswith("0:")
    assert len(report["locks"]) + report["omitted"] == 10_000


def inspected(table: LockTable, peer: Peer, key: bytes, now: float, space: Space = LOCK) -> dict:
    [(_, reply)] = table.handle(peer, Inspect(space, key), now)
    return json.loads(reply.json)


def test_inspect_names_holders_and_waiters_in_order():
    table = table_of()
    holder, first, second = (table.connect() for _ in range(3))
    for peer, name in ((holder, "holder é"), (first, "first"), (second, "second")):
        table.handle(peer, Label(name.encode()), 0.0)
    take(table, holder, b"k", lease=30)
    table.handle(first, Acquire(LOCK, b"k", 1, 60, None), 2.0)
    table.handle(second, Enqueue(LOCK, b"k", 1, None), 3.0)

    report = inspected(table, second, b"k", 5.0)

    [held] = report["holders"]
    assert (held["label"], held["held_s"], held["lease_expires_in_s"]) == ("holder é", 5.0, 25.0)
    assert repr(held["lease_s"]) == "30", "the same text, compiled or not"
    assert [(w["label"], w["waited_s"]) for w in report["waiters"]] == [
        ("first", 3.0),
        ("second", 2.0),
    ]
    assert (report["key"], report["limit"], report["omitted"]) == ("k", 1, 0)
    assert inspected(table, second, b"k", 5.0, Space.SEMAPHORE)["holders"] == []


def test_a_label_stays_with_a_detached_hold_until_somebody_else_takes_it_over():
    table = table_of()
    publisher, worker = table.connect(), table.connect()
    table.handle(publisher, StableRef(b"ref"), 0.0)
    table.handle(publisher, Label(b"publisher"), 0.0)
    token = take(table, publisher, b"k")
    table.handle(publisher, Label(b""), 0.0)
    table.disconnect(publisher, 1.0, clean=True)
    assert inspected(table, worker, b"k", 2.0)["holders"][0]["label"] == "publisher"

    table.handle(worker, Label(b"worker"), 2.0)
    table.handle(worker, Renew(LOCK, b"k", token, None), 2.0)

    assert inspected(table, worker, b"k", 3.0)["holders"][0]["label"] == "worker"


def test_evict_ends_a_hold_without_its_token_and_lets_the_next_in():
    table = table_of()
    holder, waiter, operator = (table.connect() for _ in range(3))
    token = take(table, holder, b"k")
    table.handle(waiter, Acquire(LOCK, b"k", 1, 60, None), 0.0)
    fence = fence_from_token(token)

    assert answers(table.handle(operator, Evict(LOCK, b"k", fence + 1), 1.0)) == [
        (operator.id, Status)
    ]
    [(_, done), (granted, _)] = table.handle(operator, Evict(LOCK, b"k", fence), 1.0)

    assert done is Status.OK
    assert granted == waiter.id
    [(_, lost)] = table.handle(holder, Renew(LOCK, b"k", token, None), 2.0)
    assert lost is Status.ERROR


# After a crash.


def recovering(
    seconds: float = 10.0, holds: tuple[HoldRecord, ...] = ()
) -> tuple[LockTable, Peer, Peer]:
    """Return a table that has forgotten holds, and two peers."""
    table = LockTable(Limits(), TokenIssuer(b"secret", 1000), kept=True)
    table.restore(holds, 0.0)
    table.recover(seconds)
    return table, table.connect(), table.connect()


def token_of(
    fence: int, key: bytes = b"k", space: Space = LOCK, secret: bytes = b"secret"
) -> bytes:
    return TokenIssuer(secret, 0).token(space, key, fence)


def reply_to(table: LockTable, peer: Peer, request: Request, now: float = 1.0) -> object:
    ((number, reply),) = table.handle(peer, request, now)
    assert number == peer.id
    return reply


@pytest.mark.parametrize("request_", [Acquire(LOCK, b"k", 1, 5, 3), Enqueue(LOCK, b"k", 1, 3)])
def test_nothing_is_granted_while_holders_are_waited_for(request_: Request) -> None:
    table, peer, _ = recovering(10.0)
    assert reply_to(table, peer, request_, 0.5) == Recovering(9500)
    assert reply_to(table, peer, request_, 9.9999) == Recovering(1)
    assert isinstance(reply_to(table, peer, request_, 10.0), Granted | Enqueued)


def test_a_renewal_brings_a_forgotten_hold_back() -> None:
    table, peer, other = recovering()
    table.handle(peer, Label(b"the holder"), 1.0)
    assert reply_to(table, peer, Renew(LOCK, b"k", token_of(7), 30)) == Renewed(30)
    assert inspected(table, other, b"k", 1.0)["holders"][0]["label"] == "the holder"
    assert reply_to(table, other, Acquire(LOCK, b"k", 1, 0, 3), 10.0) is Status.TIMEOUT
    assert reply_to(table, peer, Release(LOCK, b"k", token_of(7)), 11.0) is Status.OK
    granted = reply_to(table, other, Acquire(LOCK, b"k", 1, 0, 3), 11.0)
    assert isinstance(granted, Granted)
    assert fence_from_token(granted.token) > 1000


def test_only_real_tokens_bring_holds_back() -> None:
    table, peer, _ = recovering()
    real = token_of(7)
    for token in (
        token_of(7, secret=b"guess"),
        token_of(7, key=b"other"),
        token_of(7, space=SEMAPHORE),
        b"%016x" % 8 + real[16:],
        real[:-1],
        real.upper(),
        b"\xff" * 32,
    ):
        assert reply_to(table, peer, Renew(LOCK, b"k", token, 30)) is Status.ERROR
        assert reply_to(table, peer, Release(LOCK, b"k", token)) is Status.ERROR
    assert len(table) == 0


def test_nothing_is_brought_back_later() -> None:
    table, peer, _ = recovering(10.0)
    assert reply_to(table, peer, Renew(LOCK, b"k", token_of(7), 30), 10.0) is Status.ERROR
    assert reply_to(table, peer, Release(LOCK, b"k", token_of(7)), 10.0) is Status.ERROR


def test_of_two_holders_of_one_lock_the_later_one_is_right() -> None:
    table, early, late = recovering()
    assert reply_to(table, early, Renew(LOCK, b"k", token_of(7), 30)) == Renewed(30)
    assert reply_to(table, late, Renew(LOCK, b"k", token_of(8), 30)) == Renewed(30)
    assert reply_to(table, early, Renew(LOCK, b"k", token_of(7), 30)) is Status.ERROR
    assert [h["fence"] for h in inspected(table, late, b"k", 1.0)["holders"]] == [8]
    # And not even when that one has gone.
    assert reply_to(table, late, Release(LOCK, b"k", token_of(8))) is Status.OK
    assert reply_to(table, early, Renew(LOCK, b"k", token_of(7), 30)) is Status.ERROR


@pytest.mark.parametrize("end", ["release", "release unseen", "evict", "expiry"])
def test_what_has_ended_meanwhile_is_not_brought_back(end: str) -> None:
    table, holder, operator = recovering()
    renew = Renew(LOCK, b"k", token_of(7), 2)
    if end != "release unseen":
        assert reply_to(table, holder, renew) == Renewed(2)
    if end == "evict":
        assert reply_to(table, operator, Evict(LOCK, b"k", 7)) is Status.OK
    elif end == "expiry":
        table.advance(3.0)
    else:
        assert reply_to(table, operator, Release(LOCK, b"k", token_of(7))) is Status.OK
        assert reply_to(table, operator, Release(LOCK, b"k", token_of(7))) is Status.ERROR
    assert reply_to(table, holder, renew, 4.0) is Status.ERROR


def test_a_semaphore_takes_its_limit_from_who_asks_first() -> None:
    table, one, two = recovering()
    for peer, fence in ((one, 7), (two, 8)):
        renew = Renew(SEMAPHORE, b"k", token_of(fence, space=SEMAPHORE), 30)
        assert reply_to(table, peer, renew) == Renewed(30)
    stats = json.loads(reply_to(table, one, Stats()).json)  # type: ignore[attr-defined]
    assert stats["semaphores"] == [{"key": "k", "limit": 0, "holders": 2, "waiters": 0}]
    assert reply_to(table, one, Acquire(SEMAPHORE, b"k", 2, 0, 3), 10.0) is Status.TIMEOUT
    mismatch = reply_to(table, one, Acquire(SEMAPHORE, b"k", 3, 0, 3), 10.0)
    assert mismatch is Status.LIMIT_MISMATCH
    release = Release(SEMAPHORE, b"k", token_of(7, space=SEMAPHORE))
    assert reply_to(table, one, release, 11.0) is Status.OK
    assert isinstance(reply_to(table, one, Acquire(SEMAPHORE, b"k", 2, 0, 3), 11.0), Granted)


def test_a_semaphore_knows_its_limit_if_one_of_its_holds_does() -> None:
    def kept(fence: int, limit: int) -> HoldRecord:
        return HoldRecord(SEMAPHORE, b"k", limit, fence, 30.0, 30.0, 0.0, b"")

    table, peer, _ = recovering(0.0, (kept(7, 0), kept(8, 2), kept(9, 0)))
    mismatch = reply_to(table, peer, Acquire(SEMAPHORE, b"k", 3, 0, 3))
    assert mismatch is Status.LIMIT_MISMATCH


def test_a_slot_that_nobody_was_told_of_is_not_kept() -> None:
    # Its token would be known to nobody in the next process, and the key blocked for a lease.
    table = LockTable(Limits(), TokenIssuer(b"secret", 0), kept=True)
    assert table.changes is not None
    holder, queued = table.connect(), table.connect()
    token = take(table, holder, b"k")
    table.handle(queued, Enqueue(LOCK, b"k", 1, None), 0.0)
    table.changes.clear()
    table.handle(holder, Release(LOCK, b"k", token), 1.0)
    assert [hold.fence for hold in table.changes] == [fence_from_token(token)]
    granted = reply_to(table, queued, Wait(LOCK, b"k", 5))
    assert isinstance(granted, Granted)
    assert table.changes[-1].token == granted.token


def test_a_drain_that_keeps_lets_holds_outlive_their_connections() -> None:
    table = LockTable(Limits(), TokenIssuer(b"secret", 0), kept=True)
    assert table.changes is not None
    holder, waiter = table.connect(), table.connect()
    take(table, holder, b"k")
    table.handle(waiter, Acquire(LOCK, b"k", 1, 60, None), 0.0)
    assert table.drain(1.0, keep=True) == [(waiter.id, Status.DRAINING)]
    table.changes.clear()
    for peer in (holder, waiter):
        assert table.disconnect(peer, 1.0, clean=True) == []
    assert len(table) == 1
    assert table.changes == []


def test_a_detached_hold_is_nobodys_until_it_is_adopted():
    table = table_of(default_lease=10)
    sender, worker, other = (table.connect() for _ in range(3))
    token = take(table, sender, b"k", lease=10)
    assert table.handle(worker, Detach(LOCK, b"k", token, 60), 1.0) == [
        (worker.id, Status.LEASE_EXPIRED)
    ]
    assert table.handle(sender, Detach(LOCK, b"k", token, 60), 1.0) == [(sender.id, Renewed(60))]
    table.disconnect(sender, 1.0, clean=True)
    assert table.handle(other, Acquire(LOCK, b"k", 1, 0, None), 50.0) == [
        (other.id, Status.TIMEOUT)
    ]
    table.handle(worker, Renew(LOCK, b"k", token, 10), 50.0)
    assert table.handle(other, Detach(LOCK, b"k", token, 60), 51.0) == [
        (other.id, Status.LEASE_EXPIRED)
    ]
    table.disconnect(worker, 52.0, clean=True)
    take(table, other, b"k")


def test_a_connection_that_fell_silent_keeps_its_locks_for_their_leases():
    # Cut off, its holder runs on and believes in them: a partition is not a death.
    table = table_of()
    holder, other = table.connect(), table.connect()
    take(table, holder, b"k", lease=60)
    table.handle(other, Acquire(LOCK, b"k", 1, 100, None), 1.0)
    assert table.disconnect(holder, 30.0, clean=False, silent=True) == []
    assert table.advance(59.9) == []
    [(number, reply)] = table.advance(60.0)
    assert (number, type(reply)) == (other.id, Granted)


# Places that outlive a wait.


def go_away(
    table: LockTable, now: float = 0.0, *, away: int = 5000, hold: int = 2000, key: bytes = b"k"
) -> bytes:
    """Queue for a lock that is held, leave until `away` has passed; return the name of the position."""
    peer = table.connect()
    assert reply_to(table, peer, Enqueue(LOCK, key, 1, None), now) is Status.QUEUED
    assert reply_to(table, peer, Reserve(away, hold), now) is Status.OK
    kept = reply_to(table, peer, Wait(LOCK, key, 0), now)
    assert isinstance(kept, TimedOut)
    assert table.disconnect(peer, now, clean=True) == []
    return kept.ticket


def come_back(table: LockTable, ticket: bytes, now: float, key: bytes = b"k") -> object:
    return come_back_as(table, table.connect(), ticket, now, key)


def come_back_as(
    table: LockTable, peer: Peer, ticket: bytes, now: float, key: bytes = b"k"
) -> object:
    assert reply_to(table, peer, Resume(ticket), now) is Status.OK
    return reply_to(table, peer, Enqueue(LOCK, key, 1, None), now)


def queue_up(table: LockTable, now: float = 0.0, timeout: int = 100) -> Peer:
    peer = table.connect()
    assert table.handle(peer, Acquire(LOCK, b"k", 1, timeout, None), now) == []
    return peer


def held_table(**limits: int) -> tuple[LockTable, Peer, Request]:
    """Return a table with a lock that is held, its holder and the end of that."""
    table = table_of(**limits)
    holder = table.connect()
    return table, holder, Release(LOCK, b"k", take(table, holder, b"k", 1000))


def test_a_position_is_kept_when_the_wait_for_it_ends_later_too() -> None:
    table, _, _ = held_table()
    peer = table.connect()
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 0.0)
    reply_to(table, peer, Reserve(5000, 2000), 0.0)
    assert table.handle(peer, Wait(LOCK, b"k", 3), 0.0) == []
    [(number, kept)] = table.advance(3.0)
    assert (number, type(kept)) == (peer.id, TimedOut)
    assert peer.waiting is None
    # Its connection has left the queue: it may join once more, and wait for that.
    assert reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 3.0) is Status.QUEUED
    assert [w["away"] for w in inspected(table, peer, b"k", 3.0)["waiters"]] == [True, False]


@pytest.mark.parametrize("refused", [True, False])
def test_keep_is_for_the_next_wait_only(refused: bool) -> None:
    table, _, _ = held_table()
    peer = table.connect()
    take(table, table.connect(), b"l")
    for key in (b"k", b"l"):
        reply_to(table, peer, Enqueue(LOCK, key, 1, None), 0.0)
    reply_to(table, peer, Reserve(5000, 2000), 0.0)
    first = reply_to(table, peer, Wait(LOCK, b"unknown" if refused else b"k", 0), 0.0)
    assert first is Status.NOT_ENQUEUED if refused else isinstance(first, TimedOut)
    assert reply_to(table, peer, Wait(LOCK, b"l", 0), 0.0) is Status.TIMEOUT


def test_keep_changes_nothing_about_a_wait_that_is_granted() -> None:
    table, holder, release = held_table()
    peer = table.connect()
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 0.0)
    reply_to(table, peer, Reserve(5000, 2000), 0.0)
    assert table.handle(peer, Wait(LOCK, b"k", 3), 0.0) == []
    assert answers(table.handle(holder, release, 1.0)) == [(holder.id, Status), (peer.id, Granted)]
    assert table.counts.kept == 0


def test_a_position_is_not_kept_when_its_connection_ends() -> None:
    table, holder, release = held_table()
    peer = table.connect()
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 0.0)
    reply_to(table, peer, Reserve(5000, 2000), 0.0)
    table.handle(peer, Wait(LOCK, b"k", 3), 0.0)
    table.disconnect(peer, 1.0, clean=True)
    reply_to(table, holder, release, 2.0)
    assert len(table) == 0


@pytest.mark.parametrize(("away", "hold"), [(3_600_001, 0), (0, 3_600_001)])
def test_nobody_is_expected_later_than_a_lease_can_last(away: int, hold: int) -> None:
    table, _, _ = held_table()
    assert reply_to(table, table.connect(), Reserve(away, hold), 0.0) is Status.ERROR
    assert reply_to(table, table.connect(), Reserve(3_600_000, 3_600_000), 0.0) is Status.OK


def test_a_slot_that_is_held_for_a_later_one_is_not_kept_from_who_came_before() -> None:
    table = table_of()
    peers = [table.connect() for _ in range(6)]
    tokens = []
    for peer in peers[:2]:
        ((_, reply),) = table.handle(peer, Acquire(SEMAPHORE, b"k", 2, 0, 30), 0.0)
        assert isinstance(reply, Granted)
        tokens.append(reply.token)
    tickets = []
    for peer, away in zip(peers[2:4], (9000, 500), strict=True):
        reply_to(table, peer, Enqueue(SEMAPHORE, b"k", 2, 30), 0.0)
        reply_to(table, peer, Reserve(away, 3000), 0.0)
        reply = reply_to(table, peer, Wait(SEMAPHORE, b"k", 0), 0.0)
        assert isinstance(reply, TimedOut)
        tickets.append(reply.ticket)
    # The first is passed, for the second a slot is held; then the first comes back after all.
    reply_to(table, peers[0], Release(SEMAPHORE, b"k", tokens[0]), 1.0)
    reply_to(table, peers[4], Resume(tickets[0]), 1.0)
    ((number, reply),) = table.handle(peers[4], Enqueue(SEMAPHORE, b"k", 2, 30), 1.0)
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
        reply_to(table, peer, Reserve(5000, 2000))
        gone = reply_to(table, peer, Wait(LOCK, b"k", 0))
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
    take_two = Acquire(SEMAPHORE, b"s", 2, 0, 100)
    tokens = []
    for _ in range(2):
        granted = reply_to(table, one, take_two, 0.0)
        assert isinstance(granted, Granted)
        tokens.append(granted.token)
    reply_to(table, two, Enqueue(SEMAPHORE, b"s", 2, None), 0.0)
    reply_to(table, two, Reserve(0, 5000), 0.0)
    kept = reply_to(table, two, Wait(SEMAPHORE, b"s", 0), 0.0)
    for token in tokens:
        reply_to(table, one, Release(SEMAPHORE, b"s", token), 1.0)
    assert isinstance(reply_to(table, one, take_two, 2.0), Granted)
    assert reply_to(table, one, take_two, 2.0) is Status.TIMEOUT
    assert isinstance(kept, TimedOut)
    reply_to(table, two, Resume(kept.ticket), 2.0)
    assert isinstance(reply_to(table, two, take_two, 2.0), Granted)


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
    reply_to(table, semaphore, Resume(ticket), 1.0)
    assert isinstance(reply_to(table, semaphore, Enqueue(SEMAPHORE, b"k", 1, None), 1.0), Enqueued)
    assert [w["away"] for w in inspected(table, semaphore, b"k", 1.0)["waiters"]] == [True]


@pytest.mark.parametrize("refused", [Acquire(LOCK, b"k", 1, 5, 9999), Enqueue(LOCK, b"k", 1, 9999)])
def test_resume_is_for_the_next_request_only_and_a_refusal_spoils_nothing(
    refused: Request,
) -> None:
    table, _, _ = held_table()
    ticket = go_away(table)
    behind, peer = queue_up(table), table.connect()
    reply_to(table, peer, Resume(ticket), 1.0)
    assert reply_to(table, peer, refused, 1.0) is Status.ERROR
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
    reply_to(table, peers[0], Resume(tickets[0]), 1.0)
    assert table.handle(peers[0], Acquire(LOCK, b"k", 1, timeout, None), 1.0) == []
    told = table.advance(1.0)
    assert told == ([] if timeout else [(peers[0].id, Status.TIMEOUT)])
    table.disconnect(peers[0], 1.0, clean=True)
    reply_to(table, holder, release, 2.0)
    reply_to(table, peers[1], Resume(tickets[1]), 2.0)
    granted = reply_to(table, peers[1], Acquire(LOCK, b"k", 1, timeout, None), 2.0)
    assert isinstance(granted, Granted)


def test_a_position_that_was_taken_up_can_be_kept_again_under_its_name() -> None:
    table, _, _ = held_table()
    ticket = go_away(table)
    peer = table.connect()
    assert come_back_as(table, peer, ticket, 5.0) is Status.QUEUED
    reply_to(table, peer, Reserve(1000, 1000), 5.0)
    assert reply_to(table, peer, Wait(LOCK, b"k", 0), 5.0) == TimedOut(ticket)
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
    assert not table._group.reserved
    assert table.next_deadline() is None
    assert (table.counts.waiting, table.counts.forgotten) == (0, 4)


def test_a_kept_position_shows_who_had_it() -> None:
    table, _, _ = held_table()
    peer = table.connect()
    table.handle(peer, Label(b"task 7"), 0.0)
    reply_to(table, peer, Enqueue(LOCK, b"k", 1, None), 1.0)
    reply_to(table, peer, Reserve(5000, 0), 1.0)
    reply_to(table, peer, Wait(LOCK, b"k", 0), 2.0)
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
