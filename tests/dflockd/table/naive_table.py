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
from dflockd.table.deadlines import SPAN_STEP
from dflockd.table.queue import LEAST_TURN
from dflockd.table.reservations import RESERVED_LATE
from dflockd.wire import InGroup

LATE = 0.001
"""Seconds by which a place of a rate may be given later than it is free."""

Owner = tuple[bytes, int, bytes, int]
"""Identity, attempt, instance and age."""

Name = tuple[int, bytes]
"""Namespace and key."""


class Reservation(NamedTuple):
    """When somebody is expected back, for how long a slot is held, when it is all over."""

    due: float
    hold: float
    until: float


@dataclass(eq=False)
class Waiter:
    """Somebody in a queue; `since` orders what was set with equal deadlines."""

    name: Name
    peer: int
    lease: int
    two_phase: bool
    number: int = 0
    reserve: tuple[int, int] | None = None
    reservation: Reservation | None = None
    turn: float | None = None
    """Seconds for which it has a slot once it is told of its turn, if it wants to be told."""
    is_told: bool = False
    """Whether its turn has come; others may go first by now."""
    has_slot: bool = False
    ticket: bytes | None = None
    deadline: float | None = None
    span: float = 0
    since: int = 0
    hold: Hold | None = None
    owner: Owner | None = None
    group: InGroup | None = None

    @property
    def wants(self) -> bool:
        """Whether it stands in line for a turn."""
        return not self.is_told and not self.has_slot


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
    owner: Owner | None = None
    group: bytes = b""
    is_doubted: bool = False
    """Whether it was restored in a recovery and nobody has renewed it since."""


@dataclass(eq=False)
class PlacesOfRate:
    """How many runs of a key may begin in a window, and when those of late have begun."""

    runs: int
    window: float
    pending: list[Hold] = field(default_factory=list)
    """Who may begin at any time."""
    begun: list[float] = field(default_factory=list)

    def free(self, now: float) -> int:
        counted = [time for time in self.begun if time + self.window > now]
        return self.runs - len(self.pending) - len(counted)

    def begin(self, hold: Hold, now: float) -> None:
        if hold in self.pending:
            self.pending.remove(hold)
            self.begun.append(now)
            for first, last in zip(self.begun, self.begun[self.runs :], strict=False):
                assert last - first >= self.window, (first, last)


@dataclass(eq=False)
class Key:
    """A key that is held or waited for."""

    limit: int
    holds: list[Hold] = field(default_factory=list)
    queue: list[Waiter] = field(default_factory=list)
    silent: Counter[bytes] = field(default_factory=Counter)
    """How many turns in a row each process has let run out."""
    is_grouped: bool = False
    """Whether groups have come to it since somebody was here."""
    limits: dict[bytes, int] = field(default_factory=dict)
    """What was said last of how many slots a group may have; nothing is no limit."""
    turns: dict[bytes, int] = field(default_factory=dict)
    """Groups that may have a turn: since when, or when they had the last one, whatever is later."""

    def of_group(self, name: bytes) -> list[Waiter]:
        return [waiter for waiter in self.queue if name_of(waiter.group) == name]

    def taken(self, name: bytes) -> int:
        """Slots that a group has or that are held for its members."""
        held = sum(hold.group == name for hold in self.holds)
        return held + sum(waiter.has_slot for waiter in self.of_group(name))

    def has_room(self, name: bytes) -> bool:
        most = self.limits.get(name, 0)
        return not most or self.taken(name) < most

    def order(self) -> list[Waiter]:
        """Who waits, in the order of their turns if nothing else happens."""
        if not self.is_grouped:
            return self.queue
        found = [waiter for waiter in self.queue if not waiter.wants]
        lines = [
            [waiter for waiter in self.of_group(name) if waiter.wants]
            for name in sorted(self.turns, key=self.turns.__getitem__)
        ]
        while any(lines):
            found += [line.pop(0) for line in lines if line]
        return found + [waiter for waiter in self.queue if waiter not in found]


def name_of(group: InGroup | None) -> bytes:
    return group.name if group else b""


@dataclass(eq=False)
class Peer:
    """A connection."""

    detaches: bool = False
    owner: Owner | None = None
    reserve: tuple[int, int] | None = None
    resumes: bytes | None = None
    turn: float | None = None
    group: InGroup | None = None
    waiting: Waiter | None = None
    listening: Hold | None = None
    """What it holds and waits to hear of."""
    granted: Hold | None = None
    """What its last wait has brought."""
    enqueued: list[Waiter] = field(default_factory=list)


class Answer(NamedTuple):
    """What a peer is told: the kind of reply, and for a grant its hold and lease."""

    peer: int
    kind: str
    hold: Hold | None = None
    lease: int | None = None
    waiter: Waiter | None = None


