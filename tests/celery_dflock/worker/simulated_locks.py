"""A lock server and its clock, without processes and without waiting: for `simulated`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery_dflock.worker.consumer_wait import TOLD_MS

WIRE = 0.001
"""Seconds that anything takes to get from one to another."""


START = 0.01
"""Seconds from a process's accepting a task to its asking for the lock."""


class Clock:
    """The time, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def after(self, seconds: float, function: Callable[..., object], *args: Any) -> SimpleNamespace:
        entry = SimpleNamespace(is_cancelled=False)
        job = partial(self._unless_cancelled, entry, partial(function, *args))
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), job))
        return entry

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Go on until something is so; `False` if it is not after so many seconds."""
        while self._events and not until():
            at, _, job = heapq.heappop(self._events)
            if at > seconds:
                return False
            self.now = max(self.now, at)
            job()
        return until()

    @staticmethod
    def _unless_cancelled(entry: SimpleNamespace, function: Callable[[], object]) -> None:
        if not entry.is_cancelled:
            function()


@dataclass(eq=False)
class Position:
    """Somebody in the queue of a key."""

    number: int
    tell: Callable[[], None] | None = None
    """Where it waits to be told; `None` for one that is to be granted."""
    grant: Callable[[], None] | None = None
    told_until: float = -1.0
    is_passed: bool = False


@dataclass
class Key:
    """One key of the lock server."""

    clock: Clock
    limit: int = 1
    queue: list[Position] = field(default_factory=list)
    holders: set[object] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def join(self, position: Position) -> None:
        self.queue.append(position)
        self.queue.sort(key=lambda each: each.number)
        self.promote()

    def promote(self) -> None:
        while True:
            expected = [each for each in self.queue if each.told_until > self.clock.now]
            if len(self.holders) + len(expected) >= self.limit:
                return
            waiting = (each for each in self.queue if not each.is_passed and each.told_until < 0)
            first = next(waiting, None)
            if first is None:
                return
            if first.grant is not None:
                self.take(first)
            else:
                self.tell(first)

    def take(self, position: Position) -> None:
        self.queue.remove(position)
        self.holders.add(position)
        assert len(self.holders) <= self.limit, "too many holders"
        assert position.grant is not None
        self.clock.after(WIRE, position.grant)

    def tell(self, position: Position) -> None:
        position.told_until = self.clock.now + TOLD_MS / 1000
        assert position.tell is not None
        self.clock.after(WIRE, position.tell)
        self.clock.after(TOLD_MS / 1000, self.lapse, position)

    def lapse(self, position: Position) -> None:
        if 0 <= position.told_until <= self.clock.now:
            self.pass_on(position)

    def pass_on(self, position: Position) -> None:
        if position.told_until >= 0:
            position.told_until, position.is_passed = -1.0, True
            self.promote()

    def come_back(self, position: Position) -> None:
        if position in self.queue:
            position.told_until, position.is_passed = -1.0, False
            self.promote()

    def resume(self, position: Position) -> None:
        """Who runs it takes the position up, or has a new one."""
        was_expected = position.told_until > self.clock.now
        position.told_until, position.is_passed = -1.0, False
        if position not in self.queue:
            position.number = next(self.numbers)
            self.join(position)
        elif was_expected:
            self.take(position)
        else:
            self.promote()

    def leave(self, position: Position) -> None:
        if position in self.queue:
            self.queue.remove(position)
            self.promote()

    def release(self, position: Position) -> None:
        self.holders.remove(position)
        self.promote()


class Pending:
    """The client's part of one wait."""

    def __init__(self, key: Key, position: Position) -> None:
        self.key, self.position = key, position
        self.is_taken_up = False
        self.messages = 0

    def hand_over(self) -> Position:
        return self.position

    def pass_on(self) -> None:
        self._say(self.key.pass_on)

    def come_back(self) -> None:
        self._say(self.key.come_back)

    def leave(self) -> None:
        self._say(self.key.leave)

    def _say(self, what: Callable[[Position], None]) -> None:
        self.messages += 1
        self.key.clock.after(WIRE, self._arrives, what)

    def _arrives(self, what: Callable[[Position], None]) -> None:
        if not self.is_taken_up:
            what(self.position)
