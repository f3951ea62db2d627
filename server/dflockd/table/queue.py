"""The queue of one key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge

from dflockd.table.line import ClientProcess, Lines, W, earlier, number_of, take_out
from dflockd.table.pauses import KeyPause
from dflockd.table.rates import KeyRate
from dflockd.table.states import EXPECTED, PASSED
from dflockd.wire import FairGroup


class Queue(Lines[W]):
    """The waiters of a key, in order.

    Nothing here takes longer the more others wait. Nearly all stand in line. Those whose turn has
    come without a grant do not: a slot is held until they are back (`expected`) or until they use it
    (`told`). Others of these were passed, and want nothing until they come back (`passed`, unless
    they are away).
    """

    __slots__ = (
        "away",
        "expected",
        "gap",
        "is_grouped",
        "last",
        "listener",
        "passed",
        "pause",
        "pending",
        "places",
        "processes",
        "rate",
        "resized",
        "told",
    )

    def __init__(self) -> None:
        super().__init__()
        self.is_grouped = False
        """Whether groups take turns; see `dflockd.table.grouped`."""
        self.processes: dict[ClientProcess, int] = {}
        """How many of each stand in line who have to be told when it is their turn; none is 0."""
        self.expected: list[W] = []
        """By number."""
        self.told: list[W] = []
        """By number. Nobody else gets their slots, not even who is back from an earlier position."""
        self.passed: list[W] = []
        """By number."""
        self.places = 0
        """How many of those for whom a slot is held need a place of the rate."""
        self.away = 0
        """How many are away."""
        self.pending = False
        """Whether what is due here was more than fits a step, and goes on in another."""
        self.listener: W | None = None
        """The holder that listens for somebody newer; not in the queue."""
        self.rate: KeyRate | None = None
        """How many of its runs may begin in a while, if they may not at any time."""
        self.pause: KeyPause | None = None
        """Why nobody has a turn here, if the key is paused."""
        self.gap = -1.0
        """Seconds from a grant to the next, on average of the last few; negative before the first."""
        self.last = 0.0
        """When somebody here was last granted a slot."""
        self.resized = -1.0
        """When the limit of the key has changed last; negative if it has not, as far as is known."""

    def __len__(self) -> int:
        rated = 0 if self.rated is None else self.rated.length
        return self.length + rated + len(self.expected) + len(self.told) + len(self.passed)

    def __bool__(self) -> bool:
        # Compiled code does not go by the length.
        return len(self) > 0

    def __iter__(self) -> Iterator[W]:
        # Over copies: others may change the queue while somebody goes through it, a few at a time.
        others = [each.copy() for each in (self.expected, self.told, self.passed) if each]
        return merge(*self.copies(), *others, key=number_of)

    def oldest(self) -> W | None:
        """Return who has waited longest."""
        first = self.foremost_of_all()
        for others in (self.expected, self.told, self.passed):
            first = earlier(first, others[0] if others else None)
        return first

    @property
    def ahead(self) -> int:
        """How many slots a newcomer leaves to others who need no place of a rate, and can start."""
        ahead = len(self.line) + len(self.returned) + len(self.expected) + len(self.told)
        return ahead + self._asking(self.rows) if self.processes else ahead

    @property
    def rated_ahead(self) -> int:
        """How many others go before one who does."""
        if self.rated is None:
            return 0
        others = self._asking(self.processes) - self._asking(self.rows) if self.processes else 0
        return self.rated.size + others

    @property
    def present(self) -> int:
        """How many are not away."""
        return len(self) - self.away

    @property
    def has_plain(self) -> bool:
        """Whether somebody in line needs no place of the rate."""
        return self.length > 0

    def first(self, free: int, places: int) -> W | None:
        """Return whose turn it is with so many free slots; those that are held are among them.

        Args:
            free: slots.
            places: the places of the rate that are free as well, and held for nobody.
        """
        free -= len(self.told)
        waiter = self.starter(has_place=places > 0) if free > 0 else None
        return waiter if waiter is not None and free > self._held_before(waiter) else None

    def has_served(self, since: float, now: float) -> None:
        """Note a grant to somebody who has waited since then."""
        gap = now - max(self.last, since)
        self.gap = gap if self.gap < 0 else self.gap + (gap - self.gap) / 4
        self.last = now

    def join(self, waiter: W) -> None:
        """Let somebody stand in line who has just come."""
        self.of(waiter).enter(waiter)
        if waiter.process is not None:
            self._count(waiter.process)

    def come_back(self, waiter: W) -> None:
        """Let somebody in who has a position from before."""
        self.of(waiter).go_back(waiter)
        if waiter.process is not None:
            self._count(waiter.process)

    def change(self, waiter: W, process: ClientProcess | None, *, is_rated: bool) -> None:
        """Let somebody in line be one who is told by another process, or needs a place, or neither."""
        if waiter.process is not process or waiter.is_rated is not is_rated:
            self.of(waiter).leave(waiter)
            if waiter.process is not None:
                self._uncount(waiter, waiter.process)
            waiter.process, waiter.is_rated = process, is_rated
            self.come_back(waiter)

    def expect(self, waiter: W) -> None:
        """Hold a slot for somebody in line whose turn it is."""
        self.remove(waiter)
        self.away += waiter.is_away
        insort(self.expected if waiter.is_away else self.told, waiter, key=number_of)
        self.places += waiter.is_rated
        waiter.state = EXPECTED

    def let_pass(self, waiter: W) -> None:
        """Let others pass the waiter whose turn it is; one that is away leaves the queue."""
        self.remove(waiter)
        if not waiter.is_away:
            insort(self.passed, waiter, key=number_of)
        waiter.state = PASSED

    def remove(self, waiter: W) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        self.away -= waiter.is_away
        if waiter in self.line:  # as nearly all are, of no process
            del self.line[waiter]
        elif waiter.state == EXPECTED:
            self.places -= waiter.is_rated
            take_out(waiter, self.expected if waiter.is_away else self.told)
        elif waiter.state == PASSED:
            take_out(waiter, self.passed)
        else:
            self.of(waiter).leave(waiter)
            if waiter.process is not None:
                self._uncount(waiter, waiter.process)

    def _count(self, process: ClientProcess) -> None:
        """Note that one more of a process is in line."""
        self.processes[process] = self.processes.get(process, 0) + 1

    def _uncount(self, waiter: W, process: ClientProcess) -> None:
        """Note that a waiter of a process is in line no more."""
        left = self.processes[process] - 1
        if left:
            self.processes[process] = left
        else:
            del self.processes[process]
            self._forget(process, waiter)

    def _forget(self, process: ClientProcess, waiter: W) -> None:
        """Note that nobody of a process is in line any more, like a waiter that has been."""
        process.starved.pop(waiter.place, None)

    @staticmethod
    def _asking(processes: Iterable[ClientProcess]) -> int:
        """How many of them ask whose turn it is."""
        return sum([process.asking is not None for process in processes])

    # Of groups and weights, where there are any.

    @property
    def set_aside(self) -> int:
        """How many slots those take who were told, and all holders beyond one each."""
        return len(self.told)

    @property
    def extra(self) -> int:
        """How many slots all holders take beyond one each."""
        return 0

    @property
    def is_heavy(self) -> bool:
        """Whether somebody in line takes more than one slot: there may be free ones beside it."""
        return False

    @property
    def missing(self) -> int:
        """How many places more than one have to be free for who is the next to need some."""
        return 0

    def weight_of(self, fence: int) -> int:
        """Return how many slots a holder takes."""
        return 1

    def leaves_out(self, waiter: W) -> bool:
        """Whether the group of the `first` one may not have all that it takes, and is left out now."""
        return False

    def let_in(self, lane: Lines[W]) -> None:
        """Have the turn of a group come again that is left out: its first one cannot start now."""

    def is_room_for(self, waiter: W, limit: int, holders: int) -> bool:
        """Whether somebody whose turn it is has all its slots now."""
        return True

    def can_go_on(self, waiter: W, limit: int, holders: int) -> bool:
        """Whether somebody for whom a slot was set aside has it now."""
        return holders + self.set_aside < limit

    def use_turn(self, waiter: W) -> None:
        """Note that somebody who is the `first` one is given a slot."""

    def begin(self, fence: int, group: FairGroup | None) -> None:
        """Note that a member of a group has a slot, or several."""

    def restore(self, fence: int, name: bytes, weight: int) -> None:
        """Note that a member of a group has its slots from before this table was."""

    def end(self, fence: int) -> None:
        """Note that the slots that somebody has had are free."""

    def group_of(self, fence: int) -> bytes:
        """Return to which group somebody belongs who has a slot; nothing if to none."""
        return b""

    def heed(self, group: FairGroup) -> bool:
        """Take in what is said of a group; say whether somebody may have a turn with that."""
        return False

    def has_room(self, group: FairGroup) -> bool:
        """Whether a newcomer may have its slots, as one of its group that passes nobody there."""
        return True

    def limit_of(self, group: FairGroup) -> int:
        """Return how many slots a group may have by what was said of it last."""
        return group.limit

    def in_turn(self, waiters: list[W]) -> list[W]:
        """Return all waiters to hand over, by number, in the order of their turns."""
        return waiters

    def _held_before(self, waiter: W) -> int:
        return bisect_left(self.expected, waiter.number, key=number_of)
