"""What is noted of rates: in the journal, for the metrics, and until when."""

from __future__ import annotations

import random

import pytest

from dflockd.table import LockTable
from dflockd.table.rates import BLOCK, RateBlock, RateRecord
from dflockd.table.state import Entry
from dflockd.wire import (
    UNLIMITED,
    Enqueue,
    Enqueued,
    Granted,
    How,
    Rate,
    Release,
    Renew,
    Status,
    Unbegun,
    Wait,
)
from tests.dflockd.table.rates_support import LEASE, LOCK, Site, move, shard_table


class Journal:
    """What the steps of a table have written down, as a later process would read it."""

    def __init__(self, table: LockTable) -> None:
        self.changes = table.changes
        self.records: dict[int, RateRecord] = {}

    def write(self) -> None:
        assert self.changes is not None
        for change in self.changes:
            if isinstance(change, RateBlock):
                assert len(change.times) <= BLOCK
                if change.ended:
                    self.records.pop(change.number, None)
                else:
                    self.records[change.number] = change.kept()
        self.changes.clear()

    def read(self, now: float) -> Site:
        site = Site()
        site.now = now
        site.table.restore([], now, [self.records[number] for number in sorted(self.records)])
        return site


@pytest.mark.parametrize("seed", range(4))
def test_the_journal_has_the_rate_that_was_asked_for_last_and_all_that_has_begun(
    site: Site, seed: int
) -> None:
    dice = random.Random(seed)
    windows = [1000, 2000] if seed % 2 else [1000]
    journal = Journal(site.table)
    most = 0
    for _ in range(250):
        rate = Rate(dice.choice([2 * BLOCK, 3 * BLOCK]), dice.choice(windows))
        peer, reply = site.take(rate)
        if isinstance(reply, Granted):
            site.ask(peer, Renew(LOCK, b"k", reply.token, None, How.BEGUN))
            site.ask(peer, Release(LOCK, b"k", reply.token))
        site.leave(peer)
        journal.write()
        most = max(most, len(journal.records))
        after = journal.read(site.now)
        then, now = (each.table.rate_of(LOCK, b"k") for each in (after, site))
        assert then is not None
        assert now is not None
        assert (then.runs, then.window) == (now.runs, now.window)
        more = now.free(site.now) - then.free(site.now)
        # What was let be while the window was shorter may count again, which is on the safe side.
        assert more == 0 or (more > 0 and len(windows) > 1)
        site.go_to(site.now + dice.choice([0, 0, 0, 0.02, 0.05]))
    assert most > 2
    # A process that has read it writes it down anew.
    anew = Journal(after.table)
    anew.write()
    then = anew.read(site.now).table.rate_of(LOCK, b"k")
    now = after.table.rate_of(LOCK, b"k")
    assert then is not None
    assert now is not None
    assert (then.runs, then.free(site.now)) == (now.runs, now.free(site.now))
    site.go_to(site.now + 10)
    journal.write()
    assert journal.records == {}


def test_a_rate_that_is_over_is_forgotten_while_its_key_is_held(site: Site) -> None:
    holder, token = site.begin(Rate(1, 1000), limit=3)
    for key in (b"a", b"b"):
        site.begin(Rate(1, 60_000), key=key)
    assert (site.table.rates.size, site.table.rates.promised) == (3, 3)
    site.go_to(102.0)
    assert (site.table.rates.size, site.table.rates.promised) == (2, 2)
    entry = site.table.find(LOCK, b"k")
    assert isinstance(entry, Entry)
    assert entry.queue().rate is None
    assert site.ask(holder, Release(LOCK, b"k", token)) is Status.OK
    assert isinstance(site.take(None, limit=3)[1], Granted)


def test_a_rate_that_counts_is_looked_at_again_when_it_may_be_over(site: Site) -> None:
    site.begin(Rate(2, 1000), key=b"a")
    site.take(Rate(1, 1000), key=b"b")  # it has not begun, and nobody knows when it will
    site.go_to(100.9)
    site.begin(Rate(2, 1000), key=b"a")
    site.go_to(101.05)
    assert site.table.rates.size == 2
    assert site.table.next_deadline() == pytest.approx(101.9, abs=0.01)
    site.go_to(101.95)
    assert site.table.rates.size == 1
    assert site.table.next_deadline() == pytest.approx(102.0, abs=0.01)


def test_who_waits_has_the_place_as_soon_as_it_is_free(site: Site) -> None:
    rate = Rate(1, 1000)
    first, reply = site.take(rate)
    waiter, _ = site.take(rate, timeout=60)
    site.go_to(103.05)
    site.ask(first, Renew(LOCK, b"k", reply.token, None, How.BEGUN))
    site.go_to(104.049)
    assert site.granted() == []
    site.go_to(104.051)
    assert site.granted() == [waiter.id]


def test_who_has_enqueued_counts_as_a_run_too(site: Site) -> None:
    rate = Rate(1, 1000)
    site.begin(rate)
    peer, other = site.table.connect(), site.table.connect()
    assert site.ask(peer, Enqueue(LOCK, b"k", UNLIMITED, LEASE, rate)) is Status.QUEUED
    assert site.ask(peer, Wait(LOCK, b"k", 60)) is None
    site.go_to(101.01)
    assert site.granted() == [peer.id]
    assert site.take(rate)[1] is Status.TIMEOUT
    assert isinstance(site.ask(other, Enqueue(LOCK, b"k", UNLIMITED, LEASE)), Enqueued)


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


def test_what_has_begun_and_what_has_not_is_counted(site: Site) -> None:
    rate = Rate(10, 1000)
    for number in range(1, 4):
        site.begin(rate)
        peer, reply = site.take(rate)
        for _ in range(2):  # the second time it is no news
            site.ask(peer, Unbegun(b"k", reply.token))
        assert (site.table.counts.begun, site.table.counts.unbegun) == (number, number)


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


def test_who_has_begun_says_for_how_long_the_lease_is(site: Site) -> None:
    peer, reply = site.take(Rate(1, 1000))
    renewed = site.ask(peer, Renew(LOCK, b"k", reply.token, 20, How.BEGUN))
    assert renewed.lease == 20
    site.go_to(119.9)
    assert site.ask(peer, Release(LOCK, b"k", reply.token)) is Status.OK
