"""How many runs of a key may begin in a while: single rules."""

from __future__ import annotations

from typing import Any

import pytest

from dflockd.table import Peer
from dflockd.table.limits import STEP
from dflockd.table.rates import BLOCK, RateBlock
from dflockd.wire import (
    UNLIMITED,
    Acquire,
    Enqueue,
    Enqueued,
    FairGroup,
    Granted,
    Rate,
    Release,
    Reserve,
    Status,
    TimedOut,
    Wait,
    YourTurn,
)
from tests.dflockd.table.rates_support import LEASE, LOCK, TWO, Site
from tests.dflockd.table.turns_support import asks, process


def test_a_place_is_free_one_window_after_the_server_has_heard_of_the_beginning(site: Site) -> None:
    first, token = site.begin(TWO)
    site.go_to(100.5)
    site.begin(TWO)
    waiting = [site.take(TWO, timeout=60)[0].id for _ in range(3)]
    site.ask(first, Release(LOCK, b"k", token))  # that is nothing new
    site.go_to(100.999)
    assert site.granted() == []
    site.go_to(101.001)
    assert site.granted() == waiting[:1]
    site.go_to(101.501)
    assert site.granted() == waiting[1:2]
    # Neither of these has said that it has begun, so nobody knows when a place will be free.
    site.go_to(105.0)
    assert site.granted() == []
    assert site.table._partition.rates.open[LOCK, b"k"].free(site.now) == 0


def test_who_needs_many_places_waits_no_longer_than_until_they_are_free(site: Site) -> None:
    """There may be too many to look through in one step."""
    many = Rate(100_000, 60_000)

    def asked(weight: int, timeout: int = 0) -> tuple[Peer, Any]:
        peer, share = site.table.connect(), FairGroup(b"", 0, weight) if weight > 1 else None
        return peer, site.ask(
            peer, Acquire(LOCK, b"k", UNLIMITED, timeout, LEASE, many, group=share)
        )

    begun = site.now
    for weight, after in (1, 0), *[(10, 10)] * 3 * STEP * BLOCK, (1, 59):
        site.go_to(begun + after)
        peer, reply = asked(weight)
        site.ask(peer, Release(LOCK, b"k", reply.token))
    site.go_to(begun + 71)
    waiter, _ = asked(99_999, timeout=600)
    site.go_to(begun + 71.1)
    assert site.granted() == [waiter.id]


def test_who_says_nothing_has_begun_when_the_hold_ends(site: Site) -> None:
    rate = Rate(1, 1000)
    peer, reply = site.take(rate)
    site.go_to(104.0)
    waiter, _ = site.take(rate, timeout=60)
    site.ask(peer, Release(LOCK, b"k", reply.token))
    site.go_to(104.999)
    assert site.granted() == []
    site.go_to(105.001)
    assert site.granted() == [waiter.id]
    # Nor does the end of the connection free the place, nor the end of the lease.
    site.leave(waiter)
    third, _ = site.take(rate, timeout=60)
    site.go_to(105.9)
    assert site.granted() == []
    site.go_to(106.1)
    assert site.granted() == [third.id]
    fourth, _ = site.take(rate, timeout=60)
    site.go_to(106.0 + LEASE + 0.9)
    assert site.granted() == []
    site.go_to(106.0 + LEASE + 1.1)
    assert site.granted() == [fourth.id]


def test_both_hold_where_there_is_a_limit_as_well(site: Site) -> None:
    rate = Rate(3, 1000)
    holders = [site.begin(rate, limit=2) for _ in range(2)]
    waiting = [site.take(rate, limit=2, timeout=60)[0].id for _ in range(3)]
    for peer, token in holders:
        site.ask(peer, Release(LOCK, b"k", token))
    assert site.granted() == waiting[:1]  # the second slot is free, and no place
    site.go_to(101.001)
    assert site.granted() == waiting[1:2]


def test_the_latest_request_says_what_the_rate_is(site: Site) -> None:
    site.begin(Rate(1, 60_000))
    waiter, _ = site.take(Rate(1, 60_000), timeout=60)
    assert isinstance(site.take(Rate(3, 60_000), timeout=60)[1], type(None))
    site.go_to(100.01)
    assert site.granted()[0] == waiter.id
    site.go_to(100.02)
    assert site.table.rates.promised == 3
    # Less than have begun: nothing is owed, and nothing is free.
    _, reply = site.take(Rate(1, 500))
    assert reply is Status.TIMEOUT
    assert site.table.rates.promised == 1


