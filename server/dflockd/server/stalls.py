"""What is left of peers that spoke to this process while it stood still."""

from __future__ import annotations

import asyncio
import select

BEAT = 1.0
"""Seconds from one sign of the event loop to the next."""

LATE = 0.5
"""Seconds by which such a sign is late once the process was stopped, or the machine too busy."""

_FAREWELL = getattr(select, "POLLRDHUP", 0)


def has_left(transport: asyncio.Transport) -> bool:
    """Whether a peer has closed its connection, though that is still behind what it sent before.

    A client that was not answered in time closes its connection and tries again. A process that was
    stopped then finds both of its attempts, and would grant the lock to the first: the second would
    hear that somebody else has it. Where the system cannot tell, nobody has left.
    """
    sock = transport.get_extra_info("socket")
    if not _FAREWELL or sock is None or sock.fileno() < 0:
        return False
    asked = select.poll()
    asked.register(sock.fileno(), _FAREWELL)
    return bool(asked.poll(0))
