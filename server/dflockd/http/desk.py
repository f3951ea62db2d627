"""How many requests may have something made at once that takes much memory or time."""

from __future__ import annotations

import asyncio
from types import TracebackType


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
