"""What this process shares among its locks, and what a fork does to it."""

from __future__ import annotations

import os
import threading

from dflockd.client.connection import forget_connections_after_fork
from dflockd.client.pool import Pool
from dflockd.client.reactor import Renewer


class Process:
    """The pool and the renewal thread of one process."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.renewer = Renewer(self.pool)


_current: Process | None = None
_creation = threading.Lock()


def current() -> Process:
    """Return this process's pool and renewal thread; they are made when first needed."""
    global _current
    if _current is None:
        with _creation:
            if _current is None:
                _current = Process()
    return _current


def close_idle_connections() -> None:
    """Close the connections that no lock uses. Later locks make new ones."""
    if _current is not None:
        _current.pool.clear()


def _after_fork_in_child() -> None:
    # The parent's mutexes may be locked here by threads that do not exist here: leave them behind.
    global _current, _creation
    _current = None
    _creation = threading.Lock()
    forget_connections_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
