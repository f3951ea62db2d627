"""Which of several independent servers is in charge of a key."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeAlias

from dflockd.errors import InvalidArgumentError, shown

ShardingStrategy: TypeAlias = Callable[[str, int], int]
"""``(key, number of servers) -> index of the server``. It must give the same answer everywhere."""


def stable_hash_shard(key: str, num_servers: int) -> int:
    """Return the CRC-32 of the key modulo the number of servers.

    Unlike Python's ``hash``, it is the same in every process, on every machine and in every published
    dflockd client.
    """
    return zlib.crc32(key.encode("utf-8")) % num_servers


def server_index(strategy: ShardingStrategy, key: str, num_servers: int) -> int:
    """Ask `strategy` for the server of `key`, and check the answer.

    Raises:
        InvalidArgumentError: it is not an index; a key must never reach a server by accident.
    """
    index = strategy(key, num_servers)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < num_servers:
        name = getattr(strategy, "__name__", shown(strategy))
        raise InvalidArgumentError(
            f"sharding strategy {name} returned {shown(index)} for key {key!r}: "
            f"it must return a whole number from 0 to {num_servers - 1}",
            key=key,
        )
    return index
