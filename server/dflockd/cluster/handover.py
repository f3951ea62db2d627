"""How shards go from a server: frozen, then written down with their locks for the next one."""

from __future__ import annotations

import logging

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.tenures import Stage, Tenure, Tenures
from dflockd.cluster.transactions import BATCH, Kind, Transaction, take
from dflockd.cluster.view import HANDED_OVER
from dflockd.shards import Delete, Put, ValueIs
from dflockd.shards.store import Compare, Operation

MAX_HANDED = 2 * BATCH
"""Shards for each that takes some, handed over and not taken yet, before others follow: none is to
wait for long."""

HAND_OVER_TIMEOUT = 0.5
"""Seconds for which a shard that was handed over is waited for to be taken."""

MAX_SNAPSHOT = 1_000_000
"""Bytes that are handed over in one transaction: etcd takes 1.5 MiB."""

logger = logging.getLogger("dflockd.cluster")


class HandOver:
    """Gives shards away.

    Attributes:
        queue: shards to hand over, first come, first served.
        foreign: shards of an earlier life of this server, of which nothing is known.
        leaving: whether all are given away, and a silent server is not waited for again.
    """

    def __init__(self, tenures: Tenures, parameters: ClusterParameters) -> None:
        self.queue: dict[int, None] = {}
        self.foreign: dict[int, None] = {}
        self.leaving = False
        self._tenures = tenures
        self._view = tenures.view
        self._table = tenures.table
        self._parameters = parameters
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
        operations: list[Operation] = []
        tenures: list[Tenure] = []
        size = 0
        for shard in take(self.queue):
            tenure = self._tenures[shard]
            if tenure.stage is Stage.SERVING:
                self._freeze(tenure, now)
            size += len(tenure.snapshot)
            if size > MAX_SNAPSHOT and tenures:
                self.queue[shard] = None  # too much for one transaction: it is the next one's
                break
            record = self._view.records[shard]._replace(current="")
            tenure.record = record.with_clean(tenure.epoch if tenure.clean else None).with_kept(
                tenure.epoch if tenure.snapshot else None
            )
            tenure.compared = self._view.revisions[shard]
            tenure.under_way = True
            tenures.append(tenure)
            compares.append(self._tenures.unchanged(shard))
            key = self._view.key(HANDED_OVER, shard)
            operations.append(Put(key, tenure.snapshot) if tenure.snapshot else Delete(key))
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
        operations: list[Operation] = []
        shards = list(take(self.foreign))
        for shard in shards:
            record = self._view.records[shard]._replace(current="").with_clean(None).with_kept(None)
            compares.append(self._tenures.unchanged(shard))
            operations.append(self._tenures.put(shard, record))
        return Transaction(Kind.CLEAR, now, compares, operations, shards=shards)

    def _freeze(self, tenure: Tenure, now: float) -> None:
        shard = tenure.shard
        tenure.stage = Stage.LEAVING
        recovers_until = self._table.partitions[shard].recovers_until
        tenure.clean = recovers_until is None or now >= recovers_until
        snapshot = self._table.freeze(shard, now)
        tenure.snapshot = b""
        if tenure.clean and not snapshot.is_empty:
            tenure.snapshot = snapshots.dump(snapshot, tenure.epoch, now)
            if len(tenure.snapshot) > MAX_SNAPSHOT:
                logger.warning(
                    "shard %d has too many locks to hand them over: its next server waits %g s "
                    "for their holders",
                    *(shard, self._parameters.grace),
                )
                tenure.clean, tenure.snapshot = False, b""
