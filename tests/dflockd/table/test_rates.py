"""How many runs of a key begin in a while: single rules, and random histories beside a naive model."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from dflockd.cluster import snapshot as snapshots
from dflockd.storage.records import decode, encode_hold, encode_rate
from dflockd.table import (
    Effect,
    HoldRecord,
    Limits,
    LockTable,
    Peer,
    ShardTable,
    Snapshot,
    TokenIssuer,
)
from dflockd.table.rates import BLOCK, RateBlock, RateRecord
from dflockd.wire import (
    UNLIMITED,
    Acquire,
    Begun,
    Enqueue,
    Enqueued,
    Granted,
    MapReport,
    Moved,
    Rate,
    Refusal,
    Release,
    Renewed,
    Report,
    Request,
    Reserve,
    Resume,
    Space,
    Status,
    TimedOut,
    Turn,
    Unbegun,
    Wait,
    YourTurn,
)
from tests.dflockd.table.naive_rates import LATE, NaiveRate, NaiveRates, Name

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE
LEASE = 10
FIRST_FENCE = 1 << 40


class Site:
    """A table whose clock the test turns as the server's timer does: from deadline to deadline."""

    def __init__(self, **limits: Any) -> None:
        self.now = 100.0
        limits = {"max_locks": 100, "orphan_ttl": 0} | limits
        self.table = LockTable(Limits(**limits), TokenIssuer(b"secret", 0), kept=True)
        self.told: list[Effect] = []

    def ask(self, peer: Peer, request: Request) -> Any:
        effects = self.table.handle(peer, request, self.now)
        self.told += [effect for effect in effects if effect[0] != peer.id]
        return next((reply for number, reply in effects if number == peer.id), None)

    def take(
        self, rate: Rate | None, key: bytes = b"k", timeout: int = 0, limit: int = UNLIMITED
    ) -> tuple[Peer, Any]:
        peer = self.table.connect()
        space = LOCK if limit == 1 else SEMAPHORE
        return peer, self.ask(peer, Acquire(space, key, limit, timeout, LEASE, rate))

    def begin(self, rate: Rate, **more: Any) -> tuple[Peer, bytes]:
        peer, reply = self.take(rate, **more)
        assert isinstance(reply, Granted)
        space = LOCK if more.get("limit") == 1 else SEMAPHORE
        assert self.ask(peer, Begun(space, more.get("key", b"k"), reply.token, None))
        return peer, reply.token

    def leave(self, peer: Peer, **more: Any) -> None:
        self.told += self.table.disconnect(peer, self.now, clean=True, **more)

    def go_to(self, now: float) -> None:
        while (due := self.table.next_deadline()) is not None and due <= now:
            self.now = max(self.now, due)
            self.told += self.table.advance(self.now)
        self.now = now

    def granted(self) -> list[int]:
        told, self.told = self.told, []
        return [peer for peer, reply in told if isinstance(reply, Granted)]


@pytest.fixture
def site() -> Site:
    return Site()


TWO = Rate(2, 1000)


def test_a_place_is_free_one_window_after_the_server_has_heard_of_the_beginning(site: Site) -> None:
    first, token = site.begin(TWO)
    site.go_to(100.5)
    site.begin(TWO)
    waiting = [site.take(TWO, timeout=60)[0].id for _ in range(3)]
    site.ask(first, Release(SEMAPHORE, b"k", token))  # that is nothing new
    site.go_to(100.999)
    assert site.granted() == []
    site.go_to(101.001)
    assert site.granted() == waiting[:1]
    site.go_to(101.501)
    assert site.granted() == waiting[1:2]
    # Neither of these has said that it has begun, so nobody knows when a place will be free.
    site.go_to(105.0)
    assert site.granted() == []
    assert site.table._group.rates[SEMAPHORE, b"k"].free(site.now) == 0


def test_who_says_nothing_has_begun_when_the_hold_ends(site: Site) -> None:
    rate = Rate(1, 1000)
    peer, reply = site.take(rate)
    site.go_to(104.0)
    waiter, _ = site.take(rate, timeout=60)
    site.ask(peer, Release(SEMAPHORE, b"k", reply.token))
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
    assert site.ask(peer, Unbegun(SEMAPHORE, b"k", reply.token)) is Status.OK
    assert site.granted() == [waiter.id]
    # Once it has begun that cannot be taken back.
    again, _ = site.take(rate, timeout=60)
    token = next(iter(waiter.holds)).token
    assert isinstance(site.ask(waiter, Begun(SEMAPHORE, b"k", token, 5)), Renewed)
    assert site.ask(waiter, Unbegun(SEMAPHORE, b"k", token)) is Status.OK
    assert site.granted() == []
    assert again.waiting is not None
    assert (site.table.counts.begun, site.table.counts.unbegun) == (1, 1)


