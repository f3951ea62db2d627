"""A server: a real node and its table, and around them what runs them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from unittest import mock

from dflockd.cluster import node as node_module
from dflockd.cluster.backoff import Backoff
from dflockd.cluster.transactions import Kind, Transaction
from dflockd.shards import Outcome
from dflockd.shards.errors import LeaseGoneError, StoreReplacedError
from dflockd.table import Effect, Limits, ShardTable
from dflockd.table.state import Peer, Waiter
from dflockd.table.states import EXPECTED, PASSED
from dflockd.wire import (
    FEATURES,
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    Hello,
    Moved,
    Next,
    OwnerConflict,
    Pass,
    Ping,
    Recovering,
    Renewed,
    Request,
    Shards,
    Status,
    Superseded,
    TimedOut,
    Wait,
    Welcome,
    YourTurn,
)
from tests.dflockd.cluster.simulation.machines import PREFIX, Clock, Connection
from tests.dflockd.cluster.simulation.observed import Observed
from tests.dflockd.cluster.simulation.store import Watch

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.world import World


class WatchedTable:
    """A table some of whose methods are noted: they cannot be replaced where it is compiled."""

    def __init__(self, table: ShardTable) -> None:
        vars(self)["_table"] = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._table, name, value)


class ServerProcess(Observed):
    """One life of a server: what `Member` and `Server` do around a node and its table."""

    def __init__(self, world: World, address: str, clock: Clock, life: int) -> None:
        super().__init__(world, f"{address[:2]}.{life}", clock)
        self.address = address
        self.sessions: dict[int, Connection] = {}
        self.tickets: dict[Waiter, int] = {}
        self.came: dict[Waiter, float] = {}
        """When somebody came to a place, or came back to it."""
        self.kept: dict[bytes, tuple[int, float]] = {}
        """The shards of places that are kept for those who had them, and until when."""
        self.watch = Watch(self)
        self._taker: Connection | None = None
        """Who asked last, if it was given its turn before that."""
        self._judged = False
        """Whether this step may have begun what only one server may do."""
        self._waits_for_lease = False
        self._leasing = Backoff(random.Random(address).random)
        self._leasing_since = 0.0
        self._left_by: float | None = None
        self.continuity = world.rules.continuity()
        self._closes = False
        self._lives_at = -math.inf
        self._loads_at = -math.inf
        with mock.patch.object(node_module, "ShardTable", self._watched_table):
            self.node = world.rules.node(
                address,
                Limits(default_lease=2, max_lease=world.parameters.max_lease),
                world.etcd.agree(),
                world.parameters,
                prefix=PREFIX,
                balances=world.balances,
                wall=lambda: world.wall,
            )
        self.table = self.node.table
        self._observe()
        world.after(0, self.receive, self.due)

    def _watched_table(self, *args: Any, **more: Any) -> WatchedTable:
        return WatchedTable(self.world.rules.table(*args, **more))

    # What it is told.

    def due(self, now: float) -> None:
        self.node.advance(now)
        if self.node.next_deadline() <= now:
            raise self.world.violation(f"{self.name} spins: nothing is done about a deadline")
        self._dispatch(self.table.advance(now))
        if now >= self._loads_at:
            self._loads_at = now + 2.0
            if self.watch.next == 0 or self.watch.cut:
                self.watch = Watch(self)
                self.outbox.append((self.world.etcd.load, (self.watch,)))
        if now >= self._lives_at:
            self._live(now)

    def _live(self, now: float) -> None:
        node, etcd = self.node, self.world.etcd
        self._lives_at = now + self.world.parameters.serving_lease / 3
        if node.membership.wants_lease:
            if not self._waits_for_lease:
                self._waits_for_lease = True
                self._leasing_since = now
                grant = functools.partial(etcd.grant, self.world.parameters.serving_lease)
                self.outbox.append((etcd.call, (self, grant, self._leased)))
        elif node.membership.lease and self.address not in etcd.no_keep_alives:
            lease = node.membership.lease

            def keep() -> None:
                try:
                    etcd.space.keep_alive(lease, self.world.time)
                except LeaseGoneError:
                    return

            self.outbox.append((etcd.call, (self, keep, lambda *_: None)))

    def _leased(self, now: float, lease: Any) -> None:
        self._waits_for_lease = False
        self._lives_at = now + self.world.parameters.serving_lease / 3
        if lease is None:
            self._lives_at = self._leasing.failed(self._leasing_since, now)
        else:
            self._leasing.worked()
        if lease is not None:
            self.node.enlist(f"{self.name}/{lease.id}", lease.id, now)

    def loaded(self, now: float, watch: Watch, loaded: Any) -> None:
        if watch is self.watch and self._is_same_store(watch.asked, loaded.revision, now):
            self.node.loaded(loaded, now)

    def changed(self, now: float, watch: Watch, events: Any) -> None:
        if watch is self.watch:
            for event in events:
                self.continuity.told(event.revision)
            self.node.changed(events, now)

    def judge(self, asked: int, now: float, answer: Callable[..., None], result: Any) -> None:
        """Take in what the store answered, if it is still the same."""
        if isinstance(result, Outcome) and not self._is_same_store(asked, result.revision, now):
            result = None
        answer(now, result)

    def take(self, now: float, answer: Callable[..., None], result: Any) -> None:
        answer(now, result)

    def _is_same_store(self, asked: int, revision: int, now: float) -> bool:
        try:
            self.continuity.answered(asked, revision, name="etcd")
        except StoreReplacedError as exc:
            self.node.replaced(str(exc), now)
            return False
        return True

    def _close_store(self, now: float) -> None:
        """Tell servers that start that locks may be held in spite of what they find."""
        etcd = self.world.etcd

        def close() -> Outcome:
            space = etcd.space
            lease = space.grant(math.ceil(self.node.parameters.grace), self.world.time)
            return space.txn((), self.node.closing(lease.id, now))

        def closed(now: float, outcome: Outcome | None) -> None:
            self.world.after(1.0, self.receive, self._close_store)

        self.outbox.append((functools.partial(etcd.call, is_judged=False), (self, close, closed)))

    def lose_watch(self, now: float, seconds: float) -> None:
        """Hear nothing for some time, and load everything then."""
        self.watch = Watch(self)
        self._loads_at = now + seconds

    def answered(self, now: float, transaction: Transaction, outcome: Outcome | None) -> None:
        if outcome is None:
            self.world.counts[f"{transaction.kind.value} unknown"] += 1
            self.world.log(self.name, "%s: no answer", transaction.kind.value)
        elif transaction.kind is not Kind.HEARTBEAT or not outcome.succeeded:
            done = "done" if outcome.succeeded else "refused"
            self.world.counts[f"{transaction.kind.value} {done}"] += 1
            shards = [tenure.shard for tenure in transaction.tenures] + list(transaction.shards)
            self.world.log(self.name, "%s %s: %s", transaction.kind.value, shards, done)
        self.node.answered(transaction, outcome, now)
        self._judged = True

    def leave(self, now: float) -> None:
        if self.node.membership.lease and self._left_by is None:
            self.world.log(self.name, "is drained")
            self.world.counts["drains"] += 1
            self.node.leave(now)
            self._left_by = now + self.world.leave_timeout

    def _reserved(self, ticket: bytes) -> Waiter | None:
        """Return who has that ticket, of those whose positions can be taken up."""
        waiters = [group.reserved.get(ticket) for group in self.table.partitions.values()]
        return next(filter(None, waiters), None)

    def handle(self, now: float, connection: Connection, request: Request) -> None:
        if connection.ended:
            return
        if connection.peer is None:
            connection.peer = self.table.connect()
            self.sessions[connection.peer.id] = connection
        peer = connection.peer
        assert peer.waiting is None, "who waits for an answer asks nothing else"
        if isinstance(request, Hello):
            self.table.greet(peer, request)
            self._dispatch([(peer.id, Welcome(b"simulated", FEATURES))])
            return
        if isinstance(request, Shards | Ping):
            self._dispatch(self.table.handle(peer, request, now))
            return
        if isinstance(request, Next) or (isinstance(request, Enqueue) and request.turn is not None):
            self.table.greet(peer, Hello(connection.client.instance, b"0.1.0"))
        if isinstance(request, Next):
            self._dispatch(self.table.handle(peer, request, now))
            return
        if isinstance(request, Pass):  # whose sender does not wait for the answer
            told = self.table.handle(peer, request, now)
            self._dispatch(effect for effect in told if effect[0] != peer.id)
            return
        resumed, kept_until = b"", -math.inf
        if isinstance(request, Acquire | Enqueue):
            connection.group = b"" if request.group is None else request.group.name
            connection.age = 0 if request.owner is None else request.owner.age
            resumed = request.ticket
            _, kept_until = self.kept.pop(resumed, (0, kept_until))
        returned = self.table.counts.returned
        place = self._reserved(resumed)
        has_slot = place is not None and place.is_told and place.state == EXPECTED
        was_passed = isinstance(request, Wait) and self._was_passed(connection, request)
        had_turn = place is not None and place.state == EXPECTED
        self._taker = connection if had_turn else None
        effects = self.table.handle(peer, request, now)
        self.world.counts["reclaims"] += self.table.counts.returned - returned
        if isinstance(request, Acquire | Enqueue):
            # It may be told at once that it is its turn, under the same ticket.
            taken = place is not None and place.peer is peer
            taken = taken or (place is not None and self._reserved(resumed) is None)
            self._note_place(connection, request, resumed if taken else b"", now)
            is_refused = _is_refused(peer, effects)
            if not is_refused:
                self._note_age(connection)
            if now < kept_until and not taken and not is_refused:
                raise self.world.violation(f"{connection.client.name} has lost its place")
        elif isinstance(request, Wait):
            self._note_return(connection, now, was_passed)
        # A slot that was set aside is not for who came back before it was used.
        self._dispatch(effects, connection if has_slot else None)

    def part(self, now: float, connection: Connection, clean: bool) -> None:
        self._disconnect(now, connection, clean=clean, silent=False)

    def silent(self, now: float, connection: Connection) -> None:
        self._disconnect(now, connection, clean=False, silent=True)

    def _disconnect(self, now: float, connection: Connection, *, clean: bool, silent: bool) -> None:
        peer = connection.peer
        connection.ended = True
        if peer is not None and self.sessions.pop(peer.id, None) is not None:
            for ticket in connection.told:
                self.kept.pop(ticket, None)
            self._dispatch(self.table.disconnect(peer, now, clean=clean, silent=silent))

    # What it does.

    def stepped(self, now: float) -> None:
        if self.world.rules.groups:
            self._judge_turns()
        effects, idle, transactions = self.node.output()
        self._dispatch(effects)
        for number in idle:
            connection = self.sessions.get(number)
            if connection is not None and connection.peer and not connection.peer.holds:
                self._disconnect(now, connection, clean=False, silent=False)
                connection.ended = False
                self.outbox.append((connection.end, ()))
        for transaction in transactions:
            self.outbox.append((self._transact, (transaction,)))
        for time in (self.node.next_deadline(), self._lives_at, self._loads_at):
            self.wake_at(time)
        if (deadline := self.table.next_deadline()) is not None:
            self.wake_at(deadline)
        over_at = self.node.leases.over_at
        if over_at is not None:
            self._judged = True
            if not self._closes:
                self._closes = True
                self.world.log(self.name, "learns that the store was replaced")
                self.world.counts["stores seen to be replaced"] += 1
                self._close_store(now)
            if now >= over_at:
                self.outbox.append((self.world.end_for_good, (self,)))
            else:
                self.wake_at(over_at)
        if self._judged:
            self._judged = False
            self.world.judge_servers(self)
        if self._left_by is not None and (self.node.has_left or now >= self._left_by):
            self.outbox.append((self.world.end_server, (self,)))
            self._left_by = math.inf

    def _transact(self, transaction: Transaction) -> None:
        etcd = self.world.etcd
        answer = lambda now, outcome: self.answered(now, transaction, outcome)  # noqa: E731
        held_up = etcd.held_up.pop(transaction.kind, 0)
        unanswered = etcd.unanswered.get(transaction.kind) == self.address
        if unanswered:
            del etcd.unanswered[transaction.kind]
        etcd.call(self, lambda: etcd.txn(transaction), answer, held_up, unanswered)

    @staticmethod
    def _was_passed(connection: Connection, request: Wait) -> bool:
        assert connection.peer is not None
        waiter = connection.peer.enqueued.get((request.space, request.key))
        return waiter is not None and waiter.state == PASSED

    def _dispatch(self, effects: Iterable[Effect], unjudged: Connection | None = None) -> None:
        world = self.world
        for number, reply in effects:
            connection = self.sessions.get(number)
            if connection is not None:
                if isinstance(reply, Granted | Enqueued | Renewed):
                    self._judged = True
                if isinstance(reply, Granted | Enqueued) and connection is not unjudged:
                    self._judge_order(connection, reply.token)
                if isinstance(reply, Granted | Enqueued):
                    self._judge_age(connection, reply.token)
                if isinstance(reply, Superseded):
                    world.counts["superseded"] += 1
                if isinstance(reply, YourTurn):
                    waiter = self._reserved(reply.ticket)
                    at = number if waiter is None else waiter.peer.id
                    self._note_told(self.sessions.get(at, connection), reply.ticket)
                if isinstance(reply, TimedOut):
                    self._note_kept(connection, reply.ticket)
                self.outbox.append((connection.reply, (reply,)))

    def kill(self) -> None:
        super().kill()
        for connection in self.sessions.values():
            connection.end()


def _is_refused(peer: Peer, effects: list[Effect]) -> bool:
    replies = [reply for number, reply in effects if number == peer.id]
    return any(
        isinstance(reply, Status | Recovering | Moved | OwnerConflict | Superseded)
        for reply in replies
        if reply is not Status.QUEUED
    )