class NaiveTable:
    """The model. Every method returns the answers in the order in which they are sent."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.peers: dict[int, Peer] = {}
        self.keys: dict[Name, Key] = {}
        self.away: list[Waiter] = []
        """Waiters who are away, in a queue or passed by others."""
        self.grants = self.arrivals = 0
        self.kept = self.forgotten = 0
        self.seen: Counter[str] = Counter()
        """What has happened to positions that were kept, to see that a history is worth its time."""
        self.draining = self.keeps_holds = False
        self.answers: list[Answer] = []
        self.authentic: Callable[[Name, bytes], int | None] = lambda *_: None
        """The fence of a token that was once given out for that key."""
        self.recovers_until = -math.inf
        self.ended: set[tuple[Name, bytes]] = set()
        """The keys and tokens of what has ended since the recovery began."""
        self.newest: dict[bytes, int] = {}
        """The largest age with which each lock was asked for."""
        self.rates: dict[Name, PlacesOfRate] = {}
        """Of keys all of whose users name them."""
        self.first = 0
        """Where the answer to the request goes that is handled: before those that it has brought."""
        self._clock = 0

    # Looking around.

    def holds(self) -> list[Hold]:
        return [hold for key in self.keys.values() for hold in key.holds]

    def timed(self) -> list[Hold | Waiter]:
        waiting = [peer.waiting for peer in self.peers.values() if peer.waiting]
        told = [waiter for waiter in self.told() if waiter.has_slot]
        return [*self.holds(), *waiting, *self.away, *told]

    def told(self) -> list[Waiter]:
        return [waiter for key in self.keys.values() for waiter in key.queue if waiter.is_told]

    def deadlines(self) -> list[float]:
        return [x.deadline for x in self.timed() if x.deadline is not None]

    def is_in_line(self, waiter: Waiter) -> bool:
        return waiter.name in self.keys and waiter in self.keys[waiter.name].queue

    # Events.

    def taken(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        for key in self.keys.values():
            self._look_at_groups(key)
        return answers

    def connect(self, peer: int) -> None:
        self.peers[peer] = Peer()

    def advance(self, places: Iterable[tuple[float, float, Name]] = ()) -> None:
        """Let happen what is due.

        Args:
            places: when places may be free again of rates, each with how long before that was said.
        """
        for at, span, name in places:
            self._expire((at, span))
            if name in self.keys:
                before = self.grants
                self._serve(name)
                self.seen["a place that is free again"] += self.grants > before
        self._expire()

    def _expire(self, before: tuple[float, float] = (math.inf, 0.0)) -> None:
        while True:
            due = [
                (x.deadline, x.span, x.since, x)
                for x in self.timed()
                if x.deadline is not None and x.deadline <= self.now
                if (x.deadline, x.span) < before
            ]
            if not due:
                return
            # What falls due together: the shorter span first, then what was set first.
            first = min(due, key=lambda row: row[:3])[3]
            for key in self.keys.values():
                self._look_at_groups(key)
            if isinstance(first, Hold):
                self._end(first)
            elif first.is_told:
                if first.owner and first.owner[2]:
                    self.keys[first.name].silent[first.owner[2]] += 1
                self._pass_on(first)
            elif first.reservation:
                self._end_reservation(first, first.reservation)
            else:
                self._end_wait(first)

    def disconnect(self, number: int, *, clean: bool, silent: bool, told: bool = True) -> None:
        peer = self.peers.pop(number)
        for key in list(self.keys.values()):
            for waiter in list(key.queue):
                if waiter.peer == number and not waiter.is_told:
                    key.queue.remove(waiter)
        # Who has waited for a place may have been the last one there.
        self.keys = {name: key for name, key in self.keys.items() if key.holds or key.queue}
        for waiter in peer.enqueued:
            waiter.peer = 0
        self.advance()
        for waiter in peer.enqueued:
            if waiter.is_told:
                self.seen["told and gone"] += 1
                self._has_spoken(waiter)  # by that
                self.keys[waiter.name].queue.remove(waiter)
                self._serve(waiter.name)
        owned = [hold for hold in self.holds() if hold.peer == number]
        for hold in sorted(owned, key=lambda hold: hold.owned_since):
            if hold.token is None or (hold is peer.granted and not told):
                self._end(hold, has_begun=False)  # nobody was told, so nobody holds it
            elif self.keeps_holds or not self.limits.auto_release or peer.detaches or silent:
                hold.peer = None
            elif self.limits.orphan_ttl == 0 or (clean and not self.limits.orphan_all):
                self._end(hold)
            else:
                hold.peer = None
                if self.now + self.limits.orphan_ttl < hold.deadline:
                    self._set(hold, self.limits.orphan_ttl)

    def drain(self, *, keep: bool) -> None:
        self.advance()
        self.keeps_holds = keep
        self.draining = True
        for number, peer in self.peers.items():
            if peer.waiting or peer.listening:
                if peer.waiting:
                    self._leave(peer.waiting)
                peer.listening = None
                self.answers.append(Answer(number, "error_draining"))
            for waiter in list(peer.enqueued):
                if waiter.hold is None:
                    self._leave(waiter)
        for peer in self.peers.values():
            for waiter in list(peer.enqueued):
                if waiter.hold and waiter.hold.token is None:
                    self._end(waiter.hold, has_begun=False)

    def crash(self, kept: list[HoldRecord], recovers_until: float) -> None:
        """Go on with nothing but some of the holds whose tokens are known to somebody."""
        known = {self._fence(hold): hold for hold in self.holds() if hold.token}
        self.peers, self.keys, self.away, self.ended = {}, {}, [], set()
        self.kept = self.forgotten = 0
        self.recovers_until = recovers_until
        for record in kept:
            later = [each for each in kept if each.space == 0 and each.key == record.key]
            if record.space == 0 and record.fence < max(each.fence for each in later):
                continue
            hold = known[record.fence]
            key = self.keys.setdefault(hold.name, Key(record.limit))
            key.is_grouped |= hold.group != b""
            key.limit = key.limit or record.limit
            key.holds.append(hold)
            hold.peer = None
            hold.is_doubted = recovers_until > self.now
            until = max(record.deadline, recovers_until if hold.is_doubted else 0)
            self._set(hold, _rounded(until - self.now))
        for rate in self.rates.values():  # what nobody was told of has not begun
            rate.pending = [hold for hold in rate.pending if hold in self.holds()]

    def acquire(self, peer: int, name: Name, limit: int, timeout: int, lease: int | None) -> None:
        self.first = len(self.answers)
        group, self.peers[peer].group = self.peers[peer].group, None
        kept = self._taken_up(peer, name)
        answer = self._refusal(name, limit, lease)
        if not answer:
            answer = self._newest_wins(peer, name, kept)
        key = self.keys.get(name)
        span = self._lease(lease)
        if answer:
            self._reply(peer, answer)
        elif not kept and (there := self._there(peer, key)) is not None:
            if isinstance(there, Waiter) and self._is_the_same(there, peer):
                if self._has_too_much(peer, two_phase=False):
                    self._reply(peer, "error_max_holds")
                    return
                has_slot = self._take_over(there, peer, span, two_phase=False)
                self._block(there, timeout)
                self._go_on_with(there, has_slot)
            else:
                self._conflict(peer, there)
        elif self._too_many(peer, key, limit, kept, two_phase=False):
            self._reply(peer, "error_max_holds")
        elif kept:
            has_slot = self._come_back(kept, peer, limit, span, two_phase=False)
            self._block(kept, timeout)
            self._go_on_with(kept, has_slot)
        else:
            self._acquire_anew(peer, name, limit, timeout, span, group)

    def _acquire_anew(
        self, peer: int, name: Name, limit: int, timeout: int, span: int, group: InGroup | None
    ) -> None:
        has_room = self._has_room_for(name, group)
        key = self.keys.setdefault(name, Key(limit))
        if has_room:
            self._reply(peer, "granted", self._grant(name, peer, span, group), span)
        elif self._full(key):
            self._reply(peer, "error_max_waiters")
        elif timeout == 0:
            self._reply(peer, "timeout")
            if not key.holds and not key.queue:
                self.seen["a try that finds no place"] += 1
                del self.keys[name]
        else:
            waiter = Waiter(name, peer, span, two_phase=False, number=self._arrival())
            waiter.owner, waiter.group = self.peers[peer].owner, group
            self._join(key, waiter)
            self._block(waiter, timeout)

    def enqueue(self, peer: int, name: Name, limit: int, lease: int | None) -> None:
        self.first = len(self.answers)
        turn, self.peers[peer].turn = self.peers[peer].turn, None
        group, self.peers[peer].group = self.peers[peer].group, None
        kept = self._taken_up(peer, name)
        answer = self._refusal(name, limit, lease)
        span = self._lease(lease)
        if span <= self.limits.max_lease and self._waiter(peer, name):
            answer = "error_already_enqueued"
        if not answer:
            answer = self._newest_wins(peer, name, kept)
        key = self.keys.get(name)
        there = None if answer or kept else self._there(peer, key)
        if isinstance(there, Waiter) and self._is_the_same(there, peer):
            if self._has_too_much(peer, two_phase=True):
                self._reply(peer, "error_max_holds")
                return
            has_slot = self._take_over(there, peer, span, two_phase=True)
            self._queue_up(there, peer, turn, has_slot)
            return
        if there is not None:
            self._conflict(peer, there)
            return
        if not answer and self._too_many(peer, key, limit, kept, two_phase=True):
            answer = "error_max_holds"
        if answer:
            self._reply(peer, answer)
            return
        if kept:
            has_slot = self._come_back(kept, peer, limit, span, two_phase=True)
            self._queue_up(kept, peer, turn, has_slot)
            return
        waiter = Waiter(name, peer, span, two_phase=True, number=self._arrival())
        waiter.owner, waiter.group = self.peers[peer].owner, group
        has_room = self._has_room_for(name, group)
        key = self.keys.setdefault(name, Key(limit))
        if turn is None and has_room:
            waiter.hold = self._grant(name, peer, span, group)
            self._reply(peer, "acquired", waiter.hold, span)
            self.peers[peer].enqueued.append(waiter)
        elif self._full(key):
            self._reply(peer, "error_max_waiters")
        else:
            self._join(key, waiter)
            self._queue_up(waiter, peer, turn, False)

    def _queue_up(self, waiter: Waiter, peer: int, turn: float | None, has_slot: bool) -> None:
        """Have somebody wait by enqueue, who is answered before all others."""
        waiter.turn = turn
        self.peers[peer].enqueued.append(waiter)
        self._go_on_with(waiter, has_slot)
        kind = "acquired" if waiter.hold else "turn" if waiter.is_told else "queued"
        self.seen["told at once"] += kind == "turn"
        answer = Answer(peer, kind, waiter.hold, waiter.lease, waiter)
        self.answers.insert(self.first, answer)

    def want_turn(self, peer: int, milliseconds: int) -> None:
        if milliseconds > self.limits.max_lease * 1000:
            self._answer(peer, "error")
        else:
            self.peers[peer].turn = milliseconds / 1000
            self._answer(peer, "ok")

    def in_group(self, peer: int, group: InGroup) -> None:
        self.peers[peer].group = group
        self._answer(peer, "ok")

    def let_pass(self, peer: int, name: Name, ticket: bytes) -> None:
        """Let others go before whoever has that ticket."""
        for waiter in [*self.away, *self.told()]:
            if waiter.name == name and waiter.ticket == ticket:
                self._answer(peer, "ok")
                self._has_spoken(waiter)
                if waiter.has_slot:
                    self.seen["passed on"] += 1
                    self._pass_on(waiter)
                return
        self._answer(peer, "error")

    def reserve(self, peer: int, away: int, hold: int) -> None:
        if away > self.limits.max_lease * 1000 or hold > self.limits.max_lease * 1000:
            self._answer(peer, "error")
        else:
            self.peers[peer].reserve = (away, hold)
            self._answer(peer, "ok")

    def resume(self, peer: int, ticket: bytes) -> None:
        self.peers[peer].resumes = ticket
        self._answer(peer, "ok")

    def wait(self, peer: int, name: Name, timeout: int) -> None:
        reserve, self.peers[peer].reserve = self.peers[peer].reserve, None
        waiter = self._waiter(peer, name)
        if waiter is None:
            owner, newest = self.peers[peer].owner, self.newest.get(name[1], 0)
            is_older = name[0] == 0 and owner and 0 < owner[3] < newest
            self._answer(peer, f"superseded {newest}" if is_older else "error_not_enqueued")
        elif waiter.hold is not None:
            self.peers[peer].enqueued.remove(waiter)
            self._set(waiter.hold, waiter.lease)
            self._answer(peer, "granted", waiter.hold, waiter.lease)
        else:
            first = len(self.answers)
            if waiter.is_told and not waiter.has_slot:
                self._has_spoken(waiter)
                waiter.is_told = False
                self._note_group(self.keys[name], waiter.group)
                self._serve(name)
                self.seen["told later" if waiter.is_told else "waits again"] += 1
            if waiter.is_told:
                self.seen["told when it asks"] += 1
                self.answers.insert(first, Answer(peer, "turn", waiter=waiter))
                return
            waiter.reserve = reserve
            if timeout == 0:
                self._end_wait(waiter)
            else:
                self._block(waiter, timeout)

    def release(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        if hold is None:
            fence = self._forgotten(name, token)
            self._answer(peer, "error" if fence is None else "ok")
            if fence is not None:
                self.ended.add((name, token))
                self._end_earlier(name, fence)
        else:
            self._answer(peer, "ok")
            self._end(hold)

    def begun(self, peer: int, name: Name, token: bytes, lease: int | None) -> None:
        self.renew(peer, name, token, lease)
        hold = self._by_token(name, token)
        if hold is not None and self._lease(lease) <= self.limits.max_lease and name in self.rates:
            self.rates[name].begin(hold, self.now)

    def unbegun(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        if hold is not None and name in self.rates and hold in self.rates[name].pending:
            self.rates[name].pending.remove(hold)
            self.seen["a place that is given back"] += 1
        self.release(peer, name, token)

    def confirm(self, peer: int, name: Name, token: bytes, lease: int | None) -> None:
        self.renew(peer, name, token, lease, brings_back=False)

    def renew(
        self, peer: int, name: Name, token: bytes, lease: int | None, *, brings_back: bool = True
    ) -> None:
        hold = self._by_token(name, token)
        span = self._lease(lease)
        if hold and span <= self.limits.max_lease and self.now < self.recovers_until:
            if hold.is_doubted and not brings_back:
                self._answer(peer, self._recovering())
                return
            hold.is_doubted = False
        if hold is None and span <= self.limits.max_lease and brings_back:
            hold = self._brought_back(peer, name, token)
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
            hold.peer = hold.owner = None
            hold.is_doubted = False
            self._answer(peer, "renewed", None, span)

    def evict(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        self._answer(peer, "ok" if hold else "error")
        if hold:
            self._end(hold)

    def stable_ref(self, peer: int) -> None:
        self._answer(peer, "error" if self.peers[peer].detaches else "ok")
        self.peers[peer].detaches = True

    def say(self, peer: int, kind: str) -> None:
        self._answer(peer, kind)

    def own(self, peer: int, owner: Owner | None) -> None:
        self.peers[peer].owner = owner
        self._answer(peer, "ok")

    # The newest wins.

    def _newest_of(self, name: Name) -> int:
        there = self.keys.get(name, Key(1))
        ages = [item.owner[3] for item in [*there.holds, *there.queue] if item.owner]
        return self.newest.get(name[1]) or max(ages, default=0)

    def _newest_wins(self, peer: int, name: Name, kept: Waiter | None) -> str | None:
        """Send away who asks and is older than somebody, or else all who are older than that."""
        owner = self.peers[peer].owner
        if not owner or not owner[3]:
            return None
        there = self._there(peer, self.keys.get(name))
        if (
            not kept
            and there
            and not (isinstance(there, Waiter) and self._is_the_same(there, peer))
        ):
            return None  # that comes first
        if name[0] != 0:
            return "error"
        newest, age = self._newest_of(name), owner[3]
        self.newest[name[1]] = max(newest, age)
        if age < newest:
            self.seen["older"] += 1
            if kept:
                self.seen["older and back"] += 1
                self._send_away(kept)
            return f"superseded {newest}"
        if age == newest or name not in self.keys:
            return None
        for waiter in list(self.keys[name].order()):
            if waiter.owner and 0 < waiter.owner[3] < age and waiter is not kept:
                self.seen["told and older" if waiter.is_told else "older waiter"] += 1
                if waiter.peer and self.peers[waiter.peer].waiting is waiter:
                    self.answers.append(Answer(waiter.peer, f"superseded {age}"))
                self._send_away(waiter, serves=False)
        if name in self.keys:
            self._serve(name)
        self._tell_listeners(name, f"superseded {age}")
        return None

    def _send_away(self, waiter: Waiter, *, serves: bool = True) -> None:
        if waiter.is_told:
            self._has_spoken(waiter)
        in_line = self.is_in_line(waiter)
        if waiter in self.away:
            self.away.remove(waiter)
            if not in_line:
                key = self.keys.setdefault(waiter.name, Key(1))
                self._note_group(key, waiter.group)
                key.queue.append(waiter)
        number, peer = waiter.peer, self.peers.get(waiter.peer, Peer())
        self.keys[waiter.name].queue.remove(waiter)
        if peer.waiting is waiter:
            peer.waiting = None
        if waiter in peer.enqueued:
            peer.enqueued.remove(waiter)
        assert number or not peer.enqueued
        if serves:
            self._serve(waiter.name)

    def _tell_listeners(self, name: Name, kind: str) -> None:
        for number, peer in self.peers.items():
            if peer.listening and peer.listening.name == name:
                self.seen["listened"] += kind.startswith("superseded")
                peer.listening = None
                self.answers.append(Answer(number, kind))

    def listen(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        if hold is None or not hold.owner or not hold.owner[3]:
            self._answer(peer, "error" if hold else "error_lease_expired")
        elif (newest := self.newest.get(name[1], 0)) > hold.owner[3]:
            self._answer(peer, f"superseded {newest}")
        else:
            self._tell_listeners(name, "error_lease_expired")
            self.peers[peer].listening = hold

    # Who asks.

    def _there(self, peer: int, key: Key | None) -> Hold | Waiter | None:
        """What the owner has there, unless the request is a later attempt than all of that."""
        owner = self.peers[peer].owner
        there = []
        for item in [*key.holds, *key.queue] if key and owner else []:
            if item.owner and owner and item.owner[0] == owner[0]:
                there.append((item.owner[1], isinstance(item, Hold), item.number, item))
        if not there or not owner:
            return None
        attempt, _, _, latest = max(there, key=lambda row: row[:3])
        return latest if owner[1] <= attempt else None

    def _is_the_same(self, there: Waiter, peer: int) -> bool:
        """Whether it is the same process, whose former connection is lost."""
        owner = self.peers[peer].owner
        if not owner or not there.owner:
            return False
        return owner[:3] == there.owner[:3] and bool(owner[2])

    def _conflict(self, peer: int, there: Hold | Waiter) -> None:
        assert there.owner is not None
        kind = "held" if isinstance(there, Hold) else "waiting"
        self._answer(peer, f"{kind} {there.owner[1]}")

    def _take_over(self, waiter: Waiter, peer: int, lease: int, *, two_phase: bool) -> bool:
        has_slot = waiter.has_slot
        if waiter.is_told:
            self._has_spoken(waiter)
        old = self.peers[waiter.peer]
        if old.waiting is waiter:
            old.waiting = None
            self._conflict(waiter.peer, waiter)
        if waiter in old.enqueued:
            old.enqueued.remove(waiter)
        waiter.peer, waiter.lease, waiter.two_phase = peer, lease, two_phase
        waiter.reserve = waiter.turn = None
        self.seen["told and taken over"] += waiter.is_told
        self._note_group(self.keys[waiter.name], waiter.group)
        waiter.is_told = waiter.has_slot = False
        return has_slot

    # Rules.

    def _answer(
        self, peer: int, kind: str, hold: Hold | None = None, lease: int | None = None
    ) -> None:
        self.answers.append(Answer(peer, kind, hold, lease))

    def _reply(
        self, peer: int, kind: str, hold: Hold | None = None, lease: int | None = None
    ) -> None:
        """Answer the request that is handled, before all that it has brought."""
        self.answers.insert(self.first, Answer(peer, kind, hold, lease))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _set(self, what: Hold | Waiter, span: float) -> None:
        what.deadline, what.span, what.since = self.now + span, span, self._tick()

    def _block(self, waiter: Waiter, timeout: int) -> None:
        peer = self.peers[waiter.peer]
        peer.waiting, peer.granted = waiter, None
        self._set(waiter, timeout)

    def _lease(self, lease: int | None) -> int:
        return self.limits.default_lease if lease is None else lease

    def _refusal(self, name: Name, limit: int, lease: int | None) -> str | None:
        if self._lease(lease) > self.limits.max_lease:
            return "error"
        if self.now < self.recovers_until:
            return self._recovering()
        if name not in self.keys:
            return "error_max_locks" if len(self.keys) >= self.limits.max_locks else None
        self.keys[name].limit = self.keys[name].limit or limit
        return None if self.keys[name].limit == limit else "error_limit_mismatch"

    def _recovering(self) -> str:
        return f"recovering {math.ceil((self.recovers_until - self.now) * 1000)}"

    def _too_many(
        self, peer: int, key: Key | None, limit: int, kept: Waiter | None, *, two_phase: bool
    ) -> bool:
        if self._has_too_much(peer, two_phase=two_phase):
            return True
        if limit <= self._most or key is None:
            return False
        return len(key.holds) + (0 if kept else self._aside(key)) >= self._most

    def _has_too_much(self, peer: int, *, two_phase: bool) -> bool:
        owned = sum(hold.peer == peer for hold in self.holds())
        enqueued = len(self.peers[peer].enqueued) if two_phase else 0
        return max(owned, enqueued) >= self._most

    @property
    def _most(self) -> float:
        return self.limits.max_holds or math.inf

    def _full(self, key: Key) -> bool:
        there = [waiter for waiter in key.queue if waiter.reservation is None]
        return 0 < self.limits.max_waiters <= len(there)

    def _waiter(self, peer: int, name: Name) -> Waiter | None:
        for waiter in self.peers[peer].enqueued:
            if waiter.name == name:
                return waiter
        return None

    def _by_token(self, name: Name, token: bytes) -> Hold | None:
        for hold in self.holds():
            if hold.name == name and hold.token == token:
                return hold
        return None

    def _fence(self, hold: Hold) -> int | None:
        return self.authentic(hold.name, hold.token) if hold.token else None

    def _forgotten(self, name: Name, token: bytes) -> int | None:
        if self.now >= self.recovers_until or (name, token) in self.ended:
            return None
        fence = self.authentic(name, token)
        if fence is not None and name[0] == 0:
            later = [self.authentic(*each) or 0 for each in self.ended if each[0] == name]
            if fence < max(later, default=0):
                return None  # it had ended before that one was granted
        return fence

    def _brought_back(self, peer: int, name: Name, token: bytes) -> Hold | None:
        fence = self._forgotten(name, token)
        if fence is None:
            return None
        is_lock = name[0] == 0
        if is_lock and name in self.keys:
            if any((self._fence(other) or 0) > fence for other in self.keys[name].holds):
                return None
            self._end_earlier(name, fence)
        hold = Hold(name, 0, None, 0, 0, 0, 0, token, self.peers[peer].owner)
        self.keys.setdefault(name, Key(1 if is_lock else 0)).holds.append(hold)
        return hold

    def _end_earlier(self, name: Name, fence: int) -> None:
        """End what is here of a lock that was granted again later."""
        if name[0] == 0 and name in self.keys:
            for other in list(self.keys[name].holds):
                if (self._fence(other) or 0) < fence:
                    self._end(other)

    def _grant(self, name: Name, peer: int, lease: int, group: InGroup | None) -> Hold:
        self.grants += 1
        self.seen["granted beside a slot"] += any(p.has_slot for p in self.keys[name].queue)
        now = self._tick()
        hold = Hold(name, self.grants, peer, now, self.now + lease, lease, now)
        hold.owner = self.peers[peer].owner
        self._note_group(self.keys[name], group)
        hold.group = name_of(group)
        self.keys[name].holds.append(hold)
        if name in self.rates:
            assert self.rates[name].free(self.now) > 0
            self.rates[name].pending.append(hold)
        return hold

    def _leave(self, waiter: Waiter) -> None:
        peer = self.peers[waiter.peer]
        self.keys[waiter.name].queue.remove(waiter)
        self._look_at_groups(self.keys[waiter.name])
        if peer.waiting is waiter:
            peer.waiting = None
        if waiter in peer.enqueued:
            peer.enqueued.remove(waiter)
        key = self.keys[waiter.name]
        if not key.holds and not key.queue:
            del self.keys[waiter.name]

    def _end(self, hold: Hold, *, has_begun: bool = True) -> None:
        """A hold ends; for all that is known its run may have begun until now."""
        key = self.keys[hold.name]
        key.holds.remove(hold)
        if hold.name in self.rates:
            rate = self.rates[hold.name]
            if has_begun and hold.token:
                rate.begin(hold, self.now)
            elif hold in rate.pending:
                rate.pending.remove(hold)
        if hold.token:
            self.ended.add((hold.name, hold.token))
        if hold.name[0] == 0:
            self._tell_listeners(hold.name, "error_lease_expired")
        for peer in self.peers.values():
            peer.enqueued = [waiter for waiter in peer.enqueued if waiter.hold is not hold]
        self._serve(hold.name)

    def _serve(self, name: Name) -> None:
        """Go through the queue once, and give each the slot that is left for it, if any."""
        key = self.keys[name]
        if key.is_grouped:
            self._serve_groups(name, key)
            return
        told = [waiter for waiter in key.queue if waiter.is_told]
        free = self._open(name, key, min(key.limit, self._most)) - self._aside(key)
        for waiter in list(key.queue):
            if free <= 0:
                break
            if waiter in told:
                continue
            if waiter.reservation is None and waiter.turn is not None:
                self._tell(waiter, waiter.turn)
                free -= 1
            elif waiter.reservation is None:
                key.queue.remove(waiter)
                self._give(waiter)
                free -= 1
            elif waiter.has_slot or self._begin_holding(waiter, waiter.reservation):
                free -= 1
            else:
                key.queue.remove(waiter)
                self.seen["passed"] += 1
        if not key.holds and not key.queue:
            del self.keys[name]

    def _go_on_with(self, waiter: Waiter, has_slot: bool) -> None:
        """Serve who is back, and had a slot for nobody else."""
        key = self.keys[waiter.name]
        most = min(key.limit, self._most)
        if has_slot and self._open(waiter.name, key, most) > self._aside(key):
            self.seen["back before who waits"] += waiter is not key.queue[0]
            if waiter.turn is not None:
                self._tell(waiter, waiter.turn)
            else:
                key.queue.remove(waiter)
                self._give(waiter)
        self._serve(waiter.name)

    def _give(self, waiter: Waiter) -> None:
        peer = self.peers[waiter.peer]
        granted = self._grant(waiter.name, waiter.peer, waiter.lease, waiter.group)
        granted.owner = waiter.owner
        if peer.waiting is waiter:
            peer.waiting, peer.granted = None, granted
            if waiter in peer.enqueued:
                peer.enqueued.remove(waiter)
            self._answer(waiter.peer, "granted", granted, waiter.lease)
        else:
            waiter.hold = granted

    # Groups.

    def _serve_groups(self, name: Name, key: Key) -> None:
        """Give turn after turn to the group that has waited for one longest."""
        while True:
            self._look_at_groups(key)
            aside = sum(waiter.has_slot for waiter in key.queue)
            if self._open(name, key, min(key.limit, self._most)) <= aside or not key.turns:
                break
            group = min(key.turns, key=key.turns.__getitem__)
            waiter = next(each for each in key.of_group(group) if each.wants)
            if len(key.turns) > 1:
                self.seen["turns of several groups"] += 1
            if waiter.reservation is not None:
                if self._begin_holding(waiter, waiter.reservation):
                    key.turns[group] = self._tick()
                else:
                    key.queue.remove(waiter)
                    self.seen["passed"] += 1
                continue
            key.turns[group] = self._tick()
            if waiter.turn is not None:
                self._tell(waiter, waiter.turn)
            else:
                key.queue.remove(waiter)
                self._give(waiter)
        if not key.holds and not key.queue:
            del self.keys[name]

    def _look_at_groups(self, key: Key) -> None:
        """Note which groups may have a turn now, and since when."""
        waiting = dict.fromkeys(name_of(each.group) for each in key.queue if each.wants)
        for name in list(key.limits):
            if name not in waiting and not key.taken(name):
                del key.limits[name]
        ready = [name for name in waiting if key.has_room(name)]
        if len(waiting) > len(ready):
            self.seen["groups that have all they may"] += 1
        key.turns = {name: since for name, since in key.turns.items() if name in ready}
        for name in ready:
            if name not in key.turns:
                key.turns[name] = self._tick()

    def _note_group(self, key: Key, group: InGroup | None) -> None:
        """Take in that somebody of a group has come who is to have a slot or a position."""
        if group is not None:
            key.is_grouped = True
            key.limits.setdefault(group.name, group.limit)

    def _join(self, key: Key, waiter: Waiter) -> None:
        self._note_group(key, waiter.group)
        key.queue.append(waiter)
        self._look_at_groups(key)

    def _has_room_for(self, name: Name, group: InGroup | None) -> bool:
        """Whether a newcomer may have a slot; the latest word on its group counts from now on."""
        key = self.keys.get(name)
        if key is not None and group and (key.taken(group.name) or key.of_group(group.name)):
            key.limits[group.name] = group.limit
            before = key.taken(group.name)
            self._serve(name)
            if key.taken(group.name) > before:
                self.seen["served by a new limit"] += 1
        if key is None:
            return name not in self.rates or self.rates[name].free(self.now) > 0
        if name in self.rates and any(
            each.wants for each in key.queue if self._may_have(key, each)
        ):
            return False  # a place may be free, and is about to be theirs
        aside = sum(waiter.has_slot for waiter in key.queue)
        return self._open(name, key, key.limit) > aside and key.has_room(name_of(group))

    @staticmethod
    def _may_have(key: Key, waiter: Waiter) -> bool:
        return not key.is_grouped or key.has_room(name_of(waiter.group))

    def _open(self, name: Name, key: Key, most: float) -> float:
        """Slots that nobody has, so far as there are places for them: of those some are held."""
        slots = most - len(key.holds)
        if name not in self.rates:
            return slots
        places = self.rates[name].free(self.now)
        self.seen["slots, and no place"] += places <= 0 < slots and bool(key.queue)
        return min(slots, places)

    # Waiters who are told of their turn.

    @staticmethod
    def _aside(key: Key) -> int:
        return sum(waiter.is_told and waiter.has_slot for waiter in key.queue)

    def _tell(self, waiter: Waiter, turn: float) -> None:
        peer = self.peers[waiter.peer]
        waiter.is_told = waiter.has_slot = True
        waiter.reserve = None
        self._set(waiter, self._patience(waiter, turn))
        if peer.waiting is waiter:
            peer.waiting = None
            self.seen["told"] += 1
            self.answers.append(Answer(waiter.peer, "turn", waiter=waiter))

    def _patience(self, waiter: Waiter, turn: float) -> float:
        """Seconds that are left of a turn for a process that has said nothing to some of them."""
        silent = self.keys[waiter.name].silent[waiter.owner[2]] if waiter.owner else 0
        if silent:
            self.seen["told for less"] += 1
        return max(min(turn, LEAST_TURN), turn / 2**silent)

    def _has_spoken(self, waiter: Waiter) -> None:
        if waiter.owner and waiter.name in self.keys:
            del self.keys[waiter.name].silent[waiter.owner[2]]

    def _pass_on(self, waiter: Waiter) -> None:
        """Give others the slot that is free for somebody."""
        if waiter.reservation is not None:
            self._end_reservation(waiter, waiter.reservation)
        else:
            waiter.has_slot = False
            self.seen["told in vain"] += 1
            self._serve(waiter.name)

    # Waiters who are away.

    def _arrival(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def _end_wait(self, waiter: Waiter) -> None:
        number, peer = waiter.peer, self.peers[waiter.peer]
        if waiter.reserve is None:
            self._leave(waiter)
            self._answer(number, "timeout")
            return
        if peer.waiting is waiter:
            peer.waiting = None
        peer.enqueued.remove(waiter)
        away, hold = waiter.reserve
        due = self.now + away / 1000
        waiter.reservation = Reservation(due, hold / 1000, due + RESERVED_LATE)
        waiter.peer, waiter.two_phase, waiter.reserve = 0, False, None
        waiter.owner = waiter.turn = None
        self._set(waiter, _rounded(waiter.reservation.until - self.now))
        self.away.append(waiter)
        self.kept += 1
        self.answers.append(Answer(number, "kept", waiter=waiter))

    def _begin_holding(self, waiter: Waiter, reservation: Reservation) -> bool:
        """Keep a slot free for who is expected about now."""
        if abs(reservation.due - self.now) >= reservation.hold:
            return False
        waiter.has_slot = True
        self.seen["held"] += 1
        self._set(
            waiter, _rounded(min(reservation.due + reservation.hold, reservation.until) - self.now)
        )
        return True

    def _end_reservation(self, waiter: Waiter, reservation: Reservation) -> None:
        was_in_line = self.is_in_line(waiter)
        if was_in_line:
            self.keys[waiter.name].queue.remove(waiter)
        if waiter.has_slot and self.now < reservation.until:
            waiter.has_slot = False
            self._set(waiter, _rounded(reservation.until - self.now))
            self.seen["held in vain"] += 1
        else:
            self.away.remove(waiter)
            self.forgotten += 1
        if was_in_line:
            self._serve(waiter.name)

    def _taken_up(self, peer: int, name: Name) -> Waiter | None:
        """The position that this request is for, by the ticket that was said last."""
        ticket, self.peers[peer].resumes = self.peers[peer].resumes, None
        for waiter in [*self.away, *self.told()]:
            if ticket and waiter.ticket == ticket and waiter.name == name:
                return waiter
        return None

    def _come_back(
        self, waiter: Waiter, peer: int, limit: int, lease: int, *, two_phase: bool
    ) -> bool:
        """Let somebody be back in a queue: before all that came later.

        Say whether there is a slot for nobody else.
        """
        key = self.keys.setdefault(waiter.name, Key(limit))
        self._note_group(key, waiter.group)
        has_slot = (waiter.is_told or key.is_grouped) and waiter.has_slot
        if has_slot and not waiter.is_told:
            self.seen["back to a slot of its group"] += 1
        if waiter.is_told:
            self._has_spoken(waiter)
            self.seen["told and taken up"] += 1
            former = self.peers[waiter.peer].enqueued
            former.remove(waiter)
        else:
            self.seen["back to a slot" if waiter.has_slot else "back"] += 1
            self.away.remove(waiter)
        waiter.reservation = waiter.turn = None
        waiter.is_told = waiter.has_slot = False
        waiter.peer, waiter.lease, waiter.two_phase = peer, lease, two_phase
        waiter.owner = self.peers[peer].owner
        self.seen["back to a free key"] += not (key.holds or key.queue)
        queue = key.queue
        if waiter not in queue:
            self.seen["back before others"] += any(each.number > waiter.number for each in queue)
            self.seen["back behind others"] += any(each.number < waiter.number for each in queue)
            queue.append(waiter)
        queue.sort(key=lambda each: each.number)
        self._look_at_groups(key)
        return has_slot


def _rounded(seconds: float) -> float:
    """Up to the next step; what is next to nothing over one does not count."""
    return math.ceil(max(0.0, seconds) / SPAN_STEP - 1e-5) * SPAN_STEP
