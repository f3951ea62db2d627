"""Rates in random histories, beside a naive model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dflockd.table import Effect, Limits, LockTable, Peer, ShardTable, TokenIssuer
from dflockd.table.rates import BLOCK, RateRecord
from dflockd.wire import (
    UNLIMITED,
    Acquire,
    Enqueued,
    Granted,
    How,
    Rate,
    Release,
    Renew,
    Renewed,
    Request,
    Space,
    Status,
    Unbegun,
)
from tests.dflockd.table.naive_rates import LATE, NaiveRate, NaiveRates, Name
from tests.dflockd.table.rates_support import (
    FIRST_FENCE,
    LEASE,
    all_holds,
    kept_of,
    move,
    shard_table,
)
from tests.dflockd.table.recount import check_counts


class History:
    """Some connections, three keys with a rate each, and chance."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.is_sharded = seed % 2 == 1
        runs, window = self.dice.choice([(1, 1000), (2, 1000), (3, 500), (5, 3000), (40, 2000)])
        self.rates = {
            (0, b"a"): Rate(runs, window),
            (0, b"b"): Rate(2, 750),
            (0, b"c"): Rate(runs, window),
        }
        limits: dict[Name, int] = {(0, b"a"): 1, (0, b"b"): 3, (0, b"c"): UNLIMITED}
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
        space, key = Space(hold.name[0]), hold.name[1]
        peer = self.peers.get(hold.peer) or self.idle()
        if way == "begun":
            self.model.begin(token)
            hold.peer = peer.id
            request: Request = Renew(space, key, token, LEASE, How.BEGUN)
        else:
            self.model.end(token, has_begun=way == "release")
            request = Unbegun(key, token) if way == "unbegun" else Release(space, key, token)
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
            since = self.table._partition.rates.since
            self.table = self.new_table()
            if self.dice.random() < 0.3:
                rates = [r._replace(begun=()) for r in rates if isinstance(r, RateRecord)]
                since = self.model.now
                for rate in self.model.rates.values():
                    rate.closed_until = self.model.now + rate.window
            self.table.restore(holds, self.model.now, rates)
            self.table.doubt_rates(since)
        ends = {
            hold.token: hold.deadline
            for group in self.table.each_partition()
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
                request = Acquire(
                    *(Space(name[0]), name[1], self.model.limits[name], 20, LEASE),
                    self.rates[name],
                    ticket=tickets.get(number, b""),
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
        for number, act in enumerate(self.dice.choices([*moves], [*moves.values()], k=steps)):
            act()
            self.check()
            if number % 5 == 0:
                check_counts(self.table)
        self.end()

    def check(self) -> None:
        self.model.check()
        group = next(iter(self.table.each_partition()))
        for name, rate in self.model.rates.items():
            self.seen["packed"] += bytes(name[:1]) + name[1] in group.rates.packed
            real = self.table.rate_of(*name)
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
        assert not any(
            group.rates.open or group.rates.packed for group in self.table.each_partition()
        )
        assert not self.table.rates._open


@pytest.fixture(params=[10_000, 0])
def most_open(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rates that rest and are not packed: as many as there are, or none."""
    monkeypatch.setattr("dflockd.table.rates.MOST_OPEN", request.param)
    return int(request.param)


@pytest.mark.parametrize(
    "seeds", [range(80), pytest.param(range(80, 4000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_random_histories_keep_their_rates(seeds: range, most_open: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed)
        history.run(250)
        seen += history.seen
    assert bool(seen.pop("packed", 0)) is (most_open == 0)
    assert len(seen) == 7
    assert min(seen.values()) > 100, seen
