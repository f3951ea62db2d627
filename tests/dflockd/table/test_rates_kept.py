"""What is kept of the runs of a key that have begun: in a journal, and when a shard moves."""

from __future__ import annotations

import pytest

from dflockd.table import rates, report
from dflockd.table.rates import (
    BLOCK,
    PACKED_BYTES,
    PackedRates,
    PackedRecord,
    RateRecord,
    later,
)
from dflockd.wire import (
    UNLIMITED,
    Acquire,
    FairGroup,
    Granted,
    How,
    Rate,
    Release,
    Renew,
    Status,
    Unbegun,
)
from tests.dflockd.table.rates_support import LEASE, LOCK, Site, kept_of, move, shard_table


def test_a_killed_server_forgets_no_beginning(site: Site) -> None:
    rate = Rate(2, 1000)
    site.begin(rate)
    _, pending = site.take(rate)
    site.go_to(100.5)
    holds, rates = kept_of(site.table)
    after = Site()
    after.now = 100.6
    after.table.restore(holds, after.now, rates)
    assert after.take(rate)[1] is Status.TIMEOUT
    after.go_to(101.001)
    _, reply = after.take(rate)
    assert isinstance(reply, Granted)
    # The one that may begin still may, and counts from then on.
    mine = after.table.connect()
    assert after.ask(mine, Renew(LOCK, b"k", pending.token, LEASE, How.BEGUN))
    after.go_to(102.0)
    assert after.take(rate)[1] is Status.TIMEOUT
    after.go_to(102.002)
    assert isinstance(after.take(rate)[1], Granted)


def test_after_a_crash_of_the_machine_rates_wait_one_window(site: Site) -> None:
    site.begin(Rate(5, 2000))
    _, rates = kept_of(site.table)
    after = Site()
    after.now = 50.0
    after.table.restore([], 50.0, [rate._replace(begun=()) for rate in rates])
    after.table.doubt_rates(50.0)
    for key in (b"k", b"unknown"):
        assert after.take(Rate(5, 2000), key=key)[1] is Status.TIMEOUT
    waiter, _ = after.take(Rate(1, 2000), key=b"third", timeout=60)
    assert isinstance(after.take(None, key=b"plain")[1], Granted)
    after.go_to(52.001)
    assert after.granted() == [waiter.id]


def test_a_shard_takes_its_rates_along() -> None:
    site = Site()
    site.table = shard_table()
    rate = Rate(2, 1000)
    site.begin(rate)
    _, pending = site.take(rate)
    site.table, _ = move(site.table, 100.4, 700.4, 2)  # type: ignore[arg-type]
    site.now = 700.4
    assert site.take(rate)[1] is Status.TIMEOUT
    site.go_to(701.002)  # ages are rounded down
    _, reply = site.take(rate)
    assert isinstance(reply, Granted)
    site.ask(site.table.connect(), Renew(LOCK, b"k", pending.token, LEASE, How.BEGUN))
    site.go_to(701.9)
    assert site.take(rate)[1] is Status.TIMEOUT


@pytest.mark.parametrize("moves", [False, True])
def test_a_run_that_may_begin_has_the_places_that_it_took_whatever_the_rate_became(
    moves: bool,
) -> None:
    """Its rate may have been another for a moment, when it was kept or its shard moved."""
    site, ten, two = Site(), Rate(10, 1000), Rate(2, 1000)
    if moves:
        site.table = shard_table()
    peer = site.table.connect()
    heavy = Acquire(LOCK, b"k", UNLIMITED, 0, LEASE, ten, group=FairGroup(b"", 0, 9))
    granted = site.ask(peer, heavy)
    assert isinstance(granted, Granted)
    assert site.take(two)[1] is Status.TIMEOUT
    if moves:
        site.table, _ = move(site.table, site.now, site.now, 2)  # type: ignore[arg-type]
    else:
        holds, rates = kept_of(site.table)
        site.table = Site().table
        site.table.restore(holds, site.now, rates)
    assert isinstance(site.take(ten)[1], Granted)
    assert site.take(ten)[1] is Status.TIMEOUT
    again = Renew(LOCK, b"k", granted.token, LEASE, How.BEGUN)
    site.ask(site.table.connect(), again)
    site.go_to(100.9)
    assert site.take(ten)[1] is Status.TIMEOUT


