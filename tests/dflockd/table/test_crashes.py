"""What a table takes back of those who held its locks before a crash."""

from __future__ import annotations

import json

import pytest

from dflockd.table import HoldRecord, Limits, LockTable, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    How,
    Recovering,
    Release,
    Renew,
    Renewed,
    Request,
    Space,
    Stats,
    Status,
    Wait,
    fence_from_token,
)
from tests.dflockd.table.rules_support import (
    LOCK,
    SEMAPHORE,
    inspected,
    recovering,
    reply_to,
    table_of,
    take,
)


def token_of(
    fence: int,
    key: bytes = b"k",
    space: Space = LOCK,
    secret: bytes = b"secret",
    *,
    is_sole: bool = True,
) -> bytes:
    return TokenIssuer(secret, 0).token(space, key, fence, is_sole=is_sole)


@pytest.mark.parametrize("request_", [Acquire(LOCK, b"k", 1, 5, 3), Enqueue(LOCK, b"k", 1, 3)])
def test_nothing_is_granted_while_holders_are_waited_for(request_: Request) -> None:
    table, peer, _ = recovering(10.0)
    assert reply_to(table, peer, request_, 0.5) == Recovering(9500)
    assert reply_to(table, peer, request_, 9.9999) == Recovering(1)
    assert isinstance(reply_to(table, peer, request_, 10.0), Granted | Enqueued)


def test_a_renewal_brings_a_forgotten_hold_back() -> None:
    table, peer, other = recovering()
    assert reply_to(table, peer, Renew(LOCK, b"k", token_of(7), 30)) == Renewed(30)
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
        token = token_of(fence, space=SEMAPHORE, is_sole=False)
        renew = Renew(SEMAPHORE, b"k", token, 30)
        assert reply_to(table, peer, renew) == Renewed(30)
    stats = json.loads(reply_to(table, one, Stats()).json)  # type: ignore[attr-defined]
    assert stats["semaphores"] == [{"key": "k", "limit": 0, "holders": 2, "waiters": 0}]
    assert reply_to(table, one, Acquire(SEMAPHORE, b"k", 2, 0, 3), 10.0) is Status.TIMEOUT
    mismatch = reply_to(table, one, Acquire(SEMAPHORE, b"k", 3, 0, 3), 10.0)
    assert mismatch is Status.LIMIT_MISMATCH
    release = Release(SEMAPHORE, b"k", token_of(7, space=SEMAPHORE, is_sole=False))
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
    assert table.handle(worker, Renew(LOCK, b"k", token, 60, How.DETACH), 1.0) == [
        (worker.id, Status.LEASE_EXPIRED)
    ]
    assert table.handle(sender, Renew(LOCK, b"k", token, 60, How.DETACH), 1.0) == [
        (sender.id, Renewed(60))
    ]
    table.disconnect(sender, 1.0, clean=True)
    assert table.handle(other, Acquire(LOCK, b"k", 1, 0, None), 50.0) == [
        (other.id, Status.TIMEOUT)
    ]
    table.handle(worker, Renew(LOCK, b"k", token, 10), 50.0)
    assert table.handle(other, Renew(LOCK, b"k", token, 60, How.DETACH), 51.0) == [
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
