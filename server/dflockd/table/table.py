"""The table itself: every rule about who gets which slot, when, and for how long."""

from __future__ import annotations

import hmac
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from dflockd.table import report
from dflockd.table.counts import Counts
from dflockd.table.deadlines import Deadlines
from dflockd.table.issuer import TokenIssuer
from dflockd.table.state import UNKNOWN, Absence, Entry, Group, Hold, HoldRecord, Peer, Waiter
from dflockd.wire import (
    Acquire,
    Barrier,
    Confirm,
    Detach,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    Inspect,
    Keep,
    Label,
    Malformed,
    Ping,
    Recovering,
    Refusal,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Status,
    TimedOut,
    Wait,
)

SPAN_STEP = 0.1
"""Seconds up to which a time that can be any is rounded, so that there are few different ones."""

KEPT_LATE = 60.0
"""Seconds for which a place is kept after somebody was expected back: workers can be busy."""

MOST_KEPT = 100_000
"""Places that are kept at once: neither `Limits.max_locks` nor `Limits.max_waiters` bounds them."""

Effect: TypeAlias = tuple[int, Reply]
"""What is to be done after a step: send this reply to the peer with that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the table gives; times in seconds."""

    default_lease: int = 33
    """Lease of a request that names none."""
    max_lease: int = 3600
    """Longest lease: a longer one is refused, for it could lock a key for ever."""
    max_detached_lease: int = 3600
    """Longest lease of a hold that is detached."""
    max_locks: int = 1024
    """Most keys that are held or waited for at once. Keys beyond it are refused, not known ones."""
    max_waiters: int = 0
    """Most waiters of one key; 0 is no limit."""
    auto_release: bool = True
    """Whether the end of a connection releases what it holds. Its waiters leave in any case."""
    orphan_ttl: int = 0
    """How long the holds of a connection that broke off wait for a renewal before release."""


