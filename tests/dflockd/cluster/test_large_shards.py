"""A shard with as much in it as the limits allow: all of it goes with the shard."""

from __future__ import annotations

import pytest

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.transactions import Kind
from dflockd.table import Snapshot
from dflockd.table.rates import RateRecord
from dflockd.wire import (
    UNLIMITED,
    Acquire,
    Enqueue,
    FairGroup,
    Granted,
    How,
    Owner,
    Rate,
    Renew,
    Renewed,
    Reserve,
    Space,
    Status,
    TimedOut,
    Wait,
)
from tests.dflockd.cluster.nodes import KEY, Cluster, of_kind
from tests.dflockd.table.turns_support import process, ticket_of
from tests.effort import more

WINDOW = 86_400.0


class Large:
    """A shard at ``a:1``, to be moved to ``b:1``."""

    def __init__(self) -> None:
        self.cluster = Cluster("a:1", "b:1")
        self.table = self.cluster.nodes["a:1"].table

    def move(self) -> Snapshot:
        """Move it; return what was handed over, after a comparison with what has arrived."""
        cluster = self.cluster
        del cluster.transactions[:]
        cluster.move(0, "b:1")
        (*_, release) = of_kind(cluster.transactions, Kind.RELEASE)
        (tenure,) = release.tenures
        handed = snapshots.load(b"".join(tenure.parts), tenure.epoch, cluster.now)
        assert len(tenure.parts) > 1
        assert cluster.record(0).current == "b:1"
        assert not cluster.store.load("/p.handoff/").records
        there = cluster.nodes["b:1"].table
        arrived = there.freeze(0, cluster.now)
        there.thaw(0, cluster.now)
        assert {h.fence: h._replace(lease=0, deadline=0) for h in handed.holds} == {
            h.fence: h._replace(lease=0, deadline=0) for h in arrived.holds
        }
        assert sum(hold.detached for hold in handed.holds) == sum(
            hold.detached for hold in arrived.holds
        )
        assert [(w.key, w.ticket, w.owner, w.group) for w in handed.waiters] == [
            (w.key, w.ticket, w.owner, w.group) for w in arrived.waiters
        ]
        assert places(handed) == places(arrived)
        return handed


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Large:
    """One that goes over in parts, as one with twenty times as much does."""
    monkeypatch.setattr("dflockd.cluster.handover.PART", 5_000)
    return Large()


@pytest.mark.parametrize("number", [5_000, more(100_000)])
def test_all_locks(large: Large, number: int) -> None:
    cluster = large.cluster
    keys = [b"shard#0/%d" % n for n in range(number)]
    tokens = {}
    for first in range(0, number, most := large.table.limits.max_holds):
        peer, some = large.table.connect(), keys[first : first + most]
        tokens.update({key: cluster.take("a:1", key, peer) for key in some})
        for key in some[::100]:
            renew = Renew(Space.LOCK, key, tokens[key], 4, How.DETACH)
            assert isinstance(cluster.ask("a:1", renew, peer), Renewed)
    handed = large.move()
    assert len(handed.holds) == number
    assert sum(hold.detached for hold in handed.holds) == number / 100
    for key in keys[::1000]:
        assert isinstance(cluster.renew("b:1", tokens[key], key), Renewed)


def test_five_thousand_waiters_with_turns_in_groups_keep_their_positions(large: Large) -> None:
    cluster, number = large.cluster, 5_000
    token = cluster.take("a:1")
    tickets = []
    for n in range(number):
        asked = Enqueue(
            *(Space.LOCK, KEY, 1, 4),
            owner=Owner(b"run-%d" % n, 0),
            group=FairGroup(b"g%d" % (n % 3)),
            turn=1000,
            label=b"proj.tasks.sync[%d]" % n,
        )
        reply = cluster.ask("a:1", asked, process(large.table, b"worker-%d" % (n % 7)))
        tickets.append(ticket_of(reply))
    handed = large.move()
    # In the order of their turns, and under the same tickets.
    assert [waiter.ticket for waiter in handed.waiters] == tickets
    assert [waiter.owner for waiter in handed.waiters] == [b"run-%d" % n for n in range(number)]
    assert cluster.renew("b:1", token) == Renewed(4)


@pytest.mark.parametrize("number", [5_000, more(100_000)])
def test_all_reservations(large: Large, number: int) -> None:
    cluster = large.cluster
    # More of one key than its clients may leave: a server takes in all that comes.
    large.table.slots.reservations._most = number
    token = cluster.take("a:1")
    tickets = []
    for _ in range(number):
        peer = large.table.connect()
        asked = Enqueue(Space.LOCK, KEY, 1, 4)
        assert cluster.ask("a:1", asked, peer) is Status.QUEUED
        left = cluster.ask("a:1", Wait(Space.LOCK, KEY, 0, Reserve(3_500, 500)), peer)
        assert isinstance(left, TimedOut)
        tickets.append(left.ticket)
        large.table.disconnect(peer, cluster.now, clean=True)
    handed = large.move()
    assert [waiter.ticket for waiter in handed.waiters] == tickets
    until = {round(waiter.reservation.due - cluster.now, 3) for waiter in handed.waiters}  # type: ignore[union-attr]
    assert until == {3.5}
    assert cluster.renew("b:1", token) == Renewed(4)


def starts(key: bytes, number: int, now: float) -> list[RateRecord]:
    """A rate all of whose places are taken: the first is free again in a second, the last in a day."""
    step = (WINDOW - 1) / number
    begun = [part for n in range(number) for part in (now - WINDOW + 1 + step * n, 1)]
    return [
        RateRecord(Space.LOCK, key, number, WINDOW, first + 1, tuple(begun[first : first + 64]))
        for first in range(0, 2 * number, 64)
    ]


def places(snapshot: Snapshot) -> float:
    """How many places of rates are taken, all together."""
    return sum(sum(rate.begun[1::2]) for rate in snapshot.rates)


@pytest.mark.parametrize("number", [100_000, more(1_000_000)])
@pytest.mark.parametrize("keys", [1, 100])
def test_all_beginnings_of_rates(large: Large, keys: int, number: int) -> None:
    cluster = large.cluster
    names = [b"shard#0/%d" % n for n in range(keys)]
    rates = [record for name in names for record in starts(name, number // keys, cluster.now)]
    large.table.load(0, Snapshot([], [], (), rates), cluster.now)
    handed = large.move()
    assert places(handed) == number
    rate = Rate(number // keys, int(WINDOW * 1000))
    asked = Acquire(Space.LOCK, names[-1], UNLIMITED, 0, 4, rate)
    assert cluster.ask("b:1", asked) is Status.TIMEOUT
    cluster.pass_(1.2)
    assert isinstance(cluster.ask("b:1", asked), Granted)
