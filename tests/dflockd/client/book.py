"""What a simulated lock server remembers: who is connected, who holds and who waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Stage(Protocol):
    """The time, as far as the service goes."""

    now: float

    def at(self, when: float, what: Callable[[], object]) -> None: ...


class Peer:
    """A connection as its server has it."""

    reply: Callable[[Any], None]
    number = 0

    def __init__(self, server: int) -> None:
        self.server = server
        self.alive = True
        self.place: Waiter | None = None
        """The position that was taken on it, and not asked about to the end."""


class Hold:
    """A slot that is taken."""

    def __init__(self, token: bytes, peer: Peer | None, lease: int, deadline: float) -> None:
        self.token = token
        self.peer = peer
        """Whose end ends it; ``None`` if it is detached."""
        self.lease = lease
        self.deadline = deadline


@dataclass
class Ended:
    """How a hold came to its end: ``released``, ``expired``, ``evicted``, ``forgotten``, ``parted``."""

    why: str
    peer: Peer | None


class Waiter:
    """A position in the queue."""

    def __init__(self, peer: Peer | None, lease: int) -> None:
        self.peer = peer
        """``None`` while nobody is there: it is passed over."""
        self.lease = lease
        self.asks = False
        """Whether its peer waits for a reply..."""
        self.reserves = False
        """... and the position is kept if that does not come in time."""
        self.hold: Hold | None = None
        """What it was granted while nobody asked."""
        self.wants_turn = False
        """Whether it is granted nothing, and somebody takes the position up."""
