"""What a flow of the client asks of its driver.

A flow is a generator that decides and never waits: it yields one of these and is resumed with what
came of it, or with a `RemoteError`. What takes no time it does itself: it closes a connection,
returns it to the pool, passes a lease to the reactor. `dflockd.client.connection` carries steps out
on sockets; tests drive flows without any.
"""

from __future__ import annotations

import contextlib
import math
import ssl
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from dflockd.address import Address
from dflockd.client.operations import Exchange, Operation
from dflockd.client.routing import Pause as Pause

R = TypeVar("R")


class Route(NamedTuple):
    """Where a connection goes and how it presents itself: what makes two interchangeable."""

    address: Address
    auth_secret: bytes | None = None
    tls: ssl.SSLContext | None = None

    def at(self, address: Address) -> Route:
        """Return the way to another server, which wants to be shown the same."""
        return Route(address, self.auth_secret, self.tls)

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Route({self.address})"


class Link(Protocol):
    """A connection, as far as flows go. None of these calls waits."""

    route: Route
    closed: bool
    features: frozenset[bytes]
    """What its server knows beyond the published protocol."""
    pooled: bool
    """Whether it has lain idle, so that the server may have left meanwhile."""
    rested: bool
    """Whether nothing has been heard on it since."""
    guard: object
    """Closes it when its owner is forgotten, who stands in a queue on it."""
    owed: bool
    """Whether a reply is still to come to a request that `send_now` sent."""
    asked_at: float
    """When the latest `ask` was."""

    def ask(self, request: bytes, now: float) -> None:
        """Send a request, whose reply the caller waits for; if that fails, close it instead."""

    def send_now(self, request: bytes) -> None:
        """Send a request whose reply `receive_now` fetches; raises OSError."""

    def receive_now(self) -> bytes | None:
        """Return the reply if it is there; raises OSError or UnexpectedReplyError."""

    def interrupt(self) -> None:
        """Make a wait for a reply on it fail at once."""

    def close(self) -> None:
        """Close it. A server lets go of what was held on it."""


class Open(NamedTuple):
    """Connect and say hello; the outcome is the `Link`."""

    route: Route
    until: float | None = None
    """When to give up; ``None`` for soon..."""
    is_strict: bool = False
    """... and whether exactly then. Otherwise a process that was stopped for long gets a moment
    more."""
    made: Callable[[Link], object] | None = None
    """Gets the link before its server has said hello: from then on it can be interrupted."""


class Talk(Generic[R]):
    """Go through an operation on a link; the outcome is its result, or `SILENT`.

    After any error the link is closed.
    """

    is_strict = False
    """As that of `Open`."""
    look_at = math.inf
    """When the outcome is `SILENT` if no reply has come. The same talk may be yielded again then: it
    goes on."""
    under_way: tuple[Exchange, float, bytes | Exception | None] | None = None
    """Of one that has begun: its exchange, when that was sent, and what has come since."""

    def __init__(self, link: Link, operation: Operation[R], until: float | None = None) -> None:
        self.link = link
        self.operation = operation
        self.until = until
        """When no reply is waited for any more."""


class Silent:
    """The type of `SILENT`."""


SILENT: Final = Silent()


class Ready(NamedTuple):
    """Wait until something can be read from a link, or written to it; the outcome is whether."""

    link: Any
    writes: bool
    until: float
    """``inf`` for no end."""


class Hear(NamedTuple):
    """Wait for a signal; the outcome is whether it was there in time."""

    signal: Signal
    until: float


Step: TypeAlias = "Open | Talk[Any] | Pause | Ready | Hear"
Flow: TypeAlias = Generator[Step, Any, R]


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


class ReturnProbe(Signal):
    """Somebody finds out whether a server that was lost is back."""

    __slots__ = ("is_back",)

    def __init__(self) -> None:
        super().__init__()
        self.is_back = False
