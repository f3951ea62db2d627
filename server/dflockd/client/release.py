"""Locks that could not be released are released in the background.

Flows of the reactor. They take turns at a server that is gone, so that thousands of them do not try
it all the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client.connection import Route
from dflockd.client.conversation import ask_on, asker, connect
from dflockd.client.flow import Flow, Hear
from dflockd.client.lease import Lease
from dflockd.client.operations import Operation, Target
from dflockd.client.pool import Pool, ReturnProbe
from dflockd.client.routing import follow


class Turn:
    """Of many who want to reach a server that is gone, one finds out for all whether it is back.

    In a cluster all do: each lock may have its own server by now.
    """

    def __init__(self, lease: Lease, pool: Pool) -> None:
        self._lease = lease
        self._probes = pool.probes
        self._probe = ReturnProbe()
        self._at: Route | None = None

    def has_come(self, route: Route) -> bool:
        """Whether this is the one."""
        if self._lease.shards is not None:
            return True
        self._at = route
        return self._probes.setdefault(route, self._probe) is self._probe

    def wait(self, route: Route, seconds: float) -> Flow[None]:
        """Wait until this is the one, or another one has found the server, or for so many seconds."""
        until = min(self._lease.deadline, clock.now() + seconds)
        while not self.has_come(route):
            probe = self._probes.get(route)
            if probe is not None and (not (yield Hear(probe, until)) or probe.is_back):
                return

    def end(self, *, is_back: bool) -> None:
        """Let the others know, and the next of them be the one if it is not back."""
        if self._at is not None and self._probes.get(self._at) is self._probe:
            self._probes.pop(self._at, None)
        self._probe.is_back = is_back
        self._probe.fire()


Ends: TypeAlias = Callable[[Target, bytes], Operation[bool]]
"""What ends a hold by its token, such as `dflockd.client.operations.release`."""


def end_later(lease: Lease, pool: Pool, operation: Ends) -> Flow[None]:
    """End a hold once its server can be reached again, unless its lease ends before."""
    turn, is_back = Turn(lease, pool), False
    first = lease.link.route

    def attempt(server: Address, _: float | None) -> Flow[None]:
        nonlocal is_back
        route = first.at(server)
        yield from turn.wait(route, lease.left)
        link = yield from connect(route)
        target = lease.target.at(server)
        yield from ask_on(link, pool, lambda target: operation(target, lease.token), target)
        is_back = True

    try:
        with contextlib.suppress(errors.RemoteError):  # its lease has ended
            yield from follow(lease.pursuit(asker(pool, first)), attempt)
    finally:
        turn.end(is_back=is_back)
