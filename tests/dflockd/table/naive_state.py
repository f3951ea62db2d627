"""What the model of the lock table knows, and how one looks around in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dflockd.table import Limits
from dflockd.table.deadlines import SPAN_STEP
from dflockd.wire import FairGroup, Owner

LATE = 0.001
"""Seconds by which a place of a rate may be given later than it is free."""

Name = tuple[int, bytes]
"""Namespace and key."""


class ReservedPosition(NamedTuple):
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
    instance: bytes = b""
    """The process of its connection."""
    label: bytes = b""
    is_rated: bool = False
    """Whether its run takes a place of the rate."""
    reserve: tuple[int, int] | None = None
    reservation: ReservedPosition | None = None
    maker: int = 0
    """The connection that has left it."""
    turn: float | None = None
    """Seconds for which it has a slot once it is told of its turn, if it wants to be told."""
    until: float = 0
    """When the wait of its connection is over, unless it is its turn."""
    is_told: bool = False
    """Whether its turn has come; others may go first by now."""
    told_on: int = 0
    """The connection on which its process last learned of its turn."""
    has_slot: bool = False
    ticket: bytes | None = None
    is_renamed: bool = False
    """Whether it has another ticket by now than this, which nobody was told yet."""
    former: bytes | None = None
    """Its ticket before it was taken up, which was told in that very step."""
    deadline: float | None = None
    span: float = 0
    since: int = 0
    hold: Hold | None = None
    owner: Owner | None = None
    away_age: int = 0
    """That of its owner, while it is away and nobody's."""
    group: FairGroup | None = None

    @property
    def weight(self) -> int:
        """How many slots it takes."""
        return weight_of(self.group)

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
    limit: int
    """How many could hold the key when it was granted; 0 if nobody knows."""
    token: bytes | None = None
    label: bytes = b""
    owner: Owner | None = None
    group: bytes = b""
    weight: int = 1
    """How many slots it takes."""
    is_doubted: bool = False
    """Whether it was restored in a recovery and nobody has renewed it since."""


@dataclass(eq=False)
class Pause:
    """Why nothing of a key is granted."""

    name: Name
    by: bytes
    reason: bytes
    begun: float
    deadline: float | None = None
    span: float = 0
    since: int = 0


@dataclass(eq=False)
class PlacesOfRate:
    """How many runs of a key may begin in a window, and when those of late have begun."""

    runs: int
    window: float
    pending: dict[Hold, int] = field(default_factory=dict)
    """Who may begin at any time, and how many places each takes."""
    begun: list[float] = field(default_factory=list)
    closed_until: float = -math.inf
    """Others may have begun until then, of whom nobody knows."""
    changed: float = -math.inf
    """Since when it is as it is."""

    def change(self, runs: int, window: float, now: float) -> None:
        if (runs, window) != (self.runs, self.window):
            self.runs, self.window, self.changed = runs, window, now

    def free(self, now: float) -> int:
        if now < self.closed_until + self.window:
            return 0
        counted = [time for time in self.begun if time + self.window > now]
        return self.runs - sum(self.pending.values()) - len(counted)

    def need(self, waiter: Waiter) -> int:
        """How many places have to be free for somebody to have its turn."""
        return 1 if waiter.reservation else min(waiter.weight, self.runs)

    def begin(self, hold: Hold, now: float) -> None:
        self.begun += [now] * self.pending.pop(hold, 0)


@dataclass(eq=False)
class Key:
    """A key that is held or waited for, or paused."""

    limit: int
    pause: Pause | None = None
    holds: list[Hold] = field(default_factory=list)
    queue: list[Waiter] = field(default_factory=list)
    is_grouped: bool = False
    """Whether groups have come to it since somebody was here."""
    limits: dict[bytes, int] = field(default_factory=dict)
    """What was said last of how many slots a group may have; nothing is no limit."""
    turns: dict[bytes, int] = field(default_factory=dict)
    """Groups that may have a turn: since when, or when they had the last one, whatever is later."""
    plain_turns: dict[bytes, int] = field(default_factory=dict)
    """The same of those who need no place of the rate."""

    stuck: dict[bytes, object] = field(default_factory=dict)
    """Groups whose turn has come, and the first wanted more than the group may have: how they were."""
    plain_stuck: dict[bytes, object] = field(default_factory=dict)
    """The same of the first who needs no place of the rate."""
    stuck_by: dict[bytes, Waiter] = field(default_factory=dict)
    """These first ones."""

    def used(self) -> int:
        """Slots that somebody has."""
        return sum(hold.weight for hold in self.holds)

    def aside(self) -> int:
        """Slots that are kept for those who were told."""
        return sum(each.weight for each in self.queue if each.is_told and each.has_slot)

    def expected(self) -> int:
        """Slots that are kept for those who are away."""
        return sum(each.weight for each in self.queue if not each.is_told and each.has_slot)

    def fits(self, weight: int, aside: int) -> bool:
        """Whether there is room for so much beside what is taken and so much more; or for all."""
        return self.used() + aside + min(weight, self.limit) <= self.limit

    def is_heavy(self) -> bool:
        """Whether somebody in line takes more than one slot."""
        return any(each.wants and each.weight > 1 for each in self.queue)

    def state_of(self, name: bytes) -> object:
        """What there is in a group: if it changes, it is not stuck any more."""
        each = [(id(w), w.peer, w.wants, w.is_rated, w.turn) for w in self.of_group(name)]
        return self.limits.get(name, 0), self.taken(name), each

    @property
    def is_used(self) -> bool:
        return bool(self.holds or self.queue or self.pause)

    def of_group(self, name: bytes) -> list[Waiter]:
        return [waiter for waiter in self.queue if name_of(waiter.group) == name]

    def taken(self, name: bytes) -> int:
        """Slots that a group has or that are held for its members."""
        held = sum(hold.weight for hold in self.holds if hold.group == name)
        return held + sum(waiter.weight for waiter in self.of_group(name) if waiter.has_slot)

    def has_room(self, name: bytes, weight: int = 1) -> bool:
        most = self.limits.get(name, 0)
        return not most or self.taken(name) + min(weight, most) <= most

    def may_have_turns(self, name: bytes, *, is_plain: bool = False) -> bool:
        """Whether a group is not left out, or those of it who need no place of the rate."""
        stuck = self.plain_stuck if is_plain else self.stuck
        return self.has_room(name) and stuck.get(name) != self.state_of(name)

    def let_in(self, name: bytes) -> bool:
        """Have a group be left out no more; say whether it was."""
        self.stuck.pop(name, None)
        return self.plain_stuck.pop(name, None) is not None

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
        resting = [waiter for waiter in self.queue if waiter not in found]
        return found + sorted(resting, key=lambda waiter: name_of(waiter.group))


