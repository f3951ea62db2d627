"""Lock tables without one of their rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflockd.table import Effect, ShardTable, Snapshot
from dflockd.table.recovery import forgotten
from dflockd.table.state import Entry, Partition, Peer
from dflockd.wire import Refusal
from dflockd.wire.arguments import Asked


@contextmanager
def promised_for_ever(table: ShardTable) -> Iterator[None]:
    until, table._serving.until = table._serving.until, math.inf
    try:
        yield
    finally:
        table._serving.until = until


class GrantsForEver(ShardTable):
    def open(self, shard: int, fence: int, **more: Any) -> None:
        super().open(shard, fence, **more)
        self.partitions[shard].serving = None  # whoever waits is never left waiting

    def acquire(self, *args: Any) -> Any:
        with promised_for_ever(self):
            return super().acquire(*args)


class RenewsForEver(ShardTable):
    def renew(self, *args: Any, **more: Any) -> Any:
        with promised_for_ever(self):
            return super().renew(*args, **more)


class DoesNotFreeze(ShardTable):
    def freeze(self, shard: int, now: float) -> Snapshot:
        snapshot = super().freeze(shard, now)
        self.groups[shard].frozen = False
        return snapshot


class LowerFenceWins(ShardTable):
    def renew(
        self, peer: Peer, space: int, key: bytes, token: bytes, *more: Any, **how: Any
    ) -> Any:
        _, now, *_ = more
        partition = self.serving(key, now)
        if isinstance(partition, Partition):
            entry = partition.spaces[space].get(key)
            is_here = self.slots.find(partition, space, key, token) is not None
            if (
                entry is not None
                and not is_here
                and forgotten(self.slots, partition, space, key, token, now)
            ):
                for hold in list(entry.holds.values()):
                    self.slots.free(hold, now, [])
        return super().renew(peer, space, key, token, *more, **how)


class ForgetsPositions(ShardTable):
    """Positions that came with their shard are not kept."""

    def load(self, shard: int, snapshot: Snapshot, now: float) -> None:
        super().load(shard, snapshot._replace(waiters=[]), now)


class ForgetsTheNewest(ShardTable):
    """Whoever is older than those who have asked elsewhere may come again here."""

    def load(self, shard: int, snapshot: Snapshot, now: float) -> None:
        super().load(shard, snapshot._replace(newest=()), now)


class ForgetsRates(ShardTable):
    """Runs that have begun elsewhere do not count here."""

    def load(self, shard: int, snapshot: Snapshot, now: float) -> None:
        holds = [hold._replace(places=0) for hold in snapshot.holds]
        super().load(shard, snapshot._replace(rates=(), holds=holds), now)


class LetsOneMoreBegin(ShardTable):
    """Counts to one too many in each window."""

    def _admit(
        self, peer: Peer, space: int, key: bytes, asked: Asked, now: float, effects: list[Effect]
    ) -> Entry | Refusal:
        if asked.rate is not None:
            asked.rate = asked.rate._replace(runs=asked.rate.runs + 1)
        return super()._admit(peer, space, key, asked, now, effects)


class DoesNotWaitForTheRelease(ShardTable):
    """Takes the lock from who is older, and does not wait until they have let go."""

    def _admit(
        self, peer: Peer, space: int, key: bytes, asked: Asked, now: float, effects: list[Effect]
    ) -> Entry | Refusal:
        found = super()._admit(peer, space, key, asked, now, effects)
        if isinstance(found, Entry) and asked.owner is not None and asked.owner.age:
            for hold in list(found.holds.values()):
                if hold.owner is not None and hold.owner.age < asked.owner.age:
                    self.slots.free(hold, now, effects)
            if not self.slots.is_here(found):
                return self.slots.enter(found.partition, space, key, found.limit, now)
        return found


class ForgetsTurns(ShardTable):
    """Those who wait come here in the order in which they first came, and in no group."""

    def load(self, shard: int, snapshot: Snapshot, now: float) -> None:
        waiters = sorted(snapshot.waiters, key=lambda waiter: waiter.since)
        waiters = [waiter._replace(group=None) for waiter in waiters]
        super().load(shard, snapshot._replace(waiters=waiters), now)
