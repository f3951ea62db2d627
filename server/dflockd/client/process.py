"""What this process shares among its locks, and what a fork does to it."""

from __future__ import annotations

import atexit
import os

from dflockd.client import forks
from dflockd.client.connection import forget_connections_after_fork, wait_before_fork
from dflockd.client.introduction import forget_instance
from dflockd.client.pool import Pool
from dflockd.client.reactor import Reactor


class Process:
    """The pool and the reactor of one process."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.reactor = Reactor(self.pool)


_current: dict[str, Process] = {}
_process: Process | None = None
"""The one that is there: it is found sooner."""


def current() -> Process:
    """Return this process's pool and reactor; they are made when first needed.

    Without a lock: a signal handler may come in the middle.
    """
    global _process
    if _process is None:
        _process = _current.setdefault("it", Process())
    return _process


def close_idle_connections() -> None:
    """Close the connections that no lock uses. Later locks make new ones."""
    if _current:
        current().pool.clear()


def _at_exit() -> None:
    if _current:
        current().reactor.settle()


def _after_fork_in_child() -> None:
    global _process
    forks.note()
    forget_connections_after_fork()
    forget_instance()
    for process in _current.values():
        process.reactor.forget_after_fork()
    _current.clear()
    _process = None


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=wait_before_fork, after_in_child=_after_fork_in_child)
