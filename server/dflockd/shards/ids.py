"""Which shard a key belongs to: the same number in every process, forever."""

from __future__ import annotations

import re

from dflockd.errors import InvalidArgumentError

NUM_SHARDS = 8192
"""Shards of a cluster. It is fixed: with another number every key would be in another shard."""

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193

# A decimal as Go's Atoi reads it: a sign and leading zeros are fine; white space, underscores and
# other scripts' digits, all of which int() takes, are not. Nine digits are beyond any shard.
_FIXED = re.compile(rb"shard#([+-]?)0*([0-9]{1,9})/")


def fnv1a32(data: bytes) -> int:
    """Return the 32 bit FNV-1a hash (Fowler, Noll and Vo; draft-eastlake-fnv)."""
    value = _FNV_OFFSET
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def get_shard_id(object_id: str | bytes, num_shards: int = NUM_SHARDS) -> int:
    """Return the shard of a key: 0 to ``num_shards - 1``.

    A key that begins with ``shard#<number>/`` is in that shard. Every other key is hashed: FNV-1a of
    its UTF-8 bytes, modulo the number of shards. So is one that only looks like the fixed form, or
    whose number is out of range. So every key has a shard.

    Raises:
        InvalidArgumentError: there is not even one shard.
    """
    if num_shards < 1:
        raise InvalidArgumentError(f"num_shards is {num_shards}: it must be 1 or more")
    data = object_id if isinstance(object_id, bytes) else object_id.encode("utf-8")
    if fixed := _FIXED.match(data):
        number = int(fixed[2])
        if number < num_shards and (fixed[1] != b"-" or number == 0):
            return number
    return fnv1a32(data) % num_shards
