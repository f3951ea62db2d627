"""What a flow of the client waits for.

A flow is a generator that decides and never waits: it yields one of these, and a driver resumes it with
what came of it. Three drivers know how to wait, one for threads, one for asyncio, one for the reactor,
and nothing else does. What takes no time a flow does itself: it sends what a socket takes at once,
closes a connection, returns it to the pool, passes a lease to the reactor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from dflockd.client.connection import Connection

R = TypeVar("R")


class Ready(NamedTuple):
    """Wait until something can be read from a connection, or written to it; the outcome is whether."""

    link: Connection
    writes: bool
    until: float
    """``inf`` for no end."""


class Pause(NamedTuple):
    """Wait."""

    seconds: float


class Hear(NamedTuple):
    """Wait for a signal; the outcome is whether it was there in time."""

    signal: Signal
    until: float


Awaited: TypeAlias = "Connection | Ready | Pause | Hear"
"""A connection by itself is waited for like a `Ready` that reads, for the seconds that it has `left`:
that is what nearly all waits are. A driver that reads from it itself answers with the reply that it has
read, or with the error that came of that, instead of ``True``."""

Flow: TypeAlias = Generator[Awaited, Any, R]


class Signal:
    """Something that happens once, for others to wait for, in any thread.

    Without a lock: a signal handler or a finaliser may fire it and listen to it at any instant.
    """

    __slots__ = ("_listeners", "fired")

    def __init__(self) -> None:
        self.fired = False
        self._listeners: list[Callable[[], object]] = []

    def fire(self) -> None:
        """Call all listeners at once; none of them may wait."""
        self.fired = True
        while self._listeners:
            try:
                listener = self._listeners.pop()
            except IndexError:
                return  # another thread was faster
            listener()

    def listen(self, listener: Callable[[], object]) -> None:
        """Have it called once; at once, if it has happened already."""
        self._listeners.append(listener)
        if self.fired:
            self.fire()

    def forget(self, listener: Callable[[], object]) -> None:
        """Do not call it any more."""
        if listener in self._listeners:
            with contextlib.suppress(ValueError):  # it is being called
                self._listeners.remove(listener)
