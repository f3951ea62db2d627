"""The queue of one key."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import Generic, NamedTuple, TypeVar

from dflockd.table.deadlines import Timed
from dflockd.table.rates import Rate
from dflockd.table.states import EXPECTED, PASSED
from dflockd.wire import FairGroup

LEAST_TURN = 0.01
"""Least seconds for which a slot is held for a waiter with a turn that wants as many."""

MOST_SILENT = 30
"""So many turns in a row are counted that a process has let run out."""


class ReservedPosition(NamedTuple):
    """That somebody who waits is away, and what is done until they are back."""

    due: float
    """When somebody is expected."""
    hold: float
    """Seconds before and after that in which a slot is held once its turn has come."""
    until: float
    """When the position is forgotten."""

    def is_worth_holding(self, now: float) -> bool:
        """Whether to hold a slot: not for somebody who comes much later, or not at all."""
        return abs(self.due - now) < self.hold


class Position(Timed):
    """What a queue knows of a waiter."""

    __slots__ = ("group", "is_rated", "number", "reservation", "since", "state")

    state: int
    """One of `dflockd.table.states`."""
    number: int
    """Grows with every arrival at the table."""
    since: float
    group: FairGroup | None
    """To which group they belong."""
    is_rated: bool
    """Whether its run is to count for the rate of the key."""
    reservation: ReservedPosition | None
    """What is done for it while it is away."""

    @property
    def is_away(self) -> bool:
        """Whether it is away: it has reserved its position."""
        return self.reservation is not None


W = TypeVar("W", bound=Position)


def number_of(waiter: Position) -> int:
    """Return what waiters are ordered by."""
    return waiter.number


def take_out(waiter: W, waiters: list[W]) -> bool:
    """Take somebody out of a list by number; say whether they were there."""
    at = bisect_left(waiters, waiter.number, key=number_of)
    if at == len(waiters) or waiters[at] is not waiter:
        return False
    del waiters[at]
    return True


class Line(Generic[W]):
    """Waiters in one order: those of a group, or those who need a place of the rate."""

    __slots__ = ("line", "returned")

    def __init__(self) -> None:
        self.line: OrderedDict[W, None] = OrderedDict()
        """In the order of their arrival."""
        self.returned: list[W] = []
        """By number: whose turn has come while they were not ready, and who are now; or who have come
        from another line."""

    def __len__(self) -> int:
        return len(self.line) + len(self.returned)

    def __iter__(self) -> Iterator[W]:
        if not self.returned:
            return iter(self.line)
        return merge(self.returned, self.line, key=number_of)

    def first(self) -> W | None:
        """Return who came first."""
        first = next(iter(self.line)) if self.line else None
        return earlier(self.returned[0], first) if self.returned else first

    def take_out(self, waiter: W) -> bool:
        """Take somebody out; say whether they were there."""
        if waiter not in self.line:
            return take_out(waiter, self.returned)
        del self.line[waiter]
        return True


def earlier(one: W | None, other: W | None) -> W | None:
    """Return who of two came first, if there are two."""
    if one is None or other is None:
        return one or other
    return one if one.number < other.number else other


class Queue(Generic[W]):
    """The waiters of a key, in order.

    Nothing here takes longer the more others wait. Nearly all stand in `line`. Those whose turn has
    come without a grant are ahead of them: with a slot that is held until they are back
    (`expected`) or until they use it (`told`), or back again (`returned`). Others were passed, and
    want nothing until they come back (`passed`, unless they are away).

    Those who need a place of the rate as well have a line of their own (`rated`): others go first while
    the rate has none.
    """

    __slots__ = (
        "away",
        "expected",
        "gap",
        "is_grouped",
        "last",
        "line",
        "listener",
        "passed",
        "pending",
        "places",
        "rate",
        "rated",
        "returned",
        "silent",
        "told",
    )

    def __init__(self) -> None:
        self.is_grouped = False
        """Whether groups take turns; see `dflockd.table.grouped`."""
        self.line: OrderedDict[W, None] = OrderedDict()
        """In the order of their arrival."""
        self.returned: list[W] = []
        """By number."""
        self.expected: list[W] = []
        """By number."""
        self.told: list[W] = []
        """By number. Nobody else gets their slots, not even who is back from an earlier position."""
        self.passed: list[W] = []
        """By number."""
        self.rated: Line[W] | None = None
        """Those in the line and back again who need a place of the rate; absent until somebody does."""
        self.places = 0
        """How many of those for whom a slot is held need one."""
        self.away = 0
        """How many are away."""
        self.pending = False
        """Whether what is due here was more than fits a step, and goes on in another."""
        self.listener: W | None = None
        """The holder that listens for somebody newer; not in the queue."""
        self.rate: Rate | None = None
        """How many of its runs may begin in a while, if they may not at any time."""
        self.silent: dict[bytes, int] | None = None
        """How many turns in a row each process has let run out; absent while none has."""
        self.gap = -1.0
        """Seconds from a grant to the next, on average of the last few; negative before the first."""
        self.last = 0.0
        """When somebody here was last granted a slot."""

    def __len__(self) -> int:
        return self.ahead + self.rated_ahead + len(self.passed)

    def __bool__(self) -> bool:
        # Compiled code does not go by the length.
        return len(self) > 0

    def __iter__(self) -> Iterator[W]:
        # Over copies: others may change the queue while somebody goes through it, a few at a time.
        others = [each.copy() for each in self._others() if each]
        if self.rated is None:
            return itertools.chain(merge(*others, key=number_of), list(self.line))
        others += [list(self.rated), list(self.line)]
        return merge(*others, key=number_of)

    def _others(self) -> tuple[list[W], ...]:
        """Return who has had a turn."""
        return self.returned, self.expected, self.told, self.passed

    def oldest(self) -> W | None:
        """Return who has waited longest."""
        first = next(iter(self.line), None)
        for others in self._others():
            first = earlier(first, others[0] if others else None)
        return first if self.rated is None else earlier(first, self.rated.first())

    @property
    def ahead(self) -> int:
        """How many go before a newcomer who needs no place of a rate..."""
        return len(self.line) + len(self.returned) + len(self.expected) + len(self.told)

    @property
    def rated_ahead(self) -> int:
        """... and how many others before one who does."""
        return 0 if self.rated is None else len(self.rated)

    @property
    def present(self) -> int:
        """How many are not away."""
        return len(self) - self.away

    def first(self, free: int, *, has_place: bool) -> W | None:
        """Return whose turn it is with so many free slots; those that are held are among them.

        Args:
            free: slots.
            has_place: whether the rate has a place as well.
        """
        waiter = next(iter(self.line)) if self.line else None
        if self.returned:
            waiter = earlier(self.returned[0], waiter)
        if has_place and self.rated is not None:
            waiter = earlier(waiter, self.rated.first())
        if waiter is None or free - len(self.told) <= self._held_before(waiter):
            return None
        return waiter

    def has_served(self, since: float, now: float) -> None:
        """Note a grant to somebody who has waited since then."""
        gap = now - max(self.last, since)
        self.gap = gap if self.gap < 0 else self.gap + (gap - self.gap) / 4
        self.last = now

    def join(self, waiter: W) -> None:
        """Let somebody stand in line who has just come."""
        if waiter.is_rated:
            self._rated().line[waiter] = None
        else:
            self.line[waiter] = None

    def come_back(self, waiter: W) -> None:
        """Let somebody in whose turn had come."""
        returned = self._rated().returned if waiter.is_rated else self.returned
        insort(returned, waiter, key=number_of)

    def _rated(self) -> Line[W]:
        if self.rated is None:
            self.rated = Line()
        return self.rated

    def rate_it(self, waiter: W, *, is_rated: bool) -> None:
        """Let a waiter that is in line need a place of the rate, or need none."""
        if waiter.is_rated is not is_rated:
            self.remove(waiter)
            waiter.is_rated = is_rated
            self.come_back(waiter)

    def expect(self, waiter: W) -> None:
        """Hold a slot for somebody whose turn it is."""
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

    def patience(self, instance: bytes, seconds: float) -> float:
        """Return for how long a slot is held for somebody who is told, and wants so many seconds.

        A process that has been stopped says nothing to any of its turns, and hundreds may be its own:
        each costs those behind it half as much as the one before.
        """
        if self.silent is None:
            return seconds
        share = 0.5 ** self.silent.get(instance, 0)
        return max(min(seconds, LEAST_TURN), seconds * share)

    def said_nothing(self, instance: bytes) -> None:
        """Note that somebody who was told has let the time run out."""
        if not instance:
            return
        if self.silent is None:
            self.silent = {}
        turns = self.silent.get(instance, 0)
        self.silent[instance] = min(turns + 1, MOST_SILENT)

    def has_spoken(self, instance: bytes) -> None:
        """Note that a process has said something to one of its turns."""
        if self.silent is not None:
            self.silent.pop(instance, None)

    def remove(self, waiter: W) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        self.away -= waiter.is_away
        if waiter in self.line:
            del self.line[waiter]
        elif waiter.state == EXPECTED:
            self.places -= waiter.is_rated
            take_out(waiter, self.expected if waiter.is_away else self.told)
        elif waiter.state == PASSED:
            take_out(waiter, self.passed)
        elif not take_out(waiter, self.returned) and self.rated is not None:
            self.rated.take_out(waiter)

    # Of groups, where there are any.

    def use_turn(self, waiter: W) -> None:
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

    def in_turn(self, waiters: list[W]) -> list[W]:
        """Return all waiters to hand over, by number, in the order of their turns."""
        return waiters

    def _held_before(self, waiter: W) -> int:
        return bisect_left(self.expected, waiter.number, key=number_of)
