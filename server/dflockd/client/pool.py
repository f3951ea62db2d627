"""Connections of this process, kept for reuse: one for each lock that is held or waited for."""

from __future__ import annotations

import contextlib
from collections import deque

from dflockd import clock
from dflockd.client.connection import Connection, Route
from dflockd.client.flow import Signal

MAX_IDLE = 16
"""Connections that are kept idle for each server and credentials; more are closed on return."""

MAX_IDLE_IN_ALL = 64
"""The same for all of them together: a program with a new TLS context for each lock reuses none."""

FEW_ROUTES = MAX_IDLE_IN_ALL // MAX_IDLE
"""With so many routes there are never too many of all."""

MAX_CONTEXTS = 4
"""TLS contexts for one server whose connections are kept."""

IDLE_AGE = 60.0
"""Seconds after which a connection that nobody has used is closed."""


class ReturnProbe(Signal):
    """Somebody finds out whether a server that was lost is back."""

    __slots__ = ("is_back",)

    def __init__(self) -> None:
        super().__init__()
        self.is_back = False


class Pool:
    """Idle connections by route.

    Of any thread, and without a lock: a finaliser or a signal handler may come at any instant. What
    two of them do at once may leave one connection more or less than the bounds say.
    """

    def __init__(self) -> None:
        self._idle: dict[Route, deque[Connection]] = {}
        self.probes: dict[Route, ReturnProbe] = {}
        """The probe that finds out whether a lost server is back; others wait for it."""

    def take(self, route: Route) -> Connection | None:
        """Return a connection that is the caller's until given back, if there is one."""
        idle = self._idle.get(route)
        if idle:
            try:
                return idle.pop()  # the latest is the one most likely alive
            except IndexError:
                pass  # another thread was faster
        return None

    def give(self, link: Connection, since: float | None = None) -> None:
        """Take a connection back, between two requests.

        Args:
            link: the connection, which is open or closed.
            since: when it was needed last; now, if that is not said.
        """
        if link.closed:
            return
        link.pooled = link.rested = True
        link.idle_since = clock.now() if since is None else since
        idle = self._idle.get(link.route)
        if idle is None:
            self._make_room(link.route)
            idle = self._idle.setdefault(link.route, deque())
        if len(idle) < MAX_IDLE:
            idle.append(link)
            if len(self._idle) > FEW_ROUTES:
                count = sum(map(len, list(self._idle.values())))
                if count > MAX_IDLE_IN_ALL:
                    self.sweep(link.idle_since)
        else:
            link.close()

    def sweep(self, now: float) -> None:
        """Close what has been idle for long, and the oldest of too many."""
        left: list[tuple[float, Route]] = []
        for route, idle in list(self._idle.items()):
            try:
                while idle and idle[0].idle_since <= now - IDLE_AGE:
                    idle.popleft().close()
                left += [(link.idle_since, route) for link in idle]
            except (IndexError, RuntimeError):
                continue  # another thread has used it meanwhile
        left.sort(key=lambda entry: entry[0])
        for _, route in left[: max(0, len(left) - MAX_IDLE_IN_ALL)]:
            with contextlib.suppress(KeyError, IndexError):  # as above
                self._idle[route].popleft().close()

    def _make_room(self, route: Route) -> None:
        """Close what lies idle for the same server and other TLS contexts, if there are many.

        A program that makes a context for each lock never uses one again.
        """
        alike = [each for each in list(self._idle) if each[:2] == route[:2]]
        for each in alike[: max(0, len(alike) - MAX_CONTEXTS + 1)]:
            self.clear(each)

    def clear(self, route: Route | None = None) -> None:
        """Close the idle connections, all or those of one route: their server has gone away."""
        for each in list(self._idle) if route is None else [route]:
            idle = self._idle.pop(each, None)
            # `take` may look at the same ones: each connection goes to one of the two.
            while idle:
                try:
                    idle.pop().close()
                except IndexError:
                    break
