"""A cluster that is made up, and what its servers say."""

from __future__ import annotations

from typing import Any

from dflockd import errors
from dflockd.address import Address, Seeds, parse_servers
from dflockd.client.operations import ShardReport
from dflockd.client.routing import (
    ShardMap,
)
from dflockd.shards import get_shard_id

NUM_SHARDS = 16

A, B, C = (Address(name, 6388) for name in "abc")

KEY = b"account:7"

SHARD = get_shard_id(KEY, NUM_SHARDS)

NOW = 1000.0


def seeds(*addresses: Address) -> Seeds:
    parsed = parse_servers("cluster://" + ",".join(map(str, addresses)))
    assert isinstance(parsed, Seeds)
    return parsed


def report(owner: Address | None, epoch: int = 7, servers: tuple[Address, ...] = (A, B, C)) -> Any:
    index = -1 if owner is None else servers.index(owner)
    return ShardReport(servers, [index] * NUM_SHARDS, [epoch] * NUM_SHARDS)


def known(owner: Address | None = A, epoch: int = 7, at: float = NOW - 100) -> ShardMap:
    shards = ShardMap(seeds(A, B, C))
    shards.update(report(owner, epoch), A, at)
    return shards


def moved(to: Address, epoch: int = 8) -> errors.MovedError:
    return errors.MovedError("moved", shard=SHARD, epoch=epoch, to=str(to))
