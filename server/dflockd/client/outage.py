"""What an outage makes each lock of a process log: the first at WARNING, the others at INFO."""

from __future__ import annotations

import logging

from dflockd import clock

PAUSE = 60.0
"""Seconds from one line at WARNING about a server to the next."""

MOST = 256
"""Servers that are remembered. A program that releases on more of them logs more lines."""

_warned_at: dict[str, float] = {}


def level(server: str) -> int:
    """Return at which level to log that something has failed at this server."""
    now, last = clock.now(), _warned_at.get(server)
    if last is not None and 0 <= now - last < PAUSE:
        return logging.INFO
    if len(_warned_at) >= MOST:
        _warned_at.clear()
    _warned_at[server] = now
    return logging.WARNING
