"""What falls due when."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """Something that falls due. `Deadlines` keeps both fields; nobody else writes them."""

    deadline: float
    """When it falls due, on the caller's clock."""
    span: float
    """How long after it was last set that is, in seconds."""


FEW_QUEUES = 64
"""So many queues are kept without a thought."""

SPAN_STEP = 0.1
"""Seconds up to which a time that can be any is rounded, so that there are few different spans."""

T = TypeVar("T", bound=Timed)


def rounded(seconds: float) -> float:
    """Return a span of so many seconds or a little more."""
    return math.ceil(round(max(0.0, seconds) / SPAN_STEP, 6)) * SPAN_STEP


class Deadlines(Generic[T]):
    """A heap of deadlines from which anything can be taken out in constant time.

    A lock server sets a deadline with every grant and takes nearly all of them back: a plain heap
    would keep each for the length of its lease. But deadlines that are set with one span fall due
    in the order in which they were set, and there are few spans. So each span has a queue, and the
    heap holds one deadline for each queue: that of its head, or an earlier one where the head has
    left.
    """

    def __init__(self) -> None:
        self._queues: dict[float, OrderedDict[T, None]] = {}
        self._heads: list[tuple[float, float]] = []
        self._most_queues = FEW_QUEUES
        self.earliest = math.inf
        """Nothing falls due before this. It may be too early, until `next` or `pop` finds out."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def set(self, item: T, span: float, now: float) -> None:
        """Let `item`, which is not set, fall due `span` seconds from `now`."""
        item.span = span
        item.deadline = now + span
        queue = self._queues.get(span)
        if queue is None:
            if len(self._queues) >= self._most_queues:
                self._drop_empty_queues()
            queue = self._queues[span] = OrderedDict()
            heapq.heappush(self._heads, (item.deadline, span))
            self.earliest = min(self.earliest, item.deadline)
        queue[item] = None

    def _drop_empty_queues(self) -> None:
        # `next` drops them as they come up, but one whose deadline was far away could stay for
        # ages, and a client may choose another timeout, and so another span, each time.
        self._queues = {span: queue for span, queue in self._queues.items() if queue}
        self._heads = [(next(iter(q)).deadline, span) for span, q in self._queues.items()]
        heapq.heapify(self._heads)
        self._most_queues = max(FEW_QUEUES, 2 * len(self._queues))

    def clear(self, item: T) -> None:
        """Take `item` out."""
        del self._queues[item.span][item]

    def reset(self, item: T, span: float, now: float) -> None:
        """Let `item`, which is set, fall due `span` seconds from `now` instead."""
        if span == item.span:
            item.deadline = now + span
            self._queues[span].move_to_end(item)
        else:
            self.clear(item)
            self.set(item, span, now)

    def next(self) -> float | None:
        """Return when the next item falls due, or ``None`` if there is none."""
        heads = self._heads
        while heads:
            deadline, span = heads[0]
            queue = self._queues[span]
            if not queue:
                heapq.heappop(heads)
                del self._queues[span]
                continue
            head = next(iter(queue)).deadline
            if head == deadline:
                self.earliest = deadline
                return deadline
            heapq.heapreplace(heads, (head, span))
        self.earliest = math.inf
        return None

    def pop(self, now: float) -> T | None:
        """Take out and return the earliest item that is due at `now`, or ``None``."""
        deadline = self.next()
        if deadline is None or deadline > now:
            return None
        item, _ = self._queues[self._heads[0][1]].popitem(last=False)
        return item
