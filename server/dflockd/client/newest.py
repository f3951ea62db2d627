"""The newest wins: who asks for a lock with an age, and hears from the server while it holds it.

An age is the third part of a lock's ``owner``. A server that does not know ages would take no notice of
who asks at all: call `prepare` before such a lock is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from dflockd import errors
from dflockd.client import abilities, clock, operations
from dflockd.client.blocking import DistributedLock, drive
from dflockd.client.connection import carry_out
from dflockd.client.flows import Links, go_on, walk
from dflockd.client.lease import Lease
from dflockd.client.process import current
from dflockd.client.routing import Ask
from dflockd.client.steps import Flow, Link, Open, Talk
from dflockd.wire import Superseded

__all__ = ["draw_age", "listen", "prepare"]

LOOK_EVERY = 5.0
"""Seconds between looks, while nothing is heard, at whether the lock is held still, and there."""

Told: TypeAlias = Callable[[str], object]
"""Is told who is newer, as people see it; empty if that is not known."""


class _ElsewhereError(errors.RemoteError):
    """Nothing more is to be heard on this connection."""


def draw_age(lock: DistributedLock) -> int:
    """Return a number that is larger than all that were given out for the key of a lock before.

    Raises:
        UnsupportedError: the server is too old.
        RemoteError: it cannot be asked.
    """
    return drive(carry_out(lock._session.draw_age()))


def prepare(lock: DistributedLock) -> None:
    """See to it that the server of a lock knows ages; ask it, unless it is known to.

    Raises:
        UnsupportedError: it does not.
        RemoteError: it cannot be asked.
    """
    if abilities.knows(lock._session.asked_first, abilities.AGES) is not True:
        draw_age(lock)


def listen(lock: DistributedLock, told: Told) -> None:
    """Be told once if a newer owner asks for a lock that is held with an age.

    Returns at once. The thread that renews leases waits for it, on a connection of its own, for as
    long as the lock is held.

    Args:
        lock: it.
        told: called on that thread: it must not block.
    """
    lease = lock._session.lease
    if lease is not None:
        process = current()
        process.reactor.run(_listen(lease, process.pool, told))


def _listen(lease: Lease, links: Links, told: Told) -> Flow[None]:
    while not lease.is_over and clock.now() < lease.deadline:
        try:
            newer = yield from walk(
                links, lease.path_from(), lease.link.route, lambda step: _hear(lease, links, step)
            )
        except errors.RemoteError:
            continue  # the lease may have been renewed by now
        if newer is not None and not lease.is_over:
            told(newer.label.decode(errors="replace"))
        return


def _hear(lease: Lease, links: Links, step: Ask) -> Flow[Superseded | None]:
    """Wait at a server until somebody newer comes, or the lock is not held there any more."""
    if lease.is_over:
        return None
    route = lease.link.route.at(step.server)
    link: Link = links.take(route) or (yield Open(route))
    talk = Talk(link, operations.listen(lease.target.at(step.server), lease.token))

    def look(_is_waiting: bool) -> Flow[float]:
        if lease.is_over or lease.link.route.address != route.address:
            raise _ElsewhereError("the lock is not held here any more")
        return LOOK_EVERY
        yield  # a flow without steps

    newer = yield from go_on(talk, look)
    links.give(link)
    return newer
