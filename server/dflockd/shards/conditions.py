"""How it stands with a shard, for people: what the records say, and who is alive.

Pure. Each shard is in exactly one condition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import Enum

from dflockd.shards.values import ShardRecord


class Condition(Enum):
    """What happens to a request for a key of the shard."""

    SERVED = "served"
    RECOVERING = "recovering"
    """Its server renews, and grants nothing yet: it waits for holders of the server before."""
    MOVING = "moving"
    """It is served and about to go to another server, or on its way there."""
    GONE = "gone"
    """Its server is not alive, and no other one has taken it over yet."""
    UNASSIGNED = "unassigned"
    """Nobody has said which server is to serve it."""


def condition_of(record: ShardRecord, alive: Collection[str], now: float) -> Condition:
    """Return the condition of a shard.

    Args:
        record: what the store says of it.
        alive: the servers that are.
        now: the time in seconds since 1970.
    """
    if record.current in alive:
        if record.recovers > now:
            return Condition.RECOVERING
        return Condition.SERVED if record.current == record.target else Condition.MOVING
    if not (record.current or record.target):
        return Condition.UNASSIGNED
    return Condition.GONE if record.current or record.target not in alive else Condition.MOVING


def count_conditions(
    records: Iterable[ShardRecord], alive: Collection[str], now: float
) -> dict[Condition, int]:
    """Return how many shards are in each condition, those included that no shard is in."""
    counts = dict.fromkeys(Condition, 0)
    # Thousands of shards have the same record.
    for record, number in Counter(records).items():
        counts[condition_of(record, alive, now)] += number
    return counts
