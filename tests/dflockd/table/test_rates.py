"""How many runs of a key may begin in a while: single rules."""

from __future__ import annotations

import pytest

from dflockd.table.rates import BLOCK, RateBlock
from dflockd.table.state import Entry
from dflockd.wire import (
    UNLIMITED,
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    How,
    Next,
    Owner,
    Rate,
    Release,
    Renew,
    Renewed,
    Reserve,
    Status,
    TimedOut,
    Unbegun,
    Wait,
    YourTurn,
)
from tests.dflockd.table.rates_support import LEASE, LOCK, TWO, Site
from tests.dflockd.table.turns_support import asks, process, ticket_of


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


def test_a_place_that_is_given_back_costs_nothing(site: Site) -> None:
    rate = Rate(1, 60_000)
    peer, reply = site.take(rate)
    waiter, _ = site.take(rate, timeout=60)
    assert site.ask(peer, Unbegun(b"k", reply.token)) is Status.OK
    assert site.granted() == [waiter.id]
    # Once it has begun that cannot be taken back.
    again, _ = site.take(rate, timeout=60)
    token = next(iter(waiter.holds)).token
    assert isinstance(site.ask(waiter, Renew(LOCK, b"k", token, 5, How.BEGUN)), Renewed)
    assert site.ask(waiter, Unbegun(b"k", token)) is Status.OK
    assert site.granted() == []
    assert again.waiting is not None
    assert (site.table.counts.begun, site.table.counts.unbegun) == (1, 1)


def test_what_nobody_was_told_of_has_not_begun(site: Site) -> None:
    rate = Rate(1, 60_000)
    # An answer that could not be sent, and an enqueue whose grant came while nobody asked.
    holder, reply = site.take(rate)
    waiter, _ = site.take(rate, timeout=60)
    enqueued = site.table.connect()
    assert site.ask(enqueued, Enqueue(LOCK, b"k", UNLIMITED, LEASE, rate)) is Status.QUEUED
    site.ask(holder, Unbegun(b"k", reply.token))
    assert site.granted() == [waiter.id]
    site.leave(waiter, told=False)
    assert next(iter(enqueued.holds)).told is False
    site.leave(enqueued)
    assert isinstance(site.take(rate)[1], Granted)


def test_both_hold_where_there_is_a_limit_as_well(site: Site) -> None:
    rate = Rate(3, 1000)
    holders = [site.begin(rate, limit=2) for _ in range(2)]
    waiting = [site.take(rate, limit=2, timeout=60)[0].id for _ in range(3)]
    for peer, token in holders:
        site.ask(peer, Release(LOCK, b"k", token))
    assert site.granted() == waiting[:1]  # the second slot is free, and no place
    site.go_to(101.001)
    assert site.granted() == waiting[1:2]


def test_a_try_finds_no_place(site: Site) -> None:
    peer, token = site.begin(Rate(1, 1000))
    site.ask(peer, Release(LOCK, b"k", token))
    assert site.take(Rate(1, 1000))[1] is Status.TIMEOUT
    assert len(site.table) == 0  # nothing is left of it
    site.go_to(101.0)
    assert isinstance(site.take(Rate(1, 1000))[1], Granted)


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


def test_who_names_no_rate_takes_no_place(site: Site) -> None:
    site.begin(Rate(1, 60_000), limit=3)
    assert isinstance(site.take(None, limit=3)[1], Granted)
    waiter, _ = site.take(Rate(1, 60_000), limit=3, timeout=60)
    site.go_to(159.0)
    assert site.granted() == []
    site.go_to(160.01)
    assert site.granted() == [waiter.id]


def test_a_free_slot_goes_to_the_first_whom_the_rate_lets_begin(site: Site) -> None:
    rate = Rate(1, 5000)
    _, token = site.begin(rate, limit=1)
    rated, _ = site.take(rate, limit=1, timeout=60)
    others = [site.take(None, limit=1, timeout=60)[0] for _ in range(3)]
    site.ask(site.table.connect(), Release(LOCK, b"k", token))
    assert site.granted() == [others[0].id]
    site.leave(others[0])
    assert site.granted() == [others[1].id]
    # There is a place now, so who needs one is the first again.
    site.go_to(106.0)
    site.leave(others[1])
    assert site.granted() == [rated.id]
    site.leave(rated)
    assert site.granted() == [others[2].id]


