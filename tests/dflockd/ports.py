"""Ports for servers that are started again."""

from __future__ import annotations

import contextlib
import random
import socket

from examples.demo.stage import StageError

PORTS = range(10_000, 32_000)
"""No outgoing connection is given one of these, so that a server finds its own free again."""


def free_port() -> int:
    """A port that nobody listens on, and that no outgoing connection is given."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StageError(f"no free port from {PORTS.start} to {PORTS.stop}")
