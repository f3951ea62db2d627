"""The mapping in the store: made, kept, looked up. A shard is a key, ``<prefix>/shard/<number>``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import islice

from dflockd.shards import mapping as pure
from dflockd.shards.errors import BadShardValueError, NoShardMappingError, ShardConflictError
from dflockd.shards.ids import NUM_SHARDS, get_shard_id
from dflockd.shards.keys import PREFIX, SHARDS, Keys
from dflockd.shards.mapping import ShardMapping
from dflockd.shards.store import Put, RevisionIs, Store
from dflockd.shards.values import format_shard_value, parse_shard_value

BATCH = 64
"""Shards that are stored in one transaction."""

logger = logging.getLogger("dflockd.shards")


class ShardMapper:
    """Makes, stores and reads a mapping, and looks shards up in a copy in memory.

    A mapping that was loaded remembers the revision of each shard, and is stored only where nobody
    else has changed it since. So two leaders at a time cost some work, and spoil nothing.

    The copy is read from the store by the first look-up, and again by the first one after
    `invalidate_cache`.

    Args:
        store: where the mapping is.
        prefix: what its keys begin with.
        num_shards: how many shards there are; the same for everyone who uses the prefix.
    """

    def __init__(self, store: Store, *, prefix: str = PREFIX, num_shards: int = NUM_SHARDS) -> None:
        self._store = store
        self._shards = Keys(prefix).key(SHARDS, "")
        self._empty = ShardMapping.empty(num_shards)
        self._cached: ShardMapping | None = None
        self._loading = asyncio.Lock()
        self._invalidated = 0

    # Made and kept.

    async def create_shard_mapping(self, nodes: Iterable[str]) -> ShardMapping:
        """Return a new mapping over the nodes; store it with `store_shard_mapping`.

        It can be stored where there is none yet.

        Raises:
            InvalidArgumentError: there are no nodes, or one that cannot be stored.
        """
        return pure.update_shard_mapping(self._empty, nodes)

    async def update_shard_mapping(self, nodes: Iterable[str]) -> ShardMapping:
        """Return the mapping in the store, without shards of nodes that are not among `nodes`.

        Where there is none it is made. Store it with `store_shard_mapping`. Pinned shards of nodes
        that are gone stay, with a warning.

        Raises:
            InvalidArgumentError: there are no nodes, or one that cannot be stored.
            StoreError: it could not be loaded.
        """
        nodes = pure.sort_nodes(nodes)
        mapping = pure.update_shard_mapping(await self.load_shard_mapping(), nodes)
        if stranded := mapping.stranded(nodes):
            logger.warning(
                "%d shards are pinned to nodes that are gone, the first of them %d to %s: "
                "unpin or move them",
                len(stranded),
                stranded[0],
                mapping[stranded[0]].target,
            )
        return mapping

    async def load_shard_mapping(self) -> ShardMapping:
        """Read the mapping from the store; a shard that is not there has an empty record.

        Raises:
            StoreError: the store did not answer, or refused.
            BadShardValueError: there is something in it that cannot be read.
        """
        loaded = await self._store.get_prefix(self._shards)
        records = list(self._empty.records)
        revisions = list(self._empty.revisions)
        for key, record in loaded.records.items():
            shard_id = Keys.shard(key.removeprefix(self._shards), self._empty.num_shards)
            if shard_id is None:
                logger.warning("%s is not a shard: there are %d", key, self._empty.num_shards)
                continue
            try:
                records[shard_id] = parse_shard_value(record.value)
            except BadShardValueError as exc:
                raise BadShardValueError(f"{key}: {exc}") from None
            revisions[shard_id] = record.revision
        return ShardMapping(tuple(records), tuple(revisions))

    async def store_shard_mapping(self, mapping: ShardMapping) -> None:
        """Write what is new in a mapping, 64 shards at a time.

        Raises:
            ShardConflictError: some of the shards were changed by others and were left alone. All
                others have been written. Load the mapping and decide again.
            StoreError: the store did not answer, or refused; a part of it may have been written.
        """
        unsaved = iter(sorted(mapping.unsaved))
        conflicts: list[int] = []
        try:
            while batch := list(islice(unsaved, BATCH)):
                while batch and (lost := await self._store_batch(mapping, batch)):
                    conflicts += lost
                    batch = [shard_id for shard_id in batch if shard_id not in lost]
        finally:
            self.invalidate_cache()
        if conflicts:
            raise ShardConflictError(
                f"{len(conflicts)} of {len(mapping.unsaved)} shards were changed by others in "
                f"between, the first of them {conflicts[0]}: load the mapping and decide again",
                shards=conflicts,
            )

    async def pin_shard(self, shard_id: int) -> None:
        """Keep a shard with its target, whatever is updated or balanced.

        Raises:
            InvalidArgumentError: there is no such shard.
            StoreError, ShardConflictError: it was not stored.
        """
        await self.store_shard_mapping((await self.load_shard_mapping()).pin(shard_id))

    async def unpin_shard(self, shard_id: int) -> None:
        """Undo `pin_shard`. Raises the same errors."""
        await self.store_shard_mapping((await self.load_shard_mapping()).unpin(shard_id))

    # Looked up.

    async def get_shard_mapping(self) -> ShardMapping:
        """Return the copy in memory; without one, load it.

        Raises:
            StoreError: it could not be loaded.
        """
        async with self._loading:
            while self._cached is None:
                invalidated = self._invalidated
                mapping = await self.load_shard_mapping()
                # What was read before an invalidation may be what the invalidation is about.
                if invalidated == self._invalidated:
                    self._cached = mapping
            return self._cached

    def invalidate_cache(self) -> None:
        """Forget the copy in memory: the next look-up reads the store."""
        self._cached = None
        self._invalidated += 1

    async def get_node_for_shard(self, shard_id: int) -> str:
        """Return where to ask for a shard: its current node, or its target while it has none.

        Raises:
            InvalidArgumentError: there is no such shard.
            NoShardMappingError: it has neither.
            StoreError: the mapping could not be loaded.
        """
        mapping = self._cached or await self.get_shard_mapping()
        if not (node := mapping[shard_id].node):
            raise NoShardMappingError(
                f"shard {shard_id} has no node in {self._shards}: the leader has to create or "
                "update the mapping"
            )
        return node

    async def get_current_node_for_object(self, object_id: str | bytes) -> str:
        """Return where to ask for a key: `get_node_for_shard` of its shard. Raises the same errors."""
        return await self.get_node_for_shard(get_shard_id(object_id, self._empty.num_shards))

    async def _store_batch(self, mapping: ShardMapping, batch: list[int]) -> list[int]:
        """Write some shards, all or none; return those that are in the way of it."""
        compares = [RevisionIs(self._key(s), mapping.revisions[s]) for s in batch]
        puts = [Put(self._key(s), format_shard_value(mapping[s]).encode()) for s in batch]
        outcome = await self._store.txn(compares, puts)
        if outcome.succeeded:
            return []
        return [
            shard_id
            for shard_id, (key, revision) in zip(batch, compares, strict=True)
            if (outcome.records[key].revision if key in outcome.records else 0) != revision
        ]

    def _key(self, shard_id: int) -> str:
        return f"{self._shards}{shard_id}"