def test_a_shard_whose_server_was_lost_waits_one_window() -> None:
    site = Site()
    site.table = shard_table(opens_at=100.5, recovers_until=101.0, rates_since=101.0)
    site.go_to(101.0)
    assert isinstance(site.take(None)[1], Granted)
    assert site.take(Rate(5, 1000), key=b"a")[1] is Status.TIMEOUT
    site.go_to(102.001)
    assert isinstance(site.take(Rate(5, 1000), key=b"a")[1], Granted)


@pytest.mark.parametrize("ask", [True, False])
def test_what_a_lost_server_may_have_let_begin_goes_with_the_shard(ask: bool) -> None:
    """Also of keys of which nobody has heard since."""
    site = Site()
    site.table = shard_table(opens_at=100.5, recovers_until=101.0, rates_since=101.0)
    site.go_to(101.1)
    if ask:
        assert site.take(Rate(5, 1000), key=b"a")[1] is Status.TIMEOUT
    for epoch in (2, 3):
        assert not site.table.freeze(0, site.now).is_empty  # type: ignore[attr-defined]
        site.table, _ = move(site.table, site.now, site.now + 100, epoch)  # type: ignore[arg-type]
        site.now += 100
    for key in (b"a", b"b"):
        assert site.take(Rate(5, 1000), key=key)[1] is Status.TIMEOUT
    site.go_to(302.001)
    for key in (b"a", b"b"):
        assert isinstance(site.take(Rate(5, 1000), key=key)[1], Granted)
    # Once no window can have begun before, there is nothing to say of it.
    site.go_to(site.now + 86_401)
    assert site.table.freeze(0, site.now).is_empty  # type: ignore[attr-defined]


KEYS = (b"a", b"bb", b"ccc", b"d")


def resting(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a rate at each of some free keys, nearly all of which are packed."""
    monkeypatch.setattr(rates, "MOST_OPEN", 1)
    for number, key in enumerate(KEYS):
        peer, token = site.begin(Rate(number + 1, 60_000), key=key)
        site.ask(peer, Release(LOCK, key, token))
        site.go_to(site.now + 1)


def looks(site: Site) -> list[object]:
    """What people see of these rates."""
    shown = [report.rate(site.table.rate_of(LOCK, key), site.now) or {} for key in KEYS]
    # What comes with a shard is as old as it was to a millisecond.
    return [{**each, "next_s": pytest.approx(each["next_s"], abs=0.002)} for each in shown]


SHOWN = [
    {"runs": 1, "window_s": 60.0, "free": 0, "pending": 0, "next_s": 56.0},
    *({"runs": n, "window_s": 60.0, "free": n - 1, "pending": 0, "next_s": 0.0} for n in (2, 3, 4)),
]


def test_rates_that_rest_together_look_as_they_did(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    resting(site, monkeypatch)
    book = site.table._partition.rates
    assert (list(book.packed), list(book.open)) == ([b"\0a", b"\0bb"], [(0, b"ccc"), (0, b"d")])
    [packed] = set(book.packed.values())
    assert isinstance(packed, PackedRates)
    assert looks(site) == SHOWN
    assert site.take(Rate(1, 60_000), key=b"a")[1] is Status.TIMEOUT  # takes it out, and looks
    assert list(book.packed) == [b"\0bb", b"\0ccc"]
    assert looks(site) == SHOWN
    assert isinstance(site.take(Rate(2, 60_000), key=b"bb")[1], Granted)
    assert site.take(Rate(2, 60_000), key=b"bb")[1] is Status.TIMEOUT


def test_rates_that_rest_together_are_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    resting(site, monkeypatch)
    _, records = kept_of(site.table)
    after = Site()
    after.now = site.now
    after.table.restore([], after.now, records)
    assert looks(after) == SHOWN
    # Also where one of them was written down before as one that does not rest.
    both = Site()
    both.now = site.now
    known = RateRecord(LOCK, b"bb", 2, 60.0, 1, (100.5, 1))
    both.table.restore([], both.now, [known, *records])
    free = [{**SHOWN[1], "free": 0, "next_s": 56.5}]
    assert looks(both) == [SHOWN[0], *free, *SHOWN[2:]]


def test_windows_that_stood_still_go_on_where_they_were(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stopped machine has slept through does not count for its rates."""
    resting(site, monkeypatch)
    _, records = kept_of(site.table)
    assert {type(each) for each in records} == {RateRecord, PackedRecord}
    after = Site()
    after.now = site.now + 7
    after.table.restore([], after.now, [later(each, 7) for each in records])
    assert looks(after) == SHOWN


def test_rates_that_rest_together_go_with_their_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    site.table = shard_table()
    resting(site, monkeypatch)
    assert site.table.partitions[0].rates.packed  # type: ignore[attr-defined]
    site.table, _ = move(site.table, site.now, 700.0, 2)  # type: ignore[arg-type]
    site.now = 700.0
    assert looks(site) == SHOWN


def test_what_rests_together_is_no_larger_than_what_is_written_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "MOST_OPEN", 1)
    for number in range(60):
        key = b"%d" % number
        for _ in range(1 + number % 30):
            peer, token = site.begin(Rate(30, 60_000), key=key)
            site.ask(peer, Release(LOCK, key, token))
    packs = set(site.table._partition.rates.packed.values())
    assert max(len(pack.names) for pack in packs) > 4
    sizes = [sum(map(len, pack.names)) + 8 * len(pack.numbers) for pack in packs]
    assert PACKED_BYTES / 2 < max(sizes) <= PACKED_BYTES


