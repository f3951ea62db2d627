"""The rules of the lock table, written down a second time in the plainest way: lists and loops.

It is slow and obviously right, and knows nothing of the real table. It makes no tokens: a grant that
somebody sees is told its token from outside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dflockd.table import HoldRecord, Limits
from dflockd.table.table import KEPT_LATE, SPAN_STEP

Name = tuple[int, bytes]
"""Namespace and key."""


class Absence(NamedTuple):
    """When somebody is expected back, for how long a slot is held, when it is all over."""

    due: float
    hold: float
    until: float


@dataclass(eq=False)
class Place:
    """A place in a queue; `since` orders what was set with equal deadlines."""

    name: Name
    peer: int
    lease: int
    two_phase: bool
    number: int = 0
    keep: tuple[int, int] | None = None
    absence: Absence | None = None
    has_slot: bool = False
    ticket: bytes | None = None
    deadline: float | None = None
    span: float = 0
    since: int = 0
    hold: Hold | None = None


@dataclass(eq=False)
class Hold:
    """A granted slot."""

    name: Name
    number: int
    peer: int | None
    owned_since: int
    deadline: float
    span: float
    since: int
    token: bytes | None = None


@dataclass(eq=False)
class Key:
    """A key that is held or waited for."""

    limit: int
    holds: list[Hold] = field(default_factory=list)
    queue: list[Place] = field(default_factory=list)


@dataclass(eq=False)
class Peer:
    """A connection."""

    detaches: bool = False
    keep: tuple[int, int] | None = None
    resumes: bytes | None = None
    waiting: Place | None = None
    places: list[Place] = field(default_factory=list)


class Answer(NamedTuple):
    """What a peer is told: the kind of reply, and for a grant its hold and lease."""

    peer: int
    kind: str
    hold: Hold | None = None
    lease: int | None = None
    place: Place | None = None


class NaiveTable:
    """The model. Every method returns the answers in the order in which they are sent."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.peers: dict[int, Peer] = {}
        self.keys: dict[Name, Key] = {}
        self.away: list[Place] = []
        """The places that nobody is at, in a queue or passed by others."""
        self.grants = self.arrivals = 0
        self.kept = self.forgotten = 0
        self.seen: Counter[str] = Counter()
        """What has happened to places that were kept, to see that a history is worth its time."""
        self.draining = False
        self.answers: list[Answer] = []
        self.authentic: Callable[[Name, bytes], int | None] = lambda *_: None
        """The fence of a token that was once given out for that key."""
        self.recovers_until = -math.inf
        self.ended: set[bytes] = set()
        """The tokens of what has ended since the recovery began."""
        self._clock = 0

    # Looking around.

    def holds(self) -> list[Hold]:
        return [hold for key in self.keys.values() for hold in key.holds]

    def timed(self) -> list[Hold | Place]:
        waiting = [peer.waiting for peer in self.peers.values() if peer.waiting]
        return [*self.holds(), *waiting, *self.away]

    def deadlines(self) -> list[float]:
        return [x.deadline for x in self.timed() if x.deadline is not None]

    def is_in_line(self, place: Place) -> bool:
        return place.name in self.keys and place in self.keys[place.name].queue

    # Events.

    def taken(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def connect(self, peer: int) -> None:
        self.peers[peer] = Peer()

    def advance(self) -> None:
        while True:
            due = [
                (x.deadline, x.span, x.since, x)
                for x in self.timed()
                if x.deadline is not None and x.deadline <= self.now
            ]
            if not due:
                return
            # What falls due together: the shorter span first, then what was set first.
            first = min(due, key=lambda row: row[:3])[3]
            if isinstance(first, Hold):
                self._end(first)
            elif first.absence:
                self._end_absence(first, first.absence)
            else:
                self._end_wait(first)

    def disconnect(self, number: int, *, clean: bool, silent: bool) -> None:
        peer = self.peers.pop(number)
        for key in list(self.keys.values()):
            for place in list(key.queue):
                if place.peer == number:
                    key.queue.remove(place)
        for place in peer.places:
            place.peer = 0
        self.advance()
        owned = [hold for hold in self.holds() if hold.peer == number]
        for hold in sorted(owned, key=lambda hold: hold.owned_since):
            if not self.limits.auto_release or peer.detaches or silent:
                hold.peer = None
            elif clean or self.limits.orphan_ttl == 0:
                self._end(hold)
            else:
                hold.peer = None
                if self.now + self.limits.orphan_ttl < hold.deadline:
                    self._set(hold, self.limits.orphan_ttl)

    def drain(self) -> None:
        self.advance()
        self.draining = True
        for number, peer in self.peers.items():
            if peer.waiting:
                self._leave(peer.waiting)
                self.answers.append(Answer(number, "error_draining"))
            for place in list(peer.places):
                if place.hold is None:
                    self._leave(place)

    def crash(self, kept: Iterable[HoldRecord], recovers_until: float) -> None:
        """Go on with nothing but some of the holds whose tokens are known to somebody."""
        known = {self._fence(hold): hold for hold in self.holds() if hold.token}
        self.peers, self.keys, self.away, self.ended = {}, {}, [], set()
        self.kept = self.forgotten = 0
        self.recovers_until = recovers_until
        for record in kept:
            hold = known[record.fence]
            key = self.keys.setdefault(hold.name, Key(record.limit))
            key.limit = key.limit or record.limit
            key.holds.append(hold)
            hold.peer = None
            self._set(hold, _rounded(record.deadline - self.now))

    def acquire(self, peer: int, name: Name, limit: int, timeout: int, lease: int | None) -> None:
        kept = self._taken_up(peer, name)
        answer = self._refusal(name, limit, lease)
        key = self.keys.get(name)
        span = self._lease(lease)
        if answer:
            self._answer(peer, answer)
        elif kept:
            self._come_back(kept, peer, limit, span, two_phase=False)
            self.peers[peer].waiting = kept
            self._set(kept, timeout)
            self._serve(name)
        elif key is None or self._free_slots(key) > 0:
            self.keys.setdefault(name, Key(limit))
            self._answer(peer, "granted", self._grant(name, peer, span), span)
        elif self._full(key):
            self._answer(peer, "error_max_waiters")
        elif timeout == 0:
            self._answer(peer, "timeout")
        else:
            place = Place(name, peer, span, two_phase=False, number=self._arrival())
            key.queue.append(place)
            self.peers[peer].waiting = place
            self._set(place, timeout)

    def enqueue(self, peer: int, name: Name, limit: int, lease: int | None) -> None:
        kept = self._taken_up(peer, name)
        answer = self._refusal(name, limit, lease)
        key = self.keys.get(name)
        span = self._lease(lease)
        if span <= self.limits.max_lease and self._place(peer, name):
            answer = "error_already_enqueued"
        if answer:
            self._answer(peer, answer)
            return
        if kept:
            self._come_back(kept, peer, limit, span, two_phase=True)
            self.peers[peer].places.append(kept)
            self._serve(name)
            self._answer(peer, "acquired" if kept.hold else "queued", kept.hold, span)
            return
        place = Place(name, peer, span, two_phase=True, number=self._arrival())
        if key is None or self._free_slots(key) > 0:
            self.keys.setdefault(name, Key(limit))
            place.hold = self._grant(name, peer, span)
            self._answer(peer, "acquired", place.hold, span)
        elif self._full(key):
            self._answer(peer, "error_max_waiters")
            return
        else:
            key.queue.append(place)
            self._answer(peer, "queued")
        self.peers[peer].places.append(place)

    def keep(self, peer: int, away: int, hold: int) -> None:
        if away > self.limits.max_lease * 1000 or hold > self.limits.max_lease * 1000:
            self._answer(peer, "error")
        else:
            self.peers[peer].keep = (away, hold)
            self._answer(peer, "ok")

    def resume(self, peer: int, ticket: bytes) -> None:
        self.peers[peer].resumes = ticket
        self._answer(peer, "ok")

    def wait(self, peer: int, name: Name, timeout: int) -> None:
        keep, self.peers[peer].keep = self.peers[peer].keep, None
        place = self._place(peer, name)
        if place is None:
            self._answer(peer, "error_not_enqueued")
        elif place.hold is not None:
            self.peers[peer].places.remove(place)
            self._set(place.hold, place.lease)
            self._answer(peer, "granted", place.hold, place.lease)
        elif timeout == 0:
            place.keep = keep
            self._end_wait(place)
        else:
            place.keep = keep
            self.peers[peer].waiting = place
            self._set(place, timeout)

    def release(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        if hold is None:
            forgotten = self._forgotten(name, token) is not None
            if forgotten:
                self.ended.add(token)
            self._answer(peer, "ok" if forgotten else "error")
        else:
            self._answer(peer, "ok")
            self._end(hold)

    def confirm(self, peer: int, name: Name, token: bytes, lease: int | None) -> None:
        self.renew(peer, name, token, lease, brings_back=False)

    def renew(
        self, peer: int, name: Name, token: bytes, lease: int | None, *, brings_back: bool = True
    ) -> None:
        hold = self._by_token(name, token)
        span = self._lease(lease)
        if hold is None and span <= self.limits.max_lease and brings_back:
            hold = self._brought_back(name, token)
        if hold is None or span > self.limits.max_lease:
            self._answer(peer, "error")
            return
        self._set(hold, span)
        if hold.peer != peer:
            hold.peer = peer
            hold.owned_since = self._tick()
        self._answer(peer, "renewed", None, span)

    def detach(self, peer: int, name: Name, token: bytes, lease: int | None) -> None:
        hold = self._by_token(name, token)
        span = self._lease(lease)
        if span > self.limits.max_detached_lease:
            self._answer(peer, "error")
        elif hold is None or hold.peer not in (peer, None):
            self._answer(peer, "error_lease_expired")
        else:
            self._set(hold, span)
            hold.peer = None
            self._answer(peer, "renewed", None, span)

    def stable_ref(self, peer: int) -> None:
        self._answer(peer, "error" if self.peers[peer].detaches else "ok")
        self.peers[peer].detaches = True

    def say(self, peer: int, kind: str) -> None:
        self._answer(peer, kind)

    # Rules.

    def _answer(
        self, peer: int, kind: str, hold: Hold | None = None, lease: int | None = None
    ) -> None:
        self.answers.append(Answer(peer, kind, hold, lease))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _set(self, what: Hold | Place, span: float) -> None:
        what.deadline, what.span, what.since = self.now + span, span, self._tick()

    def _lease(self, lease: int | None) -> int:
        return self.limits.default_lease if lease is None else lease

    def _refusal(self, name: Name, limit: int, lease: int | None) -> str | None:
        if self._lease(lease) > self.limits.max_lease:
            return "error"
        if self.now < self.recovers_until:
            return f"recovering {math.ceil((self.recovers_until - self.now) * 1000)}"
        if name not in self.keys:
            return "error_max_locks" if len(self.keys) >= self.limits.max_locks else None
        self.keys[name].limit = self.keys[name].limit or limit
        return None if self.keys[name].limit == limit else "error_limit_mismatch"

    def _full(self, key: Key) -> bool:
        there = [place for place in key.queue if place.absence is None]
        return 0 < self.limits.max_waiters <= len(there)

    def _place(self, peer: int, name: Name) -> Place | None:
        for place in self.peers[peer].places:
            if place.name == name:
                return place
        return None

    def _by_token(self, name: Name, token: bytes) -> Hold | None:
        for hold in self.holds():
            if hold.name == name and hold.token == token:
                return hold
        return None

    def _fence(self, hold: Hold) -> int | None:
        return self.authentic(hold.name, hold.token) if hold.token else None

    def _forgotten(self, name: Name, token: bytes) -> int | None:
        if self.now >= self.recovers_until or token in self.ended:
            return None
        return self.authentic(name, token)

    def _brought_back(self, name: Name, token: bytes) -> Hold | None:
        fence = self._forgotten(name, token)
        if fence is None:
            return None
        is_lock = name[0] == 0
        if is_lock and name in self.keys:
            [other] = self.keys[name].holds
            if (self._fence(other) or 0) > fence:
                return None
            self._end(other)
        hold = Hold(name, 0, None, 0, 0, 0, 0, token)
        self.keys.setdefault(name, Key(1 if is_lock else 0)).holds.append(hold)
        return hold

    def _grant(self, name: Name, peer: int, lease: int) -> Hold:
        self.grants += 1
        self.seen["granted beside a slot"] += any(p.has_slot for p in self.keys[name].queue)
        now = self._tick()
        hold = Hold(name, self.grants, peer, now, self.now + lease, lease, now)
        self.keys[name].holds.append(hold)
        return hold

    def _leave(self, place: Place) -> None:
        peer = self.peers[place.peer]
        self.keys[place.name].queue.remove(place)
        if peer.waiting is place:
            peer.waiting = None
        if place in peer.places:
            peer.places.remove(place)

    def _end(self, hold: Hold) -> None:
        key = self.keys[hold.name]
        key.holds.remove(hold)
        if hold.token:
            self.ended.add(hold.token)
        for peer in self.peers.values():
            peer.places = [place for place in peer.places if place.hold is not hold]
        self._serve(hold.name)

    def _serve(self, name: Name) -> None:
        """Go through the queue once, and give each the slot that is left for it, if any."""
        key = self.keys[name]
        free = key.limit - len(key.holds)
        for place in list(key.queue):
            if free <= 0:
                break
            if place.absence is None:
                key.queue.remove(place)
                self._give(place)
                free -= 1
            elif place.has_slot or self._begin_holding(place, place.absence):
                free -= 1
            else:
                key.queue.remove(place)
                self.seen["passed"] += 1
        if not key.holds and not key.queue:
            del self.keys[name]

    def _give(self, place: Place) -> None:
        peer = self.peers[place.peer]
        granted = self._grant(place.name, place.peer, place.lease)
        if peer.waiting is place:
            peer.waiting = None
            if place in peer.places:
                peer.places.remove(place)
            self._answer(place.peer, "granted", granted, place.lease)
        else:
            place.hold = granted

    # Places that nobody is at.

    def _arrival(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def _free_slots(self, key: Key) -> int:
        """Slots that a newcomer may have."""
        return key.limit - len(key.holds) - sum(place.has_slot for place in key.queue)

    def _end_wait(self, place: Place) -> None:
        number, peer = place.peer, self.peers[place.peer]
        if place.keep is None:
            self._leave(place)
            self._answer(number, "timeout")
            return
        if peer.waiting is place:
            peer.waiting = None
        peer.places.remove(place)
        away, hold = place.keep
        due = self.now + away / 1000
        place.absence = Absence(due, hold / 1000, due + KEPT_LATE)
        place.peer, place.two_phase, place.keep = 0, False, None
        self._set(place, _rounded(place.absence.until - self.now))
        self.away.append(place)
        self.kept += 1
        self.answers.append(Answer(number, "kept", place=place))

    def _begin_holding(self, place: Place, absence: Absence) -> bool:
        """Keep a slot free for who is expected about now."""
        if abs(absence.due - self.now) >= absence.hold:
            return False
        place.has_slot = True
        self.seen["held"] += 1
        self._set(place, _rounded(min(absence.due + absence.hold, absence.until) - self.now))
        return True

    def _end_absence(self, place: Place, absence: Absence) -> None:
        was_in_line = self.is_in_line(place)
        if was_in_line:
            self.keys[place.name].queue.remove(place)
        if place.has_slot and self.now < absence.until:
            place.has_slot = False
            self._set(place, _rounded(absence.until - self.now))
            self.seen["held in vain"] += 1
        else:
            self.away.remove(place)
            self.forgotten += 1
        if was_in_line:
            self._serve(place.name)

    def _taken_up(self, peer: int, name: Name) -> Place | None:
        """The place that this request is for, by the name that was said last."""
        ticket, self.peers[peer].resumes = self.peers[peer].resumes, None
        for place in self.away:
            if ticket and place.ticket == ticket and place.name == name:
                return place
        return None

    def _come_back(
        self, place: Place, peer: int, limit: int, lease: int, *, two_phase: bool
    ) -> None:
        """Let somebody be at a place again: before all that came later."""
        self.seen["back to a slot" if place.has_slot else "back"] += 1
        self.away.remove(place)
        place.absence, place.has_slot = None, False
        place.peer, place.lease, place.two_phase = peer, lease, two_phase
        self.seen["back to a free key"] += place.name not in self.keys
        queue = self.keys.setdefault(place.name, Key(limit)).queue
        if place not in queue:
            self.seen["back before others"] += any(each.number > place.number for each in queue)
            self.seen["back behind others"] += any(each.number < place.number for each in queue)
            queue.append(place)
        queue.sort(key=lambda each: each.number)


def _rounded(seconds: float) -> float:
    """Up to the next step; what is next to nothing over one does not count."""
    return math.ceil(max(0.0, seconds) / SPAN_STEP - 1e-5) * SPAN_STEP
