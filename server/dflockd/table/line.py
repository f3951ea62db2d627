"""Those who stand in line for a slot, in order, found by who of them can start now.

Most can at any time. Who wants a turn can when its process asks whose turn it is: see `Process`. The
others are passed over where they are: nothing is noted of that, so the order is the same as ever
once their process asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflockd.table.state import Entry, Peer, Waiter


class Process:
    """One process of a client, with all its connections: whom it tells apart is its own affair.

    It asks whose turn it is when it has somebody to use a slot, and so at most one turn at a time is
    on its way to it.
    """

    __slots__ = ("asking", "connections", "instance", "starved")

    def __init__(self, instance: bytes) -> None:
        self.instance = instance
        self.connections = 0
        """How many have said that they are its own; with the last of them it is forgotten."""
        self.asking: Peer | None = None
        """Its connection that asks whose turn it is, while it has no answer."""
        self.starved: OrderedDict[Entry, None] = OrderedDict()
        """Where a slot was free while it had a position and did not ask: the longest ago first."""


def number_of(waiter: Waiter) -> int:
    """Return by what waiters are in order."""
    return waiter.number


class Row:
    """Waiters in order, by number."""

    __slots__ = ("line", "returned")

    def __init__(self) -> None:
        self.line: OrderedDict[Waiter, None] = OrderedDict()
        """As they have arrived."""
        self.returned: list[Waiter] = []
        """Those who have come back to a position from before, by number."""

    def __len__(self) -> int:
        return len(self.line) + len(self.returned)

    def __iter__(self) -> Iterator[Waiter]:
        return merge(self.returned, self.line, key=number_of) if self.returned else iter(self.line)

    def head(self) -> Waiter | None:
        """Return the first."""
        first = next(iter(self.line), None)
        if self.returned and (first is None or self.returned[0].number < first.number):
            return self.returned[0]
        return first

    def drop(self, waiter: Waiter) -> None:
        """Take somebody out who is in it."""
        if waiter in self.line:
            del self.line[waiter]
        else:
            del self.returned[bisect_left(self.returned, waiter.number, key=number_of)]


class Line(Row):
    """Waiters of one queue, or of one group: a row of those who can start at any time, and others."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Process, Row] = {}
        """Those who have to be told of their turn, by their process; none is empty."""

    def row(self, process: Process | None) -> Row | None:
        """Return where those of a process are, or those without one."""
        return self if process is None else self.rows.get(process)

    def all_rows(self) -> Iterator[Waiter]:
        """Return everybody, in order."""
        mine = Row.__iter__(self)
        return merge(mine, *self.rows.values(), key=number_of) if self.rows else mine

    def enter(self, waiter: Waiter) -> None:
        """Let somebody in who has just come."""
        self._row_for(waiter).line[waiter] = None

    def go_back(self, waiter: Waiter) -> None:
        """Let somebody in who has a position from before."""
        insort(self._row_for(waiter).returned, waiter, key=number_of)

    def leave(self, waiter: Waiter) -> None:
        """Take somebody out who is in it."""
        if waiter.process is None:
            self.drop(waiter)
            return
        row = self.rows[waiter.process]
        row.drop(waiter)
        if not len(row):
            del self.rows[waiter.process]

    def next(self) -> Waiter | None:
        """Return the first of those who can start now."""
        first = self.head()
        for process, row in self.rows.items():
            if process.asking is not None:
                other = row.head()
                if other is not None and (first is None or other.number < first.number):
                    first = other
        return first

    def _row_for(self, waiter: Waiter) -> Row:
        process = waiter.process = waiter.peer.process if waiter.turn is not None else None
        if process is None:
            return self
        row = self.rows.get(process)
        if row is None:
            row = self.rows[process] = Row()
        return row
