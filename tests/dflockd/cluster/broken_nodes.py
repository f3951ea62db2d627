"""Nodes of a cluster without one of their rules."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.backoff import Backoff
from dflockd.cluster.claims import Claims
from dflockd.cluster.handover import HandOver
from dflockd.cluster.membership import Membership, News
from dflockd.cluster.node import Node
from dflockd.cluster.parameters import MARGIN
from dflockd.cluster.serving_leases import ServingLeases
from dflockd.cluster.tenures import Tenure
from dflockd.cluster.transactions import RETRY, Kind, Transaction
from dflockd.cluster.view import View
from dflockd.shards import Delete, Get, Outcome, Put, Record, RevisionIs, ShardRecord
from dflockd.shards.values import format_shard_value
from dflockd.table import Snapshot


def with_part(name: str, part: type, node: type[Node] = Node) -> type[Node]:
    """Return a node one part of which is of another class."""

    class WithPart(node):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            getattr(self, name).__class__ = part

    return WithPart


class ServesUnseen(Membership):
    """Takes an entry that is found, from an attempt whose answer was lost, for a sign of life."""

    def answered(self, transaction: Transaction, outcome: Outcome | None, now: float) -> News:
        news = super().answered(transaction, outcome, now)
        if transaction.kind is Kind.ENLIST and self._is_there and not self.joined:
            self._next_beat = transaction.made + self._parameters.serving_lease / 3
            return self._alive(transaction)
        return news


class RemembersItsLife(Membership):
    """Takes answers to transactions that it made before it was taken for dead as if it had not been."""

    def end(self) -> None:
        condition = self.condition
        super().end()
        self.condition = condition


class JoinsAnyCluster(Membership):
    """Makes its entry in whatever it finds."""

    def due(self, now: float) -> Transaction | None:
        transaction = super().due(now)
        if transaction is not None:
            transaction.compares = [c for c in transaction.compares if c is not self._cluster]
        return transaction

    def answered(self, transaction: Transaction, outcome: Outcome | None, now: float) -> News:
        if outcome is not None and outcome.revision:
            founded = Record(self._cluster.value, 1)
            records = {**outcome.records, self._cluster.key: founded}
            outcome = outcome._replace(records=records)
        return super().answered(transaction, outcome, now)


class BeginsAgain(View):
    """Looks at no epochs but those that the store has."""

    @property  # type: ignore[override]
    def floor(self) -> int:
        return 0

    @floor.setter
    def floor(self, floor: int) -> None:
        pass


class ForgetsEpochs(View):
    """Takes a record that was deleted for that of a shard that nobody has served."""

    def _lose(self, shard: int, record: ShardRecord, epoch: int, revision: int) -> None:
        if not self.revisions[shard]:
            record = ShardRecord()
        self.records[shard], self.epochs[shard] = record, record.epoch


class Impatient(Backoff):
    """Tries again soon, however often it has failed."""

    def failed(self, made: float, now: float, left: float = math.inf) -> float:
        self._pause = RETRY
        return super().failed(now, now)


class RetriesSoon(Node):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.membership._backoff.__class__ = Impatient
        for backoff in self._backoffs._kinds.values():
            backoff.__class__ = Impatient


class ServesFromTheAnswer(Membership):
    def answered(self, transaction: Transaction, outcome: Outcome | None, now: float) -> News:
        transaction.made = now
        return super().answered(transaction, outcome, now)


def without(kind: Kind, is_left_out: Callable[[Node, Any], bool]) -> type[Node]:
    """Return a node whose transactions of a kind go without some of their conditions."""

    class WithoutCondition(Node):
        def _send(self, transaction: Transaction | None) -> None:
            if transaction is not None and transaction.kind is kind:
                transaction.compares = [c for c in transaction.compares if not is_left_out(self, c)]
            super()._send(transaction)

    return WithoutCondition


def is_own_entry(node: Node, compare: Any) -> bool:
    return bool(compare == node.membership.condition)


def is_any(node: Node, compare: Any) -> bool:
    return True


def is_shard(node: Node, compare: Any) -> bool:
    return isinstance(compare, RevisionIs) and "/shard/" in compare.key


def is_other_entry(node: Node, compare: Any) -> bool:
    return isinstance(compare, RevisionIs) and "/nodes/" in compare.key


def is_closed(node: Node, compare: Any) -> bool:
    return bool(compare.key == node.view.closed)


class ThawsAtOnce(HandOver):
    def may_thaw(self, tenure: Tenure) -> bool:
        return True


class NoGrace(ServingLeases):
    grace = 0.0  # type: ignore[assignment]


class GraceWithoutThePromise(ServingLeases):
    @property
    def grace(self) -> float:
        return self._parameters.max_lease * self._parameters.stretch + MARGIN


class DropsSnapshots(Claims):
    def _handed_over(
        self, parts: Sequence[Record | None], former: ShardRecord, now: float
    ) -> Snapshot | None:
        return None


class MissesNoSnapshot(Claims):
    """Takes locks that are not there any more for none."""

    def _handed_over(
        self, parts: Sequence[Record | None], former: ShardRecord, now: float
    ) -> Snapshot | None:
        return None if None in parts else super()._handed_over(parts, former, now)


class TakesAnySnapshot(Claims):
    def _handed_over(
        self, parts: Sequence[Record | None], former: ShardRecord, now: float
    ) -> Snapshot | None:
        if None in parts:
            return None
        data = b"".join(part.value for part in parts if part is not None)
        return snapshots.load(data, json.loads(zlib.decompress(data))[0], now)


class DeletesInTheClaim(Node):
    """Deletes what was handed over before it is known that it has arrived."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.claims.__class__ = MissesNoSnapshot  # that would be noticed

    def _send(self, transaction: Transaction | None) -> None:
        if transaction is not None and transaction.kind is Kind.CLAIM:
            gets = [op for op in transaction.operations if isinstance(op, Get)]
            transaction.operations = [*transaction.operations, *(Delete(get.key) for get in gets)]
        super()._send(transaction)