def test_when_there_is_more_than_one_place(site: Site) -> None:
    many = BLOCK + 8
    for number in range(many):
        site.go_to(100 + number / 8)
        begin_and_end(site, Rate(many + 1, 60_000))
    rate = site.table.rate_of(LOCK, b"k")
    assert rate is not None
    assert rate.next(site.now, 0) == site.now
    places = [rate.next(site.now, more) for more in range(1, many + 2)]
    assert places == [*(160 + number / 8 for number in range(many)), None]
    site.table.doubt_rates(site.now)
    assert rate.next(site.now + 59, 0) == site.now + 60


def begin_and_end(site: Site, rate: Rate) -> None:
    peer, token = site.begin(rate)
    site.ask(peer, Release(LOCK, b"k", token))
    site.leave(peer)


@pytest.mark.parametrize("begun", [0, 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8])
def test_a_shard_takes_all_along_that_counts(begun: int) -> None:
    site = Site()
    site.table = shard_table()
    rate = Rate(begun + 1, 60_000)
    for _ in range(begun):
        begin_and_end(site, rate)
    _, pending = site.take(rate)
    site.table, _ = move(site.table, 100.0, 700.0, 2)  # type: ignore[arg-type]
    site.now = 700.0
    assert site.take(rate)[1] is Status.TIMEOUT
    # It has not begun, and gives its place back.
    site.ask(site.table.connect(), Unbegun(b"k", pending.token))
    assert isinstance(site.take(rate)[1], Granted)
    assert site.take(rate)[1] is Status.TIMEOUT


def test_as_many_runs_are_promised_as_may_be_and_not_one_more() -> None:
    site = Site(max_rate_runs=3)
    for number, key in enumerate((b"a", b"b", b"c")):
        assert isinstance(site.take(Rate(1, 60_000), key=key)[1], Granted)
        assert site.table.rates.promised == number + 1
    for refused in (1, 2):
        assert site.take(Rate(1, 60_000), key=b"d")[1] is Status.MAX_RATES
        assert site.take(Rate(2, 60_000), key=b"a")[1] is Status.MAX_RATES
        assert site.table.counts.full == 2 * refused
    records = [RateRecord(LOCK, b"e", 5, 60.0, 1, ())]
    site.table.restore([], site.now, records)
    assert site.table.rates.promised == 8
    assert isinstance(site.take(Rate(5, 60_000), key=b"e")[1], Granted)
    assert site.take(Rate(6, 60_000), key=b"e")[1] is Status.MAX_RATES
