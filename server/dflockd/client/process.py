"""What this process shares among its locks, and what a fork does to it."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

from dflockd.client import forks
from dflockd.client.connection import forget_connections_after_fork, wait_before_fork
from dflockd.client.greenlets import current_hub
from dflockd.client.introduction import forget_instance
from dflockd.client.pool import Pool
from dflockd.client.reactor import Reactor


class Process:
    """The pool and the reactor of one process; under gevent and eventlet, of one hub."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.reactor = Reactor(self.pool)


class GreenProcess:
    """The same for a process with several hubs: each has a pool and a reactor of its own.

    The reactor is a greenlet, and runs when its hub does: the locks of another thread are not its to
    renew, and the end of that thread ends nothing of this one's.
    """

    def __init__(self) -> None:
        self._of_hub: weakref.WeakKeyDictionary[Any, Process] = weakref.WeakKeyDictionary()

    @property
    def pool(self) -> Pool:
        """Of the hub of this thread."""
        return self._here().pool

    @property
    def reactor(self) -> Reactor:
        """Of the hub of this thread."""
        return self._here().reactor

    def all(self) -> list[Process]:
        """Return those of all hubs."""
        return list(self._of_hub.values())

    def _here(self) -> Process:
        hub = current_hub()
        return self._of_hub.get(hub) or self._of_hub.setdefault(hub, Process())


_current: dict[str, Process | GreenProcess] = {}
_process: Process | GreenProcess | None = None
"""The one that is there: it is found sooner."""


def current() -> Process | GreenProcess:
    """Return this process's pool and reactor; they are made when first needed.

    Without a lock: a signal handler may come in the middle.
    """
    global _process
    if _process is None:
        made = Process() if current_hub() is None else GreenProcess()
        _process = _current.setdefault("it", made)
    return _process


def _each() -> list[Process]:
    made = _current.get("it")
    if made is None:
        return []
    return made.all() if isinstance(made, GreenProcess) else [made]


def close_idle_connections() -> None:
    """Close the connections that no lock uses. Later locks make new ones."""
    for process in _each():
        process.pool.clear()


def _at_exit() -> None:
    for process in _each():
        process.reactor.settle()


def _after_fork_in_child() -> None:
    global _process
    forks.note()
    forget_connections_after_fork()
    forget_instance()
    for process in _each():
        process.reactor.forget_after_fork()
    _current.clear()
    _process = None


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=wait_before_fork, after_in_child=_after_fork_in_child)
