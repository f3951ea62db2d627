"""The table itself: what happens to each request, with time, and at the end of a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dflockd.table import owners, report
from dflockd.table.finding import Search
from dflockd.table.identity import Identity
from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import Limits
from dflockd.table.locking import Answer, Locking
from dflockd.table.rates import Rate
from dflockd.table.slots import Effect
from dflockd.table.state import Entry, Hold, Partition, Peer
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
    Pass,
    Ping,
    Refusal,
    Release,
    Renew,
    Renewed,
    Reply,
    Report,
    Request,
    Shards,
    Space,
    StableRef,
    Stats,
    Status,
    Unbegun,
    Wait,
)
from dflockd.wire.arguments import Asked

_ABOUT_HOLDS = (Release, Renew, Unbegun)
"""What is answered to the end."""


class LockTable(Locking):
    """Locks with FIFO waiters and leases; the latest request says how many may hold one.

    Beside them are the semaphores of published clients, which keep the limit that they began with.

    Every method takes the time, on a clock that never goes back, and returns the effects in order.
    """

    def __init__(self, limits: Limits, issuer: TokenIssuer, *, kept: bool = False) -> None:
        super().__init__(limits, issuer, kept=kept)
        self.identity: Identity | None = None
        """By what this process is known to itself, at the address that it tells others."""
        self.about: dict[str, object] = {}
        """What ``stats`` says of the server besides: its version, and where it keeps its holds."""
        self._handlers: dict[type, Callable[[Peer, Any, float, list[Effect]], Reply | None]] = {
            Acquire: self._acquire,
            Enqueue: self._enqueue,
            Wait: self._wait,
            Release: self._release,
            Renew: self._renew,
            Unbegun: self._unbegun,
            Stats: self._stats,
            StableRef: self._stable_ref,
            Inspect: self._inspect,
            Find: self._find_at_once,
            Evict: self._evict,
            Ping: self._ping,
            # One server: every change is in effect as soon as it is answered.
            Barrier: self._ping,
            # What only a cluster knows.
            Shards: self._shards,
            Identify: self._identify,
            Pass: self._pass,
            DrawAge: self._draw_age,
            Listen: self._listen,
            Malformed: self._malformed,
        }

    # What the server calls.

    def greet(self, peer: Peer, request: Hello) -> bool:
        """Take in whose process a connection is; ``False`` if that was said before."""
        is_new = not peer.instance
        if is_new:
            peer.instance = request.instance
        return is_new

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
            self._expire(now, effects)
            if now >= self.deadlines.earliest:
                self._settle(peer, request, now, effects)
        if self.draining and type(request) not in _ABOUT_HOLDS:
            effects.append((peer.id, Status.DRAINING))
            return effects
        expired = len(effects)
        reply = self._handlers[type(request)](peer, request, now, effects)
        if reply is not None:
            # Ahead of the grants that follow from it, behind what has expired before it.
            effects.insert(expired, (peer.id, reply))
        return effects

    def advance(self, now: float) -> list[Effect]:
        """Let what is due by `now` take effect.

        If that is very much, only a part of it: `next_deadline` then says when to go on.
        """
        effects: list[Effect] = []
        self._expire(now, effects)
        if self.backlog:
            self._catch_up(now, effects)
        return effects

    def next_deadline(self) -> float | None:
        """Return when `advance` should next be called, or ``None`` while nothing can fall due."""
        return self._behind if self.backlog else self.deadlines.next()

    def _settle(self, peer: Peer, request: Request, now: float, effects: list[Effect]) -> None:
        """End the hold that a request is about if it is due: more is than one step lets take effect.

        Nothing revives what is past its deadline.
        """
        hold: Hold | None = None
        if isinstance(request, Wait):
            waiter = peer.enqueued.get((request.space, request.key))
            hold = waiter.hold if waiter is not None else None
        elif isinstance(request, Release | Renew | Unbegun):
            partition = self._locate(request.key)
            if isinstance(partition, Partition):
                space = Space.LOCK if isinstance(request, Unbegun) else request.space
                hold = self._find(partition, space, request.key, request.token)
        elif isinstance(request, Acquire | Enqueue) and request.space is Space.LOCK:
            entry = self.find(request.space, request.key)
            if isinstance(entry, Entry):
                hold = next(iter(entry.holds.values()), None)
        if hold is not None and hold.deadline <= now:
            self.deadlines.clear(hold)
            self._lapse(hold, now, effects)

    def status(self, now: float) -> str:
        """Return whether locks are granted, as a word: ``serving``, ``recovering`` or ``cut off``."""
        until = self._partition.recovers_until
        return "serving" if until is None or now >= until else "recovering"

    @property
    def fence(self) -> int:
        """The last fence that was given out."""
        return self._issuer.fence

    def __len__(self) -> int:
        """Return the number of keys that are held or waited for."""
        return self._size

    def find(self, space: int, key: bytes) -> Entry | Refusal | None:
        """Return a key that is held or waited for, or what to answer if it is not for this table."""
        partition = self._locate(key)
        return partition.spaces[space].get(key) if isinstance(partition, Partition) else partition

    def rate_of(self, space: int, key: bytes) -> Rate | None:
        """Return the rate of a key that is in this table, which may be free, if it has one."""
        partition = self._locate(key)
        return self.rates.view(partition, space, key) if isinstance(partition, Partition) else None

    def each_partition(self) -> Iterable[Partition]:
        """Return all that is in the table."""
        return (self._partition,)

    def search(self, request: Find) -> Search:
        """Return what finds it, in steps: a table of a hundred thousand keys takes some time."""
        return Search(
            self.each_partition(),
            request.text.decode(),
            waiters=request.waiters,
            notes=request.notes,
        )

    # One handler for each request: returns its reply, or None where the request waits.

    def _acquire(
        self, peer: Peer, request: Acquire, now: float, effects: list[Effect]
    ) -> Reply | None:
        space, key, limit, timeout, lease, rate, owner, label, partition, ticket, reserve = request
        asked = Asked(timeout, limit, lease, rate, owner, label, partition, ticket, None, reserve)
        return _granted(self.acquire(peer, space, key, asked, now, effects))

    def _enqueue(self, peer: Peer, request: Enqueue, now: float, effects: list[Effect]) -> Reply:
        space, key, limit, lease, rate, owner, label, partition, ticket, turn = request
        asked = Asked(0, limit, lease, rate, owner, label, partition, ticket, turn)
        answer = self.enqueue(peer, space, key, asked, now, effects)
        return Enqueued(answer.token, answer.lease) if isinstance(answer, Hold) else answer

    def _wait(self, peer: Peer, request: Wait, now: float, effects: list[Effect]) -> Reply | None:
        asked = Asked(request.timeout, reserve=request.reserve, age=request.age)
        return _granted(self.wait(peer, request.space, request.key, asked, now, effects))

    def _release(self, _peer: Peer, request: Release, now: float, effects: list[Effect]) -> Reply:
        return self.release(request.space, request.key, request.token, now, effects)

    def _unbegun(self, _peer: Peer, request: Unbegun, now: float, effects: list[Effect]) -> Reply:
        return self.unbegun(request.key, request.token, now, effects)

    def _renew(self, peer: Peer, request: Renew, now: float, effects: list[Effect]) -> Reply:
        space, key, token, lease, how, owner, label, partition = request
        if how is How.DETACH:
            return self._detach(peer, request, now, effects)
        confirm = how is How.CONFIRM
        answer = self.renew(
            *(peer, space, key, token, lease, now, effects, owner, label, partition),
            confirm=confirm,
        )
        if not isinstance(answer, Hold):
            return answer
        if how is How.BEGUN:
            self.begun(answer, now)
        return Renewed(answer.lease)

    def _detach(self, peer: Peer, request: Renew, now: float, effects: list[Effect]) -> Reply:
        space, key, token, asked, _, owner, label, in_group = request
        lease = self.limits.default_lease if asked is None else asked
        if lease > self.limits.max_detached_lease:
            return Status.ERROR
        partition = self._serving(key, now)
        if not isinstance(partition, Partition):
            return partition
        hold = self._find(partition, space, key, token)
        if hold is None:
            who = owner, label, in_group
            hold = self._reclaim(partition, peer, space, key, token, lease, now, effects, *who)
        # Somebody may have taken it over by now, and keeps it. One that was restored has no peer.
        if hold is None or hold.peer not in (peer, None):
            return Status.LEASE_EXPIRED
        if hold.peer is peer:
            del peer.holds[hold]
        hold.peer = None
        hold.detached = True
        owners.discard(hold.entry, hold)
        hold.owner = None
        partition.doubted.discard(hold)
        self._extend(hold, lease, now)
        return Renewed(lease)

    def _stable_ref(
        self, peer: Peer, _request: StableRef, _now: float, _effects: list[Effect]
    ) -> Reply:
        if peer.detaches:
            return Status.ERROR
        peer.detaches = True
        return Status.OK

    def _pass(self, _peer: Peer, request: Pass, now: float, effects: list[Effect]) -> Reply:
        partition = self._locate(request.key)
        if not isinstance(partition, Partition):
            return partition
        waiter = self._reservations.find(partition, Space.LOCK, request.key, request.ticket)
        if waiter is None:
            return Status.ERROR
        if self._reservations.pass_on(waiter, now):
            self._promote(waiter.entry, now, effects)
        return Status.OK

    def _draw_age(self, _peer: Peer, request: DrawAge, now: float, _effects: list[Effect]) -> Reply:
        partition = self._serving(request.key, now)
        return Aged(partition.issuer.number()) if isinstance(partition, Partition) else partition

    def _listen(
        self, peer: Peer, request: Listen, now: float, effects: list[Effect]
    ) -> Reply | None:
        return self.listen(peer, request.key, request.token, now, effects)

    def _inspect(self, _peer: Peer, request: Inspect, now: float, _effects: list[Effect]) -> Reply:
        partition = self._locate(request.key)
        if not isinstance(partition, Partition):
            return partition
        entry = partition.spaces[request.space].get(request.key)
        rate = self.rate_of(request.space, request.key)
        return report.fitting(lambda listed: report.inspect(request.key, entry, now, listed, rate))

    def _evict(self, _peer: Peer, request: Evict, now: float, effects: list[Effect]) -> Reply:
        partition = self._locate(request.key)
        if not isinstance(partition, Partition):
            return partition
        entry = partition.spaces[request.space].get(request.key)
        hold = entry.holds.get(request.fence) if entry is not None else None
        if hold is None:
            return Status.ERROR
        self.counts.evicted += 1
        self._free(hold, now, effects)
        return Status.OK

    def _stats(self, _peer: Peer, _request: Stats, now: float, _effects: list[Effect]) -> Reply:
        connections = len(self._peers)
        partitions = self.each_partition()
        return report.fitting(
            lambda listed: {
                **report.stats(partitions, self._size, connections, now, listed),
                **self.about,
                "status": self.status(now),
            }
        )

    def _find_at_once(
        self, _peer: Peer, request: Find, now: float, _effects: list[Effect]
    ) -> Reply:
        search = self.search(request)
        while not search.step(now):
            pass
        return Report(search.text())

    def _ping(
        self, _peer: Peer, _request: Ping | Barrier, _now: float, _effects: list[Effect]
    ) -> Reply:
        return Status.OK

    def _shards(self, _peer: Peer, _request: Shards, _now: float, _effects: list[Effect]) -> Reply:
        return Status.ERROR

    def _identify(
        self, _peer: Peer, request: Identify, _now: float, _effects: list[Effect]
    ) -> Reply:
        return self.identify(request)

    def _malformed(
        self, _peer: Peer, _request: Malformed, _now: float, _effects: list[Effect]
    ) -> Reply:
        return Status.ERROR


def _granted(answer: Answer | None) -> Reply | None:
    return Granted(answer.token, answer.lease) if isinstance(answer, Hold) else answer
