"""The queue of a key whose waiters belong to groups, which take turns."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, merge
from typing import Final

from dflockd.table.queue import Line, Queue, W, earlier, number_of, take_out
from dflockd.table.states import EXPECTED, PASSED, UNTOLD
from dflockd.wire import FairGroup

UNSAID: Final = -1
"""The limit of a group whose members have slots from before, and nobody has come since."""


class Lane(Line[W]):
    """The waiters of one group, and how many slots it has; it exists while there is either."""

    __slots__ = ("limit", "name", "plain", "rated", "ready", "taken", "waiting")

    def __init__(self, name: bytes, limit: int) -> None:
        super().__init__()
        self.name = name
        self.limit = limit
        """How many slots it may have, by the latest request that said so; 0 is no limit, and
        `UNSAID` is none so far."""
        self.rated: Line[W] | None = None
        """Those who need a place of the rate."""
        self.taken = 0
        """Slots that its members have, and those that are held for some."""
        self.waiting = 0
        """How many wait..."""
        self.ready = 0
        """... and may have their turn: all of them, or none while the group has all that it may..."""
        self.plain = 0
        """... and need no place of the rate."""

    def all(self) -> Iterator[W]:
        """Go through all who wait, in order."""
        return iter(self) if self.rated is None else merge(self, self.rated, key=number_of)

    @property
    def has_room(self) -> bool:
        """Whether it may have another slot."""
        return self.limit <= 0 or self.taken < self.limit


class GroupedQueue(Queue[W]):
    """A queue in which groups take turns: round robin over those that have somebody ready.

    Within a group it is first come, first served. Nothing takes longer the more wait, or the more
    groups there are. A group that has somebody ready again comes last. A waiter that leaves costs
    its group no turn, and neither does one that is passed while away. One that gets a turn uses it
    up, even in vain. Iteration follows the turns to come: last are those whose groups have all that
    they may, by the names of these groups.

    In `line` and `returned` are all who have come since groups take turns here, beside those of their
    groups: so it is known who is the oldest.

    Args:
        before: the queue of the key so far, of waiters in no group.
    """

    __slots__ = (
        "_held",
        "_lanes",
        "_plain",
        "_plain_ring",
        "_queued",
        "_ready",
        "_resting",
        "_ring",
        "groups",
    )

    def __init__(self, before: Queue[W] | None) -> None:
        super().__init__()
        self.is_grouped = True
        self._lanes: dict[bytes, Lane[W]] = {}
        """By the names of their groups."""
        self._ring: OrderedDict[Lane[W], None] = OrderedDict()
        """Those that have somebody ready: whose turn is next first."""
        self._plain_ring: OrderedDict[Lane[W], None] = OrderedDict()
        """Those that have somebody ready who needs no place, for when the rate has none."""
        self._resting: dict[bytes, Lane[W]] = {}
        """Those that have somebody who waits, and all that they may."""
        self.groups = 0
        """In how many somebody waits."""
        self._held: dict[int, Lane[W]] = {}
        """Of those who have a slot and a group, by fence."""
        self._queued = 0
        """How many wait in all lanes..."""
        self._ready = 0
        """... and of those that are in the ring..."""
        self._plain = 0
        """... and need no place of the rate."""
        if before is None:
            return
        self.expected, self.told, self.passed = before.expected, before.told, before.passed
        self.away, self.pending, self.silent = before.away, before.pending, before.silent
        self.gap, self.last, self.listener = before.gap, before.last, before.listener
        self.rate, self.places = before.rate, before.places
        lane = self._lane(None)
        lane.line, lane.returned, lane.rated = before.line, before.returned, before.rated
        lane.taken = len(self.expected) + len(self.told)
        self._review(lane)

    def __len__(self) -> int:
        return self._queued + len(self.expected) + len(self.told) + len(self.passed)

    def __iter__(self) -> Iterator[W]:
        others = [each.copy() for each in (self.expected, self.told, self.passed)]
        yield from merge(*others, key=number_of)
        yield from _rounds(list(self._ring))
        resting = self._resting.copy()
        names = list(resting)
        heapify(names)  # to sort very many would take long, and few may be wanted
        while names:
            yield from list(resting[heappop(names)].all())

    def oldest(self) -> W | None:
        """Return who has waited longest."""
        first = super().oldest()
        lane = self._lanes.get(b"")  # of who was here before there were groups
        return first if lane is None else earlier(first, next(lane.all(), None))

    @property
    def ahead(self) -> int:
        """How many go before a newcomer whose group may have another slot, and who needs no place..."""
        return self._plain + len(self.expected) + len(self.told)

    @property
    def rated_ahead(self) -> int:
        """... and how many others before one who does."""
        return self._ready - self._plain

    def first(self, free: int, *, has_place: bool) -> W | None:
        """Return whose turn it is with so many free slots; those that are held are among them."""
        if free > len(self.told) + len(self.expected):
            for lane in self._ring if has_place else self._plain_ring:
                rated = lane.rated.first() if has_place and lane.rated is not None else None
                return earlier(lane.first(), rated)
        return None

    def join(self, waiter: W) -> None:
        """Let somebody stand in line who has just come."""
        lane = self._lane(waiter.group)
        _line(lane, waiter).line[waiter] = self.line[waiter] = None
        self._review(lane)

    def come_back(self, waiter: W) -> None:
        """Let somebody in whose turn had come: ahead of the others of the group."""
        lane = self._lane(waiter.group)
        insort(_line(lane, waiter).returned, waiter, key=number_of)
        insort(self.returned, waiter, key=number_of)
        self._review(lane)

    def rate_it(self, waiter: W, *, is_rated: bool) -> None:
        """Let a waiter that is in line need a place of the rate, or need none."""
        if waiter.is_rated is not is_rated:
            lane = self._lane(waiter.group)
            _line(lane, waiter).take_out(waiter)
            waiter.is_rated = is_rated
            insort(_line(lane, waiter).returned, waiter, key=number_of)
            self._review(lane)

    def expect(self, waiter: W) -> None:
        """Hold a slot for somebody whose turn it is."""
        lane = self._lane(waiter.group)
        lane.taken += 1
        super().expect(waiter)

    def remove(self, waiter: W) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        self.away -= waiter.is_away
        lane = self._lane(waiter.group)
        if waiter.state == EXPECTED:
            lane.taken -= 1
            self.places -= waiter.is_rated
            take_out(waiter, self.expected if waiter.is_away else self.told)
        elif waiter.state == PASSED:
            take_out(waiter, self.passed)
        else:
            _line(lane, waiter).take_out(waiter)
            if waiter in self.line:
                del self.line[waiter]
            else:  # or it has come before there were groups here
                take_out(waiter, self.returned)
        self._review(lane)

    # Of groups.

    def use_turn(self, waiter: W) -> None:
        """Note that somebody who is the `first` one is given a slot: the group is the last one now."""
        lane = self._lane(waiter.group)
        self._ring.move_to_end(lane)
        if lane.plain:
            self._plain_ring.move_to_end(lane)

    def begin(self, fence: int, group: FairGroup | None) -> None:
        """Note that a member of a group has a slot."""
        if group is not None:
            lane = self._held[fence] = self._lane(group)
            lane.taken += 1
            self._review(lane)

    def restore(self, fence: int, name: bytes) -> None:
        """Note that a member of a group has a slot from before this table was."""
        lane = self._held[fence] = self._lanes.setdefault(name, Lane(name, UNSAID))
        lane.taken += 1
        self._review(lane)

    def end(self, fence: int) -> None:
        """Note that a slot that somebody has had is free."""
        lane = self._held.pop(fence, None)
        if lane is not None:
            lane.taken -= 1
            self._review(lane)

    def group_of(self, fence: int) -> bytes:
        """Return to which group somebody belongs who has a slot; nothing if to none."""
        lane = self._held.get(fence)
        return b"" if lane is None else lane.name

    def heed(self, group: FairGroup) -> bool:
        """Take in what is said of a group; say whether its waiters may have their turn with that."""
        lane = self._lanes.get(group.name)
        if lane is None or lane.limit == group.limit:
            return False
        before, lane.limit = lane.ready, group.limit
        self._review(lane)
        return lane.ready > before

    def has_room(self, group: FairGroup) -> bool:
        """Whether a group may have another slot."""
        lane = self._lanes.get(group.name)
        return lane is None or lane.has_room

    def limit_of(self, group: FairGroup) -> int:
        """Return how many slots a group may have by what was said of it last."""
        lane = self._lanes.get(group.name)
        return group.limit if lane is None or lane.limit == UNSAID else lane.limit

    def in_turn(self, waiters: list[W]) -> list[W]:
        """Return all waiters to hand over, by number, in the order of their turns.

        A server that lets them in one by one has the groups in the same order.
        """
        first: list[W] = []
        lines: dict[bytes, list[W]] = {lane.name: [] for lane in self._ring}
        for waiter in waiters:
            # Their turn has come, and what they were given by it is taken back or held for them.
            if waiter.state in (UNTOLD, EXPECTED):
                first.append(waiter)
            else:
                lines.setdefault(_name(waiter.group), []).append(waiter)
        return [*first, *_rounds(lines.values())]

    def _lane(self, group: FairGroup | None) -> Lane[W]:
        """Return the lane of a group, new if it has none."""
        name = _name(group)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name, 0 if group is None else group.limit)
        elif lane.limit == UNSAID and group is not None:
            lane.limit = group.limit
        return lane

    def _review(self, lane: Lane[W]) -> None:
        """Take in what has changed in a lane."""
        plain = len(lane)
        waiting = plain if lane.rated is None else plain + len(lane.rated)
        ready = waiting if lane.has_room else 0
        plain = plain if ready else 0
        self.groups += (waiting > 0) - (lane.waiting > 0)
        self._queued += waiting - lane.waiting
        self._ready += ready - lane.ready
        self._plain += plain - lane.plain
        _keep(self._ring, lane, is_in=ready > 0)
        _keep(self._plain_ring, lane, is_in=plain > 0)
        if waiting and not ready:
            self._resting[lane.name] = lane
        else:
            self._resting.pop(lane.name, None)
        lane.waiting, lane.ready, lane.plain = waiting, ready, plain
        if not (waiting or lane.taken):
            del self._lanes[lane.name]


def _line(lane: Lane[W], waiter: W) -> Line[W]:
    """Return the line of a lane in which a waiter stands, or is to stand."""
    if not waiter.is_rated:
        return lane
    if lane.rated is None:
        lane.rated = Line()
    return lane.rated


def _keep(ring: OrderedDict[Lane[W], None], lane: Lane[W], *, is_in: bool) -> None:
    """Let a lane be in a ring, at the end if it has not been, or not be in it."""
    if is_in:
        ring.setdefault(lane)
    else:
        ring.pop(lane, None)


def _name(group: FairGroup | None) -> bytes:
    return b"" if group is None else group.name


def _rounds(lines: Iterable[Lane[W] | list[W]]) -> Iterator[W]:
    """Go through all of them in turns: the first of each, then the second of each that has one.

    None has to be looked at that has no more: there can be very many, and somebody waits.
    """
    begun: deque[deque[W]] = deque()
    for line in lines:
        turns = deque(line.all() if isinstance(line, Lane) else line)
        if turns:
            yield turns.popleft()
        if turns:
            begun.append(turns)
    while begun:
        turns = begun.popleft()
        yield turns.popleft()
        if turns:
            begun.append(turns)