class KeepsCleanWhenCalling(Node):
    """The flag has its epoch, so it does no harm by itself: that is ignored here as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.claims.__class__ = KeepsClean

    def _send(self, transaction: Transaction | None) -> None:
        if transaction is not None and transaction.kind is Kind.CLAIM:
            for tenure in transaction.tenures:
                if tenure.former.clean is not None:
                    tenure.record = tenure.record.with_clean(tenure.former.clean)
            puts = {t.shard: format_shard_value(t.record).encode() for t in transaction.tenures}
            transaction.operations = [
                op._replace(value=puts[int(op.key.rpartition("/")[2])])
                if isinstance(op, Put)
                else op
                for op in transaction.operations
            ]
        super()._send(transaction)


class KeepsClean(Claims):
    def begin(self, tenure: Tenure, outcome: Outcome, now: float) -> None:
        if tenure.former.clean is not None:
            tenure.former = tenure.former._replace(current="").with_clean(tenure.former.epoch)
        super().begin(tenure, outcome, now)


class ResumesByAddress(Claims):
    def begin(self, tenure: Tenure, outcome: Outcome, now: float) -> None:
        if tenure.former.current == self._tenures.address:
            tenure.former = ShardRecord()
        super().begin(tenure, outcome, now)


class KeepsEpoch(Claims):
    def _next_epoch(self, shard: int) -> int:
        return self._view.epochs[shard] or 1


class DoesNotStretch(Node):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table.slots.stretch = 1


class NoSilence(ServingLeases):
    silence = 0.0  # type: ignore[assignment]


class HearsTooSoon(ServingLeases):
    def silent_at(self, server: str, claimed: float, revision: int) -> float:
        return super().silent_at(server, claimed, 0)


class ForgetsThoseBefore(ServingLeases):
    """Waits for the former server alone, not for those that it was to wait for itself."""

    def silent_at(self, server: str, claimed: float, revision: int) -> float:
        return super().silent_at(server, -math.inf, revision)


class StartsWithNothing(ServingLeases):
    """Takes what was in the store before it looked for something of long ago."""

    def loaded(self, revision: int, now: float) -> None:
        super().loaded(revision, -math.inf)
        self._claimed = [-math.inf] * self._parameters.num_shards


class MissesSigns(ServingLeases):
    """Goes by the last sign of life that it has heard, also when it has not heard all of them."""

    def loaded(self, revision: int, now: float) -> None:
        heard = dict(self._heard)
        super().loaded(revision, now)
        self._heard |= heard


class WaitsForItself(HandOver):
    """Waits for a server to take over what nobody but itself is to have."""

    def _is_taker(self, server: str) -> bool:
        return super()._is_taker(server) or server == self._tenures.address


class WaitsForAnybody(HandOver):
    """Waits for whoever is alive, those that leave among them."""

    def _is_taker(self, server: str) -> bool:
        return server in self._view.nodes


class WaitsForSomebody(Node):
    """Waits for a server to leave to, also when there is none."""

    def _is_to_leave(self, record: ShardRecord) -> bool:
        return record.target != self.address or (self.leaving and self._leave_until is None)