def test_what_nobody_was_told_of_has_not_begun(site: Site) -> None:
    rate = Rate(1, 60_000)
    # An answer that could not be sent, and an enqueue whose grant came while nobody asked.
    holder, reply = site.take(rate)
    waiter, _ = site.take(rate, timeout=60)
    enqueued = site.table.connect()
    assert site.ask(enqueued, Enqueue(SEMAPHORE, b"k", UNLIMITED, LEASE, rate)) is Status.QUEUED
    site.ask(holder, Unbegun(SEMAPHORE, b"k", reply.token))
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
        site.ask(peer, Release(SEMAPHORE, b"k", token))
    assert site.granted() == waiting[:1]  # the second slot is free, and no place
    site.go_to(101.001)
    assert site.granted() == waiting[1:2]


def test_a_try_finds_no_place(site: Site) -> None:
    peer, token = site.begin(Rate(1, 1000))
    site.ask(peer, Release(SEMAPHORE, b"k", token))
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


def test_what_is_asked_for_has_bounds_and_changes_nothing_if_refused() -> None:
    site = Site(max_rate_window=60, max_rate_runs=10, max_locks=1)
    assert site.take(Rate(1, 60_001))[1] is Status.RATE_WINDOW
    assert site.take(Rate(11, 1000))[1] is Status.MAX_RATES
    assert (len(site.table), site.table._group.rates, site.table.rates.promised) == (0, {}, 0)
    peer, token = site.begin(Rate(6, 60_000))
    site.ask(peer, Release(SEMAPHORE, b"k", token))
    assert len(site.table) == 0  # it does not count among the keys
    assert site.take(Rate(5, 60_000), key=b"other")[1] is Status.MAX_RATES
    assert isinstance(site.take(Rate(12, 60_000))[1], Granted)  # known ones are not refused
    assert site.take(Rate(5, 60_000), limit=3)[1] is Status.LIMIT_MISMATCH
    assert site.table._group.rates[SEMAPHORE, b"k"].runs == 12


def test_nothing_is_left_of_a_rate_one_window_after_its_last_run(site: Site) -> None:
    for key in (b"a", b"b"):
        for _ in range(2 * BLOCK):
            peer, token = site.begin(Rate(3 * BLOCK, 2000), key=key)
            site.ask(peer, Release(SEMAPHORE, key, token))
            site.leave(peer)
    site.go_to(101.9)
    assert len(site.table._group.rates) == 2
    site.go_to(104.2)
    assert not site.table._group.rates
    assert site.table.rates.promised == 0
    assert site.table.next_deadline() is None
    changed = [change for change in site.table.changes or () if isinstance(change, RateBlock)]
    assert len(changed) > 2 * BLOCK
    assert all(block.ended for block in changed)


def test_a_turn_is_told_when_there_is_a_place(site: Site) -> None:
    rate = Rate(1, 1000)
    site.begin(rate)
    waiter, other = site.table.connect(), site.table.connect()
    for peer in (waiter, other):
        assert site.ask(peer, Turn(200)) is Status.OK
        assert site.ask(peer, Enqueue(SEMAPHORE, b"k", UNLIMITED, LEASE, rate)) is Status.QUEUED
        assert site.ask(peer, Wait(SEMAPHORE, b"k", 60)) is None
    site.go_to(101.001)
    ((told, reply),) = site.told
    assert told == waiter.id
    assert isinstance(reply, YourTurn)
    # The place is set aside for whoever has the ticket.
    child = site.table.connect()
    assert site.take(rate)[1] is Status.TIMEOUT
    site.ask(child, Resume(reply.ticket))
    assert isinstance(site.ask(child, Acquire(SEMAPHORE, b"k", UNLIMITED, 1, LEASE, rate)), Granted)
    assert next(iter(child.holds)).is_pending
    site.told.clear()
    site.go_to(105.0)
    assert site.told == []  # the child has not begun
    site.leave(child)
    site.go_to(106.001)
    assert [told for told, _ in site.told] == [other.id]


