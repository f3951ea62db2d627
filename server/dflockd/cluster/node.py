"""One server's part in a cluster, as a state machine: which shards are its own, and since when.

Pure: no socket, no clock, no asyncio. What comes in are the time, what the store says and how
transactions ended; what comes out are transactions, and the effects on the lock table. So all of it
can be run under a clock that a test turns, with transactions that are lost, late and out of order.

The rules that keep two servers from granting one lock do not rest on leaders, watches or the leases
of the store, but on three things. A server serves while its *serving lease* lasts, which only a
transaction that finds its own entry unchanged extends (`membership`). A shard is taken over by a
transaction that finds its record unchanged, and its former server's entry gone or its locks handed
over (`claims`, `handover`). And a server that takes over without such a hand-over waits until every
earlier lease must have ended (`serving_leases`). (Gray and Cheriton, "Leases", 1989; Burrows, "The
Chubby lock service", 2006, on epochs and grace; RFC 8881, section 8.4.2, on reclaims.)
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from dflockd.cluster.backoff import Backoffs
from dflockd.cluster.claims import Claims, opens_at_once
from dflockd.cluster.handover import HandOver
from dflockd.cluster.leader import SETTLE, Leader
from dflockd.cluster.membership import Membership, News
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.serving_leases import ServingLeases
from dflockd.cluster.tenures import Stage, Tenures
from dflockd.cluster.transactions import RETRY, Kind, Transaction
from dflockd.cluster.view import LEAVING, NODES, View
from dflockd.shards import (
    Event,
    Loaded,
    Outcome,
    Put,
    Record,
    RevisionIs,
    ShardRecord,
    format_shard_value,
    get_shard_id,
)
from dflockd.shards.conditions import count_conditions
from dflockd.shards.keys import FLOORS
from dflockd.shards.store import Size, StoreOperation
from dflockd.table import Effect, Limits, ShardTable, TokenIssuer
from dflockd.wire import MapReport, Refusal

MAX_TRANSACTIONS = 4
"""Transactions about shards that are under way at once. A large move is spread out by this, and each
shard is out of service only while its own transactions are under way."""

QUEUED = (Kind.CONFIRM, Kind.READ, Kind.CLAIM, Kind.RELEASE, Kind.CLEAR)
"""What the transactions are for that are made from each of a node's queues."""

LEAVE_TIMEOUT = 3.0
"""Seconds that a server that leaves gives the leader to find new servers for its shards."""

logger = logging.getLogger("dflockd.cluster")


class Output(NamedTuple):
    """What to do after a step, in this order."""

    effects: list[Effect]
    idle: set[int]
    """Peers whose connections must be closed: all that they hold is elsewhere now."""
    transactions: list[Transaction]


