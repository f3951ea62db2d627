"""The queue of one key."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import TYPE_CHECKING

from dflockd.table.states import EXPECTED, RESERVED

if TYPE_CHECKING:
    from dflockd.table.state import Waiter


def _number(waiter: Waiter) -> int:
    return waiter.number


class Queue:
    """Who waits for a key, in order.

    Nothing here takes longer the more others wait. Nearly everybody stands in `line`. Whose turn has
    come while they were away is ahead of all of them: back again (`returned`), or with a slot that is
    held for them (`expected`).
    """

    __slots__ = ("away", "expected", "line", "pending", "returned")

    def __init__(self) -> None:
        self.line: OrderedDict[Waiter, None] = OrderedDict()
        """In the order of their arrival."""
        self.returned: list[Waiter] = []
        """By number."""
        self.expected: list[Waiter] = []
        """By number."""
        self.away = 0
        """How many of `line` and `returned` are away."""
        self.pending = False
        """Whether what is due here was more than fits a step, and goes on in another."""

    def __len__(self) -> int:
        return len(self.line) + len(self.returned) + len(self.expected)

    def __iter__(self) -> Iterator[Waiter]:
        if not (self.returned or self.expected):
            return iter(self.line)
        return itertools.chain(merge(self.returned, self.expected, key=_number), self.line)

    @property
    def present(self) -> int:
        """How many are not away."""
        return len(self.line) + len(self.returned) - self.away

    def first(self, free: int) -> Waiter | None:
        """Return whose turn it is with so many free slots; those that are held are among them."""
        if self.returned:
            waiter = self.returned[0]
            return waiter if free > self._held_before(waiter) else None
        return next(iter(self.line)) if self.line and free > len(self.expected) else None

    def come_back(self, waiter: Waiter) -> None:
        """Let somebody in whose turn had come."""
        insort(self.returned, waiter, key=_number)

    def expect(self, waiter: Waiter) -> None:
        """Hold a slot for somebody who is away and in the queue."""
        self.remove(waiter)
        insort(self.expected, waiter, key=_number)
        waiter.state = EXPECTED

    def remove(self, waiter: Waiter) -> None:
        """Take somebody out, who is still in the state in which they were here."""
        if waiter.state == EXPECTED:
            del self.expected[bisect_left(self.expected, waiter.number, key=_number)]
            return
        if waiter.state == RESERVED:
            self.away -= 1
        if waiter in self.line:
            del self.line[waiter]
        else:
            del self.returned[bisect_left(self.returned, waiter.number, key=_number)]

    def _held_before(self, waiter: Waiter) -> int:
        return bisect_left(self.expected, waiter.number, key=_number)
