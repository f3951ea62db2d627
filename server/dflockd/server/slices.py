"""Which session has the event loop, and for how long: each of its turns has one budget of time for all.

What comes in is served as it comes, until the time of the turn is over; the rest of it comes first in
the next turn. A client that has had its share and has more to do goes on behind that, and so does all
that takes long: round robin, a little of each in every turn. What somebody only wants to look at has a
queue of its own, with a rest between its turns, which the locks have for themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TypeAlias, TypeVar

from dflockd import clock

TURN = 0.004
"""Seconds of one turn of the loop for what comes in."""

SLICE = 0.001
"""Seconds of it for those who could not be served in the last one, and as many for all who go on."""

LOOK = 0.0004
"""Seconds for all that somebody wants to look at, from one `REST` to the next."""

REST = 0.001
"""Seconds from one to the next."""

AT_ONCE = 0.0001
"""Seconds for something to look at that nobody has to wait for."""

Work: TypeAlias = Callable[[float], bool]
"""Does the next part of something, as much as fits until that time, and says if there is more."""

T = TypeVar("T")


class Slices:
    """Divides the time of the event loop in which it is used first.

    Attributes:
        free_until: what comes in before that need not ask whether there is time.
        turn: see `TURN`; the others likewise.
    """

    def __init__(self) -> None:
        self.free_until = 0.0
        self.turn = TURN
        self.slice = SLICE
        self.look_for = LOOK
        self.rest = REST
        self.at_once = AT_ONCE
        self._first: deque[Work] = deque()
        self._behind: deque[Work] = deque()
        self._comes_round = False
        """Whether `_turn` is called in the next turn of the loop."""
        self._looks: deque[Generator[None, None, None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    # What comes in.

    def is_over(self, now: float) -> bool:
        """Say whether this turn of the loop has had its time: then what comes in has to `wait`.

        While little happens nobody notices where a turn begins, for that costs a call by the loop.
        So one can have twice its time before it is over.
        """
        if now < self.free_until:
            return False
        if self._comes_round:
            return True
        self._notice()
        self.free_until = now + self.turn
        return False

    def share(self) -> float:
        """Return for how many seconds one may go on who has more to do."""
        return self.slice / (1 + len(self._behind))

    def wait(self, step: Work) -> None:
        """Have something done in the next turn that there was no time for in this one."""
        self._first.append(step)
        self._notice()

    def go_on(self, step: Work) -> None:
        """Have something go on in later turns, which has had its share of this one."""
        self._behind.append(step)
        self._notice()

    def do(self, step: Work) -> None:
        """Do something that can be much, or come many times at once: now, if there is time."""
        now = clock.now()
        if self._behind or self.is_over(now) or step(now + self.slice):
            self.go_on(step)

    def _notice(self) -> None:
        if not self._comes_round:
            self._comes_round = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        # A session that has its share in this turn gets the next one in the next turn.
        first, behind = len(self._first), len(self._behind)
        try:
            self._serve(self._first, first)
            self._serve(self._behind, behind)
        finally:
            # One that fails keeps nobody from the next.
            self.free_until = clock.now() + self.turn
            self._comes_round = False
            if self._first or self._behind:
                self._notice()

    def _serve(self, waiting: deque[Work], number: int) -> None:
        now = clock.now()
        until = now + self.slice
        for _ in range(number):
            step = waiting.popleft()
            if step(now + self.share()):
                self._behind.append(step)
            now = clock.now()
            if now >= until:
                break

    # What somebody wants to look at.

    def may_look(self) -> bool:
        """Say whether somebody may look at something short at once: the others look after a `REST`."""
        if self._timer is not None:
            return False
        self._timer = asyncio.get_running_loop().call_later(self.rest, self._go_on_looking)
        return True

    def look(self, steps: Generator[None, None, None]) -> None:
        """Go through something that can be long and changes nothing."""
        self._looks.append(steps)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(0, self._go_on_looking)

    async def seen(self, steps: Generator[None, None, T]) -> T:
        """Return what something comes to that can be long and changes nothing."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.look(_seen(steps, future))
        return await future

    def stop(self) -> None:
        """Look at nothing more."""
        self._looks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _go_on_looking(self) -> None:
        self._timer = None
        if not self._looks:
            return
        self._timer = asyncio.get_running_loop().call_later(self.rest, self._go_on_looking)
        until = clock.now() + self.look_for
        while self._looks:
            steps = self._looks.popleft()
            if next(steps, _DONE) is not _DONE:
                self._looks.append(steps)
            if clock.now() >= until:
                break


_DONE = object()


def _seen(
    steps: Generator[None, None, T], future: asyncio.Future[T]
) -> Generator[None, None, None]:
    while not future.done():  # else nobody waits for it any more
        try:
            next(steps)
        except StopIteration as end:
            future.set_result(end.value)
            return
        except Exception as exc:
            future.set_exception(exc)
            return
        yield


def in_steps(items: Iterable[T], work: Callable[[T], None]) -> Work:
    """Return the step that does some work, little in itself, for each of many."""
    return partial(_go_through, iter(items), work)


def _go_through(items: Iterator[T], work: Callable[[T], None], until: float) -> bool:
    for item in items:
        work(item)
        if clock.now() >= until:
            return True
    return False
