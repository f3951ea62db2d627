"""The queue of a key whose waiters belong to groups, which take turns."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace, merge
from typing import Final, Generic

from dflockd.table.line import ClientProcess, Lines, W, earlier, number_of, take_out
from dflockd.table.queue import Queue
from dflockd.table.states import EXPECTED, PASSED, UNTOLD
from dflockd.wire import FairGroup

UNSAID: Final = -1
"""The limit of a group whose members have slots from before, and nobody has come since."""


class Lane(Lines[W]):
    """The waiters of one group, and how many slots it has; it exists while there is either."""

    __slots__ = (
        "is_plain_stuck",
        "is_stuck",
        "limit",
        "name",
        "plain",
        "rated_ready",
        "ready",
        "taken",
        "waiting",
    )

    def __init__(self, name: bytes, limit: int) -> None:
        super().__init__()
        self.name = name
        self.is_stuck = False
        """Whether its turn has come, and the first of it wants more slots than the group may have
        beside those that are taken. Then it is left out, until there is something new in it. All that
        is new where somebody takes more than one slot is followed by a look at who is the next."""
        self.is_plain_stuck = False
        """The same of the first who needs no place of the rate: while that has none, it is left out."""
        self.limit = limit
        """How many slots it may have, by the latest request that said so; 0 is no limit, and
        `UNSAID` is none so far."""
        self.taken = 0
        """Slots that its members have, and those that are held for some."""
        self.waiting = 0
        """How many wait."""
        self.ready = 0
        """How many of `waiting` may have their turn: all, or none while the group has all that it
        may."""
        self.rated_ready = 0
        """How many of `ready` need a place of the rate, and can start at any time."""
        self.plain = 0
        """How many need none, and can start at any time, of those who may have their turn then."""

    def has_room(self, weight: int) -> bool:
        """Whether it may have so many more slots, or all that it ever may."""
        return self.limit <= 0 or self.taken + min(weight, self.limit) <= self.limit

    def has_any(self, process: ClientProcess | None) -> bool:
        """Whether there is somebody of a process, or somebody who can start at any time."""
        return self.has(process) or (self.rated is not None and self.rated.has(process))

    def processes(self, *, is_plain: bool) -> list[ClientProcess]:
        """Return whose there are, of those who need no place or of all."""
        if is_plain or self.rated is None:
            return list(self.rows)
        return list({**self.rows, **self.rated.rows})


class Heap(Generic[W]):
    """The lanes of a ring where one process has somebody, by their turns."""

    __slots__ = ("lanes", "turns")

    def __init__(self) -> None:
        self.turns: list[tuple[int, Lane[W]]] = []
        """Numbers of turns that may be out of date, and then too small."""
        self.lanes: set[Lane[W]] = set()
        """All in it: also some where nobody of the process is any more, or which have left the ring."""


class Ring(Generic[W]):
    """Lanes whose turns are to come, in their order, found by who can start there now.

    A lane whose waiters cannot start now is passed over where it is. So for each process there is a
    heap of the lanes where it has somebody, and one of those where somebody can start at any time:
    the next lane is the first of the first ones of those who ask.
    """

    __slots__ = ("_heaps", "_is_plain", "_last", "lanes")

    def __init__(self, *, is_plain: bool) -> None:
        self._is_plain = is_plain
        """Whether only those count who need no place of the rate."""
        self.lanes: OrderedDict[Lane[W], int] = OrderedDict()
        """Whose turn is next first; with the number of that turn."""
        self._last = 0
        """The number of the last turn."""
        self._heaps: dict[ClientProcess | None, Heap[W]] = {}

    def keep(self, lane: Lane[W], *, is_in: bool) -> None:
        """Let a lane be in it, at the end if it has not been, or not be in it."""
        if not is_in:
            self.lanes.pop(lane, None)
        elif lane not in self.lanes:
            self.move_to_end(lane)
            self._list(lane, None)
            for process in lane.processes(is_plain=self._is_plain):
                self._list(lane, process)

    def move_to_end(self, lane: Lane[W]) -> None:
        """Let a lane have its turn after all others."""
        self._last += 1
        self.lanes[lane] = self._last
        self.lanes.move_to_end(lane)

    def first(self, processes: Iterable[ClientProcess]) -> Lane[W] | None:
        """Return the first lane where somebody can start now."""
        lane = self.first_of(None)
        for process in processes:
            if process.asking is not None:
                other = self.first_of(process)
                if lane is None or (other is not None and self.lanes[other] < self.lanes[lane]):
                    lane = other
        return lane

    def first_of(self, process: ClientProcess | None) -> Lane[W] | None:
        """Return the first lane where a process has somebody, or somebody can start at any time."""
        heap = self._heaps.get(process)
        if heap is None:
            return None
        while heap.turns:
            noted, lane = heap.turns[0]
            turn = self.lanes.get(lane)
            if turn is None or not self._has(lane, process):
                heappop(heap.turns)
                heap.lanes.discard(lane)
            elif turn != noted:
                heapreplace(heap.turns, (turn, lane))
            else:
                return lane
        del self._heaps[process]
        return None

    def note(self, lane: Lane[W], process: ClientProcess | None) -> None:
        """Note that somebody of a process is in a lane, or somebody who can start at any time."""
        if lane in self.lanes:
            self._list(lane, process)

    def forget(self, process: ClientProcess) -> None:
        """Note that nobody of a process is in any lane."""
        self._heaps.pop(process, None)

    def _has(self, lane: Lane[W], process: ClientProcess | None) -> bool:
        return lane.has(process) if self._is_plain else lane.has_any(process)

    def _list(self, lane: Lane[W], process: ClientProcess | None) -> None:
        """See to it that a lane is found where a process has somebody."""
        heap = self._heaps.get(process)
        if (heap is not None and lane in heap.lanes) or not self._has(lane, process):
            return
        if heap is None:
            heap = self._heaps[process] = Heap()
        heap.lanes.add(lane)
        heappush(heap.turns, (self.lanes[lane], lane))
        if len(heap.turns) > 2 * len(self.lanes) + 16:  # nobody has looked at those that are gone
            heap.lanes.intersection_update(self.lanes)
            heap.turns = [(self.lanes[each], each) for each in heap.lanes]
            heapify(heap.turns)


class GroupedQueue(Queue[W]):
    """A queue in which groups take turns: round robin over those that have somebody ready.

    Within a group it is first come, first served. Nothing takes longer the more wait, or the more
    groups there are. A group that has somebody ready again comes last. A waiter that leaves costs
    its group no turn, and neither does one that is passed while away. One that gets a turn uses it
    up, even in vain. Iteration follows the turns to come: last are those whose groups have all that
    they may, by the names of these groups.

    Here is also who takes how many slots, of a key where somebody has a weight, group or not. The first
    one may take more than is free. Then nobody passes it, nor does another group, as long as its
    process asks: that knows who is `behind` it.

    In `line` and `returned` are all who have come since groups take turns here, beside those of their
    groups: so it is known who is the oldest.

    Args:
        before: the queue of the key so far, of waiters in no group.
    """

    __slots__ = (
        "_expected_extra",
        "_extra",
        "_heavy",
        "_held",
        "_lanes",
        "_plain",
        "_plain_ring",
        "_queued",
        "_rated_ready",
        "_resting",
        "_ring",
        "_told_extra",
        "_weights",
        "groups",
    )

    def __init__(self, before: Queue[W] | None) -> None:
        super().__init__()
        self.is_grouped = True
        self._lanes: dict[bytes, Lane[W]] = {}
        """By the names of their groups."""
        self._ring: Ring[W] = Ring(is_plain=False)
        """Those that have somebody ready."""
        self._plain_ring: Ring[W] = Ring(is_plain=True)
        """Those that have somebody ready who needs no place, for when the rate has none."""
        self._resting: dict[bytes, Lane[W]] = {}
        """Those that have somebody who waits, and all that they may."""
        self.groups = 0
        """In how many somebody waits."""
        self._held: dict[int, Lane[W]] = {}
        """Of those who have a slot and a group, by fence."""
        self._queued = 0
        """How many wait in all lanes."""
        self._rated_ready = 0
        """How many of the waiters in the ring need a place of the rate, and can start at any time."""
        self._plain = 0
        """How many of those in the plain ring need none, and can start at any time."""
        self._weights: dict[int, int] = {}
        """Of those who have a slot and more, by fence."""
        self._extra = 0
        """How many slots these holders take beyond one each."""
        self._told_extra = 0
        """How many slots are set aside, beyond one each, for waiters that know their turn."""
        self._expected_extra = 0
        """How many slots are set aside, beyond one each, for waiters that are away."""
        self._heavy = 0
        """How many of those in line take more than one."""
        if before is None:
            return
        self.expected, self.told, self.passed = before.expected, before.told, before.passed
        self.away, self.pending, self.processes = before.away, before.pending, before.processes
        self.gap, self.last, self.listener = before.gap, before.last, before.listener
        self.rate, self.places, self.pause = before.rate, before.places, before.pause
        self.resized = before.resized
        lane = self._lane(None)
        lane.line, lane.returned, lane.rated = before.line, before.returned, before.rated
        lane.rows, lane.called = before.rows, before.called
        lane.taken = len(self.expected) + len(self.told)
        self._review(lane)

    def __len__(self) -> int:
        return self._queued + len(self.expected) + len(self.told) + len(self.passed)

    def __iter__(self) -> Iterator[W]:
        others = [each.copy() for each in (self.expected, self.told, self.passed)]
        yield from merge(*others, key=number_of)
        yield from _rounds(list(self._ring.lanes))
        resting = self._resting.copy()
        names = list(resting)
        heapify(names)  # to sort very many would take long, and few may be wanted
        while names:
            yield from list(resting[heappop(names)].all())

    def oldest(self) -> W | None:
        """Return who has waited longest."""
        first = super().oldest()
        lane = self._lanes.get(b"")  # of who was here before there were groups
        return first if lane is None else earlier(first, lane.foremost_of_all())

    @property
    def ahead(self) -> int:
        """How many slots a newcomer leaves to others who need no place, and whose groups may have more.

        Beside one for each holder. Where somebody takes more than one, the `first` one counts instead.
        """
        ahead = self.set_aside + self._expected_extra + len(self.expected)
        if self.is_heavy:
            return ahead
        if self.processes:
            ahead += sum([self._plain_ring.first_of(each) is not None for each in self._who_ask()])
        return ahead + self._plain

    @property
    def rated_ahead(self) -> int:
        """How many others go before one who does."""
        ahead = self._rated_ready
        for process in self._who_ask() if self.processes else ():
            is_plain = self._plain_ring.first_of(process) is not None
            ahead += not is_plain and self._ring.first_of(process) is not None
        return ahead

    @property
    def has_plain(self) -> bool:
        """Whether somebody needs no place of the rate whose group may have another slot."""
        return bool(self._plain_ring.lanes)

    @property
    def set_aside(self) -> int:
        """How many slots those take who were told, and all holders beyond one each."""
        return self._extra + self._told_extra + len(self.told)

    @property
    def extra(self) -> int:
        """How many slots all holders take beyond one each."""
        return self._extra

    @property
    def is_heavy(self) -> bool:
        """Whether somebody in line takes more than one slot: there may be free ones beside it."""
        return self._heavy > 0

    def weight_of(self, fence: int) -> int:
        """Return how many slots a holder takes."""
        return self._weights.get(fence, 1)

    def is_room_for(self, waiter: W, limit: int, holders: int) -> bool:
        """Whether somebody whose turn it is has all its slots now.

        A waiter that is away has its turn even so: it holds what there is, or lets others go first.
        """
        taken = holders + self.set_aside + len(self.expected) + self._expected_extra
        if taken + min(1 if waiter.is_away else waiter.weight, limit) <= limit:
            return True
        self._stay_behind(waiter)
        return False

    def can_go_on(self, waiter: W, limit: int, holders: int) -> bool:
        """Whether somebody for whom slots were set aside has them all now, and its group may."""
        taken, weight = holders + self.set_aside, waiter.weight
        has_room = weight == 1 or self._lane(waiter.group).has_room(weight)
        return has_room and taken + min(weight, limit) <= limit

    def first(self, free: int, places: int) -> W | None:
        """Return whose turn it is with so many free slots; those that are held are among them.

        All of its slots may not be free yet, or not for its group: see `leaves_out`, `is_room_for`.
        """
        if free <= len(self.told) + len(self.expected):
            return None
        lane = (self._ring if places > 0 else self._plain_ring).first(self.processes)
        waiter = None if lane is None else lane.starter(has_place=places > 0)
        if waiter is not None and waiter.is_rated and self._missing(waiter) >= places:
            # Its places come one by one. Those who need none go first meanwhile.
            lane = self._plain_ring.first(self.processes)
            waiter = None if lane is None else lane.starter(has_place=False)
        return waiter

    def leaves_out(self, waiter: W) -> bool:
        """Whether the group of the `first` one may not have all that it takes, and is left out now."""
        lane = self._lane(waiter.group)
        if waiter.is_away or lane.has_room(waiter.weight):
            return False
        # One before it may only lack a place of the rate, and fit with that.
        self._review(lane, is_stuck=lane.starter(has_place=True) is waiter, is_plain_stuck=True)
        self._stay_behind(waiter)
        for process in lane.processes(is_plain=False):
            if process.asking is None:  # once it asks, it may have somebody before this one
                process.behind[lane] = waiter.place
        return True

    def let_in(self, lane: Lines[W]) -> None:
        """Have the turn of a group come again that is left out: another one is its first now."""
        if isinstance(lane, Lane) and lane.is_plain_stuck:
            self._review(lane)

    def _stay_behind(self, waiter: W) -> None:
        """Note that others wait behind somebody, if it is there only while its process asks."""
        if waiter.process is not None:
            waiter.process.behind[self._lane(waiter.group)] = waiter.place

    @property
    def missing(self) -> int:
        """How many places more than one have to be free for who is the next to need some."""
        lane = self._ring.first(self.processes)
        waiter = None if lane is None else lane.starter(has_place=True)
        return 0 if waiter is None or not waiter.is_rated else self._missing(waiter)

    def _missing(self, waiter: W) -> int:
        """How many places more than one somebody needs who has its turn."""
        assert self.rate is not None
        missing = 0 if waiter.is_away else min(waiter.weight, self.rate.runs) - 1
        if missing:
            self._stay_behind(waiter)
        return missing

    def join(self, waiter: W) -> None:
        """Let somebody stand in line who has just come."""
        self.line[waiter] = None
        lane = self._lane(waiter.group)
        lane.of(waiter).enter(waiter)
        self._heavy += waiter.weight > 1
        if waiter.process is not None:
            self._count(waiter.process)
        self._review(lane)
        self._note(lane, waiter.process)

    def come_back(self, waiter: W) -> None:
        """Let somebody in who has a position from before: ahead of the later ones of the group."""
        insort(self.returned, waiter, key=number_of)
        lane = self._lane(waiter.group)
        lane.of(waiter).go_back(waiter)
        self._heavy += waiter.weight > 1
        if waiter.process is not None:
            self._count(waiter.process)
        self._review(lane)
        self._note(lane, waiter.process)

    def change(self, waiter: W, process: ClientProcess | None, *, is_rated: bool) -> None:
        """Let somebody in line be one who is told by another process, or needs a place, or neither."""
        lane = self._lane(waiter.group)
        lane.of(waiter).leave(waiter)
        if waiter.process is not None:
            self._uncount(waiter, waiter.process)
        waiter.process, waiter.is_rated = process, is_rated
        lane.of(waiter).go_back(waiter)
        if waiter.process is not None:
            self._count(waiter.process)
        self._review(lane)
        self._note(lane, process)

    def expect(self, waiter: W) -> None:
        """Hold a slot for somebody whose turn it is."""
        lane, extra = self._lane(waiter.group), waiter.weight - 1
        lane.taken += 1 + extra
        super().expect(waiter)
        self._set_aside(waiter, extra)

    def remove(self, waiter: W) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        self.away -= waiter.is_away
        lane = self._lane(waiter.group)
        if waiter.state == EXPECTED:
            extra = waiter.weight - 1
            lane.taken -= 1 + extra
            self._set_aside(waiter, -extra)
            self.places -= waiter.is_rated
            take_out(waiter, self.expected if waiter.is_away else self.told)
        elif waiter.state == PASSED:
            take_out(waiter, self.passed)
        else:
            lane.of(waiter).leave(waiter)
            self.drop(waiter)  # if it has come since there are groups here
            self._heavy -= waiter.weight > 1
            if waiter.process is not None:
                self._uncount(waiter, waiter.process)
        self._review(lane)

    def _set_aside(self, waiter: W, extra: int) -> None:
        """Note that so many slots beyond one are set aside for somebody, or fewer than before."""
        if waiter.is_away:
            self._expected_extra += extra
        else:
            self._told_extra += extra
        if waiter.is_rated:
            self.places += extra

    def _uncount(self, waiter: W, process: ClientProcess) -> None:
        super()._uncount(waiter, process)
        lane = self._lane(waiter.group)
        if not lane.has_any(process):
            process.behind.pop(lane, None)

    def _forget(self, process: ClientProcess, waiter: W) -> None:
        super()._forget(process, waiter)
        self._ring.forget(process)
        self._plain_ring.forget(process)

    def _note(self, lane: Lane[W], process: ClientProcess | None) -> None:
        self._ring.note(lane, process)
        self._plain_ring.note(lane, process)

    def _who_ask(self) -> list[ClientProcess]:
        return [process for process in self.processes if process.asking is not None]

    # Of groups.

    def use_turn(self, waiter: W) -> None:
        """Note that somebody who is the `first` one is given a slot: the group is the last one now."""
        lane = self._lane(waiter.group)
        for ring in (self._ring, self._plain_ring):
            if lane in ring.lanes:
                ring.move_to_end(lane)

    def begin(self, fence: int, group: FairGroup | None) -> None:
        """Note that a member of a group has a slot, or several."""
        if group is not None:
            self._hold(fence, self._lane(group), group.weight)

    def restore(self, fence: int, name: bytes, weight: int) -> None:
        """Note that a member of a group has its slots from before this table was."""
        self._hold(fence, self._lanes.setdefault(name, Lane(name, UNSAID)), weight)

    def _hold(self, fence: int, lane: Lane[W], weight: int) -> None:
        self._held[fence] = lane
        lane.taken += weight
        if weight > 1:
            self._weights[fence] = weight
            self._extra += weight - 1
        self._review(lane)

    def end(self, fence: int) -> None:
        """Note that the slots that somebody has had are free."""
        lane = self._held.pop(fence, None)
        if lane is not None:
            weight = self._weights.pop(fence, 1)
            lane.taken -= weight
            self._extra -= weight - 1
            self._review(lane)

    def group_of(self, fence: int) -> bytes:
        """Return to which group somebody belongs who has a slot; nothing if to none."""
        lane = self._held.get(fence)
        return b"" if lane is None else lane.name

    def heed(self, group: FairGroup) -> bool:
        """Take in what is said of a group; say whether somebody may have a turn with that.

        Its waiters, or those who waited behind its first one, which is left out now.
        """
        lane = self._lanes.get(group.name)
        if lane is None or lane.limit == group.limit:
            return False
        before, lane.limit = lane.ready, group.limit
        self._review(lane)
        return self.is_heavy or lane.ready > before

    def has_room(self, group: FairGroup) -> bool:
        """Whether a newcomer may have its slots, as one of its group that passes nobody there."""
        lane = self._lanes.get(group.name)
        return lane is None or (lane.has_room(group.weight) and not lane.is_stuck)

    def limit_of(self, group: FairGroup) -> int:
        """Return how many slots a group may have by what was said of it last."""
        lane = self._lanes.get(group.name)
        return group.limit if lane is None or lane.limit == UNSAID else lane.limit

    def in_turn(self, waiters: list[W]) -> list[W]:
        """Return all waiters to hand over, by number, in the order of their turns.

        A server that lets them in one by one has the groups in the same order.
        """
        first: list[W] = []
        lines: dict[bytes, list[W]] = {lane.name: [] for lane in self._ring.lanes}
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

    def _review(
        self, lane: Lane[W], *, is_stuck: bool = False, is_plain_stuck: bool = False
    ) -> None:
        """Take in what has changed in a lane."""
        lane.is_stuck, lane.is_plain_stuck = is_stuck, is_plain_stuck
        plain, rated_ready = len(lane.line) + len(lane.returned), 0
        in_line = waiting = plain + lane.called
        if lane.rated is not None:
            waiting += lane.rated.length
            rated_ready = lane.rated.size
        ready = waiting
        if is_plain_stuck or 0 < lane.limit <= lane.taken:  # as `Lane.has_room(1)`, without a call
            in_line = plain = 0
            if is_stuck or not is_plain_stuck:
                ready = rated_ready = 0
        self.groups += (waiting > 0) - (lane.waiting > 0)
        self._queued += waiting - lane.waiting
        self._rated_ready += rated_ready - lane.rated_ready
        self._plain += plain - lane.plain
        if waiting or lane.waiting:
            self._ring.keep(lane, is_in=ready > 0)
            self._plain_ring.keep(lane, is_in=in_line > 0)
        if waiting and not ready:
            self._resting[lane.name] = lane
        else:
            self._resting.pop(lane.name, None)
        lane.waiting, lane.ready, lane.plain, lane.rated_ready = waiting, ready, plain, rated_ready
        if not (waiting or lane.taken):
            del self._lanes[lane.name]


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
