"""Fixed shards: a cluster of servers that share keys by a mapping in etcd.

Each key belongs to one of 8192 shards forever (`get_shard_id`), and each shard to a node, which can
change: the mapping says to which (`ShardMapper`, `Cluster`). It is kept in a store that all share,
etcd (`dflockd.shards.etcd.EtcdStore`) or one in memory (`MemoryStore`).
"""

from dflockd.shards.cluster import Cluster
from dflockd.shards.errors import (
    BadShardValueError,
    CompactedError,
    LeaseGoneError,
    NoClusterError,
    NoShardMappingError,
    ShardConflictError,
    StoreDeniedError,
    StoreError,
    StoreFullError,
    StoreReplacedError,
    StoreUnreachableError,
)
from dflockd.shards.ids import NUM_SHARDS, get_shard_id
from dflockd.shards.keys import PREFIX
from dflockd.shards.mapper import ShardMapper
from dflockd.shards.mapping import (
    ShardMapping,
    create_shard_mapping,
    get_leader,
    rebalance_shard_mapping,
    update_shard_mapping,
)
from dflockd.shards.memory import KeySpace, MemoryStore
from dflockd.shards.store import (
    Delete,
    Event,
    Get,
    Loaded,
    Outcome,
    Put,
    Record,
    Registration,
    RevisionIs,
    Store,
    StoreLease,
    ValueIs,
    follow,
)
from dflockd.shards.values import ShardRecord, format_shard_value, parse_shard_value

__all__ = [
    "NUM_SHARDS",
    "PREFIX",
    "BadShardValueError",
    "Cluster",
    "CompactedError",
    "Delete",
    "Event",
    "Get",
    "KeySpace",
    "LeaseGoneError",
    "Loaded",
    "MemoryStore",
    "NoClusterError",
    "NoShardMappingError",
    "Outcome",
    "Put",
    "Record",
    "Registration",
    "RevisionIs",
    "ShardConflictError",
    "ShardMapper",
    "ShardMapping",
    "ShardRecord",
    "Store",
    "StoreDeniedError",
    "StoreError",
    "StoreFullError",
    "StoreLease",
    "StoreReplacedError",
    "StoreUnreachableError",
    "ValueIs",
    "create_shard_mapping",
    "follow",
    "format_shard_value",
    "get_leader",
    "get_shard_id",
    "parse_shard_value",
    "rebalance_shard_mapping",
    "update_shard_mapping",
]