def test_what_is_asked_for_has_bounds_and_changes_nothing_if_refused() -> None:
    site = Site(max_rate_window=60, max_rate_runs=10, max_locks=1)
    assert site.take(Rate(1, 60_001))[1] is Status.RATE_WINDOW
    assert site.take(Rate(11, 1000))[1] is Status.MAX_RATES
    assert (len(site.table), site.table._partition.rates.open, site.table.rates.promised) == (
        0,
        {},
        0,
    )
    peer, token = site.begin(Rate(6, 60_000))
    site.ask(peer, Release(LOCK, b"k", token))
    assert len(site.table) == 0  # it does not count among the keys
    assert site.take(Rate(5, 60_000), key=b"other")[1] is Status.MAX_RATES
    assert site.take(Rate(11, 60_000))[1] is Status.MAX_RATES  # nor may a known one take all room
    assert isinstance(site.take(Rate(10, 60_000))[1], Granted)
    assert site.take(Rate(11, 60_000))[1] is Status.MAX_RATES
    assert site.table._partition.rates.open[LOCK, b"k"].runs == 10


def test_nothing_is_left_of_a_rate_one_window_after_its_last_run(site: Site) -> None:
    for key in (b"a", b"b"):
        for _ in range(2 * BLOCK):
            peer, token = site.begin(Rate(3 * BLOCK, 2000), key=key)
            site.ask(peer, Release(LOCK, key, token))
            site.leave(peer)
    site.go_to(101.9)
    assert len(site.table._partition.rates.open) == 2
    site.go_to(104.2)
    assert not site.table._partition.rates.open
    assert site.table.rates.promised == 0
    assert site.table.next_deadline() is None
    changed = [change for change in site.table.changes or () if isinstance(change, RateBlock)]
    assert len(changed) > 2 * BLOCK
    assert all(block.ended for block in changed)


@pytest.mark.parametrize("kind", [Acquire, Enqueue])
def test_a_position_is_kept_and_has_the_place_when_it_comes_back(
    site: Site, kind: type[Acquire | Enqueue]
) -> None:
    rate = Rate(1, 1000)
    site.begin(rate)
    waiter = site.table.connect()
    site.ask(waiter, Enqueue(LOCK, b"k", UNLIMITED, LEASE, rate))
    kept = site.ask(waiter, Wait(LOCK, b"k", 0, reserve=Reserve(1500, 700)))
    assert isinstance(kept, TimedOut)
    behind, _ = site.take(rate, timeout=60)
    site.go_to(101.4)
    assert site.granted() == []  # the place is kept for who comes back
    request: Acquire | Enqueue = Enqueue(LOCK, b"k", UNLIMITED, LEASE, rate, ticket=kept.ticket)
    if kind is Acquire:
        request = Acquire(LOCK, b"k", UNLIMITED, 60, LEASE, rate, ticket=kept.ticket)
    back = site.ask(waiter, request)
    assert isinstance(back, Granted | Enqueued)
    assert next(iter(waiter.holds)).places == 1
    site.leave(waiter)
    site.go_to(102.41)
    assert site.granted() == [behind.id]


def test_who_was_told_waits_for_a_place_if_the_rate_has_become_less(site: Site) -> None:
    one = Rate(1, 1000)
    site.begin(TWO)
    waiter, child = process(site.table), site.table.connect()
    site.ask(waiter, Enqueue(LOCK, b"k", UNLIMITED, LEASE, TWO, turn=5000))
    told = asks(site.table, waiter, site.now)[1]
    assert isinstance(told, YourTurn)
    assert site.take(one)[1] is Status.TIMEOUT
    assert (
        site.ask(child, Acquire(LOCK, b"k", UNLIMITED, 60, LEASE, one, ticket=told.ticket)) is None
    )
    site.go_to(100.999)
    assert site.granted() == []
    site.go_to(101.001)
    assert site.granted() == [child.id]
