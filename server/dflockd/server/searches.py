"""Searches of clients, done in slices between the requests of others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from dflockd.table.finding import Search
from dflockd.wire import Find, Report

if TYPE_CHECKING:
    from dflockd.server.handling import Handling

SLICE = 0.0004
"""Seconds of work in one turn of the event loop."""

REST = 0.001
"""Seconds from one to the next, which the locks have for themselves."""


class Searches:
    """What clients look for, one after the other: a connection asks for one thing at a time.

    Args:
        server: whose table is looked through, and whose sessions are answered.
    """

    def __init__(self, server: Handling) -> None:
        self._server = server
        self._asked: deque[tuple[int, Find]] = deque()
        self._search: Search | None = None
        """The first of them, once it has begun."""
        self._timer: asyncio.Handle | None = None

    def begin(self, number: int, request: Find) -> None:
        """Look for something; the session with that number is answered later."""
        self._server.sessions[number].owe()
        self._asked.append((number, request))
        if self._timer is None:
            self._timer = self._server.loop.call_soon(self._go_on)

    def stop(self) -> None:
        """Look for nothing more."""
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = None
        while self._asked:
            number, request = self._asked[0]
            session = self._server.sessions.get(number)
            if session is None:
                self._asked.popleft()
                self._search = None
                continue
            if self._search is None:
                self._search = self._server.table.search(request)
            now = time.monotonic()
            until, is_done = now + SLICE, self._search.step(now)
            while not is_done and time.monotonic() < until:
                is_done = self._search.step(now)
            self._timer = self._server.loop.call_later(REST, self._go_on)
            if is_done:
                text = self._search.text()
                self._asked.popleft()
                self._search = None
                session.deliver(Report(text))
            return
