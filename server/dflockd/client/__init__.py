"""Locks for asyncio code: the API of `dflockd.sync_client`, with ``await``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflockd.client.aio import (
        DistributedLock,
        DistributedSemaphore,
        RateLimit,
        Reservation,
        ShardingStrategy,
        stable_hash_shard,
    )

__all__ = [
    "DistributedLock",
    "DistributedSemaphore",
    "RateLimit",
    "Reservation",
    "ShardingStrategy",
    "stable_hash_shard",
]


def __getattr__(name: str) -> Any:
    # When first asked for: the blocking locks live in this package as well, and do not need asyncio,
    # which is half of their import time.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflockd.client import aio

    # Found without this from now on.
    globals().update({each: getattr(aio, each) for each in __all__})
    return globals()[name]
