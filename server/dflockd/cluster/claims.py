"""How shards come to a server: claimed, opened, and confirmed after it was taken for dead."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.incoming import Incoming, Leftovers
from dflockd.cluster.serving_leases import ServingLeases
from dflockd.cluster.tenures import Stage, Tenure, Tenures
from dflockd.cluster.transactions import Kind, Transaction, take
from dflockd.cluster.view import FLOOR_MARGIN, MAX_EPOCH, NODES, SHARDS
from dflockd.shards import Get, Outcome, Record, RevisionIs, ShardRecord, ValueIs
from dflockd.shards.store import Compare, StoreOperation
from dflockd.table import Snapshot

EPOCH_SHIFT = 40
"""A fence is the epoch of its shard, and so many bits that count the grants in it."""

logger = logging.getLogger("dflockd.cluster")


class Claims:
    """Takes shards over, and opens each once nobody else can serve it.

    Attributes:
        queue: shards to claim, first come, first served.
        unconfirmed: those to confirm.
        incoming: what is to be read before a claim.
        leftovers: what was handed over and has been taken in.
    """

    def __init__(self, tenures: Tenures, leases: ServingLeases, wall: Callable[[], int]) -> None:
        self.queue: dict[int, None] = {}
        self.unconfirmed: dict[int, None] = {}
        self.incoming = Incoming(tenures)
        self.leftovers = Leftovers()
        self._tenures = tenures
        self._view = tenures.view
        self._table = tenures.table
        self._leases = leases
        self._wall = wall
        self._has_told = False
        self._unheard: dict[int, tuple[Tenure, int]] = {}
        """Shards that wait for their former servers, and the revisions of their claims."""

    def come(self, shard: int) -> None:
        """Have a shard claimed, once all that is handed over with it can be here."""
        if not _was_handed_over(self._view.records[shard]) or self.incoming.is_whole(shard):
            self.queue[shard] = None

    def due(self, condition: ValueIs, now: float) -> Transaction | None:
        """Return the transaction that takes some shards over, if there is one left to be claimed."""
        view = self._view
        compares: list[Compare] = [condition]
        operations: list[StoreOperation] = []
        tenures = []
        for shard in take(self.queue):
            record = view.records[shard]
            epoch = self._next_epoch(shard)
            unanswered = self._tenures.get(shard)
            if unanswered is not None:
                self._tenures.forget(unanswered)
            if epoch > MAX_EPOCH:
                logger.error("%s has had its last epoch", view.key(SHARDS, shard))
                continue
            claimed = record._replace(current=self._tenures.address).with_epoch(epoch)
            known = self._leases.claimed(shard, record.epoch, now)
            former = unanswered.former if unanswered is not None else record
            claimed = claimed.with_clean(None).with_parts(0)
            claimed = claimed.with_recovers(self._recovers(former))
            revision = view.revisions[shard]
            tenures.append(Tenure(shard, epoch, former, known, claimed, revision))
            compares.append(self._tenures.unchanged(shard))
            if _was_handed_over(former):
                operations.append(Get(view.handed_over(shard, 0)))
            operations.append(self._tenures.put(shard, claimed))
        if not tenures:
            return None
        compares += self._are_gone({tenure.former.current for tenure in tenures})
        if any(opens_at_once(tenure.former) for tenure in tenures):
            compares.append(RevisionIs(view.closed, 0))
        for tenure in tenures:
            self._tenures.add(tenure)
        return Transaction(Kind.CLAIM, now, compares, operations, tenures)

    def failed(self, outcome: Outcome) -> None:
        """Take in why shards could not be claimed."""
        closed = outcome.records.get(self._view.closed)
        if closed is not None and not self._has_told:
            self._has_told = True
            logger.warning(
                "etcd was wiped, or restored from a backup, says %s: shards of which nothing is known "
                "are opened when no lock from before can be left, and %s has ended",
                *(closed.value.decode(errors="replace"), self._view.closed),
            )

    def confirm(self, condition: ValueIs, now: float) -> Transaction:
        """Find out which shards are still this server's, now that nobody can claim them any more."""
        tenures = [self._tenures[shard] for shard in take(self.unconfirmed)]
        compares: list[Compare] = [condition]
        for tenure in tenures:
            tenure.under_way = True
            compares.append(self._tenures.unchanged(tenure.shard))
        return Transaction(Kind.CONFIRM, now, compares, (), tenures)

    def confirmed(self, tenure: Tenure, now: float) -> None:
        """Serve a shard again whose record was found as it was seen."""
        if self._tenures.is_mine(tenure):
            self._tenures.thaw(tenure, now)

    def begin(self, tenure: Tenure, outcome: Outcome, now: float) -> None:
        """Serve a shard whose claim has been carried out."""
        shard, former = tenure.shard, tenure.former
        tenure.stage, fence = Stage.SERVING, tenure.epoch << EPOCH_SHIFT
        key = self._view.handed_over(shard, 0)
        parts = [outcome.records.get(key), *self.incoming.take(shard, former.epoch)]
        for number, part in enumerate(parts):
            if part is not None:
                self.leftovers.add(self._view.handed_over(shard, number), part)
        if opens_at_once(former):
            try:
                snapshot = self._handed_over(parts, former, now)
            except snapshots.BadSnapshotError as exc:
                logger.error("%s: %s", key, exc)
            else:
                self._table.open(shard, fence, rates_since=self._unknown_until(former, now))
                if snapshot is not None:
                    self._table.load(shard, snapshot, now)
                return
        # Before no former server can serve it any more, holders may not come back: one of them would
        # not renew there any longer, and its lock could be granted there once more.
        opens_at = now + self._leases.silence
        recovers_until = now + self._leases.grace
        # Until then holders may come back whose runs were granted elsewhere, and begin.
        self._table.open(
            *(shard, fence),
            opens_at=opens_at,
            recovers_until=recovers_until,
            rates_since=recovers_until,
        )
        if former.current and not self._open_heard(tenure, outcome.revision):
            self._unheard[shard] = tenure, outcome.revision

    def open_heard(self) -> None:
        """Find out how soon shards can be opened: once no former server can serve them."""
        for shard, (tenure, revision) in list(self._unheard.items()):
            if self._open_heard(tenure, revision):
                del self._unheard[shard]

    def _open_heard(self, tenure: Tenure, revision: int) -> bool:
        """Return whether there is nothing more to find out about a shard."""
        if not self._tenures.has(tenure):
            return True
        former = tenure.former.current
        silent_at = self._leases.silent_at(former, tenure.former_claimed, revision)
        if silent_at == math.inf:
            return False
        group = self._table.partitions[tenure.shard]
        if group.opens_at is not None:
            group.opens_at = min(group.opens_at, silent_at)
        return True

    def beyond(self) -> int:
        """Return an epoch that is higher than all that there were, for who knows of no other.

        By the time of day as well: this server may have heard of few shards, or none.
        """
        view = self._view
        return max(view.floor, *view.epochs, self._wall() >> EPOCH_SHIFT) + FLOOR_MARGIN

    def _next_epoch(self, shard: int) -> int:
        view = self._view
        return max(view.epochs[shard] + 1, view.floor, self._wall() >> EPOCH_SHIFT)

    def _unknown_until(self, former: ShardRecord, now: float) -> float:
        """Return until when runs may have begun of which a store that was replaced knows nothing."""
        return now if former.epoch < self._view.floor else -math.inf

    def _recovers(self, former: ShardRecord) -> int | None:
        """Return until when the shard is going to recover, for those who look at the store."""
        if opens_at_once(former):
            return None
        return math.ceil(self._wall() / 1e9 + self._leases.grace)

    def _are_gone(self, nodes: set[str]) -> list[Compare]:
        others = sorted(nodes - {"", self._tenures.address})
        return [RevisionIs(self._view.key(NODES, node), 0) for node in others]

    def _handed_over(
        self, parts: Sequence[Record | None], former: ShardRecord, now: float
    ) -> Snapshot | None:
        if not former.parts:
            return None
        if None in parts:
            raise snapshots.BadSnapshotError(
                "it was deleted: the holders of locks in this shard must renew them"
            )
        data = b"".join(part.value for part in parts if part is not None)
        return snapshots.load(data, former.epoch, now)


def opens_at_once(record: ShardRecord) -> bool:
    """Whether nobody has served the shard yet, or all its locks were handed over."""
    return not (record.current or record.epoch) or _was_handed_over(record)


def _was_handed_over(record: ShardRecord) -> bool:
    return not record.current and record.clean is not None and record.clean == record.epoch
