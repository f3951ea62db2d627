"""A table whose clock the test turns, asked for keys with rates."""

from __future__ import annotations

import math
from typing import Any

from dflockd.cluster import snapshot as snapshots
from dflockd.storage.records import decode, encode_hold, encode_packed, encode_rate
from dflockd.table import Effect, HoldRecord, Limits, LockTable, Peer, ShardTable, TokenIssuer
from dflockd.table.rates import PackedRecord, RateRecord
from dflockd.wire import UNLIMITED, Acquire, Granted, How, Moved, Rate, Renew, Request, Space
from tests.dflockd.table.sharded_support import Shards

LOCK = Space.LOCK

LEASE = 10

FIRST_FENCE = 1 << 40


class Site:
    """A table whose clock the test turns as the server's timer does: from deadline to deadline."""

    def __init__(self, **limits: Any) -> None:
        self.now = 100.0
        limits = {"max_locks": 100, "orphan_ttl": 0} | limits
        self.table = LockTable(Limits(**limits), TokenIssuer(b"secret", 100), kept=True)
        self.told: list[Effect] = []

    def ask(self, peer: Peer, request: Request) -> Any:
        effects = self.table.handle(peer, request, self.now)
        self.told += [effect for effect in effects if effect[0] != peer.id]
        return next((reply for number, reply in effects if number == peer.id), None)

    def take(
        self, rate: Rate | None, key: bytes = b"k", timeout: int = 0, limit: int = UNLIMITED
    ) -> tuple[Peer, Any]:
        peer = self.table.connect()
        return peer, self.ask(peer, Acquire(LOCK, key, limit, timeout, LEASE, rate))

    def begin(self, rate: Rate, **more: Any) -> tuple[Peer, bytes]:
        peer, reply = self.take(rate, **more)
        assert isinstance(reply, Granted)
        assert self.ask(peer, Renew(LOCK, more.get("key", b"k"), reply.token, None, How.BEGUN))
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


TWO = Rate(2, 1000)


def kept_of(table: LockTable) -> tuple[list[HoldRecord], list[RateRecord | PackedRecord]]:
    """Return what a journal would restore, by way of its records."""
    holds = [
        hold for group in table.each_partition() for e in group.spaces for hold in all_holds(e)
    ]
    rates = [each for group in table.each_partition() for each in group.rates.open.values()]
    data = b"".join(encode_hold(hold.fields(), 0) for hold in holds if hold.told)
    data += b"".join(encode_rate(block.kept(), 0) for rate in rates for block in rate.blocks)
    packed = {each for group in table.each_partition() for each in group.rates.packed.values()}
    data += b"".join(encode_packed(each.kept(), 0) for each in packed)
    records, _ = decode(data, 0, len(data), 0)
    return (
        [record for record in records if isinstance(record, HoldRecord)],
        [record for record in records if isinstance(record, RateRecord | PackedRecord)],
    )


def all_holds(entries: dict[bytes, Any]) -> list[Any]:
    return [hold for entry in entries.values() for hold in entry.holds.values()]


def shard_table(fence: int = FIRST_FENCE, **more: float) -> ShardTable:
    limits = Limits(max_locks=100, default_lease=LEASE)
    table = ShardTable(limits, TokenIssuer(b"secret", 0), Shards(lambda _: 0))
    table.serve_until(math.inf, 0)
    table.open(0, fence, **more)
    return table


def move(table: ShardTable, now: float, later: float, epoch: int) -> tuple[ShardTable, Any]:
    """Return the table of the next server, whose clock is ahead, and what waiters are told."""
    snapshot = table.freeze(0, now)
    text = snapshots.dump(snapshot, epoch, now)
    effects, _ = table.drop(0, Moved(0, 2, b"other:1"))
    assert len(table.deadlines) == 0
    assert (table.rates.size, table.rates.promised) == (0, 0)
    after = shard_table(epoch << 40)
    after.load(0, snapshots.load(text, epoch, later), later)
    return after, effects
