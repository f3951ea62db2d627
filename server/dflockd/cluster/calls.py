"""What a server asks of the store: transactions, each for one purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dflockd.shards import ShardRecord
from dflockd.shards.store import Compare, Operation

RETRY = 0.2
"""Seconds before a call that was not answered is made again."""


class Kind(Enum):
    """What a call is for."""

    ENLIST = "enlist"
    HEARTBEAT = "heartbeat"
    ANNOUNCE = "announce"
    CONFIRM = "confirm"
    CLAIM = "claim"
    RELEASE = "release"
    CLEAR = "clear"
    ASSIGN = "assign"
    TIDY = "tidy"


class Stage(Enum):
    """How far a server is with a shard."""

    CLAIMING = "claiming"
    SERVING = "serving"
    LEAVING = "leaving"
    """Frozen: it is being handed over, or has been, for all that is known."""
    SUSPENDED = "suspended"
    """Frozen: the server was taken for dead, and the shard may be another's."""


@dataclass(eq=False)
class Tenure:
    """One server's time with one shard, from its claim on. No two of a shard have one epoch."""

    shard: int
    epoch: int
    former: ShardRecord
    """The record before the claim, or before the first of several that were not answered."""
    former_claimed: float
    """When the claim of the server before was first known."""
    record: ShardRecord
    """What its latest call is to make of the record."""
    compared: int
    """The revision that its latest call is to find."""
    stage: Stage = Stage.CLAIMING
    calling: bool = True
    """Whether a call is under way."""
    clean: bool = False
    """Whether `snapshot` is all that the next server needs."""
    snapshot: bytes = b""
    """What is handed over; empty for nothing."""


@dataclass(eq=False)
class Call:
    """A transaction that is to be sent once. How it ended is told to the node in any case."""

    kind: Kind
    made: float
    compares: Sequence[Compare]
    operations: Sequence[Operation]
    tenures: Sequence[Tenure] = ()
    """The shards that it is about, where they are this server's."""
    shards: Sequence[int] = ()
    """The shards that it is about, where they are not."""
