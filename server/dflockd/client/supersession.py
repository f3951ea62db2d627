"""The newest wins: a client that holds a lock with an age learns that a newer one wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client import operations
from dflockd.client.conversation import asker, connect, talk
from dflockd.client.flow import Flow, Pause
from dflockd.client.lease import Lease
from dflockd.client.pool import Pool
from dflockd.client.process import current
from dflockd.client.routing import follow
from dflockd.wire import Superseded

LISTEN_AGAIN = 0.5
"""Seconds after which a server is asked again that does not know a lock which is held."""

STILL_HELD_EVERY = 5.0
"""Seconds between looks, while nothing is heard, at whether the lock is held still, and there."""

logger = logging.getLogger("dflockd.client")

Told: TypeAlias = Callable[[str], object]
"""Is told who is newer, as people see it; empty if that is not known."""


class _ElsewhereError(errors.RemoteError):
    """Nothing more will be heard on this connection."""


def listen(lease: Lease | None, told: Told) -> None:
    """Have the thread that renews leases wait, while a lock is held, until somebody newer asks for it.

    Args:
        lease: the lease of the lock; nothing happens without one.
        told: called on that thread: it must not block.
    """
    if lease is not None:
        process = current()
        process.reactor.run(_listen(lease, process.pool, told))


def _listen(lease: Lease, pool: Pool, told: Told) -> Flow[None]:
    while not lease.is_over and clock.now() < lease.deadline:
        try:
            pursuit = lease.pursuit(asker(pool, lease.link.route))
            newer = yield from follow(pursuit, lambda server, _: _await_newer(lease, pool, server))
        except errors.RemoteError:
            continue  # the lease may have been renewed by now
        if newer is not None and not lease.is_over:
            try:
                told(newer.label.decode(errors="replace"))
            except BaseException:  # also SystemExit: this thread renews all the other locks
                logger.exception("who listens at lock %r failed", lease.target.name)
            return
        # A server that does not know the hold may have been started again, and learn of it by the
        # next renewal.
        yield Pause(LISTEN_AGAIN)


def _await_newer(lease: Lease, pool: Pool, server: Address) -> Flow[Superseded | None]:
    """Wait at a server until somebody newer comes, or the lock is not held there any more."""
    if lease.is_over:
        return None
    route = lease.link.route.at(server)
    link = pool.take(route) or (yield from connect(route))
    listening = operations.listen(lease.target.at(server), lease.token)

    def look(_is_waiting: bool) -> Flow[float]:
        if lease.is_over or lease.link.route.address != route.address:
            raise _ElsewhereError("the lock is not held here any more")
        return STILL_HELD_EVERY
        yield  # a flow without steps

    try:
        return (yield from talk(link, listening, None, look))
    finally:
        pool.give(link)  # unless it is closed
