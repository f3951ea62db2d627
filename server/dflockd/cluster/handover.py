"""How shards go from a server: frozen, then written down with their locks for the next one.

What does not fit into one transaction is written in parts, and the record with the last of them: until
then the shard is this server's. Each transaction finds the record unchanged, so a part that comes late,
of a hand-over that was given up, is not written.
"""

from __future__ import annotations

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.tenures import Stage, Tenure, Tenures
from dflockd.cluster.transactions import BATCH, Kind, Transaction, take
from dflockd.shards import Delete, Put, ValueIs
from dflockd.shards.store import Compare, StoreOperation

MAX_HANDED = 2 * BATCH
"""Shards for each that takes some, handed over and not taken yet, before others follow: none is to
wait for long."""

HAND_OVER_TIMEOUT = 0.5
"""Seconds for which a shard that was handed over is waited for to be taken."""

PART = 400_000
"""Bytes that are handed over in one transaction: etcd takes 1.5 MiB. Each has to arrive within the
time of one answer, even if the way to etcd is slow."""


class HandOver:
    """Gives shards away.

    Attributes:
        queue: shards to hand over, first come, first served.
        foreign: shards of an earlier life of this server, of which nothing is known.
        leaving: whether all are given away, and a silent server is not waited for again.
    """

    def __init__(self, tenures: Tenures) -> None:
        self.queue: dict[int, None] = {}
        self.foreign: dict[int, None] = {}
        self.leaving = False
        self._tenures = tenures
        self._view = tenures.view
        self._table = tenures.table
        self._handed: dict[int, float] = {}
        """When shards were handed over that nobody has taken yet, oldest first."""
        self._silent: set[str] = set()
        """Those that did not take in time what they were given."""

    def next_deadline(self) -> float | None:
        """Return when `may_go_on` should be asked again."""
        if not (self.queue and self._handed):
            return None
        return next(iter(self._handed.values())) + HAND_OVER_TIMEOUT

    def may_go_on(self, now: float) -> bool:
        """Whether those who take shards over keep up with this server."""
        while self._handed:
            shard = next(iter(self._handed))
            if now < self._handed[shard] + HAND_OVER_TIMEOUT:
                break
            del self._handed[shard]
            target = self._view.records[shard].target
            if self.leaving and target not in self._silent:
                # It may be dead: what it is given now is out of service for no longer than what it
                # has been given, and what this server is left with waits for holders.
                self._silent.add(target)
                self.look()
        takers = len(self._view.candidates - {self._tenures.address})
        return len(self._handed) < MAX_HANDED * max(1, takers)

    def seen(self, shard: int) -> None:
        """Take note of what there is to know about a shard: it may not be waited for any more."""
        if shard in self._handed:
            record = self._view.records[shard]
            if record.current or not self._is_taker(record.target):
                del self._handed[shard]

    def look(self) -> None:
        """Find out which of those that were to take shards over do not any more."""
        for shard in list(self._handed):
            self.seen(shard)

    def due(self, condition: ValueIs, now: float) -> Transaction:
        """Hand some shards over. From here on nothing about them changes in the table."""
        compares: list[Compare] = [condition]
        operations: list[StoreOperation] = []
        tenures: list[Tenure] = []
        size = 0
        for shard in take(self.queue):
            tenure = self._tenures[shard]
            if tenure.stage is Stage.SERVING:
                self._freeze(tenure, now)
            part = tenure.parts[tenure.unwritten] if tenure.parts else b""
            size += len(part)
            if tenures and (size > PART or tenure.unwritten):
                self.queue[shard] = None  # too much for one transaction: it is the next one's
                break
            tenure.compared = self._view.revisions[shard]
            tenure.under_way = True
            tenures.append(tenure)
            compares.append(self._tenures.unchanged(shard))
            key = self._view.handed_over(shard, tenure.unwritten)
            operations.append(Put(key, part) if part else Delete(key))
            if tenure.unwritten:
                break  # the record says that all parts are there, so it goes with the last one
            record = self._view.records[shard]._replace(current="").with_parts(len(tenure.parts))
            tenure.record = record.with_clean(tenure.epoch if tenure.clean else None)
            operations.append(self._tenures.put(shard, tenure.record))
        return Transaction(Kind.RELEASE, now, compares, operations, tenures)

    def ended(self, tenure: Tenure, now: float) -> None:
        """Forget a shard that has been handed over."""
        self._tenures.forget(tenure)
        if self._is_taker(tenure.record.target):
            self._handed[tenure.shard] = now

    def _is_taker(self, server: str) -> bool:
        """Whether a server takes over what is handed to it: not one that leaves, this one above all."""
        return (
            server in self._view.candidates
            and server != self._tenures.address
            and server not in self._silent
        )

    def may_thaw(self, tenure: Tenure) -> bool:
        """Whether a shard that is not to go after all can be served again.

        With a newer revision in the store, no release that was sent before can be carried out. An
        answer that does not come says nothing of the kind.
        """
        return self._view.revisions[tenure.shard] > tenure.compared

    def clear(self, condition: ValueIs, now: float) -> Transaction:
        """Let go of shards of an earlier life: the next server must wait for their holders."""
        compares: list[Compare] = [condition]
        operations: list[StoreOperation] = []
        shards = list(take(self.foreign))
        for shard in shards:
            record = self._view.records[shard]._replace(current="").with_clean(None).with_parts(0)
            compares.append(self._tenures.unchanged(shard))
            operations.append(self._tenures.put(shard, record))
        return Transaction(Kind.CLEAR, now, compares, operations, shards=shards)

    def _freeze(self, tenure: Tenure, now: float) -> None:
        shard = tenure.shard
        tenure.stage = Stage.LEAVING
        recovers_until = self._table.partitions[shard].recovers_until
        tenure.clean = recovers_until is None or now >= recovers_until
        snapshot = self._table.freeze(shard, now)
        tenure.parts = ()
        if tenure.clean and not snapshot.is_empty:
            data = snapshots.dump(snapshot, tenure.epoch, now)
            tenure.parts = [data[at : at + PART] for at in range(0, len(data), PART)]
        tenure.unwritten = max(0, len(tenure.parts) - 1)
