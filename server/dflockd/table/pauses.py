"""Keys that operators have paused: nothing of them is granted for a while."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

from dflockd.table.deadlines import Timed


class PauseRecord(NamedTuple):
    """What is kept of a pause where it outlives the table; times in seconds."""

    key: bytes
    by: bytes
    """The name of the person or program that has paused it, for people."""
    reason: bytes
    """Why it is paused, for people."""
    since: float
    until: float
    """When it ends by itself; infinity if it does not."""

    def at(self, since: float) -> PauseRecord:
        """Return the same, begun at another time."""
        return self._replace(since=since, until=since + (self.until - self.since))


@final
class KeyPause(Timed):
    """The pause of one key. It falls due when it ends by itself."""

    __slots__ = ("ended", "entry", "record")

    def __init__(self, entry: Any, record: PauseRecord) -> None:
        self.chain = None  # it may never be set: see `Deadlines`
        self.entry = entry
        """That of the key; it stays while this lasts."""
        self.record = record
        self.ended = False
        """Whether it is over, or another has replaced it."""

    @property
    def key(self) -> bytes:
        """Which key."""
        return self.record.key

    def kept(self) -> PauseRecord:
        """Return what is worth keeping."""
        return self.record


NEVER = math.inf
"""Until then lasts what does not end by itself."""