def test_a_position_is_kept_and_has_the_place_when_it_comes_back(site: Site) -> None:
    rate = Rate(1, 1000)
    site.begin(rate)
    waiter = site.table.connect()
    site.ask(waiter, Enqueue(SEMAPHORE, b"k", UNLIMITED, LEASE, rate))
    site.ask(waiter, Reserve(1500, 700))
    kept = site.ask(waiter, Wait(SEMAPHORE, b"k", 0))
    assert isinstance(kept, TimedOut)
    behind, _ = site.take(rate, timeout=60)
    site.go_to(101.4)
    assert site.granted() == []  # the place is kept for who comes back
    site.ask(waiter, Resume(kept.ticket))
    back = Acquire(SEMAPHORE, b"k", UNLIMITED, 60, LEASE, rate)
    assert isinstance(site.ask(waiter, back), Granted)
    site.leave(waiter)
    site.go_to(102.41)
    assert site.granted() == [behind.id]


# What outlives a table.


def kept_of(table: LockTable) -> tuple[list[HoldRecord], list[RateRecord]]:
    """Return what a journal would restore, by way of its records."""
    holds = [hold for group in table.each_group() for e in group.spaces for hold in all_holds(e)]
    rates = [each for group in table.each_group() for each in group.rates.values()]
    data = b"".join(encode_hold(hold.fields(), 0) for hold in holds if hold.told)
    data += b"".join(encode_rate(block.kept(), 0) for rate in rates for block in rate.blocks)
    records, _ = decode(data, 0, len(data), 0)
    return (
        [record for record in records if isinstance(record, HoldRecord)],
        [record for record in records if isinstance(record, RateRecord)],
    )


def all_holds(entries: dict[bytes, Any]) -> list[Any]:
    return [hold for entry in entries.values() for hold in entry.holds.values()]


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
    assert after.ask(mine, Begun(SEMAPHORE, b"k", pending.token, LEASE))
    after.go_to(102.0)
    assert after.take(rate)[1] is Status.TIMEOUT
    after.go_to(102.002)
    assert isinstance(after.take(rate)[1], Granted)


def test_after_a_crash_of_the_machine_rates_wait_one_window(site: Site) -> None:
    site.begin(Rate(5, 2000))
    _, rates = kept_of(site.table)
    after = Site()
    after.now = 50.0
    after.table.restore([], 50.0, [rate._replace(times=()) for rate in rates])
    after.table.doubt_rates(50.0)
    for key in (b"k", b"unknown"):
        assert after.take(Rate(5, 2000), key=key)[1] is Status.TIMEOUT
    waiter, _ = after.take(Rate(1, 2000), key=b"third", timeout=60)
    assert isinstance(after.take(None, key=b"plain")[1], Granted)
    after.go_to(52.001)
    assert after.granted() == [waiter.id]


class One:
    """All keys are in one shard."""

    def shard_of(self, key: bytes) -> int:
        return 0

    def refer(self, shard: int) -> Refusal:
        return Moved(0, 2, b"other:1")

    def report(self, now: float) -> MapReport:
        return MapReport(b"", Report(b"{}"), Report(b"{}"))


def shard_table(fence: int = FIRST_FENCE, **more: float) -> ShardTable:
    limits = Limits(max_locks=100, default_lease=LEASE)
    table = ShardTable(limits, TokenIssuer(b"secret", 0), One())
    table.serve_until(math.inf, 0)
    table.open(0, fence, **more)
    return table


def move(table: ShardTable, now: float, later: float, epoch: int) -> tuple[ShardTable, Any]:
    """Return the table of the next server, whose clock is ahead, and what waiters are told."""
    snapshot = table.freeze(0, now)
    text = snapshots.dump(snapshot, epoch, now)
    effects, _ = table.drop(0, Moved(0, 2, b"other:1"))
    assert len(table.deadlines) == 0
    assert table.rates.promised == 0
    after = shard_table(epoch << 40)
    after.load(0, snapshots.load(text, epoch, later), later)
    return after, effects


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
    site.ask(site.table.connect(), Begun(SEMAPHORE, b"k", pending.token, LEASE))
    site.go_to(701.9)
    assert site.take(rate)[1] is Status.TIMEOUT


def test_a_shard_whose_server_was_lost_waits_one_window() -> None:
    site = Site()
    site.table = shard_table(opens_at=100.5, recovers_until=101.0, rates_since=101.0)
    site.go_to(101.0)
    assert isinstance(site.take(None)[1], Granted)
    assert site.take(Rate(5, 1000), key=b"a")[1] is Status.TIMEOUT
    site.go_to(102.001)
    assert isinstance(site.take(Rate(5, 1000), key=b"a")[1], Granted)


