"""The queue of a key whose waiters belong to groups, which take turns."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace, merge
from typing import TYPE_CHECKING, Final

from dflockd.table.line import Line, Process, number_of
from dflockd.table.queue import Queue
from dflockd.table.states import EXPECTED, UNTOLD

if TYPE_CHECKING:
    from dflockd.table.state import Peer, Waiter
    from dflockd.wire import FairGroup


UNSAID: Final = -1
"""The limit of a group whose members have slots from before, and nobody has come since."""


def _since(waiter: Waiter) -> float:
    return waiter.since


class Lane(Line):
    """The waiters of one group, and how many slots it has; it exists while there is either."""

    __slots__ = ("limit", "listed", "name", "plain", "ready", "taken", "turn", "waiting")

    def __init__(self, name: bytes, limit: int) -> None:
        super().__init__()
        self.name = name
        self.limit = limit
        """How many slots it may have, by the latest request that said so; 0 is no limit, and
        `UNSAID` is none so far."""
        self.taken = 0
        """Slots that its members have, and those that are held for some."""
        self.waiting = 0
        """How many wait..."""
        self.ready = 0
        """... and may have their turn: all of them, or none while the group has all that it may."""
        self.plain = 0
        """How many of these can start at any time."""
        self.turn = 0
        """Its place in the ring: the smaller one is the earlier."""
        self.listed: set[Process | None] = set()
        """In which of `GroupedQueue._order` it is."""

    def __iter__(self) -> Iterator[Waiter]:
        return self.all_rows()

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
    they may.

    A group whose waiters cannot start now is passed over where it is. So for each process there is a
    heap of the groups in which it has somebody, and one of those where somebody can start at any
    time: the next group is the first of the first ones of those who ask.

    Nobody stands in the `Line` that this queue is: its groups have their own.

    Args:
        before: the queue of the key so far, of waiters in no group.
    """

    __slots__ = ("_held", "_lanes", "_order", "_plain", "_queued", "_ring", "_turns")

    def __init__(self, before: Queue | None) -> None:
        super().__init__()
        self.is_grouped = True
        self._lanes: dict[bytes, Lane] = {}
        """By the names of their groups."""
        self._ring: OrderedDict[Lane, None] = OrderedDict()
        """Those that have somebody ready: whose turn is next first."""
        self._turns = 0
        """How many times a lane has become the last of the ring."""
        self._order: dict[Process | None, list[tuple[int, Lane]]] = {}
        """Lanes of the ring with somebody of each process, or with somebody who can start at any time:
        heaps, with numbers that may be out of date, and then too small."""
        self._held: dict[int, Lane] = {}
        """Of those who have a slot and a group, by fence."""
        self._queued = 0
        """How many wait in all lanes."""
        self._plain = 0
        """How many of those that are in the ring can start at any time."""
        if before is None:
            return
        self.expected, self.told, self.passed = before.expected, before.told, before.passed
        self.away, self.pending, self.processes = before.away, before.pending, before.processes
        self.gap, self.last, self.listener = before.gap, before.last, before.listener
        self.rate = before.rate
        lane = self._lane(None)
        lane.line, lane.returned, lane.rows = before.line, before.returned, before.rows
        lane.taken = len(self.expected) + len(self.told)
        self._review(lane)

    def __len__(self) -> int:
        return self._queued + len(self.expected) + len(self.told) + len(self.passed)

    def __iter__(self) -> Iterator[Waiter]:
        others = merge(self.expected, self.told, self.passed, key=number_of)
        resting = [lane for lane in self._lanes.values() if lane.waiting and not lane.ready]
        last = merge(*resting, key=number_of)
        return itertools.chain(others, _rounds(self._ring), last)

    def oldest(self) -> Waiter | None:
        """Return who has waited longest: the first of a group, which may be none of the next."""
        lines: list[Iterable[Waiter]] = [self.expected, self.told, self.passed]
        lines += self._lanes.values()
        return min((waiter for line in lines for waiter in _first(line)), key=_since, default=None)

    @property
    def groups(self) -> int:
        """In how many groups somebody waits."""
        return sum(1 for lane in self._lanes.values() if lane.waiting)

    @property
    def ahead(self) -> int:
        """How many go before a newcomer whose group may have another slot."""
        ahead = self._plain + len(self.expected) + len(self.told)
        return ahead + self._asking if self.processes else ahead

    @property
    def _asking(self) -> int:
        asking = (process for process in self.processes if process.asking is not None)
        return sum(self._next_of(process) is not None for process in asking)

    def first(self, free: int) -> Waiter | None:
        """Return whose turn it is with so many free slots; those that are held are among them."""
        if free <= len(self.told) + len(self.expected):
            return None
        lane = self._next_of(None)
        for process in self.processes:
            if process.asking is not None:
                other = self._next_of(process)
                if other is not None and (lane is None or other.turn < lane.turn):
                    lane = other
        return None if lane is None else lane.next()

    def join(self, waiter: Waiter) -> None:
        """Let somebody stand in line who has just come."""
        lane = self._lane(waiter.group)
        lane.enter(waiter)
        self._count(waiter)
        self._review(lane, waiter.process)

    def come_back(self, waiter: Waiter) -> None:
        """Let somebody in who has a position from before: ahead of the later ones of the group."""
        lane = self._lane(waiter.group)
        lane.go_back(waiter)
        self._count(waiter)
        self._review(lane, waiter.process)

    def hand(self, waiter: Waiter, peer: Peer, turn: float | None) -> None:
        """Let somebody in line be of another peer, which wants such a turn, or a grant."""
        lane = self._lane(waiter.group)
        self._uncount(waiter)
        self._hand_in(lane, waiter, peer, turn)
        self._count(waiter)
        self._review(lane, waiter.process)

    def expect(self, waiter: Waiter) -> None:
        """Hold a slot for somebody whose turn it is."""
        lane = self._lane(waiter.group)
        lane.taken += 1
        super().expect(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        lane = self._lane(waiter.group)
        if self._aside(waiter) is None:
            self.away -= waiter.is_away
            lane.leave(waiter)
            self._uncount(waiter)
        else:
            lane.taken -= waiter.state == EXPECTED
            super().remove(waiter)
        self._review(lane)

    # Of groups.

    def use_turn(self, waiter: Waiter) -> None:
        """Note that somebody who is the `first` one is given a slot: the group is the last one now."""
        lane = self._lane(waiter.group)
        self._ring.move_to_end(lane)
        self._turns += 1
        lane.turn = self._turns

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

    def _review(self, lane: Lane, newest: Process | None = None) -> None:
        """Take in what has changed in a lane, where there may be somebody new of a process."""
        plain = len(lane.line) + len(lane.returned)
        waiting = plain + sum([len(row) for row in lane.rows.values()])
        ready = waiting if lane.has_room else 0
        self._queued += waiting - lane.waiting
        self._plain += (plain if ready else 0) - lane.plain
        if ready and not lane.ready:
            self._ring[lane] = None
            self._turns += 1
            lane.turn = self._turns
            for process in lane.rows:
                self._list(lane, process)
        elif lane.ready and not ready:
            del self._ring[lane]
        lane.waiting, lane.ready, lane.plain = waiting, ready, plain if ready else 0
        if ready and (newest is not None or plain):
            self._list(lane, newest)
        if not (waiting or lane.taken):
            del self._lanes[lane.name]

    def _list(self, lane: Lane, process: Process | None) -> None:
        if process in lane.listed:
            return
        lane.listed.add(process)
        heap = self._order.setdefault(process, [])
        heappush(heap, (lane.turn, lane))
        if len(heap) > 2 * len(self._lanes) + 16:  # nobody has looked at those that are gone
            gone = [lane for _, lane in heap if not lane.ready]
            for lane in gone:
                lane.listed.discard(process)
            heap[:] = [(lane.turn, lane) for _, lane in heap if lane.ready]
            heapify(heap)

    def _next_of(self, process: Process | None) -> Lane | None:
        """Return the first lane of the ring where a process has somebody."""
        heap = self._order.get(process)
        while heap:
            turn, lane = heap[0]
            if not lane.ready or not lane.row(process):
                heappop(heap)
                lane.listed.discard(process)
            elif turn != lane.turn:
                heapreplace(heap, (lane.turn, lane))
            else:
                return lane
        if heap is not None:
            del self._order[process]
        return None


def _name(group: FairGroup | None) -> bytes:
    return b"" if group is None else group.name


def _first(line: Iterable[Waiter]) -> list[Waiter]:
    return list(itertools.islice(line, 1))


def _rounds(lines: Iterable[Iterable[Waiter]]) -> Iterator[Waiter]:
    """Go through all of them in turns: the first of each, then the second of each that has one."""
    turns = deque(iter(line) for line in lines)
    while turns:
        line = turns.popleft()
        for waiter in line:
            yield waiter
            turns.append(line)
            break
