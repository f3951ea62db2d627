"""What one server knows of the store: its copy of the records, which only ever gets newer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Set
from functools import lru_cache

from dflockd.errors import InvalidArgumentError
from dflockd.shards import (
    BadShardValueError,
    Loaded,
    Record,
    ShardMapping,
    ShardRecord,
    parse_shard_value,
)
from dflockd.shards.mapping import sort_nodes
from dflockd.wire import Moved, Recovering, Refusal, Report

MAX_EPOCH = (1 << 24) - 1
"""The last epoch of a shard: fences have no room for more."""

NOT_YET = Recovering(100)
"""The answer about a shard that no server has at the moment."""

SHARDS, NODES, LEAVING, HANDED_OVER = "shard", "nodes", "leaving", "handoff"
"""The folders of the store: records by shard, incarnations by address (twice), snapshots by shard."""

logger = logging.getLogger("dflockd.cluster")


class View:
    """The shards and the servers, as far as they are known.

    What is told of a key with a revision lower than one already seen is ignored: an answer that took
    its time must not undo what came after it.

    Attributes:
        records: of each shard; an empty one where the store has none, or one that cannot be read.
        epochs: of each shard, as in its record.
        revisions: of each shard, to be compared with; 0 where the store has none.
        unreadable: shards whose records are to be left alone.
        nodes: the servers that are alive, and what tells each from others of its name.
        leavers: those of them that want to have no shards.
    """

    def __init__(self, prefix: str, num_shards: int) -> None:
        self.prefix = prefix.rstrip("/") + "/"
        self.records = [ShardRecord()] * num_shards
        self.epochs = [0] * num_shards
        self.revisions = [0] * num_shards
        self.unreadable: set[int] = set()
        self.nodes: dict[str, Record] = {}
        self.leavers: dict[str, Record] = {}
        # Until they change: they are asked for at each event.
        self._candidates: frozenset[str] | None = None
        self._leader: str | None = None
        self._seen: dict[str, int] = {}
        """The revisions at which keys were last seen, where no record tells."""

    def key(self, folder: str, name: object) -> str:
        """Return a key of the store."""
        if folder == HANDED_OVER:
            # Beside the rest: it can be long, and nobody needs to be told of it.
            return f"{self.prefix[:-1]}.{folder}/{name}"
        return f"{self.prefix}{folder}/{name}"

    def see(self, key: str, record: Record | None, revision: int) -> int | str | None:
        """Take in what a key was at a revision; return the shard or folder if that is news."""
        folder, _, name = key.removeprefix(self.prefix).partition("/")
        if folder == SHARDS and name.isascii() and name.isdigit() and len(name) < 10:
            shard = int(name)
            is_one = shard < len(self.records) and str(shard) == name
            return shard if is_one and self.see_shard(shard, record, revision) else None
        names = {NODES: self.nodes, LEAVING: self.leavers}.get(folder)
        if (
            names is None
            or not (name in names or _is_address(name))
            or revision <= self._seen.get(key, 0)
        ):
            return None
        self._seen[key] = revision
        known = names.get(name)
        if (known is None) is not (record is None):
            self._candidates = self._leader = None
        if record is not None:
            names[name] = record
            return folder if known is None or known.value != record.value else None
        names.pop(name, None)
        return folder if known is not None else None

    def see_shard(self, shard: int, record: Record | None, revision: int) -> bool:
        """Take in what a shard's record was at a revision; return whether that is news."""
        if revision <= max(self.revisions[shard], self._seen.get(self.key(SHARDS, shard), 0)):
            return False
        parsed, epoch = ShardRecord(), 0
        self.unreadable.discard(shard)
        if record is None:
            self._seen[self.key(SHARDS, shard)] = revision
        else:
            try:
                parsed, epoch = _parse(record.value)
            except BadShardValueError as exc:
                logger.error("%s is left alone: %s", self.key(SHARDS, shard), exc)
                self.unreadable.add(shard)
        self.revisions[shard] = record.revision if record is not None else 0
        self.records[shard], self.epochs[shard] = parsed, epoch
        return True

    def differences(self, loaded: Loaded) -> Iterator[tuple[str, Record | None, int]]:
        """Yield what `see` should be told of a whole load, also of what has vanished."""
        known = [self.key(NODES, name) for name in self.nodes]
        known += [self.key(LEAVING, name) for name in self.leavers]
        known += [self.key(SHARDS, s) for s, revision in enumerate(self.revisions) if revision]
        for key in known:
            if key not in loaded.records:
                yield key, None, loaded.revision
        for key, record in loaded.records.items():
            yield key, record, record.revision

    @property
    def mapping(self) -> ShardMapping:
        """The records as the functions of `dflockd.shards` take them."""
        return ShardMapping(tuple(self.records), tuple(self.revisions))

    @property
    def leader(self) -> str | None:
        """The server that looks after the targets: the smallest."""
        if self._leader is None:
            self._leader = min(self.nodes, default=None)
        return self._leader

    @property
    def candidates(self) -> Set[str]:
        """The servers that may be given shards."""
        if self._candidates is None:
            self._candidates = frozenset(self.nodes.keys() - self.leavers.keys())
        return self._candidates

    def refer(self, shard: int, asked: str) -> Refusal:
        """Return what the server `asked`, which has not got a shard, is to answer about it."""
        record = self.records[shard]
        for node in (record.current, record.target):
            if node == asked:
                break  # it is about to take it over
            if node in self.nodes:
                return Moved(shard, self.epochs[shard], node.encode())
        return NOT_YET

    def report(self) -> Report:
        """Return which server has which shard, or is to have it."""
        servers = {node: number for number, node in enumerate(sorted(self.nodes))}
        document = {
            "num_shards": len(self.records),
            "servers": list(servers),
            "shards": [servers.get(r.current, servers.get(r.target, -1)) for r in self.records],
            "epochs": self.epochs,
        }
        return Report(json.dumps(document, separators=(",", ":")).encode())


def _is_address(name: str) -> bool:
    """Whether a shard's record can name it. Anything else is no server of this cluster."""
    try:
        sort_nodes([name])
    except InvalidArgumentError:
        return False
    return True


@lru_cache(1 << 12)
def _parse(value: bytes) -> tuple[ShardRecord, int]:
    """Return a record and its epoch. Thousands of shards have one value, and change it at a time."""
    record = parse_shard_value(value)
    epoch = record.epoch
    if max(epoch, record.clean or 0) > MAX_EPOCH:
        raise BadShardValueError(f"epoch {epoch} is over {MAX_EPOCH}")
    return record, epoch