class LockTable:
    """Locks and semaphores with FIFO waiters and leases. A lock is a semaphore of limit 1.

    Every method takes the time, on a clock that never goes back, and returns the effects in order.
    """

    _stretch: float = 1
    """How many times as long as they are said to be leases are here."""

    def __init__(self, limits: Limits, issuer: TokenIssuer, *, kept: bool = False) -> None:
        self.limits = limits
        self.counts = Counts()
        """What has happened here."""
        self.changes: list[Hold] | None = [] if kept else None
        """The holds that the steps since it was last emptied have begun, extended or ended.

        Only where the table is `kept`: whoever keeps it empties the list, and does so before the
        effects of a step are carried out.
        """
        self._issuer = issuer
        self._group = Group(issuer)
        self._size = 0
        self._peers: dict[int, Peer] = {}
        self._last_peer = 0
        self._arrivals = itertools.count()
        self._absent = 0
        self._deadlines: Deadlines[Hold | Waiter] = Deadlines()
        self._draining = False
        self._keeps_holds = False
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
            Inspect: self._inspect,
            Evict: self._evict,
            Ping: lambda *_: Status.OK,
            # One server: every change is in effect as soon as it is answered.
            Barrier: lambda *_: Status.OK,
            Resume: self._resume,
            Keep: self._keep,
            # What only a cluster knows.
            Shards: lambda *_: Status.ERROR,
            Malformed: lambda *_: Status.ERROR,
        }

    # What the server calls.

    def connect(self) -> Peer:
        """Return a new peer. Its number is never used again."""
        self._last_peer += 1
        peer = self._peers[self._last_peer] = Peer(self._last_peer)
        return peer

    def handle(self, peer: Peer, request: Request, now: float) -> list[Effect]:
        """Handle one request of a peer that is not waiting.

        Without an effect for `peer` the request waits: `Peer.waiting` is set, and the reply comes
        as an effect of some later call.
        """
        effects: list[Effect] = []
        if now >= self._deadlines.earliest:
            self._expire(now, effects)
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
        """Let everything that is due by `now` take effect."""
        effects: list[Effect] = []
        self._expire(now, effects)
        return effects

    def disconnect(
        self, peer: Peer, now: float, *, clean: bool, silent: bool = False
    ) -> list[Effect]:
        """Forget a peer whose connection has ended.

        Args:
            peer: the peer.
            now: the time.
            clean: whether the other side closed it.
            silent: whether the other side was not heard of any more. It may run on, cut off, and
                believe in its locks until their leases end: so does the table.
        """
        effects: list[Effect] = []
        # Before anything that falls due now is handed out: nobody is there to receive it.
        del self._peers[peer.id]
        if peer.waiting is not None:
            self._leave(peer.waiting)
        for place in list(peer.places.values()):
            if place.hold is None:
                self._leave(place)
            else:
                place.hold.place = None
        peer.places.clear()
        self._expire(now, effects)
        for hold in list(peer.holds):
            self._part(hold, peer, now, effects, clean=clean, silent=silent)
        return effects

    def restore(self, holds: Iterable[HoldRecord], now: float) -> None:
        """Take in what was kept of an earlier table; nobody owns it until it is renewed."""
        for kept in holds:
            self._restore(self._group, kept, kept.deadline - now, now)

    def recover(self, until: float) -> None:
        """Grant nothing until then: there may be holds that are forgotten here.

        Their holders bring them back meanwhile by renewing them: that their tokens are authentic
        proves that they were granted.
        """
        self._group.recovers_until = until

    def drain(self, now: float, *, keep: bool = False) -> list[Effect]:
        """Send every waiter away; from now on only renewals and releases are handled.

        With `keep`, holds do not end with their connections any more: they are kept for later.
        """
        self._keeps_holds = keep
        effects: list[Effect] = []
        self._expire(now, effects)
        self._draining = True
        for peer in self._peers.values():
            waiter = peer.waiting
            if waiter is not None:
                self._leave(waiter)
                effects.append((peer.id, Status.DRAINING))
            for place in list(peer.places.values()):
                if place.hold is None:
                    self._leave(place)
        return effects

    def next_deadline(self) -> float | None:
        """Return when `advance` should next be called, or ``None`` while nothing can fall due."""
        return self._deadlines.next()

    @property
    def quiet_until(self) -> float:
        """A time before which nothing falls due: the next deadline or earlier, but at hand."""
        return self._deadlines.earliest

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
        resumed, peer.resumes = peer.resumes, b""
        lease = self._lease(request.lease)
        if lease is None:
            return Status.ERROR
        entry = self._entry(request.space, request.key, request.limit, now)
        if not isinstance(entry, Entry):
            return entry
        place = self._kept_for(entry, resumed) if resumed else None
        if place is not None:
            self._take_up(place, entry, peer, lease, two_phase=False)
            self._block(place, request.timeout, now)
            self._promote(entry, now, effects)
            return None
        if entry.has_room:
            hold = self._grant(entry, peer, lease, now)
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
        lease = self._lease(request.lease)
        if lease is None:
            return Status.ERROR
        name = (request.space, request.key)
        if name in peer.places:
            return Status.ALREADY_ENQUEUED
        entry = self._entry(request.space, request.key, request.limit, now)
        if not isinstance(entry, Entry):
            return entry
        place = self._kept_for(entry, resumed) if resumed else None
        if place is not None:
            self._take_up(place, entry, peer, lease, two_phase=True)
            self._promote(entry, now, effects)
        elif entry.has_room:
            hold = self._grant(entry, peer, lease, now)
            number = next(self._arrivals)
            hold.place = place = Waiter(entry, peer, number, lease, now, two_phase=True)
            place.hold = hold
        elif self._is_full(entry):
            self.counts.full += 1
            return Status.MAX_WAITERS
        else:
            place = self._join(entry, peer, lease, now, two_phase=True)
        peer.places[name] = place
        if place.hold is None:
            return Status.QUEUED
        place.hold.told = True
        self._note(place.hold)
        return Enqueued(place.hold.token, lease)

    def _wait(self, peer: Peer, request: Wait, now: float, _effects: list[Effect]) -> Reply | None:
        keep, peer.keep = peer.keep, None
        place = peer.places.get((request.space, request.key))
        if place is None:
            return Status.NOT_ENQUEUED
        hold = place.hold
        if hold is not None:
            self._forget_place(place)
            hold.place = None
            hold.told = True
            self._extend(hold, place.lease, now)
            return Granted(hold.token, place.lease)
        place.keep = keep
        if request.timeout == 0:
            return self._end_wait(place, now)
        self._block(place, request.timeout, now)
        return None

    def _release(self, _peer: Peer, request: Release, now: float, effects: list[Effect]) -> Reply:
        group = self._group_of(request.key)
        if not isinstance(group, Group):
            return group
        hold = self._find(group, request.space, request.key, request.token)
        if hold is None:
            return self._release_forgotten(group, request, now)
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
        # Somebody may have taken it over by now, and keeps it. One that was restored has no peer.
        if hold is None or hold.peer not in (peer, None):
            return Status.LEASE_EXPIRED
        if hold.peer is peer:
            del peer.holds[hold]
        hold.peer = None
        hold.detached = True
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

    def _resume(self, peer: Peer, request: Resume, _now: float, _effects: list[Effect]) -> Reply:
        peer.resumes = request.place
        return Status.OK

    def _keep(self, peer: Peer, request: Keep, _now: float, _effects: list[Effect]) -> Reply:
        if max(request.away, request.hold) > self.limits.max_lease * 1000:
            return Status.ERROR
        peer.keep = request
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

    # Slots.

    def _entry(self, space: Space, key: bytes, limit: int, now: float) -> Entry | Refusal:
        """Return the entry that somebody wants a slot of, new if it has to be."""
        group = self._serving(key, now)
        if not isinstance(group, Group):
            return group
        if group.recovers_until is not None:
            if now < group.recovers_until:
                return Recovering(math.ceil((group.recovers_until - now) * 1000))
            group.recovers_until = None
            group.ended.clear()
        entry = group.spaces[space].get(key)
        if entry is None:
            if self._size >= self.limits.max_locks:
                self.counts.full += 1
                return Status.MAX_LOCKS
            entry = self._add(group, space, key, limit)
        elif entry.limit == UNKNOWN:
            entry.limit = limit
        elif entry.limit != limit:
            return Status.LIMIT_MISMATCH
        return entry

    def _group_of(self, key: bytes) -> Group | Refusal:
        """Return the group that a key is in, or what to answer if that is not here."""
        return self._group

    def _serving(self, key: bytes, now: float) -> Group | Refusal:
        """Return the group that a key is in, if it may be granted and renewed there now."""
        return self._group

    def _add(self, group: Group, space: Space, key: bytes, limit: int) -> Entry:
        self._size += 1
        entry = group.spaces[space][key] = Entry(group, space, key, limit)
        return entry

    def _remove(self, entry: Entry) -> None:
        self._size -= 1
        del entry.group.spaces[entry.space][entry.key]

    def _restore(self, group: Group, kept: HoldRecord, left: float, now: float) -> None:
        """Take in a hold that has so many seconds left."""
        entry = group.spaces[kept.space].get(kept.key)
        if entry is None:
            entry = self._add(group, kept.space, kept.key, kept.limit)
        elif entry.limit == UNKNOWN:
            entry.limit = kept.limit
        token = self._issuer.token(kept.space, kept.key, kept.fence)
        hold = entry.holds[kept.fence] = Hold(entry, kept.fence, token, None, kept.since)
        hold.label = kept.label
        hold.detached = kept.detached
        self._deadlines.set(hold, _rounded(left), now)  # a lease that ends late harms nobody
        group.issuer.fence = max(group.issuer.fence, kept.fence)
        self.counts.returned += 1
        self._note(hold)

    def _lease(self, asked: int | None) -> int | None:
        lease = self.limits.default_lease if asked is None else asked
        return lease if lease <= self.limits.max_lease else None

    def _grant(self, entry: Entry, peer: Peer, lease: int, now: float) -> Hold:
        fence, token = entry.group.issuer.issue(entry.space, entry.key)
        hold = entry.holds[fence] = Hold(entry, fence, token, peer, now)
        peer.holds[hold] = None
        self._deadlines.set(hold, lease * self._stretch, now)
        self.counts.granted += 1
        return hold

    def _extend(self, hold: Hold, span: float, now: float) -> None:
        self._deadlines.reset(hold, span * self._stretch, now)
        self._note(hold)

    def _note(self, hold: Hold) -> None:
        if self.changes is not None and hold.told:
            self.changes.append(hold)

    @staticmethod
    def _find(group: Group, space: Space, key: bytes, token: bytes) -> Hold | None:
        entry = group.spaces[space].get(key)
        if entry is None:
            return None
        try:
            hold = entry.holds.get(int(token[:16], 16))
        except ValueError:
            return None
        if hold is not None and hmac.compare_digest(hold.token, token):
            return hold
        return None

    def _forgotten(self, group: Group, request: Renew | Release, now: float) -> int | None:
        """Return the fence of a hold that is authentic and was forgotten, while that may be."""
        if group.recovers_until is None or now >= group.recovers_until:
            return None
        fence = self._issuer.verify(request.space, request.key, request.token)
        return None if fence in group.ended else fence

    def _release_forgotten(self, group: Group, request: Release, now: float) -> Status:
        fence = self._forgotten(group, request, now)
        if fence is None:
            return Status.ERROR
        group.ended.add(fence)
        return Status.OK

    def _reclaim(self, group: Group, peer: Peer, request: Renew, lease: int, now: float) -> bool:
        """Bring back a hold that was forgotten here.

        Of two for one lock the later grant counts: the earlier one had ended before it.
        """
        fence = self._forgotten(group, request, now)
        if fence is None:
            return False
        is_lock = request.space is Space.LOCK
        entry = group.spaces[request.space].get(request.key)
        if entry is not None and is_lock:
            [other] = entry.holds.values()
            if other.fence > fence:
                return False
            self.counts.superseded += 1
            self._free(other, now, [])
            entry = None
        if entry is None:
            limit = 1 if is_lock else UNKNOWN
            entry = self._add(group, request.space, request.key, limit)
        hold = entry.holds[fence] = Hold(entry, fence, request.token, peer, now)
        peer.holds[hold] = None
        self._deadlines.set(hold, lease * self._stretch, now)
        group.issuer.fence = max(group.issuer.fence, fence)
        self.counts.returned += 1
        self._note(hold)
        return True

    def _free(self, hold: Hold, now: float, effects: list[Effect]) -> None:
        self._deadlines.clear(hold)
        self._forget(hold, now, effects)

    def _forget(self, hold: Hold, now: float, effects: list[Effect]) -> None:
        """End a hold whose deadline is no longer set, and give its slot to the next."""
        entry = hold.entry
        del entry.holds[hold.fence]
        self.counts.held.add(now - hold.since)
        self._note(hold)
        if entry.group.recovers_until is not None:
            entry.group.ended.add(hold.fence)
        if hold.peer is not None:
            del hold.peer.holds[hold]
        if hold.place is not None:
            self._forget_place(hold.place)
            hold.place = None  # which refers to it
        if entry.waiters:
            self._promote(entry, now, effects)
        elif not entry.holds:
            self._remove(entry)

    def _part(
        self,
        hold: Hold,
        peer: Peer,
        now: float,
        effects: list[Effect],
        *,
        clean: bool,
        silent: bool,
    ) -> None:
        """Say what becomes of a hold whose peer has ended."""
        if self.limits.auto_release and not (peer.detaches or self._keeps_holds or silent):
            patience = 0 if clean else self.limits.orphan_ttl
            if not patience:
                self._free(hold, now, effects)
                return
            if hold.deadline - now > patience:
                self._extend(hold, patience, now)
        hold.peer = None

    # Places in the queue.

    def _is_full(self, entry: Entry) -> bool:
        most = self.limits.max_waiters
        if not (most and entry.waiters and len(entry.waiters) >= most):
            return False
        return sum(waiter.absence is None for waiter in entry.waiters) >= most

    def _join(self, entry: Entry, peer: Peer, lease: int, now: float, *, two_phase: bool) -> Waiter:
        waiter = Waiter(entry, peer, next(self._arrivals), lease, now, two_phase=two_phase)
        if entry.waiters is None:
            entry.waiters = OrderedDict()
        entry.waiters[waiter] = None
        self.counts.queued += 1
        return waiter

    def _block(self, waiter: Waiter, timeout: int, now: float) -> None:
        waiter.peer.waiting = waiter
        self._deadlines.set(waiter, timeout, now)

    def _end_wait(self, waiter: Waiter, now: float) -> Reply:
        """Return what the end of a wait for lack of time is answered with.

        The waiter's deadline is not set any more.
        """
        if waiter.keep is None or self._absent >= MOST_KEPT:
            self.counts.timed_out += 1
            self._give_up(waiter)
            return Status.TIMEOUT
        peer, keep = waiter.peer, waiter.keep
        if peer.waiting is waiter:
            peer.waiting = None
        self._forget_place(waiter)
        # The next server of its shard may know it by the name that it has already.
        entry = waiter.entry
        name = waiter.place or entry.group.issuer.place(entry.space, entry.key)
        due = now + keep.away / 1000
        absence = Absence(due, keep.hold / 1000, due + KEPT_LATE)
        self._keep_place(waiter, name, peer.label, absence, now)
        self.counts.kept += 1
        return TimedOut(name)

    def _leave(self, waiter: Waiter) -> None:
        """Take a waiter out of its queue. The slots are taken, so nobody moves up."""
        if waiter.peer.waiting is waiter:
            self._deadlines.clear(waiter)
        self._give_up(waiter)

    def _give_up(self, waiter: Waiter) -> None:
        """Take a waiter whose deadline is no longer set out of its queue."""
        entry = waiter.entry
        assert entry.waiters is not None
        del entry.waiters[waiter]
        self.counts.gave_up += 1
        if not (entry.waiters or entry.holds):
            self._remove(entry)
        if waiter.peer.waiting is waiter:
            waiter.peer.waiting = None
        if waiter.two_phase:
            self._forget_place(waiter)

    def _forget_place(self, place: Waiter) -> None:
        place.peer.places.pop((place.entry.space, place.entry.key), None)

    def _promote(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        """Give free slots to the waiters, first come, first served."""
        while (waiter := self._next(entry, now)) is not None:
            assert entry.waiters is not None
            del entry.waiters[waiter]
            peer = waiter.peer
            hold = self._grant(entry, peer, waiter.lease, now)
            self.counts.waited.add(now - waiter.since)
            if peer.waiting is waiter:
                self._deadlines.clear(waiter)
                peer.waiting = None
                if waiter.two_phase:
                    self._forget_place(waiter)
                self._note(hold)
                effects.append((peer.id, Granted(hold.token, waiter.lease)))
            else:
                hold.told = False
                waiter.hold = hold
                hold.place = waiter
        if not (entry.waiters or entry.holds):
            self._remove(entry)

    def _next(self, entry: Entry, now: float) -> Waiter | None:
        """Return who is to have a slot, if one is free.

        Places that nobody is at have a slot held for a while. If that is over, or not worth it, who
        is behind them goes first.
        """
        free = entry.limit - len(entry.holds)
        passed = []
        found = None
        waiters: dict[Waiter, None] = entry.waiters or {}
        for waiter in waiters:
            if free <= 0:
                break
            if waiter.absence is None:
                found = waiter
                break
            if self._is_held_for(waiter, waiter.absence, now):
                free -= 1
            else:
                passed.append(waiter)
        for waiter in passed:
            del waiters[waiter]
        return found

    # Places that nobody is at.

    def _keep_place(
        self, waiter: Waiter, name: bytes, label: bytes, absence: Absence, now: float
    ) -> None:
        waiter.peer = Peer(0)
        waiter.peer.label = label
        waiter.two_phase = False
        waiter.keep = None
        waiter.place = name
        waiter.absence = absence
        waiter.entry.group.absent[name] = waiter
        self._absent += 1
        self._deadlines.set(waiter, _rounded(absence.until - now), now)

    @staticmethod
    def _kept_for(entry: Entry, name: bytes) -> Waiter | None:
        """Return the place of that name, if it is one of this key, even if others have passed it."""
        place = entry.group.absent.get(name)
        if place is None or (place.entry.space, place.entry.key) != (entry.space, entry.key):
            return None
        return place

    def _is_held_for(self, waiter: Waiter, absence: Absence, now: float) -> bool:
        if not waiter.is_held and absence.is_worth_holding(now):
            waiter.is_held = True
            end = min(absence.due + absence.hold, absence.until)
            self._deadlines.reset(waiter, _rounded(end - now), now)
        return waiter.is_held

    def _take_up(
        self, waiter: Waiter, entry: Entry, peer: Peer, lease: int, *, two_phase: bool
    ) -> None:
        """Let a peer have a place that was kept."""
        del entry.group.absent[waiter.place]
        self._absent -= 1
        self._deadlines.clear(waiter)
        waiter.absence, waiter.is_held = None, False
        waiter.entry = entry  # not the same, if nobody was here meanwhile
        waiter.peer = peer
        waiter.lease = lease
        waiter.two_phase = two_phase
        if entry.waiters is None:
            entry.waiters = OrderedDict()
        if waiter not in entry.waiters:
            # Others passed it. All that are still ahead of it did the same, and have come back.
            ahead = list(itertools.takewhile(lambda w: w.number < waiter.number, entry.waiters))
            entry.waiters[waiter] = None
            for each in (waiter, *reversed(ahead)):
                entry.waiters.move_to_end(each, last=False)

    def _end_absence(
        self, waiter: Waiter, absence: Absence, now: float, effects: list[Effect]
    ) -> None:
        """Stop holding a slot for a place, or forget it; its deadline is not set any more."""
        entry = waiter.entry
        is_queued = entry.waiters is not None and waiter in entry.waiters
        if entry.waiters is not None:
            entry.waiters.pop(waiter, None)
        if waiter.is_held and now < absence.until:
            waiter.is_held = False
            self._deadlines.set(waiter, _rounded(absence.until - now), now)
        else:
            del entry.group.absent[waiter.place]
            self._absent -= 1
            self.counts.gave_up += 1
            self.counts.forgotten += 1
        if is_queued:
            self._promote(entry, now, effects)

    # Time.

    def _expire(self, now: float, effects: list[Effect]) -> None:
        while (item := self._deadlines.pop(now)) is not None:
            if isinstance(item, Hold):
                if item.detached:
                    self.counts.lapsed += 1
                else:
                    self.counts.expired += 1
                self._forget(item, now, effects)
            else:
                self._time_out(item, now, effects)

    def _time_out(self, waiter: Waiter, now: float, effects: list[Effect]) -> None:
        if waiter.absence is None:
            peer = waiter.peer
            effects.append((peer.id, self._end_wait(waiter, now)))
        else:
            self._end_absence(waiter, waiter.absence, now, effects)


def _rounded(seconds: float) -> float:
    return math.ceil(round(max(0.0, seconds) / SPAN_STEP, 6)) * SPAN_STEP
