"""What is handed over to this server: read before the shard is claimed, and deleted afterwards.

Until the claim nothing is lost if this server ends, and any other can read the same. What has been
taken in is deleted once nobody can need it any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflockd.cluster.tenures import Tenures
from dflockd.cluster.transactions import RETRY, Kind, Transaction
from dflockd.shards import Delete, Get, Outcome, Record, RevisionIs

BATCH = 64
"""Keys that are deleted in one transaction."""


class Incoming:
    """Reads all parts but the first, which comes with the answer to the claim.

    Attributes:
        queue: shards of which a part is to be read.
    """

    def __init__(self, tenures: Tenures) -> None:
        self.queue: dict[int, None] = {}
        self._tenures = tenures
        self._view = tenures.view
        self._parts: dict[tuple[int, int], list[Record | None]] = {}
        """By shard and epoch, those that are here; ``None`` was deleted by hand."""
        self._reading: dict[int, int] = {}
        """The shards of which one is being read, and the epochs."""

    def is_whole(self, shard: int) -> bool:
        """Whether nothing is left to be read; if something is, have it read."""
        record = self._view.records[shard]
        if len(self._parts.get((shard, record.epoch), ())) >= record.parts - 1:
            return True
        if shard not in self._reading:  # else there is another look when that has ended
            self.queue[shard] = None
        return False

    def due(self, now: float) -> Transaction:
        """Read a part.

        It is of this hand-over if the record is the same at the claim: nobody writes parts of a shard
        but who has it.
        """
        for key in list(self._parts):
            if self._view.records[key[0]].current not in ("", self._tenures.address):
                del self._parts[key]  # somebody else has taken it over
        shard = next(iter(self.queue))
        del self.queue[shard]
        epoch = self._reading[shard] = self._view.records[shard].epoch
        here = self._parts.setdefault((shard, epoch), [])
        get = Get(self._view.handed_over(shard, len(here) + 1))
        return Transaction(Kind.READ, now, (), [get], shards=[shard])

    def answered(self, transaction: Transaction, outcome: Outcome | None) -> None:
        """Take in how the transaction ended."""
        (shard,), (get,) = transaction.shards, transaction.operations
        here = self._parts.get((shard, self._reading.pop(shard)))
        if outcome is not None and here is not None:
            here.append(outcome.records.get(get.key))

    def take(self, shard: int, epoch: int) -> Sequence[Record | None]:
        """Return the parts that were read, and forget them."""
        return self._parts.pop((shard, epoch), ())


class Leftovers:
    """Deletes keys, each only as it was read: what is handed over later has the same key.

    Not in the claim itself: if its answer got lost, so would be what was handed over.
    """

    def __init__(self) -> None:
        self._revisions: dict[str, int] = {}
        self._calling = False
        self._due_at = 0.0

    def add(self, key: str, record: Record) -> None:
        """Have a key deleted in a moment."""
        self._revisions[key] = record.revision

    def next_deadline(self) -> float | None:
        """Return when `transaction` should next be asked for."""
        return self._due_at if self._revisions and not self._calling else None

    def due(self, now: float) -> Transaction | None:
        """Return what to send now, if anything."""
        if self._calling or not self._revisions or now < self._due_at:
            return None
        self._calling = True
        keys = list(self._revisions)[:BATCH]
        compares = [RevisionIs(key, self._revisions[key]) for key in keys]
        return Transaction(Kind.TIDY, now, compares, [Delete(key) for key in keys])

    def answered(self, transaction: Transaction, outcome: Outcome | None, now: float) -> None:
        """Take in how the transaction ended; ``None`` if nobody knows."""
        self._calling = False
        if outcome is None:
            self._due_at = now + RETRY
            return
        for compare in transaction.compares:
            assert isinstance(compare, RevisionIs)
            there = outcome.records.get(compare.key)
            is_done = outcome.succeeded or there is None or there.revision != compare.revision
            if is_done and self._revisions.get(compare.key) == compare.revision:
                del self._revisions[compare.key]
