"""The rules of a cluster, each taken out of the code in turn: what a simulation must find out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflockd.client.operations import GRACE, Answer, Exchange, Operation, Target, acquire
from dflockd.client.renewal import _Rescue
from dflockd.client.steps import Link
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
from dflockd.table import Effect, ShardTable, Snapshot
from dflockd.table.state import Entry, Group, Peer
from dflockd.wire import Owner, Rate, Refusal, Renew, Status
from tests.dflockd.cluster.simulation import Rules


@contextmanager
def promised_for_ever(table: ShardTable) -> Iterator[None]:
    until, table._serves_until = table._serves_until, math.inf
    try:
        yield
    finally:
        table._serves_until = until


class GrantsForEver(ShardTable):
    def acquire(self, *args: Any) -> Any:
        with promised_for_ever(self):
            return super().acquire(*args)

    def _promote(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        with promised_for_ever(self):
            super()._promote(entry, now, effects)


class RenewsForEver(ShardTable):
    def renew(self, *args: Any, **more: Any) -> Any:
        with promised_for_ever(self):
            return super().renew(*args, **more)


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


class DoesNotFreeze(ShardTable):
    def freeze(self, shard: int, now: float) -> Snapshot:
        snapshot = super().freeze(shard, now)
        self.groups[shard].frozen = False
        return snapshot


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
        self, record: Record | None, former: ShardRecord, now: float
    ) -> Snapshot | None:
        return None


class MissesNoSnapshot(Claims):
    """Takes locks that are not there any more for none."""

    def _handed_over(
        self, record: Record | None, former: ShardRecord, now: float
    ) -> Snapshot | None:
        return super()._handed_over(record, former.with_kept(None), now)


class TakesAnySnapshot(Claims):
    def _handed_over(
        self, record: Record | None, former: ShardRecord, now: float
    ) -> Snapshot | None:
        if record is None:
            return None
        return snapshots.load(record.value, json.loads(record.value)["epoch"], now)


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
        self.table._stretch = 1


class LowerFenceWins(ShardTable):
    def _reclaim(self, group: Group, peer: Peer, request: Renew, lease: int, now: float) -> bool:
        entry = group.spaces[request.space].get(request.key)
        fence = self._forgotten(group, request, now)
        if entry is not None and fence is not None and not request.space:
            for hold in list(entry.holds.values()):
                self._free(hold, now, [])
        return super()._reclaim(group, peer, request, lease, now)


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
        holds = [hold._replace(is_pending=False) for hold in snapshot.holds]
        super().load(shard, snapshot._replace(rates=(), holds=holds), now)


class LetsOneMoreBegin(ShardTable):
    """Counts to one too many in each window."""

    def _name_rate(self, entry: Entry, asked: Rate, now: float) -> Status | None:
        return super()._name_rate(entry, asked._replace(runs=asked.runs + 1), now)


class DoesNotWaitForTheRelease(ShardTable):
    """Takes the lock from who is older, and does not wait until they have let go."""

    def _asked_with_age(
        self,
        entry: Entry,
        peer: Peer,
        owner: Owner,
        ticket: bytes,
        now: float,
        effects: list[Effect],
    ) -> Entry | Refusal:
        found = super()._asked_with_age(entry, peer, owner, ticket, now, effects)
        if isinstance(found, Entry):
            for hold in list(found.holds.values()):
                if hold.owner is not None and hold.owner.age < owner.age:
                    self._free(hold, now, effects)
            if not self._is_here(found):
                return self._add(found.group, found.space, found.key, found.limit)
        return found


class ForgetsTurns(ShardTable):
    """Those who wait come here in the order in which they first came, and in no group."""

    def load(self, shard: int, snapshot: Snapshot, now: float) -> None:
        waiters = sorted(snapshot.waiters, key=lambda waiter: waiter.since)
        waiters = [waiter._replace(group=None) for waiter in waiters]
        super().load(shard, snapshot._replace(waiters=waiters), now)


def silence_for_an_answer(target: Target, timeout: float | None) -> Operation[Any]:
    """Take the end of a client's patience for the answer that the lock is not free."""
    operation = acquire(target, timeout)
    return (yield from _changed(operation, lambda e: e._replace(timeout_is_reply=True)))


def long_patience(target: Target, timeout: float | None) -> Operation[Any]:
    """Give a server ten seconds for any answer."""

    def change(exchange: Exchange) -> Exchange:
        if exchange.timeout_is_reply or exchange.patience is None:
            return exchange
        return exchange._replace(patience=exchange.patience + 10 - GRACE)

    return (yield from _changed(acquire(target, timeout), change))


def without_an_attempt(target: Target, timeout: float | None) -> Operation[Any]:
    """Cut a wait off without having been told before that the lock is not free."""
    operation = acquire(target, timeout)
    exchange = next(operation)
    if timeout and exchange.patience == GRACE:
        exchange = operation.send(Answer(b"timeout", 0.0, 0.0))
    return (yield from _changed(operation, lambda e: e, exchange))