class Node:
    """A server of a cluster.

    Take the `output` after every call, and call `advance` when `next_deadline` says so.

    Args:
        address: where clients reach it, as ``host:port``.
        limits: the limits of its lock table.
        secret: what tokens are made with, the same on all servers. Until that is `found`, one that
            nobody has.
        parameters: what all servers have agreed upon.
        prefix: what its keys in the store begin with.
        balances: whether it moves shards, while it leads, until all servers have equally many.
        wall: the time since 1970 in nanoseconds, for fences to grow with, and for people to read.

    Attributes:
        table: the locks of its shards.
        view: what it knows of the store.
        leases: until when it, and others, may serve.
        membership: its entry in the store.
        claims: shards that come.
        handover: shards that go.
        leader: what it does while it leads.
        leaving: whether it gives all shards away.
        trouble: why it does not serve, in a few words; empty while it does, or nothing is known.
        store_size: how much room the store takes, where that is known.
    """

    def __init__(
        self,
        address: str,
        limits: Limits,
        secret: bytes,
        parameters: ClusterParameters,
        *,
        prefix: str,
        balances: bool = False,
        wall: Callable[[], int],
    ) -> None:
        self.address = address
        self.parameters = parameters
        self._wall = wall
        self._issuer = TokenIssuer(secret, 0)
        self.table = ShardTable(limits, self._issuer, self, stretch=parameters.stretch)
        self.view = View(prefix, parameters.num_shards)
        self.leases = ServingLeases(parameters)
        self.membership = Membership(address, secret, self.view, parameters, self.leases)
        self._tenures = Tenures(address, self.view, self.table)
        self.claims = Claims(self._tenures, self.leases, wall)
        self.handover = HandOver(self._tenures)
        self.leader = Leader(self.view, address, balances=balances)
        self.leaving = False
        self.trouble = ""
        self.store_size: Size | None = None
        self._shard_of = lru_cache(1 << 16)(lambda key: get_shard_id(key, parameters.num_shards))
        self._transactions: list[Transaction] = []
        self._under_way = 0
        self._is_loaded = False
        self._leave_until: float | None = None
        self._sends_away = False
        # What remains to do; a shard is in one of them at most.
        self._queues = (
            self.claims.unconfirmed,
            self.claims.incoming.queue,
            self.claims.queue,
            self.handover.queue,
            self.handover.foreign,
        )
        self._retries: dict[int, None] = {}
        self._retry_at: float | None = None
        self._backoffs = Backoffs(random.Random(address).random)

    # What comes in.

    def found(self, secret: bytes) -> None:
        """Take in the secret of the cluster, before anything else comes in."""
        self._issuer.rekey(secret)
        self.membership.found(secret)
        self.trouble = ""

    def loaded(self, loaded: Loaded, now: float) -> None:
        """Take in all that the store has under the prefix, at the start and after an interruption."""
        # Here and below: nothing that comes out of a store that was replaced makes this server serve
        # again, for other servers may have granted its locks there.
        if self.leases.over_at is not None:
            return
        for key, record, revision in self.view.differences(loaded):
            self._learn(key, record, revision, now)
        self._is_loaded = True
        self.leases.loaded(loaded.revision, now)
        self.claims.open_heard()
        self.leader.settle(now)
        self.membership.hurry(now)
        self._look_at_all(now)

    def changed(self, events: Iterable[Event], now: float) -> None:
        """Take in what has changed in the store since."""
        if self.leases.over_at is not None:
            return
        for event in events:
            if event.record is not None and event.record.value != self.membership.condition.value:
                self._hear(event.key, now)
            elif event.record is None and event.key == self.membership.key:
                self.membership.hurry(now)
            self._see(event.key, event.record, event.revision, now)
            self.leases.told(event.revision)
        self.claims.open_heard()
        self._work(now)

    def enlist(self, incarnation: str, lease: int, now: float) -> None:
        """Begin a life: by a name that was never used, and with a new lease of the store."""
        if self.leases.over_at is None:
            self.membership.enlist(incarnation, lease, now)
        self._work(now)

    def answered(self, transaction: Transaction, outcome: Outcome | None, now: float) -> None:
        """Take in how a transaction ended. Without an outcome it may yet be carried out."""
        if self.leases.over_at is not None:
            return
        if transaction.kind in (Kind.ENLIST, Kind.HEARTBEAT):
            self._beaten(transaction, outcome, now)
        elif transaction.kind is Kind.TIDY:
            self._backoffs.ended(transaction, worked=outcome is not None, now=now)
            self.claims.leftovers.answered(transaction, outcome, now)
        elif transaction.kind is Kind.ANNOUNCE:
            self._backoffs.ended(transaction, worked=outcome is not None, now=now)
            if outcome is None or not outcome.succeeded:
                self.membership.not_announced()
                self._later((), now)
        else:
            self._under_way -= 1
            if transaction.kind is Kind.ASSIGN:
                self.leader.answered(outcome.succeeded if outcome else None, now)
            elif transaction.kind is Kind.READ:
                self.claims.incoming.answered(transaction, outcome)
            if outcome is not None and outcome.succeeded:
                self._succeeded(transaction, outcome, now)
                worked = True
            else:
                worked = self._failed(transaction, outcome, now)
            self._backoffs.ended(transaction, worked=worked, now=now)
        self._work(now)

    def replaced(self, reason: str, now: float) -> None:
        """Serve nothing any more: the store was wiped, or restored from a backup.

        What other servers find there says nothing of the locks that were granted here. So this server
        grants and renews nothing from now on, and is not to be started again before all of them have
        ended: ``leases.over_at``.
        """
        if self.leases.over_at is not None:
            return
        wait = self.leases.end(now)
        self.table.lapse()
        self.membership.give_up()
        for queue in (*self._queues, self._retries):
            queue.clear()
        self.trouble = f"etcd was wiped, or restored from a backup: {reason}"
        logger.error(
            "%s: no lock is granted or renewed any more; this server stops in %d s, when no earlier "
            "lock can be left: do not start another one before that",
            *(self.trouble, wait),
        )

    def closing(self, lease: int, now: float) -> list[StoreOperation]:
        """Return what tells other servers of locks that a store that was replaced does not know of.

        They are to open no shard at once while the lease lasts, and to begin no epoch again.

        Args:
            lease: the lease of the store as it is now, for as long as a lock from before may be left.
            now: the time.
        """
        view = self.view
        floor = Put(view.key(FLOORS, self.address), b"%d" % self.claims.beyond())
        puts: list[StoreOperation] = [floor]
        if now < self.leases.hopeless_at:
            puts.append(Put(view.closed, self.address.encode(), lease))
        return puts

    def advance(self, now: float) -> None:
        """Do what is due."""
        self._work(now)

    def leave(self, now: float, timeout: float | None = None) -> None:
        """Hand over every shard. Once it `has_left`, the server is not needed any more.

        Args:
            now: the time.
            timeout: seconds for all of it; ``None`` is as long as it takes.
        """
        self.leaving = self.handover.leaving = True
        self._leave_until = now + min(LEAVE_TIMEOUT, math.inf if timeout is None else timeout / 2)
        self._look_at_all(now)

    # What goes out.

    def output(self) -> Output:
        """Return what to do since the last call."""
        output = Output(self._tenures.effects, self._tenures.idle, self._transactions)
        self._tenures.effects, self._tenures.idle, self._transactions = [], set(), []
        return output

    @property
    def has_left(self) -> bool:
        """Whether no shard is this server's, and none will be."""
        return self.leaving and not len(self._tenures)

    def next_deadline(self) -> float:
        """Return when `advance` should next be called."""
        times = [self._retry_at, self.membership.next_deadline()]
        if self._sends_away:
            times.append(self.leases.hopeless_at)
        if self.membership.joined and self._is_loaded:
            times.append(self._leave_until)
            if self.membership.in_touch:
                times += self._due_times()
        return min((time for time in times if time is not None), default=math.inf)

    def _due_times(self) -> Iterator[float | None]:
        """Yield when transactions are due, also such as have failed."""
        backoffs = self._backoffs
        yield backoffs[Kind.TIDY].due(self.claims.leftovers.next_deadline())
        if self.leaving and self._retry_at is None:
            yield backoffs.again_at(Kind.ANNOUNCE)
        if self._under_way < MAX_TRANSACTIONS:
            yield backoffs[Kind.ASSIGN].due(self.leader.next_deadline())
            yield (waits := backoffs[Kind.RELEASE].due(self.handover.next_deadline()))
            for queue, kind in zip(self._queues, QUEUED, strict=True):
                if queue and (kind is not Kind.RELEASE or waits is None):
                    yield backoffs.again_at(kind)

    def may_serve(self, now: float) -> bool:
        """Whether its serving lease lasts, so that locks are granted."""
        return self.leases.lasts(now)

    @property
    def joined(self) -> bool:
        """Whether it is in the cluster, and knows what the store has."""
        return self.membership.joined and self._is_loaded

    def counts(self) -> Counter[str]:
        """Return how many shards it has in each `Stage`, by its value."""
        return self._tenures.counts()

    def unserved(self) -> dict[int, int]:
        """Return the shards assigned to this server that no server serves.

        While a shard is under way from a server that lives, that one serves it until it hands it over.

        Returns:
            The revision of each record, by shard.
        """
        found = {}
        for shard, record in enumerate(self.view.records):
            if record.target != self.address:
                continue
            if record.current in ("", self.address):
                tenure = self._tenures.get(shard)
                is_served = tenure is not None and tenure.stage is Stage.SERVING
            else:
                is_served = record.current in self.view.nodes
            if not is_served:
                found[shard] = self.view.revisions[shard]
        return found

    def conditions(self) -> dict[str, int]:
        """Return how it stands with all shards of the cluster: how many are in which condition."""
        now = self._wall() / 1e9
        counts = count_conditions(self.view.records, self.view.nodes, now)
        return {condition.value: number for condition, number in counts.items()}

    # What the table asks; see `dflockd.table.Directory`.

    def shard_of(self, key: bytes) -> int:
        """Return the shard of a key."""
        return self._shard_of(key)

    def refer(self, shard: int) -> Refusal:
        """Return what to answer about a shard that is not here."""
        return self.view.refer(shard, self.address)

    def report(self, now: float) -> MapReport:
        """Return which server has which shard."""
        return self.view.report(now)

    # Signs of life.

    def _beaten(self, transaction: Transaction, outcome: Outcome | None, now: float) -> None:
        news = self.membership.answered(transaction, outcome, now)
        if news is News.GONE:
            self._gone()
        elif news is News.REPLACED:
            self.replaced(self.membership.reason, now)
        elif news is not News.NOTHING:
            self._sends_away = True
            self._tenures.effects.extend(self.table.serve_until(self.leases.until, now))
        if news is News.JOINED:
            self.leader.settle(now)
            self._look_at_all(now)

    def _gone(self) -> None:
        """Begin a new life: the others take this server for dead, and what it had may be theirs.

        It may also be nobody's: then the record still says that it is this server's, under the epoch
        of its own claim, and all its locks are here. Once the new entry is there nobody can claim the
        shard, so a look at the record after that decides.
        """
        logger.warning(
            "%s was declared dead: its %d shards are checked before it serves them again",
            *(self.address, len(self._tenures)),
        )
        # Before the new life begins: its serving lease would have them served here again, and another
        # server may have them by now.
        self._tenures.suspend()
        for queue in (*self._queues, self._retries):
            queue.clear()
        self.membership.end()

    # What follows from what the store says.

    def _hear(self, key: str, now: float) -> None:
        folder = self.view.key(NODES, "")
        if key.startswith(folder):
            self.leases.heard(key.removeprefix(folder), now)

    def _learn(
        self, key: str, record: Record | None, revision: int, now: float
    ) -> int | str | None:
        news = self.view.see(key, record, revision)
        if isinstance(news, int):
            self.leases.claimed(news, self.view.epochs[news], now)
        return news

    def _see(self, key: str, record: Record | None, revision: int, now: float) -> bool:
        news = self._learn(key, record, revision, now)
        if isinstance(news, int):
            if self.view.is_lost(news):
                self.leader.look(now)
            elif self.view.records[news].target not in self.view.candidates:
                self.leader.look(now + SETTLE)
            self._retries.pop(news, None)
            self._look_at(news, now)
        elif news == NODES and key.removeprefix(self.view.key(NODES, "")) in self.view.nodes:
            self.leader.joined(now)
            # While nobody knew of it, its shards seemed to be there for the taking.
            self._look_at_those_of(key.removeprefix(self.view.key(NODES, "")), now)
        elif news == NODES:
            # Its shards can be taken over. Nobody waits for it to be back where others leave, for the
            # leader may be gone that was to find servers for theirs.
            self.leader.look(now if self.view.roster.leavers else now + SETTLE)
            self._look_at_those_of(key.removeprefix(self.view.key(NODES, "")), now)
        elif news == LEAVING:
            if record is not None:
                self.leader.look(now)
            self._look_at_those_of("", now)
        return news is not None

    def _look_at_all(self, now: float) -> None:
        for shard in range(self.parameters.num_shards):
            self._look_at(shard, now)
        self._work(now)

    def _look_at_those_of(self, server: str, now: float) -> None:
        """Look at the shards that a server had, and at those that the servers left are to take."""
        if server:
            for shard, record in enumerate(self.view.records):
                if record.current == server:
                    self._look_at(shard, now)
        if self.leaving:
            for tenure in self._tenures:
                self._look_at(tenure.shard, now)
        self.handover.look()

    def _look_at(self, shard: int, now: float) -> None:
        """Find out what to do about a shard."""
        self.handover.seen(shard)
        for queue in self._queues:
            queue.pop(shard, None)
        if not self.membership.joined or shard in self._retries:
            return
        record, tenure = self.view.records[shard], self._tenures.get(shard)
        if self.view.is_lost(shard):
            if tenure is not None:
                if tenure.under_way:
                    return
                self._tenures.forget(tenure)
            if record.current == self.address:
                # Written anew at once: a server that starts from now on must know that it was
                # served.
                self.handover.foreign[shard] = None
            return
        if tenure is not None and not tenure.under_way:
            is_claiming = tenure.stage is Stage.CLAIMING
            is_mine = self._tenures.is_mine(tenure)
            if not is_mine or (is_claiming and not opens_at_once(tenure.former)):
                self._tenures.forget(tenure)
                tenure = None
            elif is_claiming:
                # Its claim was carried out and not answered. Nobody else has had the shard since, so
                # what was handed over to it is still there, and still all there is.
                self.claims.queue[shard] = None
            elif tenure.stage is Stage.SUSPENDED:
                self.claims.unconfirmed[shard] = None
            elif self._is_to_leave(record):
                self.handover.queue[shard] = None
            elif tenure.stage is Stage.LEAVING:
                if self.handover.may_thaw(tenure):
                    self._tenures.thaw(tenure, now)
                else:
                    self.handover.queue[shard] = None
        if tenure is None and shard not in self.view.unreadable:
            if self._is_to_come(record):
                self.claims.come(shard)
            elif record.current == self.address != record.target:
                self.handover.foreign[shard] = None

    def _is_to_come(self, record: ShardRecord) -> bool:
        if record.target != self.address or self.leaving:
            return False
        return record.current in ("", self.address) or self.view.roster.is_gone(record.current)

    def _is_to_leave(self, record: ShardRecord) -> bool:
        if record.target != self.address:
            return True
        # Nobody else will be found for a pinned shard, or where there is nobody else, or no leader.
        return self.leaving and (
            record.pinned
            or self._leave_until is None
            or all(node == self.address for node in self.view.candidates)
        )

    def _work(self, now: float) -> None:
        """Make the transactions that are due."""
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            shards, self._retries = self._retries, {}
            for shard in shards:
                self._look_at(shard, now)
        self._send(self.membership.due(now))
        if self._sends_away and now >= self.leases.hopeless_at:
            # All locks that were held here have ended, so nobody waits for them any more.
            self._sends_away = False
            self._tenures.effects.extend(self.table.send_away(now))
        if not (self.membership.joined and self._is_loaded):
            return
        if self._leave_until is not None and now >= self._leave_until:
            self._leave_until = None
            for tenure in self._tenures:
                self._look_at(tenure.shard, now)
        if not self.membership.in_touch:
            return  # one transaction finds out whether the store answers again, and not all of them
        if self.leaving and self._retry_at is None and self._backoffs[Kind.ANNOUNCE].may(now):
            self._send(self.membership.announce(now))
        self._work_on_shards(now)
        if self._backoffs[Kind.TIDY].may(now):
            self._send(self.claims.leftovers.due(now))

    def _work_on_shards(self, now: float) -> None:
        # With each goes the condition that the entry of this life is still there. If others have taken
        # this server for dead, and its shards for theirs, nothing that it sends is carried out.
        condition, claims, handover = self.membership.condition, self.claims, self.handover
        while claims.unconfirmed and self._may_send(Kind.CONFIRM, now):
            self._send_about_shards(claims.confirm(condition, now))
        while handover.foreign and self._may_send(Kind.CLEAR, now):
            transaction = handover.clear(condition, now)
            self._later(transaction.shards, now)  # not again before this one has ended
            self._send_about_shards(transaction)
        while claims.incoming.queue and self._may_send(Kind.READ, now):
            self._send_about_shards(claims.incoming.due(now))
        while claims.queue and self._may_send(Kind.CLAIM, now):
            self._send_about_shards(claims.due(condition, now))
        while handover.queue and self._may_send(Kind.RELEASE, now) and handover.may_go_on(now):
            self._send_about_shards(handover.due(condition, now))
        if self._may_send(Kind.ASSIGN, now):
            self._send_about_shards(self.leader.due(now))

    # How transactions end.

    def _succeeded(self, transaction: Transaction, outcome: Outcome, now: float) -> None:
        for tenure in transaction.tenures:
            shard = tenure.shard
            tenure.under_way = False
            if transaction.kind is Kind.CONFIRM:
                # Unless it was taken for dead once more.
                if self.membership.condition in transaction.compares:
                    self.claims.confirmed(tenure, now)
                self._look_at(shard, now)
                continue
            if tenure.unwritten and transaction.kind is Kind.RELEASE:
                tenure.unwritten -= 1
                self._look_at(shard, now)
                continue
            put = Record(format_shard_value(tenure.record).encode(), outcome.revision)
            if self.view.see_shard(shard, put, outcome.revision):
                self.leases.claimed(shard, self.view.epochs[shard], now)
            if self._tenures.has(tenure):  # not taken for dead meanwhile
                if transaction.kind is Kind.CLAIM:
                    self.claims.begin(tenure, outcome, now)
                else:
                    self.handover.ended(tenure, now)
            self._look_at(shard, now)
        if not transaction.tenures:
            for put_ in transaction.operations:
                if isinstance(put_, Put):
                    self._see(put_.key, Record(put_.value, outcome.revision), outcome.revision, now)
            for shard in transaction.shards:
                self._look_at(shard, now)

    def _failed(self, transaction: Transaction, outcome: Outcome | None, now: float) -> bool:
        """Look at it as it is now. Something was not as expected, or nobody knows what was done.

        Returns:
            Whether it is known why.
        """
        # Without an outcome it may have been carried out, or may be yet. So nothing follows from that
        # here: the record says later whose the shard is, and until then nobody opens it here.
        for tenure in transaction.tenures:
            tenure.under_way = False
        shards = [tenure.shard for tenure in transaction.tenures] + list(transaction.shards)
        if outcome is not None:
            mine = self.membership.condition
            me = outcome.records.get(mine.key)
            if mine in transaction.compares and (not me or me.value != mine.value):
                self._gone()
                return True
            has_learned = False
            for compare in transaction.compares:
                record = outcome.records.get(compare.key)
                revision = record.revision if record is not None else outcome.revision
                if isinstance(compare, RevisionIs) and record and revision < compare.revision:
                    self.replaced(f"{compare.key} is older than it was", now)
                    return True
                if compare is not mine:
                    self._hear(compare.key, now)
                has_learned |= self._see(compare.key, record, revision, now)
            if has_learned:
                for shard in shards:
                    self._look_at(shard, now)
                return True
            self.claims.failed(outcome)
        self._later(shards, now)
        return False

    def _later(self, shards: Iterable[int], now: float) -> None:
        """Look at some shards again in a moment."""
        for shard in shards:
            self._retries[shard] = None
            for queue in self._queues:
                queue.pop(shard, None)
        if self._retry_at is None:
            self._retry_at = now + RETRY

    # Calls.

    def _may_send(self, kind: Kind, now: float) -> bool:
        return self._under_way < MAX_TRANSACTIONS and self._backoffs[kind].may(now)

    def _send_about_shards(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            self._under_way += 1
            self._send(transaction)

    def _send(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            self._backoffs[transaction.kind].begin()
            self._transactions.append(transaction)
