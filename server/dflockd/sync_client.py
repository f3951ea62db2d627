"""Locks for blocking code: threads, scripts, web workers, gevent and eventlet."""

from dflockd.client.blocking import (
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
