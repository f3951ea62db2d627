"""How many runs of a key may begin in a window, and which have.

A grant takes a *place* of the rate. The run says when it has begun, and one window later the place
is free. If the run does not say so, its place is taken for longer, never for less.
"""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, NamedTuple

from dflockd.table.counts import Counts
from dflockd.table.deadlines import SPAN_STEP, Deadlines, Timed, rounded
from dflockd.table.limits import Limits
from dflockd.wire import Rate as Asked
from dflockd.wire import Status

if TYPE_CHECKING:
    from dflockd.table.state import Change, Group

BLOCK = 32
"""So many beginnings are recorded together: a record on disk is written anew for each that joins it."""

LATE = 0.0002
"""Seconds by which a place is checked after it is free, because times are not exact numbers."""


class RateRecord(NamedTuple):
    """What is kept of a rate where it outlives the table: one block of it; times in seconds."""

    space: int
    key: bytes
    runs: int
    window: float
    number: int
    """Of the block: the later of one rate has the larger one."""
    times: tuple[float, ...]
    """When runs have begun, in order."""


class RateBlock:
    """Some beginnings of a rate, in order."""

    __slots__ = ("ended", "first", "number", "rate", "times")

    def __init__(self, rate: Rate, number: int) -> None:
        self.rate = rate
        self.number = number
        self.times: array[float] = array("d")
        self.first = 0
        """So many of them are over a window ago."""
        self.ended = False
        """Whether it is of no more use."""

    def kept(self) -> RateRecord:
        """Return what is worth keeping."""
        rate = self.rate
        times = tuple(self.times[self.first :])
        return RateRecord(rate.space, rate.key, rate.runs, rate.window, self.number, times)


class Rate(Timed):
    """The runs of one key that have begun of late, or may begin at any time.

    It stays until nothing of it counts any more, whether or not its key is held or waited for. It falls
    due when somebody who waits can have a place, or else when it may be dropped.
    """

    __slots__ = ("begun", "blocks", "group", "key", "pending", "runs", "space", "window")

    def __init__(self, group: Group, space: int, key: bytes, runs: int, window: float) -> None:
        self.group = group
        self.space = space
        self.key = key
        self.runs = runs
        """How many may begin..."""
        self.window = window
        """... in so many seconds."""
        self.pending: set[int] = set()
        """The fences of those who may begin at any time: they have a hold, and have said nothing."""
        self.blocks: list[RateBlock] = []
        """Those of the last window, and the last one in any case."""
        self.begun = 0
        """How many are in them that count."""

    def free(self, now: float) -> int:
        """Return how many places are free. It is less than none after `runs` has become less."""
        if now < self.group.rates_since + self.window:
            return 0
        self._forget(now)
        return self.runs - len(self.pending) - self.begun

    def next(self, now: float, more: int) -> float | None:
        """Return when more than so many places are free; ``None`` if somebody has to begin before."""
        opens_at = self.group.rates_since + self.window
        if now < opens_at:
            return opens_at
        over = len(self.pending) + self.begun + more - self.runs
        if over < 0:
            return now
        for block in self.blocks:
            count = len(block.times) - block.first
            if over < count:
                return block.times[block.first + over] + self.window
            over -= count
        return None

    def kept(self, now: float) -> list[RateRecord]:
        """Return what is worth keeping: its last block, and others that count."""
        self._forget(now)
        last = self.blocks[-1]
        return [b.kept() for b in self.blocks if b is last or b.first < len(b.times)]

    def _forget(self, now: float) -> None:
        """Let those be that have begun over a window ago."""
        for block in self.blocks:
            times, first = block.times, block.first
            while first < len(times) and times[first] + self.window <= now:
                first += 1
            self.begun -= first - block.first
            block.first = first
            if first < len(times):
                return


