"""The queue of a key whose waiters belong to groups, which take turns."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from heapq import merge
from typing import TYPE_CHECKING, Final

from dflockd.table.queue import Queue, number_of, take_out
from dflockd.table.states import EXPECTED, PASSED, UNTOLD

if TYPE_CHECKING:
    from dflockd.table.state import Waiter
    from dflockd.wire import FairGroup


UNSAID: Final = -1
"""The limit of a group whose members have slots from before, and nobody has come since."""


class Lane:
    """The waiters of one group, and how many slots it has; it exists while there is either."""

    __slots__ = ("limit", "line", "name", "ready", "returned", "taken", "waiting")

    def __init__(self, name: bytes, limit: int) -> None:
        self.name = name
        self.limit = limit
        """How many slots it may have, by the latest request that said so; 0 is no limit, and
        `UNSAID` is none so far."""
        self.line: OrderedDict[Waiter, None] = OrderedDict()
        """In the order of their arrival."""
        self.returned: list[Waiter] = []
        """Those whose turn has come while they were not ready, and who are now: by number."""
        self.taken = 0
        """Slots that its members have, and those that are held for some."""
        self.waiting = 0
        """How many wait..."""
        self.ready = 0
        """... and may have their turn: all of them, or none while the group has all that it may."""

    def __iter__(self) -> Iterator[Waiter]:
        return itertools.chain(self.returned, self.line)

    @property
    def has_room(self) -> bool:
        """Whether it may have another slot."""
        return self.limit <= 0 or self.taken < self.limit


class GroupedQueue(Queue):
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

    __slots__ = ("_held", "_lanes", "_queued", "_ready", "_resting", "_ring", "groups")

    def __init__(self, before: Queue | None) -> None:
        super().__init__()
        self.is_grouped = True
        self._lanes: dict[bytes, Lane] = {}
        """By the names of their groups."""
        self._ring: OrderedDict[Lane, None] = OrderedDict()
        """Those that have somebody ready: whose turn is next first."""
        self._resting: dict[bytes, Lane] = {}
        """Those that have somebody who waits, and all that they may."""
        self.groups = 0
        """In how many somebody waits."""
        self._held: dict[int, Lane] = {}
        """Of those who have a slot and a group, by fence."""
        self._queued = 0
        """How many wait in all lanes..."""
        self._ready = 0
        """... and of those that are in the ring."""
        if before is None:
            return
        self.expected, self.told, self.passed = before.expected, before.told, before.passed
        self.away, self.pending, self.silent = before.away, before.pending, before.silent
        self.gap, self.last, self.listener = before.gap, before.last, before.listener
        self.rate = before.rate
        lane = self._lane(None)
        lane.line, lane.returned = before.line, before.returned
        lane.taken = len(self.expected) + len(self.told)
        self._review(lane)

    def __len__(self) -> int:
        return self._queued + len(self.expected) + len(self.told) + len(self.passed)

    def __iter__(self) -> Iterator[Waiter]:
        others = [each.copy() for each in (self.expected, self.told, self.passed)]
        yield from merge(*others, key=number_of)
        yield from _rounds(list(self._ring))
        for _, lane in sorted(self._resting.items()):
            yield from list(lane)

    def oldest(self) -> Waiter | None:
        """Return who has waited longest."""
        first = super().oldest()
        lane = self._lanes.get(b"")  # of who was here before there were groups
        last = None if lane is None else next(iter(lane), None)
        return last if first is None or (last is not None and last.number < first.number) else first

    @property
    def ahead(self) -> int:
        """How many go before a newcomer whose group may have another slot."""
        return self._ready + len(self.expected) + len(self.told)

    def first(self, free: int) -> Waiter | None:
        """Return whose turn it is with so many free slots; those that are held are among them."""
        if free > len(self.told) + len(self.expected):
            for lane in self._ring:
                return next(iter(lane))
        return None

    def join(self, waiter: Waiter) -> None:
        """Let somebody stand in line who has just come."""
        lane = self._lane(waiter.group)
        lane.line[waiter] = self.line[waiter] = None
        self._review(lane)

    def come_back(self, waiter: Waiter) -> None:
        """Let somebody in whose turn had come: ahead of the others of the group."""
        lane = self._lane(waiter.group)
        insort(lane.returned, waiter, key=number_of)
        insort(self.returned, waiter, key=number_of)
        self._review(lane)

    def expect(self, waiter: Waiter) -> None:
        """Hold a slot for somebody whose turn it is."""
        lane = self._lane(waiter.group)
        lane.taken += 1
        super().expect(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        self.away -= waiter.is_away
        lane = self._lane(waiter.group)
        if waiter in lane.line:
            del lane.line[waiter]
            self.line.pop(waiter, None)
        elif waiter.state == EXPECTED:
            lane.taken -= 1
            take_out(waiter, self.expected if waiter.is_away else self.told)
        elif waiter.state == PASSED:
            take_out(waiter, self.passed)
        else:
            take_out(waiter, lane.returned)
            take_out(waiter, self.returned)
        self._review(lane)

    # Of groups.

    def use_turn(self, waiter: Waiter) -> None:
        """Note that somebody who is the `first` one is given a slot: the group is the last one now."""
        self._ring.move_to_end(self._lane(waiter.group))

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

    def in_turn(self, waiters: list[Waiter]) -> list[Waiter]:
        """Return all waiters to hand over, by number, in the order of their turns.

        A server that lets them in one by one has the groups in the same order.
        """
        first: list[Waiter] = []
        lines: dict[bytes, list[Waiter]] = {lane.name: [] for lane in self._ring}
        for waiter in waiters:
            # Their turn has come, and what they were given by it is taken back or held for them.
            if waiter.state in (UNTOLD, EXPECTED):
                first.append(waiter)
            else:
                lines.setdefault(_name(waiter.group), []).append(waiter)
        return [*first, *_rounds(lines.values())]

    def _lane(self, group: FairGroup | None) -> Lane:
        """Return the lane of a group, new if it has none."""
        name = _name(group)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name, 0 if group is None else group.limit)
        elif lane.limit == UNSAID and group is not None:
            lane.limit = group.limit
        return lane

    def _review(self, lane: Lane) -> None:
        """Take in what has changed in a lane."""
        waiting = len(lane.line) + len(lane.returned)
        ready = waiting if lane.has_room else 0
        self.groups += (waiting > 0) - (lane.waiting > 0)
        self._queued += waiting - lane.waiting
        self._ready += ready - lane.ready
        if ready and not lane.ready:
            self._ring[lane] = None
        elif lane.ready and not ready:
            del self._ring[lane]
        if waiting and not ready:
            self._resting[lane.name] = lane
        else:
            self._resting.pop(lane.name, None)
        lane.waiting, lane.ready = waiting, ready
        if not (waiting or lane.taken):
            del self._lanes[lane.name]


def _name(group: FairGroup | None) -> bytes:
    return b"" if group is None else group.name


def _rounds(lines: Iterable[Iterable[Waiter]]) -> Iterator[Waiter]:
    """Go through all of them in turns: the first of each, then the second of each that has one."""
    begun: deque[Iterator[Waiter]] = deque()
    for line in lines:
        turns = iter(list(line))
        for waiter in turns:
            yield waiter
            begun.append(turns)
            break
    while begun:
        turns = begun.popleft()
        for waiter in turns:
            yield waiter
            begun.append(turns)
            break
