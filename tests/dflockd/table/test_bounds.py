"""How much there may be, for one connection and one key as well as in total, and what that takes."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from dflockd.table import LockTable, Peer
from dflockd.table.reservations import MAX_RESERVED
from dflockd.wire import (
    MAX_LINE,
    MAX_OWNER,
    Acquire,
    Aged,
    DrawAge,
    FairGroup,
    Granted,
    How,
    Owner,
    Rate,
    Release,
    Renew,
    Reserve,
    Space,
    Status,
    TimedOut,
)
from tests.dflockd.table.rules_support import table_of
from tests.dflockd.table.turns_support import ask
from tests.effort import more

LOCK = Space.LOCK
LABEL = b"l" * 60
DAY = 86_400_000


def reserve(table: LockTable, peer: Peer, key: bytes, number: int = 0) -> object:
    """Want what somebody has, and be away."""
    who = {"owner": Owner(b"run-%d" % number, 0), "label": LABEL + b"%d" % number}
    reply = ask(table, peer, Acquire(LOCK, key, 1, 0, None, reserve=Reserve(60_000, 0), **who))
    if isinstance(reply, Granted):
        return reserve(table, peer, key, number)
    return reply


def begin_and_end(table: LockTable, peer: Peer, key: bytes, number: int) -> None:
    """Have the one run of a day begin and end, some time after the one before."""
    now = number / 100
    reply = ask(table, peer, Acquire(LOCK, key, 1, 0, None, Rate(1, DAY)), now)
    assert isinstance(reply, Granted)
    ask(table, peer, Renew(LOCK, key, reply.token, None, How.BEGUN), now)
    ask(table, peer, Release(LOCK, key, reply.token), now)


def bytes_of(make: Callable[[], object]) -> int:
    """Return how much memory is in use that was not before, with all that only a collector frees."""
    interval = sys.getswitchinterval()
    # What a thread that an earlier test has left allocates would count, too.
    sys.setswitchinterval(60)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        kept = make()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
        sys.setswitchinterval(interval)
    assert kept
    return size


def test_a_connection_leaves_so_many_positions() -> None:
    table = table_of(max_holds=3)
    peer, other, holder = table.connect(), table.connect(), table.connect()
    tickets = []
    for number in range(3):
        assert isinstance(ask(table, holder, Acquire(LOCK, b"%d" % number, 1, 0, None)), Granted)
        reply = reserve(table, peer, b"%d" % number, number)
        assert isinstance(reply, TimedOut)
        tickets.append(reply.ticket)
    assert reserve(table, peer, b"0", 4) is Status.TIMEOUT
    assert isinstance(reserve(table, other, b"0", 4), TimedOut)
    # One that is taken up, or forgotten, makes room for another.
    back = table.connect()
    assert ask(table, back, Acquire(LOCK, b"0", 1, 9, None, ticket=tickets[0])) is None
    assert isinstance(reserve(table, peer, b"0", 5), TimedOut)
    assert reserve(table, peer, b"0", 6) is Status.TIMEOUT
    table.advance(121.0)
    assert peer.kept == 0


def test_in_a_queue_are_so_many_positions_of_who_is_away() -> None:
    table = table_of(max_holds=3)
    holder = table.connect()
    got = ask(table, holder, Acquire(LOCK, b"k", 1, 0, None))
    assert isinstance(got, Granted)
    replies = [reserve(table, table.connect(), b"k", number) for number in range(4)]
    assert [type(reply) for reply in replies] == [TimedOut] * 3 + [Status]
    assert ask(table, table.connect(), Acquire(LOCK, b"k", 1, 9, None)) is None  # others may wait
    assert ask(table, holder, Acquire(LOCK, b"o", 1, 0, None)) is not None
    assert isinstance(reserve(table, table.connect(), b"o", 4), TimedOut)
    # They are passed, and the queue has room for others.
    ask(table, holder, Release(LOCK, b"k", got.token))
    assert isinstance(reserve(table, table.connect(), b"k", 4), TimedOut)


@pytest.mark.parametrize("most", [2_000, more(MAX_RESERVED)])
def test_a_reservation_takes_800_bytes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflockd.table.reservations.MAX_RESERVED", most)
    table = table_of(max_locks=20, max_holds=10_000)
    keys = [b"%d" % number for number in range(10)]
    holder = table.connect()
    for key in keys:
        assert isinstance(ask(table, holder, Acquire(LOCK, key, 1, 0, None)), Granted)

    def fill() -> object:
        for number in range(most):
            if number % 10_000 == 0:
                peer = table.connect()
            assert isinstance(reserve(table, peer, keys[number % 10], number), TimedOut)
        return True

    assert bytes_of(fill) < 800 * most
    assert reserve(table, table.connect(), keys[0], most) is Status.TIMEOUT


def long_request(key: bytes, number: int, **more: Any) -> Acquire:
    """A request for a lock that says as much as it may, and nothing that was said before."""
    end = b"%08d" % number
    return Acquire(
        *(LOCK, key, 1, 0, None),
        owner=Owner(end.rjust(MAX_OWNER, b"o"), 0),
        label=end.rjust(MAX_LINE, b"l"),
        group=FairGroup(end.rjust(MAX_LINE, b"g")),
        **more,
    )


SAMPLE = 2_700
"""So that dictionaries are as full as they are, in the mean, of many more."""
OPEN = 200
"""Rates that rest and are not packed."""


@pytest.fixture
def few_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflockd.table.rates.MOST_OPEN", OPEN)


def test_a_reservation_with_the_longest_names_takes_2450_bytes() -> None:
    table = table_of()
    holder = table.connect()
    assert isinstance(ask(table, holder, Acquire(LOCK, b"k", 1, 0, None)), Granted)

    def fill() -> object:
        for number in range(SAMPLE):
            request = long_request(b"k", number, reserve=Reserve(60_000, 0))
            assert isinstance(ask(table, holder, request), TimedOut)
        return True

    assert bytes_of(fill) < 2450 * SAMPLE


@pytest.mark.parametrize("is_long", [False, True])
def test_a_held_lock_takes_1000_bytes_and_with_the_longest_names_4400(is_long: bool) -> None:
    table = table_of(max_locks=SAMPLE)
    peer = table.connect()

    def fill() -> object:
        for number in range(SAMPLE):
            key = b"%08d" % number
            request = Acquire(LOCK, key, 1, 0, None, label=LABEL + key)
            if is_long:
                request = long_request(key.rjust(MAX_LINE, b"k"), number)
            assert isinstance(ask(table, peer, request), Granted)
        return True

    assert bytes_of(fill) < (4400 if is_long else 1000) * SAMPLE


def test_the_newest_of_a_key_takes_900_bytes_at_most() -> None:
    table = table_of()
    peer = table.connect()

    def fill() -> object:
        for number in range(SAMPLE):
            key = b"%0256d" % number
            drawn = ask(table, peer, DrawAge(key))
            assert isinstance(drawn, Aged)
            who = {"owner": Owner(b"run", 0, drawn.age), "label": b"%0256d" % number}
            reply = ask(table, peer, Acquire(LOCK, key, 1, 0, None, **who))  # type: ignore[arg-type]
            assert isinstance(reply, Granted)
            ask(table, peer, Release(LOCK, key, reply.token))
        return True

    assert bytes_of(fill) < 900 * SAMPLE


@pytest.mark.usefixtures("few_open")
def test_a_rate_of_the_longest_key_takes_600_bytes() -> None:
    table = table_of()
    peer = table.connect()

    def fill() -> object:
        for number in range(SAMPLE):
            begin_and_end(table, peer, (b"%d" % number).rjust(MAX_LINE, b"k"), number)
        return True

    open_ones = OPEN * (1000 + MAX_LINE)
    assert bytes_of(fill) - open_ones < 600 * (SAMPLE - OPEN)


@pytest.mark.usefixtures("few_open")
@pytest.mark.parametrize("many", [SAMPLE, more(50_000)])
def test_a_rate_with_one_run_takes_200_bytes(many: int) -> None:
    """As one a day for each of many users."""
    table = table_of()
    peer = table.connect()

    def fill() -> object:
        for number in range(many):
            begin_and_end(table, peer, b"digest:user-%08d" % number, number)
        return True

    size = bytes_of(fill)
    assert table.rates.size == many
    assert size - OPEN * 1000 < 200 * (many - OPEN)
    # They are known all the same, and gone a day later.
    again = Acquire(LOCK, b"digest:user-00000001", 1, 0, None, Rate(1, DAY))
    assert ask(table, peer, again, many / 100) is Status.TIMEOUT
    while (due := table.next_deadline()) is not None:
        table.advance(due)
    assert (table.rates.size, table.rates.promised) == (0, 0)


def test_more_rates_than_may_be_are_refused() -> None:
    table = table_of(max_rate_runs=10)
    peer = table.connect()
    replies = [
        ask(table, peer, Acquire(LOCK, b"%d" % number, 1, 0, None, Rate(1, DAY)))
        for number in range(11)
    ]
    assert [type(reply) for reply in replies[:10]] == [Granted] * 10
    assert replies[10] is Status.MAX_RATES
