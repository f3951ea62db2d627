"""Connections of this process, kept for reuse: one for each lock that is held or waited for."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from dflockd import errors
from dflockd.address import Address
from dflockd.client.connection import Connection, run
from dflockd.client.operations import PING_PATIENCE, Operation, ping, shards
from dflockd.client.routing import Ask, Load, Outcome, Path, Ping, ShardMap, glance

R = TypeVar("R")

MAX_IDLE = 16
"""Connections that are kept idle for each server and credentials; more are closed on return."""


class Route(NamedTuple):
    """Where a connection goes and how it presents itself: what makes two interchangeable."""

    address: Address
    auth_secret: bytes | None = None
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Route({self.address})"


class Pool:
    """Idle connections by route. Safe to use from any thread."""

    def __init__(self) -> None:
        self._idle: defaultdict[Route, list[Connection]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, route: Route, until: float | None = None) -> Connection:
        """Return a connection that is the caller's until given back.

        Raises:
            UnreachableError: there is none idle, and none can be made, until this monotonic time.
        """
        idle = self._idle.get(route)
        if idle:
            with contextlib.suppress(IndexError):
                return idle.pop()  # atomic; the latest is the one most likely alive
        return Connection.open(*route, until)

    def give(self, route: Route, connection: Connection) -> None:
        """Take a connection back, between two requests."""
        if connection.closed:
            return
        connection.pooled = True
        with self._lock:
            idle = self._idle[route]
            if len(idle) < MAX_IDLE:
                idle.append(connection)
                return
        connection.close()

    def ask(self, route: Route, operation: Callable[[], Operation[R]], patience: float) -> R:
        """Run an operation that leaves nothing behind; again, if its connection has died here.

        Args:
            route: to the server.
            operation: begins it.
            patience: seconds for all of it.

        Raises:
            RemoteError: as `run` and `Connection.open` do.
        """
        until = time.monotonic() + patience
        connection = self.take(route, until)
        try:
            result = run(operation(), connection, until)
        except errors.UnreachableError:
            if not connection.pooled:
                raise
            self.clear(route)
            if time.monotonic() >= until:
                raise
            connection = Connection.open(*route, until)
            result = run(operation(), connection, until)
        self.give(route, connection)
        return result

    def look(self, shards: ShardMap, key: bytes, route: Route, is_waiting: bool) -> float:
        """Look at a server of a cluster that has not answered yet; see `dflockd.client.routing.glance`.

        Returns:
            After how many seconds to look again.

        Raises:
            MovedError: another is in charge of the key.
        """
        path = glance(shards, key, route.address, is_waiting, time.monotonic())
        return self.follow(path, route, lambda step: step.timeout or 0.0)

    def follow(
        self,
        path: Path,
        route: Route,
        attempt: Callable[[Ask], R],
        pause: Callable[[float], object] | None = None,
    ) -> R:
        """Walk a path until an attempt succeeds.

        Args:
            path: its servers are reached as `route` says, but for the address.
            route: see there.
            attempt: asks the server that the path has come to.
            pause: waits for so many seconds; ``time.sleep`` unless given.

        Raises:
            RemoteError: the path has come to its end.
        """
        step = next(path)
        while True:
            report = None
            try:
                if isinstance(step, Ask):
                    return attempt(step)
                if isinstance(step, Load):
                    there = route._replace(address=step.server)
                    loading = partial(shards, str(step.server), step.known)
                    report = self.ask(there, loading, step.patience)
                elif isinstance(step, Ping):
                    there = route._replace(address=step.server)
                    self.ask(there, partial(ping, str(step.server)), PING_PATIENCE)
                else:
                    # Looked up now: gevent and eventlet replace what is in `time`.
                    (pause or time.sleep)(step.seconds)
            except errors.RemoteError as exc:
                step = path.send(Outcome(time.monotonic(), error=exc))
            else:
                step = path.send(Outcome(time.monotonic(), report=report))

    def clear(self, route: Route | None = None) -> None:
        """Close the idle connections, all or those of one route: their server has gone away."""
        with self._lock:
            routes = list(self._idle) if route is None else [route]
            lists = [self._idle.pop(each) for each in routes if each in self._idle]
        for idle in lists:
            # `take` may have its hands on the same list: a connection goes to one of us.
            with contextlib.suppress(IndexError):
                while True:
                    idle.pop().close()
