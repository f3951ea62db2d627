"""What falls due when."""

from __future__ import annotations

import heapq
import math


class Timed:
    """Something that falls due. `Deadlines` keeps all of its fields; nobody else writes them."""

    __slots__ = ("after", "before", "chain", "deadline", "span")

    deadline: float
    """When it falls due, on the caller's clock."""
    span: float
    """How long after it was last set that is, in seconds."""
    chain: Chain | None
    """What it is in while it is set, between two others or at an end."""
    before: Timed | None
    after: Timed | None


class Chain:
    """All that was set with one span, in that order: so it falls due."""

    __slots__ = ("first", "last", "span")

    def __init__(self, span: float) -> None:
        self.span = span
        self.first: Timed | None = None
        self.last: Timed | None = None


FEW_CHAINS = 64
"""So many chains are kept without a thought."""

SPAN_STEP = 0.1
"""Seconds up to which a time that can be any is rounded, so that there are few different spans."""


def rounded(seconds: float) -> float:
    """Return a span of so many seconds or a little more."""
    return math.ceil(round(max(0.0, seconds) / SPAN_STEP, 6)) * SPAN_STEP


class Deadlines:
    """A heap of deadlines from which anything can be taken out in constant time.

    A lock server sets a deadline with every grant and takes nearly all of them back: a plain heap
    would keep each for the length of its lease. But deadlines that are set with one span fall due
    in the order in which they were set, and there are few spans. So each span has a chain, and the
    heap holds one deadline for each chain: that of its head, or an earlier one where the head has
    left.
    """

    __slots__ = ("_chains", "_heads", "_most_chains", "_recent", "earliest")

    def __init__(self) -> None:
        self._chains: dict[float, Chain] = {}
        self._heads: list[tuple[float, float]] = []
        self._most_chains = FEW_CHAINS
        self._recent = Chain(math.nan)
        """The one that was found last: most of what is set has the span of what was set before it."""
        self.earliest = math.inf
        """Nothing falls due before this. It may be too early, until `next` or `pop` finds out."""

    def __len__(self) -> int:
        """Return how many are set, after looking at each of them."""
        number = 0
        for chain in self._chains.values():
            item = chain.first
            while item is not None:
                number += 1
                item = item.after
        return number

    def set(self, item: Timed, span: float, now: float) -> None:
        """Let `item`, which is not set, fall due `span` seconds from `now`."""
        item.span = span
        item.deadline = now + span
        chain = self._recent
        if chain.span != span:
            chain = self._recent = self._chain(span, item.deadline)
        item.chain = chain
        item.after = None
        last = item.before = chain.last
        chain.last = item
        if last is None:
            chain.first = item
        else:
            last.after = item

    def _chain(self, span: float, deadline: float) -> Chain:
        chain = self._chains.get(span)
        if chain is None:
            if len(self._chains) >= self._most_chains:
                self._drop_empty_chains()
            chain = self._chains[span] = Chain(span)
            heapq.heappush(self._heads, (deadline, span))
            self.earliest = min(self.earliest, deadline)
        return chain

    def _drop_empty_chains(self) -> None:
        # `next` drops them as they come up, but one whose deadline was far away could stay for
        # ages, and a client may choose another timeout, and so another span, each time.
        heads = [(chain.first, span) for span, chain in self._chains.items()]
        self._heads = [(first.deadline, span) for first, span in heads if first is not None]
        self._chains = {span: self._chains[span] for _, span in self._heads}
        heapq.heapify(self._heads)
        self._most_chains = max(FEW_CHAINS, 2 * len(self._chains))

    def clear(self, item: Timed) -> None:
        """Take `item` out.

        Raises:
            KeyError: it is not set any more.
        """
        chain, before, after = item.chain, item.before, item.after
        if chain is None:
            raise KeyError(item)
        if before is None:
            chain.first = after
        else:
            before.after = after
        if after is None:
            chain.last = before
        else:
            after.before = before
        # Nothing keeps what was next to it alive.
        item.chain = item.before = item.after = None

    def reset(self, item: Timed, span: float, now: float) -> None:
        """Let `item`, which is set, fall due `span` seconds from `now` instead."""
        self.clear(item)
        self.set(item, span, now)

    def next(self) -> float | None:
        """Return when the next item falls due, or ``None`` if there is none."""
        item = self._first()
        return None if item is None else item.deadline

    def pop(self, now: float) -> Timed | None:
        """Take out and return the earliest item that is due at `now`, or ``None``."""
        item = self._first()
        if item is None or item.deadline > now:
            return None
        self.clear(item)
        return item

    def _first(self) -> Timed | None:
        """Return what falls due next, and bring the heap up to date so far."""
        heads = self._heads
        while heads:
            deadline, span = heads[0]
            first = self._chains[span].first
            if first is None:
                heapq.heappop(heads)
                if self._chains.pop(span) is self._recent:
                    self._recent = Chain(math.nan)
            elif first.deadline == deadline:
                self.earliest = deadline
                return first
            else:
                heapq.heapreplace(heads, (first.deadline, span))
        self.earliest = math.inf
        return None
