"""The table itself: what happens to each request, with time, and at the end of a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from dflockd.table import owners, recovery, report, superseding
from dflockd.table.connections import Connections
from dflockd.table.finding import Search
from dflockd.table.identity import Identity
from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import Limits
from dflockd.table.newest import NewestRecord
from dflockd.table.pauses import NEVER, PauseRecord
from dflockd.table.rates import KeyRate, PackedRecord, RateRecord
from dflockd.table.report import Listing
from dflockd.table.requests import Answer, Requests
from dflockd.table.slots import Effect, Slots, answer_asking
from dflockd.table.state import Entry, Hold, HoldRecord, Partition, Peer
from dflockd.wire import (
    Acquire,
    Aged,
    Barrier,
    DrawAge,
    Enqueue,
    Enqueued,
    Evict,
    Find,
    Granted,
    Hello,
    How,
    Identify,
    Inspect,
    Listen,
    Malformed,
    Next,
    Pass,
    Pause,
    Ping,
    Refusal,
    Release,
    Renew,
    Renewed,
    Reply,
    Report,
    Request,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Status,
    Unbegun,
    Wait,
)
from dflockd.wire.requests import asked_of

_ABOUT_HOLDS = (Release, Renew, Unbegun)
"""What is answered to the end."""


class LockTable(Requests):
    """Locks with FIFO waiters and leases; the latest request says how many may hold one.

    Beside them are the semaphores of published clients, which keep the limit that they began with.

    Every method takes the time, on a clock that never goes back, and returns the effects in order.

    Attributes:
        limits: how much it allows.
        counts: what has happened here.
        changes: what is to be kept; see `Slots`.
        deadlines: what falls due by itself.
        rates: how many runs may begin in a while.
        newest: the newest of keys.
        backlog: what was more than fits a step: there are more to come.
        connections: the connections, with what each holds and waits for.
    """

    def __init__(
        self, limits: Limits, issuer: TokenIssuer, *, kept: bool = False, stretch: float = 1
    ) -> None:
        super().__init__(Slots(limits, issuer, kept=kept, stretch=stretch))
        self.connections = Connections(self.slots)
        self.deadlines = self.slots.deadlines
        self.newest = self.slots.newest
        self.backlog = self.slots.backlog
        self.identity: Identity | None = None
        """By what this process is known to itself, at the address that it tells others."""
        self.about: dict[str, object] = {}
        """What ``stats`` says of the server besides: its version, and where it keeps its holds."""

    # What the server calls.

    def greet(self, peer: Peer, request: Hello) -> bool:
        """Take in whose process a connection is; ``False`` if that was said before."""
        is_new = not peer.instance
        if is_new:
            self.connections.introduce(peer, request.instance)
        return is_new

    def connect(self) -> Peer:
        """Return a new peer. Its number is never used again."""
        return self.connections.connect()

    def disconnect(
        self, peer: Peer, now: float, *, clean: bool, silent: bool = False, told: bool = True
    ) -> list[Effect]:
        """Forget a peer whose connection has ended; see `Connections`."""
        return self.connections.disconnect(peer, now, clean=clean, silent=silent, told=told)

    def drain(self, now: float, *, keep: bool = False) -> list[Effect]:
        """Send every waiter away, in steps; see `Connections`."""
        return self.connections.drain(now, keep=keep)

    def identify(self, request: Identify) -> Reply:
        """Return what no other process can answer; in no cluster an error."""
        if self.identity is None:
            return Status.ERROR
        return Report(b'{"proof":"%b"}' % self.identity.prove(request.nonce))

    def handle(self, peer: Peer, request: Request, now: float) -> list[Effect]:
        """Handle one request of a peer that is not waiting.

        Without an effect for `peer` the request waits: `Peer.waiting` is set, and the reply comes
        as an effect of some later call.
        """
        effects: list[Effect] = []
        if now >= self.deadlines.earliest:
            self.slots.expire(now, effects)
            if now >= self.deadlines.earliest:
                self._settle(peer, request, now, effects)
        if self.connections.draining and type(request) not in _ABOUT_HOLDS:
            effects.append((peer.id, Status.DRAINING))
            return effects
        expired = len(effects)
        reply = _HANDLERS[type(request)](self, peer, request, now, effects)
        if reply is not None:
            # Ahead of the grants that follow from it, behind what has expired before it.
            effects.insert(expired, (peer.id, reply))
        return effects

    def advance(self, now: float) -> list[Effect]:
        """Let what is due by `now` take effect.

        If that is very much, only a part of it: `next_deadline` then says when to go on.
        """
        effects: list[Effect] = []
        self.slots.expire(now, effects)
        if self.backlog:
            self.slots.catch_up(now, effects)
        return effects

    def next_deadline(self) -> float | None:
        """Return when `advance` should next be called, or ``None`` while nothing can fall due."""
        return self.slots.behind if self.backlog else self.deadlines.next()

    def _settle(self, peer: Peer, request: Request, now: float, effects: list[Effect]) -> None:
        """End the hold that a request is about if it is due: more is than one step lets take effect.

        Nothing revives what is past its deadline.
        """
        hold: Hold | None = None
        if isinstance(request, Wait):
            waiter = peer.enqueued.get((request.space, request.key))
            hold = waiter.hold if waiter is not None else None
        elif isinstance(request, Release | Renew | Unbegun):
            partition = self.locate(request.key)
            if isinstance(partition, Partition):
                space = Space.LOCK if isinstance(request, Unbegun) else request.space
                hold = self.slots.find(partition, space, request.key, request.token)
        elif isinstance(request, Acquire | Enqueue) and request.space is Space.LOCK:
            entry = self.find(request.space, request.key)
            if isinstance(entry, Entry):
                hold = next(iter(entry.holds.values()), None)
        if hold is not None and hold.deadline <= now:
            self.deadlines.clear(hold)
            self.slots.lapse(hold, now, effects)

    def status(self, now: float) -> str:
        """Return whether locks are granted, in a word or two: everybody asks this.

        ``serving``; ``recovering``: only holders from before are served yet. In a cluster also
        ``cut off`` from the store, and ``closed``: the store was replaced, and this server ends.
        """
        until = self._partition.recovers_until
        return "serving" if until is None or now >= until else "recovering"

    @property
    def fence(self) -> int:
        """The last fence that was given out."""
        return self.slots.issuer.fence

    def __len__(self) -> int:
        """Return the number of keys that are held or waited for."""
        return self.slots.size

    def find(self, space: int, key: bytes) -> Entry | Refusal | None:
        """Return a key that is held or waited for, or what to answer if it is not for this table."""
        partition = self.locate(key)
        return partition.spaces[space].get(key) if isinstance(partition, Partition) else partition

    def rate_of(self, space: int, key: bytes) -> KeyRate | None:
        """Return the rate of a key that is in this table, which may be free, if it has one."""
        partition = self.locate(key)
        return (
            self.rates.view(partition.rates, space, key)
            if isinstance(partition, Partition)
            else None
        )

    def each_partition(self) -> Iterable[Partition]:
        """Return all that is in the table."""
        return (self._partition,)

    def look(self, request: Find | Inspect | Stats, now: float) -> Search | Listing | Refusal:
        """Return what is made in steps: to look at a hundred thousand keys takes some time."""
        if isinstance(request, Find):
            text, waiters = request.text.decode(), request.waiters
            return Search(self.each_partition(), text, waiters=waiters, notes=request.notes)
        if isinstance(request, Inspect):
            partition = self.locate(request.key)
            if not isinstance(partition, Partition):
                return partition
            entry = partition.spaces[request.space].get(request.key)
            rate = self.rate_of(request.space, request.key)
            return report.inspect(request.key, entry, now, rate)
        connections = len(self.connections.peers)
        said = {"connections": connections, **self.about, "status": self.status(now)}
        return report.stats(self.each_partition(), self.slots.size, said)

    def shards(self, _request: Shards, _now: float) -> Reply:
        """Return which server has which shard; in no cluster an error."""
        return Status.ERROR

    # What outlives it.

    def restore(
        self,
        holds: Iterable[HoldRecord],
        now: float,
        rates: Iterable[RateRecord | PackedRecord] = (),
        pauses: Iterable[PauseRecord] = (),
    ) -> None:
        """Take in what was kept of an earlier table; see `recovery`."""
        recovery.restore(self.slots, self._partition, holds, now, rates)
        for record in pauses:
            recovery.restore_pause(self.slots, self._partition, record, now)
        self._earlier = self._partition.issuer.fence

    def recover(self, until: float) -> None:
        """Grant nothing until then; see `recovery`."""
        recovery.recover(self.slots, self._partition, until)

    def doubt_rates(self, since: float) -> None:
        """Let nobody begin for one window from then who has a rate: others may have begun before."""
        self._partition.rates.since = since

    def remember(self, records: Iterable[NewestRecord]) -> None:
        """Take in who was the newest of which key."""
        for record in records:
            self._partition.issuer.fence = max(self._partition.issuer.fence, record.age)
            superseding.remember(self.slots, self._partition, record)


# One handler for each request: returns its reply, or None where the request waits.


def _acquire(
    table: LockTable, peer: Peer, request: Acquire, now: float, effects: list[Effect]
) -> Reply | None:
    asked = asked_of(request)
    return _granted(table.acquire(peer, request.space, request.key, asked, now, effects))


def _enqueue(
    table: LockTable, peer: Peer, request: Enqueue, now: float, effects: list[Effect]
) -> Reply:
    asked = asked_of(request)
    answer = table.enqueue(peer, request.space, request.key, asked, now, effects)
    return Enqueued(answer.token, answer.lease) if isinstance(answer, Hold) else answer


def _wait(
    table: LockTable, peer: Peer, request: Wait, now: float, effects: list[Effect]
) -> Reply | None:
    asked = asked_of(request)
    return _granted(table.wait(peer, request.space, request.key, asked, now, effects))


def _release(
    table: LockTable, _peer: Peer, request: Release, now: float, effects: list[Effect]
) -> Reply:
    return table.release(request.space, request.key, request.token, now, effects)


def _unbegun(
    table: LockTable, _peer: Peer, request: Unbegun, now: float, effects: list[Effect]
) -> Reply:
    return table.unbegun(request.key, request.token, now, effects)


def _renew(
    table: LockTable, peer: Peer, request: Renew, now: float, effects: list[Effect]
) -> Reply:
    space, key, token, lease, how, owner, label, group = request
    if how is How.DETACH:
        return _detach(table, peer, request, now, effects)
    confirm = how is How.CONFIRM
    answer = table.renew(
        *(peer, space, key, token, lease, now, effects, owner, label, group),
        confirm=confirm,
    )
    if not isinstance(answer, Hold):
        return answer
    if how is How.BEGUN:
        table.begun(answer, now)
    return Renewed(answer.lease)


def _detach(
    table: LockTable, peer: Peer, request: Renew, now: float, effects: list[Effect]
) -> Reply:
    space, key, token, asked, _, owner, label, in_group = request
    lease = table.limits.default_lease if asked is None else asked
    if lease > table.limits.max_detached_lease:
        return Status.ERROR
    partition = table.serving(key, now)
    if not isinstance(partition, Partition):
        return partition
    hold = table.slots.find(partition, space, key, token)
    if hold is None:
        who = owner, label, in_group
        hold = recovery.reclaim(
            table.slots, partition, peer, space, key, token, lease, now, effects, *who
        )
    # Somebody may have taken it over by now, and keeps it. One that was restored has no peer.
    if hold is None or hold.peer not in (peer, None):
        return Status.LEASE_EXPIRED
    if hold.peer is peer:
        del peer.holds[hold]
    table.slots.forget_enqueue(hold)
    hold.peer = None
    hold.detached = True
    owners.discard(hold.entry, hold)
    hold.owner = None
    partition.doubted.discard(hold)
    table.slots.extend(hold, lease, now)
    return Renewed(lease)


def _stable_ref(
    table: LockTable, peer: Peer, _request: StableRef, _now: float, _effects: list[Effect]
) -> Reply:
    if peer.detaches:
        return Status.ERROR
    peer.detaches = True
    return Status.OK


def _next(
    table: LockTable, peer: Peer, _request: Next, now: float, effects: list[Effect]
) -> Reply | None:
    process = peer.process
    if process is None:
        return Status.ERROR
    # On a connection that is lost: the process has another one for this now.
    answer_asking(process, Status.ERROR, effects)
    process.asking, peer.waiting, peer.told = peer, process, None
    table.slots.look_behind(process, now)
    table.slots.find_turn(process, now, effects)
    return None


def _pass(table: LockTable, _peer: Peer, request: Pass, now: float, effects: list[Effect]) -> Reply:
    partition = table.locate(request.key)
    if not isinstance(partition, Partition):
        return partition
    waiter = table.slots.reservations.find(partition, Space.LOCK, request.key, request.ticket)
    if waiter is None:
        return Status.ERROR
    table.slots.pass_on(waiter, now, effects)
    return Status.OK


def _draw_age(
    table: LockTable, _peer: Peer, request: DrawAge, now: float, _effects: list[Effect]
) -> Reply:
    partition = table.serving(request.key, now)
    return Aged(partition.issuer.number()) if isinstance(partition, Partition) else partition


def _listen(
    table: LockTable, peer: Peer, request: Listen, now: float, effects: list[Effect]
) -> Reply | None:
    partition = table.locate(request.key)
    if not isinstance(partition, Partition):
        return partition
    key, token = request
    return superseding.listen(table.slots, partition, peer, key, token, now, effects)


def _evict(
    table: LockTable, _peer: Peer, request: Evict, now: float, effects: list[Effect]
) -> Reply:
    # Not where another server may have the shard by now: there the holder has renewed, and goes on.
    partition = table.serving(request.key, now)
    if not isinstance(partition, Partition):
        return partition
    entry = partition.spaces[request.space].get(request.key)
    hold = entry.holds.get(request.fence) if entry is not None else None
    if hold is None:
        return Status.ERROR
    table.counts.evicted += 1
    table.slots.free(hold, now, effects)
    return Status.OK


def _pause(
    table: LockTable, _peer: Peer, request: Pause, now: float, _effects: list[Effect]
) -> Reply:
    key, span, by, reason = request
    partition = table.serving(key, now)
    if not isinstance(partition, Partition):
        return partition
    entry = partition.spaces[Space.LOCK].get(key)
    if entry is None:
        found = table.slots.enter(partition, Space.LOCK, key, 1, now)
        if not isinstance(found, Entry):
            return found
        entry = found
    left = NEVER if span is None else span / 1000
    table.slots.pause(entry, PauseRecord(key, by, reason, now, now + left), left, now)
    return Status.OK


def _resume(
    table: LockTable, _peer: Peer, request: Resume, now: float, effects: list[Effect]
) -> Reply:
    partition = table.serving(request.key, now)
    if not isinstance(partition, Partition):
        return partition
    entry = partition.spaces[Space.LOCK].get(request.key)
    if entry is None or entry.pause is None:
        return Status.ERROR
    table.slots.resume(entry.pause, now, effects)
    return Status.OK


def _look_at_once(
    table: LockTable,
    _peer: Peer,
    request: Find | Inspect | Stats,
    now: float,
    _effects: list[Effect],
) -> Reply:
    steps = table.look(request, now)
    if not isinstance(steps, Search | Listing):
        return steps
    while not steps.step(now):
        pass
    return Report(steps.text())


def _ping(
    table: LockTable, _peer: Peer, _request: Ping | Barrier, _now: float, _effects: list[Effect]
) -> Reply:
    return Status.OK


def _shards(
    table: LockTable, _peer: Peer, request: Shards, now: float, _effects: list[Effect]
) -> Reply:
    return table.shards(request, now)


def _identify(
    table: LockTable, _peer: Peer, request: Identify, _now: float, _effects: list[Effect]
) -> Reply:
    return table.identify(request)


def _malformed(
    table: LockTable, _peer: Peer, _request: Malformed, _now: float, _effects: list[Effect]
) -> Reply:
    return Status.ERROR


def _granted(answer: Answer | None) -> Reply | None:
    return Granted(answer.token, answer.lease) if isinstance(answer, Hold) else answer


_HANDLERS: Final[
    dict[type, Callable[[LockTable, Peer, Any, float, list[Effect]], Reply | None]]
] = {
    Acquire: _acquire,
    Enqueue: _enqueue,
    Wait: _wait,
    Release: _release,
    Renew: _renew,
    Unbegun: _unbegun,
    Stats: _look_at_once,
    StableRef: _stable_ref,
    Inspect: _look_at_once,
    Find: _look_at_once,
    Evict: _evict,
    Pause: _pause,
    Resume: _resume,
    Ping: _ping,
    # One server: every change is in effect as soon as it is answered.
    Barrier: _ping,
    # What only a cluster knows.
    Shards: _shards,
    Identify: _identify,
    Next: _next,
    Pass: _pass,
    DrawAge: _draw_age,
    Listen: _listen,
    Malformed: _malformed,
}
