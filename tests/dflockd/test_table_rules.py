"""Single rules of the lock table, each with the history that once broke it."""

from __future__ import annotations

import json
import time

import pytest

from dflockd.table import Effect, Kept, Limits, LockTable, Mint, Peer
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
    Space,
    StableRef,
    Stats,
    Status,
    Wait,
    fence_from_token,
)

LOCK = Space.LOCK
SEMAPHORE = Space.SEMAPHORE


def table_of(**limits: int) -> LockTable:
    return LockTable(Limits(**limits), Mint(b"secret", 0))


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
    table = LockTable(Limits(auto_release=False), Mint(b"secret", 0))
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
    assert len(table.advance(5.0)) == 20_000
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
    # And the place is free again: no endless error_already_enqueued.
    assert table.handle(late, Enqueue(LOCK, b"k", 1, 2), 3.0) == [(late.id, Status.QUEUED)]


@pytest.mark.parametrize("end", ["release", "release by another", "expiry", "wait"])
def test_enqueue_works_again_after_every_end_of_a_place(end: str) -> None:
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
    mint = Mint(b"secret", 2**64 - 2)
    fence, token = mint.mint(LOCK, b"k")
    assert fence == fence_from_token(token) == 2**64 - 1
    with pytest.raises(OverflowError):
        mint.mint(LOCK, b"k")


def test_tokens_differ_by_secret_key_and_space() -> None:
    made = {
        Mint(secret, 0).mint(space, key)[1]
        for secret in (b"a", b"b")
        for space in Space
        for key in (b"k", b"l")
    }
    assert len(made) == 8


@pytest.mark.parametrize("letter", ["k", "é", "\x01"])
def test_stats_of_many_keys_fit_into_what_clients_read(letter):
    table = LockTable(Limits(max_locks=10_000), Mint(b"secret", 1))
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


def recovering(seconds: float = 10.0, holds: tuple[Kept, ...] = ()) -> tuple[LockTable, Peer, Peer]:
    """Return a table that has forgotten holds, and two peers."""
    table = LockTable(Limits(), Mint(b"secret", 1000), kept=True)
    table.restore(holds, 0.0)
    table.recover(seconds)
    return table, table.connect(), table.connect()


def token_of(
    fence: int, key: bytes = b"k", space: Space = LOCK, secret: bytes = b"secret"
) -> bytes:
    return Mint(secret, 0).token(space, key, fence)


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
    def kept(fence: int, limit: int) -> Kept:
        return Kept(SEMAPHORE, b"k", limit, fence, 30.0, 30.0, 0.0, b"")

    table, peer, _ = recovering(0.0, (kept(7, 0), kept(8, 2), kept(9, 0)))
    mismatch = reply_to(table, peer, Acquire(SEMAPHORE, b"k", 3, 0, 3))
    assert mismatch is Status.LIMIT_MISMATCH


def test_a_slot_that_nobody_was_told_of_is_not_kept() -> None:
    # Its token would be known to nobody in the next process, and the key blocked for a lease.
    table = LockTable(Limits(), Mint(b"secret", 0), kept=True)
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
    table = LockTable(Limits(), Mint(b"secret", 0), kept=True)
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
