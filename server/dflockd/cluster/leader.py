"""The leader's part: it says which server is to have a shard, and no more than that.

Nothing breaks if two servers take themselves for the leader, or none does: a target gives no right to
anything, and each is written only where nobody has changed the record since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from dflockd.cluster.transactions import BATCH as CLAIMED
from dflockd.cluster.transactions import RETRY, Kind, Transaction
from dflockd.cluster.view import SHARDS, View
from dflockd.shards import (
    Put,
    RevisionIs,
    ShardMapping,
    format_shard_value,
    rebalance_shard_mapping,
    update_shard_mapping,
)
from dflockd.shards.store import MAX_OPERATIONS

BATCH = MAX_OPERATIONS
"""Targets that are written in one transaction."""

SETTLE = 2.0
"""Seconds after a server has come or gone before its shards are given away, or the first mapping made.

When the store was away for long it takes all servers for dead at once. Each of them goes on with its
locks if it is back before its shards are given to another.
"""

BALANCE_EVERY = 1.0
"""Seconds between two rounds of automatic rebalancing."""


class Leader:
    """Gives shards to servers, if the server at `address` is the one to do so.

    Args:
        view: what is known of the store.
        address: the server that this is a part of.
        balances: whether shards are moved until all servers have equally many.
    """

    def __init__(self, view: View, address: str, *, balances: bool = False) -> None:
        self._view = view
        self._address = address
        self._balances = balances
        self._joined_at = 0.0
        self._look_at: float | None = None
        self._balance_at = 0.0
        self._targets: dict[int, str] = {}
        self._calling = False

    @property
    def leads(self) -> bool:
        """Whether it is this server's turn."""
        return self._view.leader == self._address

    def look(self, at: float) -> None:
        """Find out by then whether shards need another server."""
        self._look_at = at if self._look_at is None else min(at, self._look_at)

    def joined(self, now: float) -> None:
        """Take note that there is a new server. Shards of those that leave have waited for it."""
        self._joined_at = now
        self.look(now if self._view.roster.leavers else now + SETTLE)

    def settle(self, now: float) -> None:
        """Give the others time to show themselves: this server has only just come in."""
        self._joined_at = now
        self._look_at = now + SETTLE

    def next_deadline(self) -> float | None:
        """Return when `due` should next be asked; ``None`` while something is under way."""
        if self._calling or self._targets or not self.leads:
            return None
        times = [self._look_at] if self._look_at is not None else []
        if self._balances:
            times.append(self._balance_at)
        return min(times, default=None)

    def due(self, now: float) -> Transaction | None:
        """Return what to write now, if anything."""
        if not self.leads:
            # A server that serves it has looked. One that should serve it waits for others to show
            # up.
            self._look_at = None
            self._targets.clear()
            return None
        if self._calling:
            return None
        if not self._targets:
            self._decide(now)
        candidates = self._view.candidates
        compares, puts = [], []
        for shard in list(self._targets):
            target = self._targets.pop(shard)
            if target not in candidates:
                continue  # it leaves by now, or is gone: there will be another look
            record = self._view.records[shard]._replace(target=target)
            if self._view.is_lost(shard):
                # It was deleted by hand. What there was since that nobody has heard of is nobody's.
                record = record.with_epoch(record.epoch + 1)
            key = self._view.key(SHARDS, shard)
            compares.append(RevisionIs(key, self._view.revisions[shard]))
            puts.append(Put(key, format_shard_value(record).encode()))
            if len(puts) == BATCH:
                break
        if not puts:
            return None
        self._calling = True
        return Transaction(Kind.ASSIGN, now, compares, puts)

    def answered(self, succeeded: bool | None, now: float) -> None:
        """Take in how the transaction ended; ``None`` if nobody knows."""
        self._calling = False
        if not succeeded:
            self._targets.clear()
            self.look(now if succeeded is False else now + RETRY)

    def _decide(self, now: float) -> None:
        due = self._look_at is not None and now >= self._look_at
        balancing = self._balances and now >= self._balance_at
        candidates = self._view.candidates
        if not (due or balancing):
            return
        if due:
            self._look_at = None
        self._balance_at = now + BALANCE_EVERY
        if not candidates:
            return
        mapping = self._view.mapping
        is_first = not any(record.target for record in mapping.records)
        if is_first and now < self._joined_at + SETTLE:
            self._look_at = self._joined_at + SETTLE
            return
        decided = update_shard_mapping(mapping, candidates) if due else mapping
        if decided is mapping and balancing and self._is_settled(mapping, candidates):
            decided = rebalance_shard_mapping(mapping, candidates)
        self._targets = _in_turns(
            {
                shard: decided[shard].target
                for shard in sorted(decided.unsaved)
                if shard not in self._view.unreadable
            }
        )

    @staticmethod
    def _is_settled(mapping: ShardMapping, candidates: Set[str]) -> bool:
        """Whether no shard is on its way, or waits for a server that may yet be back."""
        return not any(
            record.moving or not (record.target in candidates or record.pinned)
            for record in mapping.records
        )


def _in_turns(targets: dict[int, str]) -> dict[int, str]:
    """Return them so that each server gets as many at a time as it takes over in one transaction.

    One by one, a hundred servers would make thousands of transactions of it; all of one server
    first, the others would have nothing to do meanwhile.
    """
    numbers: Counter[str] = Counter()
    turns: dict[int, int] = {}
    for shard, target in targets.items():
        turns[shard] = numbers[target] // CLAIMED
        numbers[target] += 1
    ordered = sorted(targets, key=lambda shard: (turns[shard], targets[shard], shard))
    return {shard: targets[shard] for shard in ordered}
