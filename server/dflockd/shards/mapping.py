"""Which node serves which shard: made, updated and balanced by pure functions.

A mapping knows of each shard the record and the revision under which the store has it, and which
records the store does not know yet. So a function here decides, `ShardMapper` stores what was
decided, and what another process changed in between is not overwritten.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dflockd.errors import InvalidArgumentError
from dflockd.shards.ids import NUM_SHARDS
from dflockd.shards.values import PINNED, ShardRecord, format_shard_value

THRESHOLD = 0.2
"""How far apart the fullest and the emptiest node may be, in shares of the mean."""


@dataclass(frozen=True)
class ShardMapping:
    """All shards of a cluster. Not changed: what changes it returns another one.

    Attributes:
        records: what is known of each shard, by its number.
        revisions: the store's revision of each of them; 0 for one that the store does not have.
        unsaved: the shards whose record is not what the store has.
    """

    records: tuple[ShardRecord, ...]
    revisions: tuple[int, ...] = field(repr=False)
    unsaved: frozenset[int] = field(default=frozenset(), repr=False)

    @classmethod
    def empty(cls, num_shards: int = NUM_SHARDS) -> ShardMapping:
        """Return the mapping of a store that has none.

        Raises:
            InvalidArgumentError: there is not even one shard.
        """
        if num_shards < 1:
            raise InvalidArgumentError(f"num_shards is {num_shards}: it must be 1 or more")
        return cls((ShardRecord(),) * num_shards, (0,) * num_shards)

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.records)

    def __getitem__(self, shard_id: int) -> ShardRecord:
        """Return the record of a shard.

        Raises:
            InvalidArgumentError: there is no such shard.
        """
        self._check(shard_id)
        return self.records[shard_id]

    def with_records(self, changes: Mapping[int, ShardRecord]) -> ShardMapping:
        """Return the mapping with other records for some shards; without a difference, this one.

        Raises:
            InvalidArgumentError: there is no such shard, or a record cannot be stored.
        """
        for shard_id, record in changes.items():
            self._check(shard_id)
            format_shard_value(record)
        changed = {s: record for s, record in changes.items() if record != self.records[s]}
        if not changed:
            return self
        records = list(self.records)
        for shard_id, record in changed.items():
            records[shard_id] = record
        return replace(self, records=tuple(records), unsaved=self.unsaved | changed.keys())

    def pin(self, shard_id: int) -> ShardMapping:
        """Return the mapping in which the shard stays with its target."""
        return self.with_records({shard_id: self[shard_id].with_flag(PINNED)})

    def unpin(self, shard_id: int) -> ShardMapping:
        """Return the mapping in which the shard may go to other nodes."""
        return self.with_records({shard_id: self[shard_id].without_flag(PINNED)})

    def move(self, shard_id: int, node: str) -> ShardMapping:
        """Return the mapping in which `node` should serve the shard, pinned or not."""
        (node,) = sort_nodes([node])
        return self.with_records({shard_id: self[shard_id]._replace(target=node)})

    def counts(self) -> Counter[str]:
        """Return how many shards each node is to serve."""
        return Counter(record.target for record in self.records if record.target)

    def stranded(self, nodes: Iterable[str]) -> list[int]:
        """Return the pinned shards whose node is none of `nodes`: nobody serves them."""
        live = set(nodes)
        return [
            s for s, r in enumerate(self.records) if r.pinned and r.target and r.target not in live
        ]

    def _check(self, shard_id: int) -> None:
        if not 0 <= shard_id < self.num_shards:
            raise InvalidArgumentError(
                f"shard {shard_id} does not exist: they are 0 to {self.num_shards - 1}"
            )


def sort_nodes(nodes: Iterable[str]) -> list[str]:
    """Return the nodes in their order, each once. The first one is the leader.

    Raises:
        InvalidArgumentError: there is none, or one of them cannot be written into a shard's value.
    """
    if isinstance(nodes, str):
        raise InvalidArgumentError(f"nodes is {nodes!r}: give a list, such as ['10.0.0.1:6388']")
    ordered = sorted(set(nodes))
    if not ordered:
        raise InvalidArgumentError("nodes is empty: shards need at least one node")
    if not ordered[0]:
        raise InvalidArgumentError("nodes has an empty name: write host:port")
    for node in ordered:
        format_shard_value(ShardRecord(node))
    return ordered


def get_leader(nodes: Iterable[str]) -> str:
    """Return the node that looks after the mapping: the smallest, compared as text.

    Nothing breaks if two nodes think that they are it for a while: see `ShardMapper`.

    Raises:
        InvalidArgumentError: there are no nodes.
    """
    return sort_nodes(nodes)[0]


def create_shard_mapping(nodes: Iterable[str], num_shards: int = NUM_SHARDS) -> ShardMapping:
    """Deal all shards over the nodes, in turns: shard ``s`` to the ``s % n``-th in their order.

    Raises:
        InvalidArgumentError: there are no nodes, or one that cannot be stored.
    """
    return update_shard_mapping(ShardMapping.empty(num_shards), nodes)


def update_shard_mapping(mapping: ShardMapping, nodes: Iterable[str]) -> ShardMapping:
    """Give the shards of nodes that are gone to the others; with none to give, the same object.

    A shard whose target is still there keeps it, so a new node gets nothing until shards are moved
    or balanced. Any other shard stays with the node that serves it, if that is there, or else goes
    to the one that a new mapping would give it. A pinned shard keeps its target even if that is
    gone: see `ShardMapping.stranded`.

    Raises:
        InvalidArgumentError: there are no nodes, or one that cannot be stored.
    """
    ordered = sort_nodes(nodes)
    live = set(ordered)
    changes = {}
    for shard_id, record in enumerate(mapping.records):
        if record.target in live or (record.pinned and record.target):
            continue
        served = record.current in live
        target = record.current if served else ordered[shard_id % len(ordered)]
        changes[shard_id] = record._replace(target=target)
    return mapping.with_records(changes)


def rebalance_shard_mapping(
    mapping: ShardMapping,
    nodes: Iterable[str],
    *,
    threshold: float = THRESHOLD,
    batch: int | None = None,
) -> ShardMapping:
    """Move shards from the fullest node to the emptiest; with none to move, return the same object.

    It is over when the two are less than two shards apart, or no more than `threshold` times the
    mean, or when the fullest has only pinned shards left; or after `batch` moves (default: a 128th
    of all shards), so that a large move is spread over several calls. Lower shard numbers go first.
    Shards of nodes that are gone are left alone: `update_shard_mapping` is for them.

    Raises:
        InvalidArgumentError: there are no nodes, or a shard has no target.
    """
    ordered = sort_nodes(nodes)
    if not all(record.target for record in mapping.records):
        raise InvalidArgumentError(
            "shards without a node cannot be balanced: update the mapping first"
        )
    movable: dict[str, deque[int]] = {node: deque() for node in ordered}
    counts = dict.fromkeys(ordered, 0)
    for shard_id, record in enumerate(mapping.records):
        if record.target in counts:
            counts[record.target] += 1
            if not record.pinned:
                movable[record.target].append(shard_id)
    tolerated = threshold * mapping.num_shards / len(ordered)
    changes = {}
    for _ in range(max(1, mapping.num_shards // 128) if batch is None else batch):
        # Of equals, min and max take the first: the smallest address.
        fullest, emptiest = (
            max(ordered, key=counts.__getitem__),
            min(ordered, key=counts.__getitem__),
        )
        apart = counts[fullest] - counts[emptiest]
        if apart < 2 or apart <= tolerated or not movable[fullest]:
            break
        shard_id = movable[fullest].popleft()
        changes[shard_id] = mapping.records[shard_id]._replace(target=emptiest)
        counts[fullest] -= 1
        counts[emptiest] += 1
    return mapping.with_records(changes)
