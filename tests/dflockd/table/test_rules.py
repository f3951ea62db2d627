"""Single rules of the lock table, each with the history that once broke it."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.wire import (
    Acquire,
    Enqueue,
    Evict,
    Granted,
    Identify,
    Release,
    Renew,
    Space,
    StableRef,
    Stats,
    Status,
    Wait,
    fence_from_token,
)
from tests.dflockd.table.rules_support import LOCK, answers, inspected, reply_to, table_of, take


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


def test_d19_two_tables_share_nothing() -> None:
    one, two = table_of(), table_of()
    take(one, one.connect(), b"k")
    take(two, two.connect(), b"k")
    assert len(one) == len(two) == 1


def test_d28_the_end_of_a_connection_frees_all_it_had() -> None:
    # D28: cleanup awaited a lock and could be cut short. Here it is one synchronous step.
    table = table_of()
    busy, next_ = table.connect(), table.connect()
    for number in range(STEP // 4):
        take(table, busy, b"held%d" % number)
        table.handle(next_, Enqueue(LOCK, b"held%d" % number, 1, None), 0.0)
        take(table, next_, b"other%d" % number)
        table.handle(busy, Enqueue(LOCK, b"other%d" % number, 1, None), 0.0)
    assert table.disconnect(busy, 1.0, clean=False) == []
    assert len(next_.holds) == STEP // 2
    table.disconnect(next_, 1.0, clean=False)
    assert len(table) == 0
    assert table.next_deadline() is None


def test_each_fence_is_larger_than_the_last_of_any_key() -> None:
    table = table_of()
    peers = [table.connect() for _ in range(4)]
    tokens = [take(table, peer, key) for peer, key in zip(peers, (b"k", b"l", b"m"), strict=False)]
    table.disconnect(peers[0], 1.0, clean=True)
    fences = [fence_from_token(token) for token in [*tokens, take(table, peers[3], b"k")]]
    assert fences == sorted(set(fences))


def test_fences_end_instead_of_starting_again() -> None:
    issuer = TokenIssuer(b"secret", 2**64 - 2)
    token = issuer.issue(LOCK, b"k", is_sole=True)
    fence = issuer.fence
    assert fence == fence_from_token(token) == 2**64 - 1
    with pytest.raises(OverflowError):
        issuer.issue(LOCK, b"k", is_sole=True)


def test_tokens_differ_by_secret_key_and_space() -> None:
    names = list(itertools.product((b"a", b"b"), Space, (b"k", b"l"), (True, False)))
    made = {
        TokenIssuer(secret, 0).issue(space, key, is_sole=is_sole): (secret, space, key, is_sole)
        for secret, space, key, is_sole in names
    }
    assert len(made) == 16
    for token, (secret, space, key, is_sole) in made.items():
        for other, other_space, other_key, _ in names:
            found = TokenIssuer(other, 0).verify(other_space, other_key, token)
            is_it = (other, other_space, other_key) == (secret, space, key)
            assert found == ((1, is_sole) if is_it else None)


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


def test_inspect_names_holders_and_waiters_in_order():
    table = table_of()
    holder, first, second = (table.connect() for _ in range(3))
    table.handle(holder, Acquire(LOCK, b"k", 1, 0, 30, label="holder é".encode()), 0.0)
    table.handle(first, Acquire(LOCK, b"k", 1, 60, None, label=b"first"), 2.0)
    table.handle(second, Enqueue(LOCK, b"k", 1, None, label=b"second"), 3.0)

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
    request = Acquire(LOCK, b"k", 1, 0, None, label=b"publisher")
    ((_, granted),) = table.handle(publisher, request, 0.0)
    token = granted.token
    table.disconnect(publisher, 1.0, clean=True)
    assert inspected(table, worker, b"k", 2.0)["holders"][0]["label"] == "publisher"

    table.handle(worker, Renew(LOCK, b"k", token, None, label=b"worker"), 2.0)

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
    assert table.counts.evicted == 1
    [(_, lost)] = table.handle(holder, Renew(LOCK, b"k", token, None), 2.0)
    assert lost is Status.ERROR


def test_a_table_in_no_cluster_proves_nothing() -> None:
    table = table_of()
    assert reply_to(table, table.connect(), Identify(b"nonce")) is Status.ERROR