def test_a_newcomer_goes_by_the_same_rule(site: Site) -> None:
    rate = Rate(1, 5000)
    site.begin(rate, limit=2)
    rated, _ = site.take(rate, limit=2, timeout=60)
    assert isinstance(site.take(None, limit=2)[1], Granted)
    waiter, _ = site.take(None, limit=2, timeout=60)
    assert site.take(rate, limit=2)[1] is Status.TIMEOUT
    site.go_to(106.0)
    assert site.granted() == []  # both slots are taken
    assert site.take(None, limit=2)[1] is Status.TIMEOUT
    site.go_to(110.5)
    assert site.granted() == [rated.id]
    site.leave(rated)
    assert site.granted() == [waiter.id]


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


def test_a_rate_that_is_refused_changes_neither_the_limit_nor_who_is_the_newest() -> None:
    site = Site(max_rate_window=60)
    site.take(None, limit=1)
    site.take(None, limit=1, timeout=60)
    too_long, newest = Rate(1, 60_001), Owner(b"run", 0, 90)
    assert site.take(too_long, limit=2)[1] is Status.RATE_WINDOW
    asked = Acquire(LOCK, b"k", 1, 0, LEASE, too_long, newest)
    assert site.ask(site.table.connect(), asked) is Status.RATE_WINDOW
    entry = site.table.find(LOCK, b"k")
    assert isinstance(entry, Entry)
    assert entry.limit == 1
    assert site.granted() == []
    assert not len(site.table.newest)


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


def test_a_turn_is_told_when_there_is_a_place(site: Site) -> None:
    rate = Rate(1, 1000)
    site.begin(rate)
    asking, tickets = process(site.table, b"here"), []
    for peer in (process(site.table, b"here"), process(site.table, b"here")):
        wanted = Enqueue(LOCK, b"k", UNLIMITED, LEASE, rate, turn=200)
        tickets.append(ticket_of(site.ask(peer, wanted)))
        assert site.ask(peer, Wait(LOCK, b"k", 60)) is None
    assert site.ask(asking, Next()) is None
    site.go_to(101.001)
    ((told, reply),) = site.told
    assert told == asking.id
    assert reply == YourTurn(tickets[0])
    assert site.ask(asking, Next()) is None
    # The place is set aside for whoever has the ticket.
    child = site.table.connect()
    assert site.take(rate)[1] is Status.TIMEOUT
    assert isinstance(
        site.ask(child, Acquire(LOCK, b"k", UNLIMITED, 1, LEASE, rate, ticket=reply.ticket)),
        Granted,
    )
    assert next(iter(child.holds)).is_pending
    site.told.clear()
    site.go_to(105.0)
    assert site.told == []  # the child has not begun
    site.leave(child)
    site.go_to(106.001)
    assert site.told == [(asking.id, YourTurn(tickets[1]))]


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
    assert next(iter(waiter.holds)).is_pending
    site.leave(waiter)
    site.go_to(102.41)
    assert site.granted() == [behind.id]


def test_the_next_place_goes_to_who_is_next_while_one_is_kept(site: Site) -> None:
    rate = Rate(3, 1000)
    for _ in range(3):
        site.begin(rate)
        site.go_to(site.now + 0.3)
    waiter = site.table.connect()
    site.ask(waiter, Enqueue(LOCK, b"k", UNLIMITED, LEASE, rate))
    assert isinstance(site.ask(waiter, Wait(LOCK, b"k", 0, reserve=Reserve(1000, 2000))), TimedOut)
    behind, _ = site.take(rate, timeout=60)
    site.go_to(101.29)
    assert site.granted() == []  # one that is free since 101.0 is kept
    site.go_to(101.31)
    assert site.granted() == [behind.id]