class Rates:
    """The rates of one table.

    Args:
        deadlines: those of the table.
        counts: those of the table.
        limits: those of the table.
        changes: those of the table; blocks that have changed or are gone join them.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        counts: Counts,
        limits: Limits,
        changes: list[Change] | None,
    ) -> None:
        self._deadlines = deadlines
        self._counts = counts
        self._limits = limits
        self._numbers = itertools.count(1)
        self.size = 0
        """How many there are."""
        self.promised = 0
        """How many beginnings may have to be remembered: the sum of what all rates allow."""
        self._changes = changes

    # What is asked.

    def refusal(self, group: Group, name: tuple[int, bytes], asked: Asked) -> Status | None:
        """Return what to answer to who asks for such a rate of a key, if it may not be."""
        if asked.window > self._limits.max_rate_window * 1000:
            return Status.RATE_WINDOW
        known = group.rates.get(name)
        more = asked.runs if known is None else asked.runs - known.runs
        if more > 0 and self.promised + more > self._limits.max_rate_runs:
            self._counts.full += 1
            return Status.MAX_RATES
        return None

    def name(self, group: Group, name: tuple[int, bytes], asked: Asked, now: float) -> Rate:
        """Return the rate of a key, which from now on is what was asked last."""
        rate = group.rates.get(name)
        if rate is None:
            return self._add(group, name, asked.runs, asked.window / 1000, now)
        self.change(rate, asked.runs, asked.window / 1000, now)
        return rate

    def change(self, rate: Rate, runs: int, window: float, now: float) -> None:
        """Have a rate allow so many runs in so many seconds."""
        if (rate.runs, rate.window) != (runs, window):
            self.promised += runs - rate.runs
            rate.runs, rate.window = runs, window
            self._note(rate.blocks[-1])
            # Somebody who waits may have a place with that.
            self._deadlines.reset(rate, LATE, now)

    def _add(
        self, group: Group, name: tuple[int, bytes], runs: int, window: float, now: float
    ) -> Rate:
        rate = group.rates[name] = Rate(group, *name, runs, window)
        self.size += 1
        self.promised += runs
        self._deadlines.set(rate, rounded(window), now)
        self._note(self._block(rate))
        return rate

    # What happens.

    def begin(self, rate: Rate, fence: int, now: float) -> bool:
        """Note that a run has begun; say whether that is news."""
        if fence not in rate.pending:
            return False
        rate.pending.discard(fence)
        block = rate.blocks[-1]
        if len(block.times) >= BLOCK:
            block = self._renewed(rate)
        block.times.append(now)
        rate.begun += 1
        self._counts.begun += 1
        self._note(block)
        return True

    def give_back(self, rate: Rate, fence: int) -> bool:
        """Note that a run will not begin; say whether it had not."""
        if fence not in rate.pending:
            return False
        rate.pending.discard(fence)
        self._counts.unbegun += 1
        return True

    def wake(self, rate: Rate, more: int, now: float) -> None:
        """Have the rate fall due when more than so many places are free: somebody waits for one."""
        at = rate.next(now, more)
        if at is not None and now < at < rate.deadline:
            self._deadlines.reset(rate, at - now + LATE, now)

    def look_again(self, rate: Rate, now: float, *, is_used: bool) -> bool:
        """Say whether a rate that is due can be dropped; if not, it falls due again.

        Args:
            rate: it, whose deadline is not set any more.
            now: the time.
            is_used: whether anybody waits for its key.
        """
        is_open = now >= rate.group.rates_since + rate.window
        if is_open and rate.free(now) == rate.runs and not is_used:
            self._drop(rate)
            return True
        last = rate.blocks[-1].times
        until = last[-1] + rate.window if last else now + rate.window
        self._deadlines.set(rate, max(rounded(until - now), SPAN_STEP), now)
        return False

    def _drop(self, rate: Rate) -> None:
        del rate.group.rates[rate.space, rate.key]
        self.size -= 1
        self.promised -= rate.runs
        for block in rate.blocks:
            self._end(block)

    def leave(self, group: Group) -> None:
        """Forget those of a group that leaves."""
        for rate in group.rates.values():
            self._deadlines.clear(rate)
            self.size -= 1
            self.promised -= rate.runs

    # What outlives the table.

    def restore(self, group: Group, record: RateRecord, now: float) -> None:
        """Take in a block of a rate; those of one rate come in their order."""
        name = record.space, record.key
        rate = group.rates.get(name)
        if rate is None:
            rate = self._add(group, name, record.runs, record.window, now)
        else:
            self.change(rate, record.runs, record.window, now)
        if rate.blocks[-1].times:
            self._block(rate)
        block = rate.blocks[-1]
        block.times.extend(record.times)
        rate.begun += len(record.times)
        self._note(block)

    # Blocks.

    def _block(self, rate: Rate) -> RateBlock:
        block = RateBlock(rate, next(self._numbers))
        rate.blocks.append(block)
        return block

    def _renewed(self, rate: Rate) -> RateBlock:
        """Return an empty block, and drop those in which nothing counts any more."""
        over = [block for block in rate.blocks if block.first == len(block.times)]
        for block in over:
            rate.blocks.remove(block)
            self._end(block)
        return self._block(rate)

    def _end(self, block: RateBlock) -> None:
        block.ended = True
        self._note(block)

    def _note(self, block: RateBlock) -> None:
        if self._changes is not None:
            self._changes.append(block)