def weight_of(group: FairGroup | None) -> int:
    return group.weight if group else 1


def name_of(group: FairGroup | None) -> bytes:
    return group.name if group else b""


@dataclass(eq=False)
class Peer:
    """A connection."""

    instance: bytes = b""
    detaches: bool = False
    waiting: Waiter | None = None
    listening: Hold | None = None
    """What it holds and waits to hear of."""
    asks: bool = False
    """Whether it waits to hear whose turn it is."""
    told: Waiter | None = None
    """Of whose turn it was told last."""
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


class NaiveState:
    """All that there is."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.peers: dict[int, Peer] = {}
        self.keys: dict[Name, Key] = {}
        self.away: list[Waiter] = []
        """Waiters who are away, in a queue or passed by others."""
        self.granted: list[Hold] = []
        """All that ever were."""
        self.earlier: set[tuple[Name, bytes]] = set()
        """What was granted before the last crash: with longer leases, perhaps."""
        self.arrivals = 0
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
        self.newest: dict[bytes, tuple[int, bytes]] = {}
        """The largest age with which each lock was asked for, and the label of who did."""
        self.rates: dict[Name, PlacesOfRate] = {}
        """As the latest request has named them."""
        self.rates_since = -math.inf
        """Runs may have begun before that nobody knows of."""
        self.first = 0
        """Where the answer to the request goes that is handled: before those that it has brought."""
        self.starved: dict[bytes, dict[Name, None]] = {}
        """Where a slot was free while a process had a position and did not ask, in that order."""
        self._clock = 0

    # Looking around.

    def holds(self) -> list[Hold]:
        return [hold for key in self.keys.values() for hold in key.holds]

    def timed(self) -> list[Hold | Waiter | Pause]:
        peers = self.peers.values()
        waiting = [peer.waiting for peer in peers if peer.waiting and not peer.waiting.is_told]
        told = [waiter for waiter in self.told() if waiter.has_slot]
        pauses = [key.pause for key in self.keys.values() if key.pause]
        return [*self.holds(), *waiting, *self.away, *told, *pauses]

    @property
    def grants(self) -> int:
        return len(self.granted)

    def asking(self, instance: bytes) -> int | None:
        """The connection of a process on which it asks whose turn it is."""
        asking = [number for number, each in self.peers.items() if each.asks]
        return next((each for each in asking if self.peers[each].instance == instance), None)

    def can_start(self, waiter: Waiter) -> bool:
        return waiter.turn is None or self.asking(waiter.instance) is not None

    def with_turns(self) -> list[Waiter]:
        """Those who want to be told, or were."""
        return [w for key in self.keys.values() for w in key.queue if w.turn is not None]

    def told(self) -> list[Waiter]:
        return [waiter for key in self.keys.values() for waiter in key.queue if waiter.is_told]

    def deadlines(self) -> list[float]:
        return [x.deadline for x in self.timed() if x.deadline is not None]

    def was_alone(self, name: Name, token: bytes) -> bool:
        """Whether a grant was to one alone: all that were granted before had ended then."""
        return any((h.name, h.token, h.limit) == (name, token, 1) for h in self.granted)

    def is_in_line(self, waiter: Waiter) -> bool:
        return waiter.name in self.keys and waiter in self.keys[waiter.name].queue


def rounded(seconds: float) -> float:
    """Up to the next step; what is next to nothing over one does not count."""
    return math.ceil(max(0.0, seconds) / SPAN_STEP - 1e-5) * SPAN_STEP
