"""Background work: locks that could not be released are released later.

Flows of the reactor. They take turns at a server that is gone, so that thousands of them do not try
it all the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from dflockd import errors
from dflockd.client import clock
from dflockd.client.flows import Links, talk, walk
from dflockd.client.lease import Lease
from dflockd.client.operations import Target, detach, release
from dflockd.client.routing import Ask
from dflockd.client.steps import Flow, Hear, Link, Open, ReturnProbe, Route


class Probing(Links, Protocol):
    """The pool, with what its users know of servers that were lost."""

    probes: dict[Route, ReturnProbe]


class Turn:
    """Of many who want to reach a server that is gone, one finds out for all whether it is back.

    In a cluster all do: each lock may have its own server by now.
    """

    def __init__(self, lease: Lease, links: Probing) -> None:
        self._lease = lease
        self._links = links
        self._probe = ReturnProbe()
        self._at: Route | None = None

    def has_come(self, route: Route) -> bool:
        """Whether this is the one."""
        if self._lease.shards is not None:
            return True
        self._at = route
        return self._links.probes.setdefault(route, self._probe) is self._probe

    def wait(self, route: Route, seconds: float) -> Flow[None]:
        """Wait until this is the one, or another one has found the server, or for so many seconds."""
        until = min(self._lease.deadline, clock.now() + seconds)
        while not self.has_come(route):
            probe = self._links.probes.get(route)
            if probe is not None and (not (yield Hear(probe, until)) or probe.is_back):
                return

    def end(self, *, is_back: bool) -> None:
        """Let the others know, and the next of them be the one if it is not back."""
        if self._at is not None and self._links.probes.get(self._at) is self._probe:
            self._links.probes.pop(self._at, None)
        self._probe.is_back = is_back
        self._probe.fire()


def release_later(lease: Lease, links: Probing) -> Flow[None]:
    """Release a lock once its server can be reached again, unless its lease ends before."""

    def releasing(link: Link, target: Target) -> Flow[None]:
        yield from talk(link, release(target, lease.token))

    return _later(lease, links, releasing)


def take_back(lease: Lease, links: Probing) -> Flow[None]:
    """Free a hold that was meant for another process, unless that has adopted it.

    The process that wanted to hand it over does not know whether it has, and nobody has its token.
    """

    def taking_back(link: Link, target: Target) -> Flow[None]:
        # The server says no to this if it is another's.
        if (yield from talk(link, detach(target, lease.token, 1))):
            yield from talk(link, release(target, lease.token))

    return _later(lease, links, taking_back)


def _later(lease: Lease, links: Probing, do: Callable[[Link, Target], Flow[None]]) -> Flow[None]:
    turn, route, is_back = Turn(lease, links), lease.link.route, False

    def attempt(step: Ask) -> Flow[None]:
        nonlocal route, is_back
        route = route.at(step.server)
        yield from turn.wait(route, lease.left)
        link: Link = yield Open(route)
        yield from do(link, lease.target.at(step.server).knowing(link.features))
        links.give(link)
        is_back = True

    try:
        with contextlib.suppress(errors.RemoteError):  # its lease has ended
            yield from walk(links, lease.path_from(), route, attempt)
    finally:
        turn.end(is_back=is_back)