def test_an_older_server_loads_a_snapshot_with_rates_and_this_one_loads_one_without() -> None:
    site = Site()
    site.table = shard_table()
    site.begin(TWO)
    text = snapshots.dump(site.table.freeze(0, site.now), 1, site.now)
    assert b'"rates":[[1,"k",2,1.0,1,[0.0]]]' in text
    older = snapshots.dump(Snapshot([], []), 1, 0.0)
    assert b"rates" not in older
    assert snapshots.load(older, 1, 0.0) == Snapshot([], [], (), [])


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


# Random histories.


class History:
    """Some connections, three keys with a rate each, and chance."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.is_sharded = seed % 2 == 1
        runs, window = self.dice.choice([(1, 1000), (2, 1000), (3, 500), (5, 3000), (40, 2000)])
        self.rates = {
            (0, b"a"): Rate(runs, window),
            (1, b"b"): Rate(2, 750),
            (1, b"c"): Rate(runs, window),
        }
        limits: dict[Name, int] = {(0, b"a"): 1, (1, b"b"): 3, (1, b"c"): UNLIMITED}
        self.model = NaiveRates(
            limits,
            {name: NaiveRate(rate.runs, rate.window / 1000) for name, rate in self.rates.items()},
            LEASE,
            100.0,
        )
        self.names = list(self.rates)
        self.fence = FIRST_FENCE
        self.epoch = 1
        self.table: LockTable = shard_table() if self.is_sharded else self.new_table()
        self.peers: dict[int, Peer] = {}
        self.waiting: dict[int, Name] = {}
        self.seen: Counter[str] = Counter()

    def new_table(self) -> LockTable:
        self.fence += 1 << 32
        limits = Limits(max_locks=100, default_lease=LEASE)
        return LockTable(limits, TokenIssuer(b"secret", self.fence), kept=True)

    def heed(self, effects: list[Effect]) -> None:
        """Do with what the table says what clients and the model do."""
        for number, reply in effects:
            name = self.waiting.pop(number, None)
            if name is None:
                continue
            queue = self.model.queues.setdefault(name, [])
            if isinstance(reply, Granted | Enqueued):
                assert queue[0] == number, "first come, first served"
                self.seen["granted later"] += 1
                self.model.grant(name, number, reply.token)
            queue.remove(number)

    def acquire(self) -> None:
        name, peer = self.dice.choice(self.names), self.idle()
        timeout = self.dice.choice([0, 2, 20])
        request = Acquire(
            Space(name[0]), name[1], self.model.limits[name], timeout, LEASE, self.rates[name]
        )
        effects = self.table.handle(peer, request, self.model.now)
        mine = [reply for number, reply in effects if number == peer.id]
        if not mine:
            self.waiting[peer.id] = name
            self.model.queues.setdefault(name, []).append(peer.id)
        elif isinstance(mine[0], Granted):
            assert not self.model.queues.get(name), "nobody overtakes"
            self.seen["granted at once"] += 1
            self.model.grant(name, peer.id, mine[0].token)
        else:
            assert mine[0] is Status.TIMEOUT
            self.seen["tried in vain"] += 1
        self.heed([effect for effect in effects if effect[0] != peer.id])

    def tell(self) -> None:
        """Somebody begins, or gives the slot back, or ends."""
        if not self.model.holds:
            return
        token = self.dice.choice(list(self.model.holds))
        hold = self.model.holds[token]
        way = self.dice.choice(["begun", "begun", "release", "unbegun", "unbegun"])
        self.seen[way] += 1
        kinds: dict[str, Any] = {"release": Release, "unbegun": Unbegun}
        space, key = Space(hold.name[0]), hold.name[1]
        peer = self.peers.get(hold.peer) or self.idle()
        if way == "begun":
            self.model.begin(token)
            hold.peer = peer.id
            request: Request = Begun(space, key, token, LEASE)
        else:
            self.model.end(token, has_begun=way == "release")
            request = kinds[way](space, key, token)
        effects = self.table.handle(peer, request, self.model.now)
        assert effects[0][0] == peer.id
        assert effects[0][1] is Status.OK or isinstance(effects[0][1], Renewed)
        self.heed(effects[1:])

    def idle(self) -> Peer:
        ready = [peer for peer in self.peers.values() if peer.waiting is None]
        if len(ready) > 6 and self.dice.random() < 0.9:
            return self.dice.choice(ready)
        peer = self.table.connect()
        self.peers[peer.id] = peer
        return peer

    def leave(self) -> None:
        if self.peers:
            number = self.dice.choice(list(self.peers))
            self.waiting.pop(number, None)
            self.model.leave(number)
            peer = self.peers.pop(number)
            self.heed(self.table.disconnect(peer, self.model.now, clean=True))

    def pass_time(self) -> None:
        until = self.model.now + self.dice.choice([0.05, 0.25, 0.25, 0.5, 1.0])
        # What was rounded on its way through a restart may be due a little later than in the model.
        while (due := self.table.next_deadline()) is not None and due <= until + 1e-6:
            self.model.now = max(self.model.now, due)
            self.model.lapse()
            self.heed(self.table.advance(self.model.now))
        self.model.now = max(self.model.now, until)
        self.model.lapse()

    def go_elsewhere(self) -> None:
        """The server is killed and restarted, or its machine ends, or the shard moves."""
        self.seen["elsewhere"] += 1
        queues = {name: list(queue) for name, queue in self.model.queues.items()}
        self.model.queues.clear()
        self.peers.clear()
        tickets = {}
        if isinstance(self.table, ShardTable):
            self.epoch += 1
            self.table, effects = move(self.table, self.model.now, self.model.now, self.epoch)
            tickets = {number: reply.ticket for number, reply in effects}
        else:
            holds, rates = kept_of(self.table)
            since = self.table._group.rates_since
            self.table = self.new_table()
            if self.dice.random() < 0.3:
                rates = [rate._replace(times=()) for rate in rates]
                since = self.model.now
                for rate in self.model.rates.values():
                    rate.closed_until = self.model.now + rate.window
            self.table.restore(holds, self.model.now, rates)
            self.table.doubt_rates(since)
        ends = {
            hold.token: hold.deadline
            for group in self.table.each_group()
            for entries in group.spaces
            for hold in all_holds(entries)
        }
        for token, left in self.model.holds.items():
            # All leases begin anew with a shard; else they end up to a tenth of a second late.
            most = LEASE if self.is_sharded else left.deadline - self.model.now + 0.1
            assert left.deadline - 1e-6 <= ends[token] <= self.model.now + most + 1e-6
            left.peer, left.deadline = 0, ends[token]
        self.waiting.clear()
        for name, queue in queues.items():
            for number in queue:
                peer = self.table.connect()
                self.peers[peer.id] = peer
                if number in tickets:
                    self.table.handle(peer, Resume(tickets[number]), self.model.now)
                request = Acquire(
                    *(Space(name[0]), name[1], self.model.limits[name], 20, LEASE),
                    self.rates[name],
                )
                self.waiting[peer.id] = name
                self.model.queues.setdefault(name, []).append(peer.id)
                self.heed(self.table.handle(peer, request, self.model.now))

    def run(self, steps: int) -> None:
        moves = {
            self.acquire: 10,
            self.tell: 8,
            self.leave: 0.6,
            self.pass_time: 5,
            self.go_elsewhere: 0.3,
        }
        for step in self.dice.choices(list(moves), list(moves.values()), k=steps):
            step()
            self.check()
        self.end()

    def check(self) -> None:
        self.model.check()
        group = next(iter(self.table.each_group()))
        for name, rate in self.model.rates.items():
            real = group.rates.get(name)  # type: ignore[call-overload]
            free = rate.runs if real is None else real.free(self.model.now)
            if self.model.now >= rate.closed_until:
                now = self.model.now  # a move rounds times up
                assert rate.free(now - LATE) <= free <= rate.free(now), name
            if real is not None:
                assert len(real.blocks) <= 2 + rate.runs // BLOCK * 2

    def end(self) -> None:
        for number in list(self.peers):
            self.table.disconnect(self.peers.pop(number), self.model.now, clean=True)
        while (due := self.table.next_deadline()) is not None:
            self.model.now = max(due, self.model.now)
            self.table.advance(self.model.now)
        assert len(self.table) == 0
        assert self.table.rates.promised == 0
        assert not any(group.rates for group in self.table.each_group())


@pytest.mark.parametrize(
    "seeds", [range(80), pytest.param(range(80, 4000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_random_histories_keep_their_rates(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed)
        history.run(250)
        seen += history.seen
    assert len(seen) == 7
    assert min(seen.values()) > 100, seen
