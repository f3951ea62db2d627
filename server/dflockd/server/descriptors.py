"""How many descriptors the process has, and who gets how many of them."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from dflockd.server.admission import MOST_PENDING

MOST = 1 << 20
"""Descriptors that are shared out at most, where the system has no limit."""

MOST_HTTP = 256


@dataclass(frozen=True, slots=True)
class Shares:
    """Descriptors shared out: what peers have can never use up what the server needs itself."""

    total: int
    """What the process may have open."""
    reserve: int
    """Kept for the journal, the log, listeners, the event loop and etcd."""
    http: int
    """Connections of the HTTP port."""
    pending: int
    """Kept for connections of the lock port that have still to show that they may come in."""
    connections: int
    """Connections of the lock port that are in."""


def raise_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            # Some systems refuse their own hard limit (macOS, where there is none).
            pass
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


def share(total: int, *, wanted: int = 0, asks: bool = False, http: bool = False) -> Shares:
    """Share out `total` descriptors.

    Args:
        total: what the process may have open.
        wanted: how many connections were asked for; 0 is as many as there can be.
        asks: whether the lock port asks for TLS or the secret, so that some are pending.
        http: whether there is an HTTP port.
    """
    reserve = min(128, max(28, total // 8))
    rest = max(total - reserve, 0)
    of_http = min(MOST_HTTP, max(rest // 8, 4)) if http else 0
    pending = min(MOST_PENDING, max(rest // 4, 4)) if asks else 0
    connections = max(rest - of_http - pending, 1)
    if 0 < wanted < connections:
        connections = wanted
        if asks:
            pending = min(MOST_PENDING, rest - of_http - wanted)
    return Shares(total, reserve, of_http, pending, connections)
