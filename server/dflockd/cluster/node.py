"""One server's part in a cluster, as a state machine: which shards are its own, and since when.

Pure: no socket, no clock, no asyncio. What comes in are the time, what the store says and how calls
to it ended; what comes out are calls to the store, and the effects on the lock table. So all of it
can be run under a clock that a test turns, with calls that are lost, late and out of order.

The rules that keep two servers from granting one lock do not rest on leaders, watches or the leases
of the store, but on three things. A server serves while its *promise* lasts, which only a transaction
that finds its own entry unchanged extends. A shard is taken over by a transaction that finds its
record unchanged, and its former server's entry gone or its locks handed over. And whoever takes over
without such a hand-over waits until every promise and lease from before must have ended. (Gray and
Cheriton, "Leases", 1989; Burrows, "The Chubby lock service", 2006, on epochs and grace; RFC 8881,
section 8.4.2, on reclaims.)
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.calls import RETRY, Call, Kind, Stage, Tenure
from dflockd.cluster.leader import SETTLE, Leader
from dflockd.cluster.leftovers import Leftovers
from dflockd.cluster.promises import Promises
from dflockd.cluster.terms import Terms
from dflockd.cluster.view import HANDED_OVER, LEAVING, MAX_EPOCH, NODES, SHARDS, View
from dflockd.shards import (
    Delete,
    Event,
    Get,
    Loaded,
    Outcome,
    Put,
    Record,
    RevisionIs,
    ShardRecord,
    ValueIs,
    format_shard_value,
    get_shard_id,
)
from dflockd.shards.store import Compare, Operation
from dflockd.table import Effect, Limits, ShardTable, Snapshot, TokenIssuer
from dflockd.wire import Refusal, Report

BATCH = 40
"""Shards in one transaction: each may need three operations, and a transaction has 128."""

MAX_CALLS = 4
"""Transactions about shards that are under way at once. A large move is spread out by this, and each
shard is out of service only while its own transactions are under way."""

MAX_HANDED = 2 * BATCH
"""Shards that were handed over and not taken yet, before others follow: none is to wait for long."""

HAND_OVER_TIMEOUT = 0.5
"""Seconds for which a shard that was handed over is waited for to be taken."""

MAX_SNAPSHOT = 1_000_000
"""Bytes that are handed over in one transaction: etcd takes 1.5 MiB."""

LEAVE_TIMEOUT = 5.0
"""Seconds that a server that leaves gives the leader to find new servers for its shards."""

EPOCH_SHIFT = 40
"""A fence is the epoch of its shard, and so many bits that count the grants in it."""

logger = logging.getLogger("dflockd.cluster")


class Output(NamedTuple):
    """What is to be done after a step, in this order."""

    effects: list[Effect]
    idle: set[int]
    """Peers whose connections are to be closed: all that they hold is elsewhere now."""
    calls: list[Call]


class Node:
    """A server of a cluster.

    Take the `output` after every call, and call `advance` when `next_deadline` says so.

    Args:
        address: where clients reach it, as ``host:port``.
        limits: of its lock table.
        secret: what tokens are made with, the same on all servers.
        terms: what all servers have agreed upon.
        prefix: what its keys in the store begin with.
        balances: whether it moves shards, while it leads, until all servers have equally many.
        wall: the time since 1970 in nanoseconds, for fences to grow with; nothing else rests on it.

    Attributes:
        table: the locks of its shards.
        view: what it knows of the store.
        leader: what it does while it leads.
        lease: of the store, by which its entry there lives; 0 while there is none.
        wants_lease: whether it has to `enlist`, for it never did or was taken for dead.
        promised: until when it may serve.
        leaving: whether it gives all shards away.
    """

    def __init__(
        self,
        address: str,
        limits: Limits,
        secret: bytes,
        terms: Terms,
        *,
        prefix: str,
        balances: bool = False,
        wall: Callable[[], int],
    ) -> None:
        self.address = address
        self.terms = terms
        self.table = ShardTable(limits, TokenIssuer(secret, 0), self, stretch=terms.stretch)
        self.view = View(prefix, terms.num_shards)
        self.leader = Leader(self.view, address, balances=balances)
        self.lease = 0
        self.wants_lease = True
        self.promised = 0.0
        self.leaving = False
        self._wall = wall
        self._shard_of = lru_cache(1 << 16)(lambda key: get_shard_id(key, terms.num_shards))
        self._output = Output([], set(), [])
        self._is_loaded = False
        self._me = self.view.key(NODES, address)
        self._condition = ValueIs(self._me, b"")
        self._enlisted = False
        self._is_there = False
        self._is_taken = False
        self._beating = False
        self._next_beat = 0.0
        self._announcing = False
        self._leave_until: float | None = None
        self._sends_away = False
        self._promises = Promises(terms.num_shards)
        self._leftovers = Leftovers()
        self._unheard: dict[int, tuple[Tenure, int]] = {}
        self._tenures: dict[int, Tenure] = {}
        self._under_way = 0
        # What is to be done, first come, first served; a shard is in one of them at most.
        self._confirms: dict[int, None] = {}
        self._claims: dict[int, None] = {}
        self._releases: dict[int, None] = {}
        self._clears: dict[int, None] = {}
        self._queues = (self._confirms, self._claims, self._releases, self._clears)
        self._retries: dict[int, None] = {}
        self._retry_at: float | None = None
        self._handed: dict[int, float] = {}
        """When shards were handed over that nobody has taken yet, oldest first."""

    # What comes in.

    def loaded(self, loaded: Loaded, now: float) -> None:
        """Take in all that the store has under the prefix, at the start and after an interruption."""
        for key, record, revision in self.view.differences(loaded):
            self._learn(key, record, revision, now)
        self._is_loaded = True
        self._promises.loaded(loaded.revision, now)
        self._open_heard()
        self.leader.settle(now)
        self._look_at_all(now)

    def changed(self, events: Iterable[Event], now: float) -> None:
        """Take in what has changed in the store since."""
        for event in events:
            if event.record is not None and event.record.value != self._condition.value:
                self._hear(event.key, now)
            self._see(event.key, event.record, event.revision, now)
            self._promises.told(event.revision)
        self._open_heard()
        self._work(now)

    def enlist(self, incarnation: str, lease: int, now: float) -> None:
        """Begin a life: by a name that was never used, and with a new lease of the store."""
        self._condition = ValueIs(self._me, incarnation.encode())
        self.lease = lease
        self.wants_lease = False
        self._next_beat = now
        self._work(now)

    def answered(self, call: Call, outcome: Outcome | None, now: float) -> None:
        """Take in how a call ended. Without an outcome nobody knows: it may yet be carried out."""
        if call.kind in (Kind.ENLIST, Kind.HEARTBEAT):
            self._beaten(call, outcome, now)
        elif call.kind is Kind.TIDY:
            self._leftovers.answered(call, outcome, now)
        elif call.kind is Kind.ANNOUNCE:
            if outcome is None or not outcome.succeeded:
                self._announcing = False
                self._later((), now)
        else:
            self._under_way -= 1
            if call.kind is Kind.ASSIGN:
                self.leader.answered(outcome.succeeded if outcome else None, now)
            if outcome is not None and outcome.succeeded:
                self._succeeded(call, outcome, now)
            else:
                self._failed(call, outcome, now)
        self._work(now)

    def advance(self, now: float) -> None:
        """Do what is due."""
        self._work(now)

    def leave(self, now: float) -> None:
        """Hand over every shard. Once it `has_left`, the server is not needed any more."""
        self.leaving = True
        self._leave_until = now + LEAVE_TIMEOUT
        self._look_at_all(now)

    # What goes out.

    def output(self) -> Output:
        """Return what is to be done since this was last asked for."""
        output, self._output = self._output, Output([], set(), [])
        return output

    @property
    def has_left(self) -> bool:
        """Whether no shard is this server's, and none will be."""
        return self.leaving and not self._tenures

    def next_deadline(self) -> float:
        """Return when `advance` should next be called."""
        times = [self._retry_at]
        if self._sends_away:
            times.append(self._hopeless_at)
        if not (self.wants_lease or self._beating):
            times.append(self._next_beat)
        if self._enlisted and self._is_loaded:
            times += self._leave_until, self._leftovers.next_deadline()
            if self._under_way < MAX_CALLS:
                times.append(self.leader.next_deadline())
                if self._releases and self._handed:
                    times.append(next(iter(self._handed.values())) + HAND_OVER_TIMEOUT)
        return min((time for time in times if time is not None), default=math.inf)

    def may_serve(self, now: float) -> bool:
        """Whether its promise lasts, so that locks are granted."""
        return now < self.promised

    def counts(self) -> Counter[str]:
        """Return how many shards it is ``claiming``, ``serving``, ``leaving``."""
        return Counter(tenure.stage.value for tenure in self._tenures.values())

    # What the table asks; see `dflockd.table.Directory`.

    def shard_of(self, key: bytes) -> int:
        """Return the shard of a key."""
        return self._shard_of(key)

    def refer(self, shard: int) -> Refusal:
        """Return what to answer about a shard that is not here."""
        return self.view.refer(shard, self.address)

    def report(self) -> Report:
        """Return which server has which shard."""
        return self.view.report()

    # Signs of life.

    @property
    def _hopeless_at(self) -> float:
        # All locks that were held here have ended by then, so nobody waits for them any more.
        return self.promised + self.terms.max_lease * self.terms.stretch

    def _beat(self, now: float) -> None:
        if self.wants_lease or self._beating or now < self._next_beat:
            return
        self._beating = True
        self._next_beat = now + self.terms.promise / 3
        put = Put(self._me, self._condition.value, self.lease)
        if self._enlisted or self._is_there:
            # A lease that is kept alive would not do: an etcd member that was cut off has been known
            # to confirm that (etcd-io/etcd, issue 15247).
            self._call(Call(Kind.HEARTBEAT, now, [self._condition], [put]))
        else:
            self._call(Call(Kind.ENLIST, now, [RevisionIs(self._me, 0)], [put]))

    def _beaten(self, call: Call, outcome: Outcome | None, now: float) -> None:
        self._beating = False
        put = call.operations[0]
        assert isinstance(put, Put)
        if put.lease != self.lease:
            return  # of an earlier life
        if outcome is None:
            self._next_beat = now + RETRY
        elif outcome.succeeded:
            self._alive(call, now)
        elif call.kind is Kind.HEARTBEAT:
            self._gone(now)
        else:
            there = outcome.records.get(self._me)
            if there is None:
                self._gone(now)  # the lease has ended before
            elif (there.value, there.lease) == (put.value, put.lease):
                # It is there from an attempt whose answer was lost. No promise follows: the others
                # have seen nothing now, and reckon with the signs of life that they have seen.
                self._is_there = True
                self._next_beat = now
            else:
                # An earlier process's, until its lease ends; or somebody else advertises this address.
                if not self._is_taken:
                    logger.warning(
                        "another server is known as %s: waiting for it to be gone, up to %d s "
                        "if it has ended; no two servers may --advertise one address",
                        *(self.address, self.terms.promise),
                    )
                self._is_taken = True
                self._next_beat = now + RETRY

    def _alive(self, call: Call, now: float) -> None:
        self.promised = max(self.promised, self._promise_of(call))
        self._sends_away = True
        self._output.effects.extend(self.table.promise(self.promised, now))
        if not self._enlisted:
            self._enlisted, self._is_taken = True, False
            logger.info("%s is in the cluster", self.address)
            self.leader.settle(now)
            self._look_at_all(now)

    def _promise_of(self, call: Call) -> float:
        # From before it was sent: whoever finds the entry gone does so after it was carried out.
        return call.made + self.terms.promise

    def _gone(self, now: float) -> None:
        """Begin a new life: the others take this server for dead, and what it had may be theirs.

        It may also be nobody's: then the record still says that it is this server's, under the epoch
        of its own claim, and all its locks are here. Once the new entry is there nobody can claim the
        shard, so a look at the record after that decides.
        """
        logger.warning(
            "%s was taken for dead: its %d shards are looked at before they are served again",
            *(self.address, len(self._tenures)),
        )
        for tenure in list(self._tenures.values()):
            if tenure.stage is Stage.CLAIMING:
                self._forget(tenure)
            else:
                tenure.stage = Stage.SUSPENDED
                self.table.groups[tenure.shard].frozen = True
        for queue in (*self._queues, self._retries):
            queue.clear()
        self._enlisted = self._is_there = self._announcing = False
        self._condition = ValueIs(self._me, b"")  # answers that are under way are of another life
        self.lease = 0
        self.wants_lease = True

    def _announce(self, now: float) -> None:
        """Tell the leader that this server leaves."""
        if not self._announcing:
            self._announcing = True
            put = Put(self.view.key(LEAVING, self.address), self._condition.value, self.lease)
            self._call(Call(Kind.ANNOUNCE, now, [self._condition], [put]))

    # What follows from what the store says.

    def _hear(self, key: str, now: float) -> None:
        folder = self.view.key(NODES, "")
        if key.startswith(folder):
            self._promises.heard(key.removeprefix(folder), now)

    def _learn(
        self, key: str, record: Record | None, revision: int, now: float
    ) -> int | str | None:
        news = self.view.see(key, record, revision)
        if isinstance(news, int):
            self._promises.claimed(news, self.view.epochs[news], now)
        return news

    def _see(self, key: str, record: Record | None, revision: int, now: float) -> bool:
        news = self._learn(key, record, revision, now)
        if isinstance(news, int):
            if self.view.records[news].target not in self.view.candidates:
                self.leader.look(now + SETTLE)
            self._retries.pop(news, None)
            self._look_at(news, now)
        elif news == NODES and key.removeprefix(self.view.key(NODES, "")) in self.view.nodes:
            self.leader.joined(now)
        elif news is not None:
            # Its shards can be taken over, or are to be. Who says that it leaves is not waited for.
            self.leader.look(now + (SETTLE if news == NODES else 0))
            self._look_at_all(now)
        return news is not None

    def _look_at_all(self, now: float) -> None:
        for shard in range(self.terms.num_shards):
            self._look_at(shard, now)
        self._work(now)

    def _look_at(self, shard: int, now: float) -> None:
        """Find out what is to be done about a shard."""
        for queue in self._queues:
            queue.pop(shard, None)
        if not self._enlisted or shard in self._retries:
            return
        record, tenure = self.view.records[shard], self._tenures.get(shard)
        if tenure is not None and not tenure.calling:
            is_claiming = tenure.stage is Stage.CLAIMING
            if not self._is_mine(tenure) or (is_claiming and not _opens_at_once(tenure.former)):
                self._forget(tenure)
                tenure = None
            elif is_claiming:
                # Its claim was carried out and not answered. Nobody else has had the shard since, so
                # what was handed over to it is still there, and still all there is.
                self._claims[shard] = None
            elif tenure.stage is Stage.SUSPENDED:
                self._confirms[shard] = None
            elif self._is_to_leave(record):
                self._releases[shard] = None
            elif tenure.stage is Stage.LEAVING:
                if self._may_thaw(tenure):
                    self._thaw(tenure, now)
                else:
                    self._releases[shard] = None
        if tenure is None and shard not in self.view.unreadable:
            if self._is_to_come(record):
                self._claims[shard] = None
            elif record.current == self.address != record.target:
                # This server's in an earlier life, of which nothing is known.
                self._clears[shard] = None

    def _is_mine(self, tenure: Tenure) -> bool:
        """Whether nobody else has taken the shard over since, for all that is known."""
        shard = tenure.shard
        is_here = self.view.records[shard].current == self.address
        return is_here and self.view.epochs[shard] == tenure.epoch

    def _is_to_come(self, record: ShardRecord) -> bool:
        if record.target != self.address or self.leaving:
            return False
        return record.current in ("", self.address) or record.current not in self.view.nodes

    def _is_to_leave(self, record: ShardRecord) -> bool:
        if record.target != self.address:
            return True
        # Nobody else will be found for a pinned shard, or where there is nobody else, or no leader.
        return self.leaving and (
            record.pinned
            or self._leave_until is None
            or all(node == self.address for node in self.view.candidates)
        )

    def _may_thaw(self, tenure: Tenure) -> bool:
        # With a newer revision in the store, no release that was sent before can be carried out. An
        # answer that does not come says nothing of the kind.
        return self.view.revisions[tenure.shard] > tenure.compared

    def _thaw(self, tenure: Tenure, now: float) -> None:
        tenure.stage = Stage.SERVING
        self._output.effects.extend(self.table.thaw(tenure.shard, now))

    def _forget(self, tenure: Tenure) -> None:
        """Drop a shard that is another's by now."""
        del self._tenures[tenure.shard]
        if tenure.stage is not Stage.CLAIMING:
            effects, idle = self.table.drop(tenure.shard, self.refer(tenure.shard))
            self._output.effects.extend(effects)
            self._output.idle.update(idle)

    def _work(self, now: float) -> None:
        """Make the calls that are due."""
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            shards, self._retries = self._retries, {}
            for shard in shards:
                self._look_at(shard, now)
        self._beat(now)
        if self._sends_away and now >= self._hopeless_at:
            self._sends_away = False
            self._output.effects.extend(self.table.send_away())
        if not (self._enlisted and self._is_loaded):
            return
        if self.leaving:
            if self._retry_at is None:
                self._announce(now)
            if self._leave_until is not None and now >= self._leave_until:
                self._leave_until = None
                for shard in list(self._tenures):
                    self._look_at(shard, now)
        for queue, send in (
            (self._confirms, self._confirm),
            (self._clears, self._clear),
            (self._claims, self._claim),
        ):
            while queue and self._under_way < MAX_CALLS:
                send(queue, now)
        while self._releases and self._under_way < MAX_CALLS and self._are_taken(now):
            self._release(self._releases, now)
        if self._under_way < MAX_CALLS and (call := self.leader.call(now)):
            self._under_way += 1
            self._call(call)
        if call := self._leftovers.call(now):
            self._call(call)

    # Shards come.

    def _claim(self, queue: dict[int, None], now: float) -> None:
        """Take over some shards."""
        compares: list[Compare] = [self._condition]
        operations: list[Operation] = []
        tenures = []
        for shard in _take(queue, BATCH):
            record, revision = self.view.records[shard], self.view.revisions[shard]
            epoch = self._next_epoch(shard)
            unanswered = self._tenures.pop(shard, None)
            if epoch > MAX_EPOCH:
                logger.error("%s has had its last epoch", self.view.key(SHARDS, shard))
                continue
            claimed = record._replace(current=self.address).with_epoch(epoch).with_clean(None)
            known = self._promises.claimed(shard, record.epoch, now)
            former = unanswered.former if unanswered is not None else record
            tenures.append(Tenure(shard, epoch, former, known, claimed, revision))
            compares.append(RevisionIs(self.view.key(SHARDS, shard), revision))
            if _was_handed_over(former):
                operations.append(Get(self.view.key(HANDED_OVER, shard)))
            operations.append(self._put(shard, claimed))
        if tenures:
            compares += self._are_gone({tenure.former.current for tenure in tenures})
            self._tenures |= {tenure.shard: tenure for tenure in tenures}
            self._under_way += 1
            self._call(Call(Kind.CLAIM, now, compares, operations, tenures))

    def _next_epoch(self, shard: int) -> int:
        return max(self.view.epochs[shard] + 1, self._wall() >> EPOCH_SHIFT)

    def _are_gone(self, nodes: set[str]) -> list[Compare]:
        others = sorted(nodes - {"", self.address})
        return [RevisionIs(self.view.key(NODES, node), 0) for node in others]

    def _begin(self, tenure: Tenure, handed_over: Record | None, revision: int, now: float) -> None:
        """Serve a shard whose claim has been carried out."""
        shard, former = tenure.shard, tenure.former
        tenure.stage, fence = Stage.SERVING, tenure.epoch << EPOCH_SHIFT
        if handed_over is not None:
            self._leftovers.add(self.view.key(HANDED_OVER, shard), handed_over)
        if _opens_at_once(former):
            try:
                snapshot = self._handed_over(handed_over, former.epoch, now)
            except snapshots.BadSnapshotError as exc:
                logger.error("%s: %s", self.view.key(HANDED_OVER, shard), exc)
            else:
                self.table.open(shard, fence)
                if snapshot is not None:
                    self.table.load(shard, snapshot, now)
                return
        # Before no former server can serve it any more, holders may not come back: one of them would
        # not renew there any longer, and its lock could be granted there once more.
        opens_at = now + self._silence
        self.table.open(shard, fence, opens_at=opens_at, recovers_until=now + self._grace)
        if former.current:
            self._unheard[shard] = tenure, revision
            self._open_heard()

    @property
    def _silence(self) -> float:
        return self.terms.promise * self.terms.stretch

    def _open_heard(self) -> None:
        """Find out how soon shards can be opened: once no promise from before can last."""
        for shard, (tenure, revision) in list(self._unheard.items()):
            if self._tenures.get(shard) is not tenure:
                del self._unheard[shard]
                continue
            former = tenure.former.current
            latest = self._promises.latest(former, tenure.former_claimed, revision)
            if latest is not None:
                del self._unheard[shard]
                group = self.table.groups[shard]
                if group.opens_at is not None:
                    group.opens_at = min(group.opens_at, latest + self._silence)

    def _handed_over(self, record: Record | None, epoch: int, now: float) -> Snapshot | None:
        return None if record is None else snapshots.load(record.value, epoch, now)

    def _confirm(self, queue: dict[int, None], now: float) -> None:
        """Find out which shards are still this server's, now that nobody can claim them any more."""
        tenures = [self._tenures[shard] for shard in _take(queue, BATCH)]
        compares: list[Compare] = [self._condition]
        for tenure in tenures:
            tenure.calling = True
            key = self.view.key(SHARDS, tenure.shard)
            compares.append(RevisionIs(key, self.view.revisions[tenure.shard]))
        self._under_way += 1
        self._call(Call(Kind.CONFIRM, now, compares, (), tenures))

    @property
    def _grace(self) -> float:
        return self.terms.grace

    # Shards go.

    def _release(self, queue: dict[int, None], now: float) -> None:
        """Hand some shards over. From here on nothing about them changes in the table."""
        compares: list[Compare] = [self._condition]
        operations: list[Operation] = []
        tenures: list[Tenure] = []
        size = 0
        for shard in _take(queue, BATCH):
            tenure = self._tenures[shard]
            if tenure.stage is Stage.SERVING:
                self._freeze(tenure, now)
            size += len(tenure.snapshot)
            if size > MAX_SNAPSHOT and tenures:
                queue[shard] = None  # too much for one transaction: it is the next one's
                break
            record = self.view.records[shard]._replace(current="")
            tenure.record = record.with_clean(tenure.epoch if tenure.clean else None)
            tenure.compared = self.view.revisions[shard]
            tenure.calling = True
            tenures.append(tenure)
            compares.append(RevisionIs(self.view.key(SHARDS, shard), tenure.compared))
            key = self.view.key(HANDED_OVER, shard)
            operations.append(Put(key, tenure.snapshot) if tenure.snapshot else Delete(key))
            operations.append(self._put(shard, tenure.record))
        self._under_way += 1
        self._call(Call(Kind.RELEASE, now, compares, operations, tenures))

    def _are_taken(self, now: float) -> bool:
        """Whether those who take shards over keep up with this server."""
        for shard, since in list(self._handed.items()):
            if self.view.records[shard].current or now >= since + HAND_OVER_TIMEOUT:
                del self._handed[shard]
        return len(self._handed) < MAX_HANDED

    def _freeze(self, tenure: Tenure, now: float) -> None:
        shard = tenure.shard
        tenure.stage = Stage.LEAVING
        recovers_until = self.table.groups[shard].recovers_until
        tenure.clean = recovers_until is None or now >= recovers_until
        snapshot = self.table.freeze(shard)
        tenure.snapshot = b""
        if tenure.clean and (snapshot.holds or snapshot.waiters):
            tenure.snapshot = snapshots.dump(snapshot, tenure.epoch, now)
            if len(tenure.snapshot) > MAX_SNAPSHOT:
                logger.warning(
                    "shard %d has too many locks to hand them over: its next server waits %g s "
                    "for their holders",
                    *(shard, self.terms.grace),
                )
                tenure.clean, tenure.snapshot = False, b""

    def _clear(self, queue: dict[int, None], now: float) -> None:
        """Let go of shards of an earlier life: whoever gets them must wait for their holders."""
        compares: list[Compare] = [self._condition]
        operations: list[Operation] = []
        shards = list(_take(queue, BATCH))
        for shard in shards:
            record = self.view.records[shard]._replace(current="").with_clean(None)
            compares.append(RevisionIs(self.view.key(SHARDS, shard), self.view.revisions[shard]))
            operations.append(self._put(shard, record))
        self._later(shards, now)  # not again before this one has ended
        self._under_way += 1
        self._call(Call(Kind.CLEAR, now, compares, operations, shards=shards))

    # How calls end.

    def _succeeded(self, call: Call, outcome: Outcome, now: float) -> None:
        for tenure in call.tenures:
            shard = tenure.shard
            tenure.calling = False
            if call.kind is Kind.CONFIRM:
                # Unless it was taken for dead once more.
                if self._condition in call.compares and self._is_mine(tenure):
                    self._thaw(tenure, now)
                self._look_at(shard, now)
                continue
            put = Record(format_shard_value(tenure.record).encode(), outcome.revision)
            if self.view.see_shard(shard, put, outcome.revision):
                self._promises.claimed(shard, self.view.epochs[shard], now)
            is_here = self._tenures.get(shard) is tenure  # not taken for dead meanwhile
            if is_here and call.kind is Kind.CLAIM:
                key = self.view.key(HANDED_OVER, shard)
                self._begin(tenure, outcome.records.get(key), outcome.revision, now)
            elif is_here:
                self._forget(tenure)
                if tenure.record.target in self.view.nodes:
                    self._handed[shard] = now
            self._look_at(shard, now)
        if not call.tenures:
            for put_ in call.operations:
                assert isinstance(put_, Put)
                self._see(put_.key, Record(put_.value, outcome.revision), outcome.revision, now)

    def _failed(self, call: Call, outcome: Outcome | None, now: float) -> None:
        """Look at it as it is now. Something was not as expected, or nobody knows what was done."""
        for tenure in call.tenures:
            tenure.calling = False
        shards = [tenure.shard for tenure in call.tenures] + list(call.shards)
        if outcome is not None:
            me = outcome.records.get(self._me)
            if self._condition in call.compares and (not me or me.value != self._condition.value):
                self._gone(now)
                return
            has_learned = False
            for compare in call.compares:
                record = outcome.records.get(compare.key)
                revision = record.revision if record is not None else outcome.revision
                if compare is not self._condition:
                    self._hear(compare.key, now)
                has_learned |= self._see(compare.key, record, revision, now)
            if has_learned:
                for shard in shards:
                    self._look_at(shard, now)
                return
        self._later(shards, now)

    def _later(self, shards: Iterable[int], now: float) -> None:
        """Look at some shards again in a moment."""
        for shard in shards:
            self._retries[shard] = None
            for queue in self._queues:
                queue.pop(shard, None)
        if self._retry_at is None:
            self._retry_at = now + RETRY

    # Bits and pieces.

    def _call(self, call: Call) -> None:
        self._output.calls.append(call)

    def _put(self, shard: int, record: ShardRecord) -> Put:
        return Put(self.view.key(SHARDS, shard), format_shard_value(record).encode())


def _was_handed_over(record: ShardRecord) -> bool:
    return not record.current and record.clean is not None and record.clean == record.epoch


def _opens_at_once(record: ShardRecord) -> bool:
    """Whether nobody has served the shard yet, or all its locks were handed over."""
    return not (record.current or record.epoch) or _was_handed_over(record)


def _take(queue: dict[int, None], most: int) -> Iterator[int]:
    """Yield what came first, up to so many, and take it out."""
    for _ in range(min(most, len(queue))):
        if not queue:
            return
        shard = next(iter(queue))
        del queue[shard]
        yield shard
