"""Which due tasks go to the pool, and which let others go first: plain bookkeeping.

A worker may have few processes and many tasks that wait for one key. It must not get all their
turns at once: each would set a slot of the key aside, and none could use it. So at most as many of
a key are on their way to a process as may hold it at once. The others are *due*: they let others go
first, ask nothing, and are called back one by one, in the order in which their turns came, as those
before them are settled. Each gets its turn once and is called back once, however many there are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Turn(Hashable, Protocol):
    """Somebody who waits."""

    @property
    def line(self) -> Hashable:
        """What is waited for."""

    @property
    def limit(self) -> int:
        """How many may hold it at once."""


T = TypeVar("T", bound=Turn)


class _Line(Generic[T]):
    """Those of one key whose turn has come."""

    __slots__ = ("due", "first")

    def __init__(self) -> None:
        self.first: set[T] = set()
        """On their way to a process, or called back to be told again."""
        self.due: dict[T, None] = {}
        """In the order of their turns."""


class Turns(Generic[T]):
    """The turns of one worker. Nobody is due while there is room for one on the way."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[T]] = {}

    def told(self, waiter: T) -> bool:
        """Note that its turn has come; ``True`` if it goes to the pool, ``False`` if it is due."""
        line = self._lines.setdefault(waiter.line, _Line())
        if waiter in line.first:
            return True
        if len(line.first) < waiter.limit:
            line.first.add(waiter)
            return True
        line.due.setdefault(waiter)
        return False

    def settle(self, waiter: T) -> list[T]:
        """Note that it is out of the way; return those who are to come back instead.

        It has taken its position up, or it is over. Nothing happens to one that never had a turn.
        """
        line = self._lines.get(waiter.line)
        if line is None:
            return []
        line.first.discard(waiter)
        line.due.pop(waiter, None)
        back: list[T] = []
        while line.due and len(line.first) < waiter.limit:
            back.append(next(iter(line.due)))
            del line.due[back[-1]]
            line.first.add(back[-1])
        if not line.first:
            del self._lines[waiter.line]
        return back

    def is_due(self, waiter: T) -> bool:
        """Whether it has let others go first, and has not been called back."""
        line = self._lines.get(waiter.line)
        return line is not None and waiter in line.due

    def has_followers(self, waiter: T) -> bool:
        """Whether somebody of the same key is due."""
        line = self._lines.get(waiter.line)
        return line is not None and bool(line.due)

    def __len__(self) -> int:
        """Return how many are on their way or due."""
        return sum(len(line.first) + len(line.due) for line in self._lines.values())
