"""The table itself: what becomes of each request, of time, and of the ends of connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dflockd.table import owners, report
from dflockd.table.connections import Connections
from dflockd.table.identity import Identity
from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import Limits
from dflockd.table.slots import Effect
from dflockd.table.state import Entry, Group, Hold, Peer, Waiter
from dflockd.table.states import EXPECTED, GONE, GRANTED, PASSED, QUEUED, UNTOLD, WAITING
from dflockd.wire import (
    Acquire,
    Barrier,
    Confirm,
    Detach,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    Identify,
    Inspect,
    Label,
    Malformed,
    Owner,
    OwnerConflict,
    Pass,
    Ping,
    Refusal,
    Release,
    Renew,
    Renewed,
    Reply,
    Report,
    Request,
    Reserve,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Status,
    Turn,
    Wait,
    YourTurn,
)


class LockTable(Connections):
    """Locks and semaphores with FIFO waiters and leases. A lock is a semaphore of limit 1.

    Every method takes the time, on a clock that never goes back, and returns the effects in order.
    """

    def __init__(self, limits: Limits, issuer: TokenIssuer, *, kept: bool = False) -> None:
        super().__init__(limits, issuer, kept=kept)
        self.identity: Identity | None = None
        """By what this process is known to itself, at the address that it tells others."""
        self._handlers: dict[type, Callable[[Peer, Any, float, list[Effect]], Reply | None]] = {
            Acquire: self._acquire,
            Enqueue: self._enqueue,
            Wait: self._wait,
            Release: self._release,
            Renew: self._renew,
            Confirm: self._renew,
            Detach: self._detach,
            Stats: self._stats,
            StableRef: self._stable_ref,
            Label: self._label,
            Owner: self._owner,
            Inspect: self._inspect,
            Evict: self._evict,
            Ping: self._ping,
            # One server: every change is in effect as soon as it is answered.
            Barrier: self._ping,
            Resume: self._resume,
            Reserve: self._reserve,
            # What only a cluster knows.
            Shards: self._shards,
            Identify: self._identify,
            Turn: self._turn,
            Pass: self._pass,
            Malformed: self._malformed,
        }

    # What the server calls.

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
        if now >= self._deadlines.earliest:
            self._expire(now, effects)
            if now >= self._deadlines.earliest:
                self._settle(peer, request, now, effects)
        if self._draining and type(request) not in (Release, Renew, Confirm):
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

        If that is very much, a part of it: `next_deadline` says so, and is to be heeded.
        """
        effects: list[Effect] = []
        self._expire(now, effects)
        if self._backlog:
            self._catch_up(now, effects)
        return effects

    def next_deadline(self) -> float | None:
        """Return when `advance` should next be called, or ``None`` while nothing can fall due."""
        return self._behind if self._backlog else self._deadlines.next()

    @property
    def quiet_until(self) -> float:
        """A time before which nothing falls due: the next deadline or earlier, but at hand."""
        return self._behind if self._backlog else self._deadlines.earliest

    def _settle(self, peer: Peer, request: Request, now: float, effects: list[Effect]) -> None:
        """End the hold that a request is about if it is due: more is than one step lets take effect.

        Nothing revives what is past its deadline.
        """
        hold: Hold | None = None
        if isinstance(request, Wait):
            waiter = peer.enqueued.get((request.space, request.key))
            hold = waiter.hold if waiter is not None else None
        elif isinstance(request, Release | Renew | Confirm | Detach):
            group = self._group_of(request.key)
            if isinstance(group, Group):
                hold = self._find(group, request.space, request.key, request.token)
        elif isinstance(request, Acquire | Enqueue) and request.space is Space.LOCK:
            entry = self.find(request.space, request.key)
            if isinstance(entry, Entry):
                hold = next(iter(entry.holds.values()), None)
        if hold is not None and hold.deadline <= now:
            self._deadlines.clear(hold)
            self._lapse(hold, now, effects)

    @property
    def fence(self) -> int:
        """The last fence that was given out."""
        return self._issuer.fence

    def __len__(self) -> int:
        """Return the number of keys that are held or waited for."""
        return self._size

    def find(self, space: Space, key: bytes) -> Entry | Refusal | None:
        """Return a key that is held or waited for, or what to answer if it is not for this table."""
        group = self._group_of(key)
        return group.spaces[space].get(key) if isinstance(group, Group) else group

    def each_group(self) -> Iterable[Group]:
        """Return all that is in the table."""
        return (self._group,)

    # One handler for each request: returns its reply, or None where the request waits.

    def _acquire(
        self, peer: Peer, request: Acquire, now: float, effects: list[Effect]
    ) -> Reply | None:
        resumed = peer.resumes
        if resumed:
            peer.resumes = b""
        limits, lease = self.limits, request.lease
        if lease is None:
            lease = limits.default_lease
        if lease > limits.max_lease:
            return Status.ERROR
        entry = self._entry(request.space, request.key, request.limit, now)
        if not isinstance(entry, Entry):
            return entry
        waiter = self._resumed(entry, resumed) if resumed else None
        if peer.owner is not None and entry.owners is not None and waiter is None:
            there = self._there(entry, peer.owner)
            if isinstance(there, Waiter):
                if len(peer.holds) >= self._max_holds:
                    return self._refuse(entry)
                has_slot = self._take_over(there, peer, lease, effects, two_phase=False)
                self._block(there, request.timeout, now)
                self._go_on_with(there, has_slot, now, effects)
                return None
            if there is not None:
                return there
        most = self._max_holds
        if len(peer.holds) >= most or (request.limit > most and self._is_used_up(entry, waiter)):
            return self._refuse(entry)
        if waiter is not None:
            owner = peer.owner
            has_slot = self._reservations.take_up(
                waiter, entry, peer, lease, owner, two_phase=False
            )
            self._block(waiter, request.timeout, now)
            self._go_on_with(waiter, has_slot, now, effects)
            return None
        # Who waits while a slot is free is somebody for whom it is held, or will be given it as soon
        # as grants are given again.
        waiters, holders = entry.waiters, len(entry.holds)
        if holders < entry.limit and (waiters is None or holders + waiters.ahead < entry.limit):
            hold = self._grant(entry, peer, lease, now)
            if hold.owner is not None:
                owners.add(entry, hold)
            if self.changes is not None:
                self._note(hold)
            return Granted(hold.token, lease)
        if self._is_full(entry):
            self.counts.full += 1
            return Status.MAX_WAITERS
        if request.timeout == 0:
            self.counts.busy += 1
            return Status.TIMEOUT
        waiter = self._join(entry, peer, lease, now, two_phase=False)
        self._block(waiter, request.timeout, now)
        return None

    def _enqueue(
        self, peer: Peer, request: Enqueue, now: float, effects: list[Effect]
    ) -> Reply | None:
        resumed, peer.resumes = peer.resumes, b""
        turn, peer.turn = peer.turn, None
        lease = self._lease(request.lease)
        if lease is None:
            return Status.ERROR
        name = (request.space, request.key)
        if name in peer.enqueued:
            return Status.ALREADY_ENQUEUED
        entry = self._entry(request.space, request.key, request.limit, now)
        if not isinstance(entry, Entry):
            return entry
        waiter = self._resumed(entry, resumed) if resumed else None
        lost: Waiter | None = None
        if peer.owner is not None and entry.owners is not None and waiter is None:
            there = self._there(entry, peer.owner)
            if isinstance(there, OwnerConflict):
                return there
            lost = there
        if max(len(peer.holds), len(peer.enqueued)) >= self._max_holds or (
            lost is None and request.limit > self._max_holds and self._is_used_up(entry, waiter)
        ):
            return self._refuse(entry)
        if lost is not None:
            has_slot = self._take_over(lost, peer, lease, effects, two_phase=True)
            waiter = lost
        elif waiter is not None:
            owner = peer.owner
            has_slot = self._reservations.take_up(waiter, entry, peer, lease, owner, two_phase=True)
        else:
            return self._enqueue_anew(entry, peer, lease, turn, now, effects)
        peer.enqueued[name] = waiter
        waiter.turn = turn
        self._go_on_with(waiter, has_slot, now, effects)
        return self._answer_enqueued(waiter)

    def _enqueue_anew(
        self,
        entry: Entry,
        peer: Peer,
        lease: int,
        turn: float | None,
        now: float,
        effects: list[Effect],
    ) -> Reply:
        """Enqueue somebody who has no position yet, and wants to be told of the turn or a grant."""
        waiters, holders = entry.waiters, len(entry.holds)
        is_free = holders < entry.limit and (
            waiters is None or holders + waiters.ahead < entry.limit
        )
        if turn is None and is_free:
            waiter = self._grant_enqueued(entry, peer, lease, now)
        elif self._is_full(entry):
            self.counts.full += 1
            return Status.MAX_WAITERS
        else:
            waiter = self._join(entry, peer, lease, now, two_phase=True)
        peer.enqueued[entry.space, entry.key] = waiter
        if turn is not None:
            waiter.turn = turn
            self._promote(entry, now, effects)
        return self._answer_enqueued(waiter)

    def _answer_enqueued(self, waiter: Waiter) -> Reply:
        hold = waiter.hold
        if hold is None:
            return YourTurn(waiter.ticket) if waiter.state == EXPECTED else Status.QUEUED
        if waiter.state == UNTOLD:
            waiter.state = GRANTED
            hold.told = True
        self._note(hold)
        return Enqueued(hold.token, waiter.lease)

    def _grant_enqueued(self, entry: Entry, peer: Peer, lease: int, now: float) -> Waiter:
        """Grant at once what somebody enqueues for, and return who has yet to say ``wait``."""
        hold = self._grant(entry, peer, lease, now)
        owners.add(entry, hold)
        number = next(self._arrivals)
        waiter = Waiter(entry, peer, number, lease, now, two_phase=True, state=GRANTED)
        hold.waiter, waiter.hold = waiter, hold
        return waiter

    def _resumed(self, entry: Entry, ticket: bytes) -> Waiter | None:
        return self._reservations.find(entry.group, entry.space, entry.key, ticket)

    @staticmethod
    def _there(entry: Entry, owner: Owner) -> OwnerConflict | Waiter | None:
        """Return the answer to an owner whose attempt is at a key already, or a later one is.

        Or the waiter of the same process: then its former connection is lost.
        """
        there = owners.latest(entry, owner.id)
        if there is None or there.owner is None or owner.attempt > there.owner.attempt:
            return None
        if isinstance(there, Hold):
            return OwnerConflict(b"held", there.owner.attempt)
        if owner.instance and there.owner == owner and not there.is_away:
            return there
        return OwnerConflict(b"waiting", there.owner.attempt)

    def _take_over(
        self, waiter: Waiter, peer: Peer, lease: int, effects: list[Effect], *, two_phase: bool
    ) -> bool:
        """Let a peer wait where another connection of the same process does so far.

        Returns:
            Whether there is a slot for it alone.
        """
        has_slot = False
        if waiter.state == WAITING and waiter.owner is not None:
            self._deadlines.clear(waiter)
            waiter.peer.waiting = None
            waiter.state = QUEUED
            effects.append((waiter.peer.id, OwnerConflict(b"waiting", waiter.owner.attempt)))
        elif waiter.is_told:
            has_slot = self._reservations.come_back(waiter, waiter.entry)
        if waiter.two_phase:
            self._forget_waiter(waiter)
        waiter.peer, waiter.lease, waiter.two_phase = peer, lease, two_phase
        waiter.reserve = waiter.turn = None
        return has_slot

    def _is_used_up(self, entry: Entry, resumed: Waiter | None) -> bool:
        """Whether an entry has as many holders as one may have; who is told of a turn will be one."""
        told = len(entry.waiters.told) if entry.waiters is not None and resumed is None else 0
        return len(entry.holds) + told >= self._max_holds

    def _refuse(self, entry: Entry) -> Reply:
        """Return the answer to who asks for too much, of an entry that may be new."""
        self.counts.full += 1
        if not (entry.holds or entry.waiters):
            self._remove(entry)
        return Status.MAX_HOLDS

    def _wait(self, peer: Peer, request: Wait, now: float, effects: list[Effect]) -> Reply | None:
        reserve, peer.reserve = peer.reserve, None
        waiter = peer.enqueued.get((request.space, request.key))
        if waiter is None:
            return Status.NOT_ENQUEUED
        hold = waiter.hold
        if hold is not None:
            self._forget_waiter(waiter)
            waiter.state = GONE
            hold.waiter = None
            hold.told = True
            self._extend(hold, waiter.lease, now)
            return Granted(hold.token, waiter.lease)
        if waiter.state == PASSED:
            self._reservations.come_back(waiter, waiter.entry)
            self._promote(waiter.entry, now, effects)
        if waiter.state == EXPECTED:
            return YourTurn(waiter.ticket)
        waiter.reserve = reserve
        if request.timeout == 0:
            return self._end_wait(waiter, now)
        self._block(waiter, request.timeout, now)
        return None

    def _release(self, _peer: Peer, request: Release, now: float, effects: list[Effect]) -> Reply:
        group = self._group_of(request.key)
        if not isinstance(group, Group):
            return group
        hold = self._find(group, request.space, request.key, request.token)
        if hold is None:
            return self._release_forgotten(group, request, now, effects)
        self.counts.released += 1
        self._free(hold, now, effects)
        return Status.OK

    def _renew(
        self, peer: Peer, request: Renew | Confirm, now: float, _effects: list[Effect]
    ) -> Reply:
        lease = self._lease(request.lease)
        if lease is None:
            return Status.ERROR
        group = self._serving(request.key, now)
        if not isinstance(group, Group):
            return group
        hold = self._find(group, request.space, request.key, request.token)
        if hold is None:
            if type(request) is Renew and self._reclaim(group, peer, request, lease, now):
                return Renewed(lease)
            self.counts.unknown += 1
            return Status.ERROR
        if group.recovers_until is not None and (doubt := self._doubt(group, hold, request, now)):
            return doubt
        self.counts.renewed.add(1 - (hold.deadline - now) / hold.span)
        self._extend(hold, lease, now)
        if hold.peer is not peer:
            if hold.peer is not None:
                del hold.peer.holds[hold]
            hold.peer = peer
            hold.detached = False
            hold.label = peer.label or hold.label
            peer.holds[hold] = None
        return Renewed(lease)

    def _detach(self, peer: Peer, request: Detach, now: float, _effects: list[Effect]) -> Reply:
        lease = self.limits.default_lease if request.lease is None else request.lease
        if lease > self.limits.max_detached_lease:
            return Status.ERROR
        group = self._serving(request.key, now)
        if not isinstance(group, Group):
            return group
        hold = self._find(group, request.space, request.key, request.token)
        if hold is None and self._reclaim(group, peer, request, lease, now):
            hold = self._find(group, request.space, request.key, request.token)
        # Somebody may have taken it over by now, and keeps it. One that was restored has no peer.
        if hold is None or hold.peer not in (peer, None):
            return Status.LEASE_EXPIRED
        if hold.peer is peer:
            del peer.holds[hold]
        hold.peer = None
        hold.detached = True
        owners.discard(hold.entry, hold)
        hold.owner = None
        group.doubted.discard(hold)
        self._extend(hold, lease, now)
        return Renewed(lease)

    def _stable_ref(
        self, peer: Peer, _request: StableRef, _now: float, _effects: list[Effect]
    ) -> Reply:
        if peer.detaches:
            return Status.ERROR
        peer.detaches = True
        return Status.OK

    def _label(self, peer: Peer, request: Label, _now: float, _effects: list[Effect]) -> Reply:
        peer.label = request.text
        return Status.OK

    def _owner(self, peer: Peer, request: Owner, _now: float, _effects: list[Effect]) -> Reply:
        if request.label is not None:
            peer.label = request.label
            request = request._replace(label=None)  # what is compared are runs
        peer.owner = request if request.id else None
        return Status.OK

    def _resume(self, peer: Peer, request: Resume, _now: float, _effects: list[Effect]) -> Reply:
        peer.resumes = request.ticket
        return Status.OK

    def _reserve(self, peer: Peer, request: Reserve, _now: float, _effects: list[Effect]) -> Reply:
        if max(request.away, request.hold) > self.limits.max_lease * 1000:
            return Status.ERROR
        peer.reserve = request
        return Status.OK

    def _turn(self, peer: Peer, request: Turn, _now: float, _effects: list[Effect]) -> Reply:
        if request.hold > self.limits.max_lease * 1000:
            return Status.ERROR
        peer.turn = request.hold / 1000
        return Status.OK

    def _pass(self, _peer: Peer, request: Pass, now: float, effects: list[Effect]) -> Reply:
        group = self._group_of(request.key)
        if not isinstance(group, Group):
            return group
        waiter = self._reservations.find(group, request.space, request.key, request.ticket)
        if waiter is None:
            return Status.ERROR
        if self._reservations.pass_on(waiter, now):
            self._promote(waiter.entry, now, effects)
        return Status.OK

    def _inspect(self, _peer: Peer, request: Inspect, now: float, _effects: list[Effect]) -> Reply:
        group = self._group_of(request.key)
        if not isinstance(group, Group):
            return group
        entry = group.spaces[request.space].get(request.key)
        return report.fitting(lambda listed: report.inspect(request.key, entry, now, listed))

    def _evict(self, _peer: Peer, request: Evict, now: float, effects: list[Effect]) -> Reply:
        group = self._group_of(request.key)
        if not isinstance(group, Group):
            return group
        entry = group.spaces[request.space].get(request.key)
        hold = entry.holds.get(request.fence) if entry is not None else None
        if hold is None:
            return Status.ERROR
        self.counts.evicted += 1
        self._free(hold, now, effects)
        return Status.OK

    def _stats(self, _peer: Peer, _request: Stats, now: float, _effects: list[Effect]) -> Reply:
        connections = len(self._peers)
        groups = self.each_group()
        return report.fitting(
            lambda listed: report.stats(groups, self._size, connections, now, listed)
        )

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
