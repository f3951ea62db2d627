"""What was handed over and has been taken in: it is deleted once nobody can need it any more."""

from __future__ import annotations

from dflockd.cluster.transactions import RETRY, Kind, Transaction
from dflockd.shards import Delete, Outcome, Record, RevisionIs

BATCH = 64
"""Keys in one transaction."""


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
