"""How much of the event loop the HTTP side may take from the locks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType

SLICE = 0.0004
"""Seconds of work for one turn. A request at the lock port waits no longer than that, and a step."""

REST = 0.001
"""Seconds from one turn to the next, which the locks have for themselves."""


class Pace:
    """Gives out turns, one after the other, to all that takes long: first come, first served.

    However many ask for something big, they share one `SLICE` in every `REST`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.Handle | None = None

    async def turn(self) -> float:
        """Wait for a turn, and return until when it lasts, on the monotonic clock."""
        turn = self._loop.create_future()
        self._waiting.append(turn)
        if self._timer is None:
            self._timer = self._loop.call_soon(self._next)
        await turn
        return time.monotonic() + SLICE

    def _next(self) -> None:
        self._timer = None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else the client has gone away
                turn.set_result(None)
                self._timer = self._loop.call_later(REST, self._next)
                return

    def stop(self) -> None:
        """Give no more turns."""
        if self._timer is not None:
            self._timer.cancel()


class BusyError(Exception):
    """So many wait already that one more would wait in vain."""


class Desk:
    """Lets one at a time do what takes much memory or time, and few wait for it.

    Args:
        most: how many may wait.
    """

    def __init__(self, most: int) -> None:
        self._lock = asyncio.Lock()
        self._most = most
        self._waiting = 0

    async def __aenter__(self) -> None:
        """Wait until no other search runs.

        Raises:
            BusyError: enough wait already.
        """
        if self._waiting >= self._most:
            raise BusyError
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Let the next one have it."""
        self._lock.release()
