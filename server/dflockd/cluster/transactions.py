"""What a server asks of the store: transactions, each for one purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from dflockd.cluster.tenures import Tenure
from dflockd.shards.store import Compare, StoreOperation

RETRY = 0.2
"""Seconds before a transaction that was not answered is made again."""

BATCH = 40
"""Shards in one transaction: each may need three operations, and a transaction has 128."""


class Kind(Enum):
    """What a transaction is for."""

    ENLIST = "enlist"
    HEARTBEAT = "heartbeat"
    ANNOUNCE = "announce"
    CONFIRM = "confirm"
    READ = "read"
    CLAIM = "claim"
    RELEASE = "release"
    CLEAR = "clear"
    ASSIGN = "assign"
    TIDY = "tidy"


@dataclass(eq=False)
class Transaction:
    """A transaction that must be sent once. How it ended is told to the node in any case."""

    kind: Kind
    made: float
    compares: Sequence[Compare]
    operations: Sequence[StoreOperation]
    tenures: Sequence[Tenure] = ()
    """The shards that it is about, where they are this server's."""
    shards: Sequence[int] = ()
    """The shards that it is about, where they are not."""


def take(queue: dict[int, None]) -> Iterator[int]:
    """Yield what came first, up to a `BATCH`, and take it out."""
    for _ in range(min(BATCH, len(queue))):
        if not queue:
            return
        shard = next(iter(queue))
        del queue[shard]
        yield shard
