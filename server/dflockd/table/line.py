"""Those who stand in line for a slot, in order, found by who of them can start now.

Most can at any time. A waiter that wants a turn can while its process asks whose turn it is: see
`ClientProcess`. The others are passed over where they are: nothing is noted of that, so the order is
the usual one once their process asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import Any, Generic, NamedTuple, TypeVar

from dflockd.table.deadlines import Timed
from dflockd.wire import FairGroup


class ClientProcess:
    """One process of a client, with all its connections: whom it tells apart is its own affair.

    It asks whose turn it is when it has somebody to use a slot, and so at most one turn at a time is
    on its way to it.
    """

    __slots__ = ("asking", "behind", "connections", "instance", "starved")

    def __init__(self, instance: bytes) -> None:
        self.instance = instance
        self.connections = 0
        """How many have said that they are its own; with the last of them it is forgotten."""
        self.asking: Any = None
        """Its connection that asks whose turn it is, while it has no answer."""
        self.starved: OrderedDict[Any, None] = OrderedDict()
        """At which keys a slot was free while it had a position and did not ask: the longest ago
        first."""
        self.behind: OrderedDict[Any, Any] = OrderedDict()
        """Lines to look at when it asks, or asks no more, each with its key: others wait behind it, for
        it needs more slots or places than are free; or it may have somebody before them."""


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

    __slots__ = ("group", "is_rated", "number", "process", "reservation", "since", "state")

    state: int
    """One of `dflockd.table.states`."""
    number: int
    """Grows with every arrival at the table."""
    since: float
    group: FairGroup | None
    """To which group they belong, and how many slots they take."""
    is_rated: bool
    """Whether its run is to count for the rate of the key."""
    process: ClientProcess | None
    """The process that has to ask before the waiter has its turn; ``None`` if it can at any time."""
    reservation: ReservedPosition | None
    """What is done for it while it is away."""

    @property
    def is_away(self) -> bool:
        """Whether it is away: it has reserved its position."""
        return self.reservation is not None

    @property
    def weight(self) -> int:
        """How many slots it takes."""
        return 1 if self.group is None else self.group.weight

    @property
    def can_start(self) -> bool:
        """Whether it can have its turn now."""
        return self.process is None or self.process.asking is not None

    @property
    def place(self) -> object:
        """By what its `ClientProcess` knows where it waits."""
        return None


W = TypeVar("W", bound=Position)


def number_of(waiter: Position) -> int:
    """Return what waiters are ordered by."""
    return waiter.number


def take_out(waiter: W, waiters: list[W]) -> None:
    """Take somebody out of a list by number, if they are there."""
    at = bisect_left(waiters, waiter.number, key=number_of)
    if at < len(waiters) and waiters[at] is waiter:
        del waiters[at]


def earlier(one: W | None, other: W | None) -> W | None:
    """Return who of two came first, if there are two."""
    if one is None or other is None:
        return one or other
    return one if one.number < other.number else other


class WaiterRow(Generic[W]):
    """Waiters in order."""

    __slots__ = ("line", "returned")

    def __init__(self) -> None:
        self.line: OrderedDict[W, None] = OrderedDict()
        """As they have arrived."""
        self.returned: list[W] = []
        """By number: those who have come back to a position from before, or from another row."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.line) + len(self.returned)

    def each(self) -> Iterator[W]:
        """Go through them in order."""
        if not self.returned:
            return iter(self.line)
        return merge(self.returned, self.line, key=number_of)

    def copies(self) -> list[list[W]]:
        """Return them as they are now, each list by number."""
        return [list(self.line), self.returned.copy()]

    def head(self) -> W | None:
        """Return who came first."""
        first = next(iter(self.line)) if self.line else None
        return earlier(self.returned[0], first) if self.returned else first

    def drop(self, waiter: W) -> None:
        """Take somebody out, if they are there."""
        if waiter in self.line:
            del self.line[waiter]
        else:
            take_out(waiter, self.returned)


class Line(WaiterRow[W]):
    """Waiters in one order: a row of those who can start at any time, and one for each process.

    Those of a queue or a group, who need no place of the rate; or those of it who do.
    """

    __slots__ = ("called", "rows")

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[ClientProcess, WaiterRow[W]] = {}
        """Those who have to be told when it is their turn, by their process; none is empty."""
        self.called = 0
        """How many these are."""

    @property
    def length(self) -> int:
        """How many stand in it."""
        return len(self.line) + len(self.returned) + self.called

    def everybody(self) -> Iterator[W]:
        """Go through all of them, in order."""
        if not self.rows:
            return self.each()
        return merge(self.each(), *[row.each() for row in self.rows.values()], key=number_of)

    def enter(self, waiter: W) -> None:
        """Let somebody in who has just come."""
        self._row_for(waiter).line[waiter] = None

    def go_back(self, waiter: W) -> None:
        """Let somebody in who has a position from before."""
        insort(self._row_for(waiter).returned, waiter, key=number_of)

    def leave(self, waiter: W) -> None:
        """Take somebody out who is in it."""
        if waiter in self.line:  # as nearly all are
            del self.line[waiter]
        elif waiter.process is None:
            take_out(waiter, self.returned)
        else:
            self._drop_called(waiter, waiter.process)

    def _drop_called(self, waiter: W, process: ClientProcess) -> None:
        row = self.rows[process]
        row.drop(waiter)
        self.called -= 1
        if not row.size:
            del self.rows[process]

    def has(self, process: ClientProcess | None) -> bool:
        """Whether there is somebody of a process, or somebody who can start at any time."""
        return self.size > 0 if process is None else process in self.rows

    def next(self) -> W | None:
        """Return the first of those who can start now."""
        first = self.head()
        for process, row in self.rows.items():
            if process.asking is not None:
                first = earlier(first, row.head())
        return first

    def foremost(self) -> W | None:
        """Return who came first."""
        first = self.head()
        for row in self.rows.values():
            first = earlier(first, row.head())
        return first

    def _row_for(self, waiter: W) -> WaiterRow[W]:
        process = waiter.process
        if process is None:
            return self
        self.called += 1
        row = self.rows.get(process)
        if row is None:
            row = self.rows[process] = WaiterRow()
        return row


class Lines(Line[W]):
    """Those who need no place of a rate, and beside them those who do."""

    __slots__ = ("rated",)

    def __init__(self) -> None:
        super().__init__()
        self.rated: Line[W] | None = None
        """Those who need a place of the rate: the others go first while it has none. Absent until
        somebody does."""

    def of(self, waiter: W) -> Line[W]:
        """Return the line in which a waiter stands, or is to stand."""
        if not waiter.is_rated:
            return self
        if self.rated is None:
            self.rated = Line()
        return self.rated

    def copies(self) -> list[list[W]]:
        """Return all of both as they are now, each list by number."""
        lines: list[Line[W]] = [self] if self.rated is None else [self, self.rated]
        rows = [row for line in lines for row in (line, *line.rows.values())]
        return [part for row in rows for part in WaiterRow.copies(row)]

    def all(self) -> Iterator[W]:
        """Go through all of both, in order."""
        mine = self.everybody()
        return mine if self.rated is None else merge(mine, self.rated.everybody(), key=number_of)

    def foremost_of_all(self) -> W | None:
        """Return who of both came first."""
        mine = self.foremost()
        return mine if self.rated is None else earlier(mine, self.rated.foremost())

    def starter(self, *, has_place: bool) -> W | None:
        """Return the first of both who can start now, with a place of the rate or without."""
        mine = self.next()
        return earlier(mine, self.rated.next()) if has_place and self.rated is not None else mine
