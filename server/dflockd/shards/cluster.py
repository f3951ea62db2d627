"""The nodes that share a store, and the cluster that this process is a part of.

One key for each node that is alive, ``<prefix>/nodes/<address>``; the mapping is a `ShardMapper`'s.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from dflockd.errors import InvalidArgumentError
from dflockd.shards import mapping as pure
from dflockd.shards.errors import NoClusterError
from dflockd.shards.ids import NUM_SHARDS
from dflockd.shards.keys import LEAVING, NODES, PREFIX, Keys
from dflockd.shards.liveness import Roster
from dflockd.shards.mapper import ShardMapper
from dflockd.shards.store import Registration, Store

TTL = 15
"""Seconds after its latest heartbeat that a node is taken for dead."""

_of_process: Cluster | None = None


def init(store: Store, address: str, **options: Any) -> Cluster:
    """Make the cluster of this process, which `get` returns from now on, and return it.

    Args:
        store: what its nodes share.
        address: this node's name to the others.
        options: those of `Cluster`.

    Raises:
        InvalidArgumentError: one of them is out of its range.
    """
    global _of_process
    _of_process = Cluster(store, address, **options)
    return _of_process


def get() -> Cluster:
    """Return the cluster of this process: the one that `init` has made last.

    Raises:
        NoClusterError: there is none yet.
    """
    if _of_process is None:
        raise NoClusterError(
            "this process has no cluster yet: call dflockd.shards.cluster.init(store, address) "
            "where it starts"
        )
    return _of_process


class Cluster:
    """The nodes that share a store, seen from one of them: who is alive, who leads, who has what.

    Args:
        store: what they share.
        address: this node's name to the others, say ``10.0.0.1:6388``.
        prefix: what all keys begin with.
        num_shards: how many shards there are; the same for all nodes.
        ttl: seconds after its latest heartbeat that a node is taken for dead.
        mark: what the entries of nodes begin with: others are no nodes.

    Attributes:
        mapper: the mapping.
        registration: this node's entry among those that are alive: ``register()`` it, call
            ``heartbeat()`` a few times in each `ttl`, ``end()`` it.
    """

    def __init__(
        self,
        store: Store,
        address: str,
        *,
        prefix: str = PREFIX,
        num_shards: int = NUM_SHARDS,
        ttl: int = TTL,
        mark: str = "",
    ) -> None:
        (self.address,) = pure.sort_nodes([address])
        self.mapper = ShardMapper(store, prefix=prefix, num_shards=num_shards)
        self._store = store
        self._mark = mark
        keys = Keys(prefix)
        self._nodes = keys.key(NODES, "")
        self._leaving = keys.key(LEAVING, "")
        self.registration = Registration(
            store,
            f"{self._nodes}{address}",
            f"{mark}{uuid.uuid4().hex}",
            ttl=ttl,
            sign=keys.library,
            unless=keys.meta,
        )

    async def get_nodes(self) -> list[str]:
        """Return the nodes that are alive, in their order; there may be none."""
        return sorted((await self.get_roster(leavers=False)).nodes)

    async def get_leavers(self) -> list[str]:
        """Return those that want to have no shards any more."""
        return sorted((await self.get_roster()).leavers)

    async def get_candidates(self) -> list[str]:
        """Return the nodes that may be given shards."""
        return sorted((await self.get_roster()).candidates)

    async def is_leader(self) -> bool:
        """Whether this node is the smallest that is alive."""
        return (await self.get_roster(leavers=False)).leader == self.address

    async def get_roster(self, *, leavers: bool = True) -> Roster:
        """Return what the store says of the nodes.

        Args:
            leavers: whether to ask which of them want to have no shards as well.
        """
        roster = Roster(self._mark)
        if leavers:
            loaded = await self._store.get_prefix(self._leaving)
            for key, record in loaded.records.items():
                roster.see_leaver(key.removeprefix(self._leaving), record)
        loaded = await self._store.get_prefix(self._nodes)
        for key, record in loaded.records.items():
            roster.see_node(key.removeprefix(self._nodes), record)
        return roster

    async def initialize_shard_mapping(self) -> None:
        """Make the mapping over the nodes that are alive; of one that is there, only what is missing.

        For the leader: ``if await cluster.is_leader(): ...``, as all that changes the mapping.

        Raises:
            InvalidArgumentError: no node is alive.
            StoreError, ShardConflictError: not all of it was stored.
        """
        await self.update_shard_mapping()

    async def update_shard_mapping(self) -> None:
        """Give the shards of nodes that are not alive to those that are. Raises the same errors."""
        mapping = await self.mapper.update_shard_mapping(await self.get_candidates())
        await self.mapper.store_shard_mapping(mapping)

    async def rebalance_shard_mapping(self, *, threshold: float = 0.0) -> int:
        """Move shards until the nodes that are alive have equally many; return how many moved.

        Nothing else gives shards to a node that has joined.

        Args:
            threshold: how far apart they may stay, in shares of the mean.

        Raises:
            InvalidArgumentError: no node is alive, or shards have no node yet.
            StoreError, ShardConflictError: not all of it was stored.
        """
        mapping = await self.mapper.load_shard_mapping()
        balanced = pure.rebalance_shard_mapping(
            mapping, await self.get_candidates(), threshold=threshold, batch=mapping.num_shards
        )
        await self.mapper.store_shard_mapping(balanced)
        return len(balanced.unsaved)

    async def move_shard(self, shard_id: int, node: str) -> None:
        """Have a shard, pinned or not, served by another node. Raises as `move_shards` does."""
        await self.move_shards([shard_id], node)

    async def move_shards(self, shard_ids: Iterable[int], node: str) -> int:
        """Have shards, pinned or not, served by another node; return how many were not before.

        Raises:
            InvalidArgumentError: there is no such shard, or the node is not alive, or leaves.
            StoreError, ShardConflictError: it was not stored.
        """
        roster = await self.get_roster()
        if node not in roster.candidates:
            nodes = ", ".join(sorted(roster.candidates)) or "none"
            what = "leaves" if node in roster.nodes else "is not alive"
            raise InvalidArgumentError(
                f"node {node!r} {what}: {nodes} of {self._nodes} may be given shards"
            )
        mapping = await self.mapper.load_shard_mapping()
        for shard_id in shard_ids:
            mapping = mapping.move(shard_id, node)
        await self.mapper.store_shard_mapping(mapping)
        return len(mapping.unsaved)

    async def get_current_node_for_object(self, object_id: str | bytes) -> str:
        """Return where to ask for a key. See `ShardMapper`."""
        return await self.mapper.get_current_node_for_object(object_id)

    def invalidate_cache(self) -> None:
        """Forget the mapping in memory: the next look-up reads the store."""
        self.mapper.invalidate_cache()
