"""The queue of one key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from typing import TYPE_CHECKING

from dflockd.table.line import Line, Process, number_of
from dflockd.table.states import EXPECTED, PASSED

if TYPE_CHECKING:
    from dflockd.table.rates import Rate
    from dflockd.table.state import Peer, Waiter
    from dflockd.wire import FairGroup


class Queue(Line):
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
        "pending",
        "processes",
        "rate",
        "told",
    )

    def __init__(self) -> None:
        super().__init__()
        self.is_grouped = False
        """Whether groups take turns; see `dflockd.table.grouped`."""
        self.processes: dict[Process, int] = {}
        """How many of each stand in line who have to be told of their turn; none is 0."""
        self.expected: list[Waiter] = []
        """By number."""
        self.told: list[Waiter] = []
        """By number. Nobody else gets their slots, not even who is back from an earlier position."""
        self.passed: list[Waiter] = []
        """By number."""
        self.away = 0
        """How many are away."""
        self.pending = False
        """Whether what is due here was more than fits a step, and goes on in another."""
        self.listener: Waiter | None = None
        """The holder that listens for somebody newer; not in the queue."""
        self.rate: Rate | None = None
        """How many of its runs may begin in a while, if they may not at any time."""
        self.gap = -1.0
        """Seconds from a grant to the next, on average of the last few; negative before the first."""
        self.last = 0.0
        """When somebody here was last granted a slot."""

    def __len__(self) -> int:
        return len(self.line) + len(self.returned) + self._others

    def __bool__(self) -> bool:
        # Compiled code does not go by the length.
        return len(self) > 0

    def __iter__(self) -> Iterator[Waiter]:
        others = [each for each in (self.expected, self.told, self.passed) if each]
        line = self.all_rows()
        return merge(line, *others, key=number_of) if others else line

    @property
    def _others(self) -> int:
        """How many are not among those in line who can start at any time."""
        called = sum(self.processes.values()) if self.processes else 0
        return called + len(self.expected) + len(self.told) + len(self.passed)

    def oldest(self) -> Waiter | None:
        """Return who has waited longest: the first, for nobody overtakes."""
        return next(iter(self), None)

    @property
    def ahead(self) -> int:
        """How many go before a newcomer: not those who cannot start now."""
        ahead = len(self.line) + len(self.returned) + len(self.expected) + len(self.told)
        return ahead + self._asking if self.processes else ahead

    @property
    def _asking(self) -> int:
        """How many processes ask that have somebody in line."""
        return sum(process.asking is not None for process in self.processes)

    @property
    def present(self) -> int:
        """How many are not away."""
        return len(self) - self.away

    def first(self, free: int) -> Waiter | None:
        """Return whose turn it is with so many free slots; those that are held are among them."""
        free -= len(self.told)
        waiter = self.next() if free > 0 else None
        return waiter if waiter is not None and free > self._held_before(waiter) else None

    def has_served(self, since: float, now: float) -> None:
        """Note a grant to somebody who has waited since then."""
        gap = now - max(self.last, since)
        self.gap = gap if self.gap < 0 else self.gap + (gap - self.gap) / 4
        self.last = now

    def join(self, waiter: Waiter) -> None:
        """Let somebody stand in line who has just come."""
        self.enter(waiter)
        self._count(waiter)

    def come_back(self, waiter: Waiter) -> None:
        """Let somebody in who has a position from before."""
        self.go_back(waiter)
        self._count(waiter)

    def hand(self, waiter: Waiter, peer: Peer, turn: float | None) -> None:
        """Let somebody in line be of another peer, which wants such a turn, or a grant."""
        if waiter.turn is None and turn is None:
            waiter.peer = peer
            return
        self._uncount(waiter)
        self._hand_in(self, waiter, peer, turn)
        self._count(waiter)

    @staticmethod
    def _hand_in(line: Line, waiter: Waiter, peer: Peer, turn: float | None) -> None:
        line.leave(waiter)
        waiter.peer, waiter.turn = peer, turn
        line.go_back(waiter)

    def _count(self, waiter: Waiter) -> None:
        process = waiter.process
        if process is not None:
            self.processes[process] = self.processes.get(process, 0) + 1

    def expect(self, waiter: Waiter) -> None:
        """Hold a slot for somebody in line whose turn it is."""
        self.remove(waiter)
        self.away += waiter.is_away
        insort(self.expected if waiter.is_away else self.told, waiter, key=number_of)
        waiter.state = EXPECTED

    def let_pass(self, waiter: Waiter) -> None:
        """Let others pass the waiter whose turn it is; one that is away leaves the queue."""
        self.remove(waiter)
        if not waiter.is_away:
            insort(self.passed, waiter, key=number_of)
        waiter.state = PASSED

    def remove(self, waiter: Waiter) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        self.away -= waiter.is_away
        aside = self._aside(waiter)
        if aside is None:
            self.leave(waiter)
            self._uncount(waiter)
        else:
            del aside[bisect_left(aside, waiter.number, key=number_of)]

    def _aside(self, waiter: Waiter) -> list[Waiter] | None:
        """Return where somebody is who does not stand in line."""
        if waiter.state == EXPECTED:
            return self.expected if waiter.is_away else self.told
        return self.passed if waiter.state == PASSED else None

    def _uncount(self, waiter: Waiter) -> None:
        process = waiter.process
        if process is None:
            return
        left = self.processes[process] - 1
        if left:
            self.processes[process] = left
        else:
            del self.processes[process]
            process.starved.pop(waiter.entry, None)

    # Of groups, where there are any.

    def use_turn(self, waiter: Waiter) -> None:
        """Note that somebody who is the `first` one is given a slot."""

    def begin(self, fence: int, group: FairGroup | None) -> None:
        """Note that a member of a group has a slot."""

    def restore(self, fence: int, name: bytes) -> None:
        """Note that a member of a group has a slot from before this table was."""

    def end(self, fence: int) -> None:
        """Note that a slot that somebody has had is free."""

    def group_of(self, fence: int) -> bytes:
        """Return to which group somebody belongs who has a slot; nothing if to none."""
        return b""

    def heed(self, group: FairGroup) -> bool:
        """Take in what is said of a group; say whether its waiters may have their turn with that."""
        return False

    def has_room(self, group: FairGroup) -> bool:
        """Whether a group may have another slot."""
        return True

    def limit_of(self, group: FairGroup) -> int:
        """Return how many slots a group may have by what was said of it last."""
        return group.limit

    def in_turn(self, waiters: list[Waiter]) -> list[Waiter]:
        """Return all waiters to hand over, by number, in the order of their turns."""
        return waiters

    def _held_before(self, waiter: Waiter) -> int:
        return bisect_left(self.expected, waiter.number, key=number_of)