def _changed(
    operation: Operation[Any],
    change: Callable[[Exchange], Exchange],
    exchange: Exchange | None = None,
) -> Operation[Any]:
    try:
        exchange = exchange or next(operation)
        while True:
            exchange = operation.send((yield change(exchange)))
    except StopIteration as stop:
        return stop.value


class GivesUpWhatMayAnswer(_Rescue):
    """Closes connections on which a renewal may still be read."""

    def _end(self, link: Link | None) -> None:
        super()._end(link)
        self._keeper.close()
        self._keeper.spare = None


BROKEN: dict[str, Rules] = {
    "grants without a serving lease": Rules(table=GrantsForEver),
    "renewals without a serving lease": Rules(table=RenewsForEver),
    "serving lease counted from the answer": Rules(
        node=with_part("membership", ServesFromTheAnswer)
    ),
    "heartbeat whatever the entry": Rules(node=without(Kind.HEARTBEAT, is_own_entry)),
    "no freeze before the release": Rules(table=DoesNotFreeze),
    "thaw without a newer revision": Rules(node=with_part("handover", ThawsAtOnce)),
    "no grace": Rules(node=with_part("leases", NoGrace)),
    "serving lease that nobody sees": Rules(node=with_part("membership", ServesUnseen)),
    "confirmed in an earlier life": Rules(node=with_part("membership", RemembersItsLife)),
    "grace without the serving lease": Rules(node=with_part("leases", GraceWithoutThePromise)),
    "snapshot dropped": Rules(node=with_part("claims", DropsSnapshots)),
    "snapshot deleted by hand": Rules(node=with_part("claims", MissesNoSnapshot)),
    "snapshot deleted in the claim": Rules(node=DeletesInTheClaim),
    "deleted whatever was handed over": Rules(
        node=with_part("claims", MissesNoSnapshot, without(Kind.TIDY, is_any))
    ),
    "snapshot of any epoch": Rules(node=with_part("claims", TakesAnySnapshot)),
    "clean for ever": Rules(node=KeepsCleanWhenCalling),
    "resumed by address": Rules(node=with_part("claims", ResumesByAddress)),
    "claim while the former server lives": Rules(node=without(Kind.CLAIM, is_other_entry)),
    "claim whatever the record": Rules(node=without(Kind.CLAIM, is_shard)),
    "release whatever the record": Rules(node=without(Kind.RELEASE, is_shard)),
    "confirmed whatever the record": Rules(node=without(Kind.CONFIRM, is_shard)),
    "epoch not increased": Rules(node=with_part("claims", KeepsEpoch)),
    "leases not stretched": Rules(node=DoesNotStretch),
    "lower fence wins": Rules(table=LowerFenceWins),
    "reclaim while the former server serves": Rules(node=with_part("leases", NoSilence)),
    "signs of life not waited for": Rules(node=with_part("leases", HearsTooSoon)),
    "what was before the start forgotten": Rules(node=with_part("leases", StartsWithNothing)),
    "signs of life that were missed": Rules(node=with_part("leases", MissesSigns)),
    "those before the former server forgotten": Rules(node=with_part("leases", ForgetsThoseBefore)),
    "takers that are the leaver itself": Rules(node=with_part("handover", WaitsForItself)),
    "takers that leave": Rules(node=with_part("handover", WaitsForAnybody)),
    "leaving to somebody or not at all": Rules(node=WaitsForSomebody),
    "lease counted from the answer": Rules(counts_from_answer=True),
    "grant confirmed by a renewal": Rules(confirms_by_renewal=True),
    "opened in a store that was wiped": Rules(node=without(Kind.CLAIM, is_closed)),
    # Who knows that the shards have been served would notice that their records are gone.
    "joined whatever the cluster": Rules(
        node=with_part("membership", JoinsAnyCluster, with_part("view", ForgetsEpochs))
    ),
    "epochs of before used again": Rules(node=with_part("view", BeginsAgain)),
    "epochs forgotten with the record": Rules(node=with_part("view", ForgetsEpochs)),
    "retried without a pause": Rules(node=RetriesSoon),
    "positions not kept": Rules(table=ForgetsPositions),
    "newest forgotten on a move": Rules(table=ForgetsTheNewest),
    "rates forgotten on a move": Rules(table=ForgetsRates),
    "one more may begin": Rules(table=LetsOneMoreBegin),
    "superseded without waiting for the release": Rules(table=DoesNotWaitForTheRelease),
    "groups forgotten on a move": Rules(table=ForgetsTurns),
    "silence taken for an answer": Rules(acquires=silence_for_an_answer),
    "cut off though nobody has answered": Rules(acquires=without_an_attempt),
    "nobody looks at a silent server": Rules(looks=False),
    "connections given up that owe an answer": Rules(rescue=GivesUpWhatMayAnswer),
    "ten seconds for any answer": Rules(acquires=long_patience, gives_up=False),
}
