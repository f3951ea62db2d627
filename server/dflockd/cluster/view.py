"""What one server knows of the store: its copy of the records, which only ever gets newer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Set
from functools import lru_cache

from dflockd.shards import (
    BadShardValueError,
    Loaded,
    Record,
    ShardMapping,
    ShardRecord,
    parse_shard_value,
)
from dflockd.shards.keys import FLOORS, FOLDERS, SERVERS_MARK, Keys
from dflockd.shards.liveness import Roster, is_name
from dflockd.wire import MapReport, Moved, Recovering, Refusal, encode_map

MAX_EPOCH = (1 << 24) - 1
"""The last epoch of a shard: fences have no room for more."""

NOT_YET = Recovering(100)
"""The answer about a shard that no server has at the moment."""

REPORT_INTERVAL = 0.1
"""Seconds from one map to the next while shards move: to make one takes some milliseconds."""

SHARDS, NODES, LEAVING, HANDED_OVER = FOLDERS

FLOOR_MARGIN = 1000
"""Epochs that are left out after the last one that is known: one server does not know of all."""

logger = logging.getLogger("dflockd.cluster")


class View:
    """The shards and the servers, as far as they are known.

    News of a key with a revision lower than one already seen is ignored: a late answer must not
    undo what came after it. Nor does the epoch of a shard ever get lower: no server deletes a
    record, so somebody else has, and locks of that epoch may be held.

    Attributes:
        records: the record of each shard; an empty one where the store has none, or one that cannot
            be read, but for the server and the epoch of one that was deleted.
        epochs: the highest epoch of each shard that was seen.
        revisions: the revision of each shard, to be compared with; 0 where the store has none.
        unreadable: shards whose records must be left alone.
        roster: the servers: who is alive, who may be given shards, and who leads.
        nodes: those that are alive, and what tells each from others of its name.
        floor: the first epoch that was not used before the store was wiped or restored.
    """

    def __init__(self, prefix: str, num_shards: int) -> None:
        self._keys = Keys(prefix)
        self.key = self._keys.key
        self.secret, self.closed = self._keys.secret, self._keys.closed
        self.prefix = f"{self._keys.prefix}/"
        self.records = [ShardRecord()] * num_shards
        self.epochs = [0] * num_shards
        self.revisions = [0] * num_shards
        self.unreadable: set[int] = set()
        self.roster = Roster(SERVERS_MARK)
        self.nodes = self.roster.nodes
        self.floor = 0
        self._lost_at = 0
        """The latest revision at which a record was deleted or changed by hand."""
        self._seen: dict[str, int] = {}
        """The revisions at which keys were last seen, where no record tells."""
        self._report: MapReport | None = None
        self._is_reported = False
        """Whether that has all that is known."""
        self._next_report = -math.inf

    def handed_over(self, shard: int, part: int) -> str:
        """Return the key of a part of what is handed over with a shard."""
        return self.key(HANDED_OVER, f"{shard}/{part}" if part else shard)

    def see(self, key: str, record: Record | None, revision: int) -> int | str | None:
        """Take in what a key was at a revision; return the shard or folder if that is news."""
        folder, _, name = key.removeprefix(self.prefix).partition("/")
        if folder == SHARDS:
            shard = self._keys.shard(name, len(self.records))
            is_news = shard is not None and self.see_shard(shard, record, revision)
            return shard if is_news else None
        if folder == FLOORS and record is not None and record.value.isdigit():
            self.floor = max(self.floor, min(int(record.value[:9]), MAX_EPOCH - FLOOR_MARGIN))
        if folder not in (NODES, LEAVING) or not is_name(name):
            return None
        if revision <= self._seen.get(key, 0):
            return None
        self._seen[key] = revision
        if folder == LEAVING:
            return folder if self.roster.see_leaver(name, record) else None
        if not self.roster.see_node(name, record):
            return None  # a sign of life, say: no reason to make the map anew
        self._is_reported = False
        if name in self.roster.strangers:
            logger.warning(
                "%s was not written by a server, and is ignored; delete it: etcdctl del %s",
                *(key, key),
            )
        return folder

    def see_shard(self, shard: int, record: Record | None, revision: int) -> bool:
        """Take in what a shard's record was at a revision; return whether that is news."""
        is_late = revision <= max(self.revisions[shard], self._seen.get(self.key(SHARDS, shard), 0))
        try:
            parsed, epoch = _parse(record.value) if record is not None else (ShardRecord(), 0)
        except BadShardValueError as exc:
            if not is_late:
                logger.error("%s is ignored: %s", self.key(SHARDS, shard), exc)
                self.unreadable.add(shard)
            parsed, epoch = ShardRecord(), self.epochs[shard]
        else:
            if not is_late:
                self.unreadable.discard(shard)
        if is_late:
            if epoch > self.epochs[shard]:
                self._lose(shard, self.records[shard], epoch, revision)
            return False
        if record is None:
            self._seen[self.key(SHARDS, shard)] = revision
            if self.epochs[shard]:  # who has served it may do so still
                parsed = parsed._replace(current=self.records[shard].current)
        self._is_reported = False
        self.revisions[shard] = record.revision if record is not None else 0
        if epoch < self.epochs[shard]:
            self._lose(shard, parsed, self.epochs[shard], revision)
        else:
            self.records[shard], self.epochs[shard] = parsed, epoch
        return True

    def is_lost(self, shard: int) -> bool:
        """Whether the record of a shard that was served is not there: the leader writes it anew."""
        return bool(self.epochs[shard] and not self.revisions[shard])

    def _lose(self, shard: int, record: ShardRecord, epoch: int, revision: int) -> None:
        """Take in that somebody has deleted or changed a record: locks of that epoch may be held."""
        self.epochs[shard] = epoch
        self.records[shard] = record.with_epoch(epoch).with_clean(None)
        # Once for all that are deleted at a time: there are thousands.
        level = logging.ERROR if revision > self._lost_at else logging.DEBUG
        self._lost_at = max(self._lost_at, revision)
        logger.log(
            level,
            "%s was deleted, or changed by hand: the next server of this shard, and of others of which "
            "that is true, waits for holders as after a crash",
            self.key(SHARDS, shard),
        )

    def differences(self, loaded: Loaded) -> Iterator[tuple[str, Record | None, int]]:
        """Yield what `see` should learn from a whole load, including what has vanished."""
        known = [self.key(NODES, name) for name in (*self.nodes, *self.roster.strangers)]
        known += [self.key(LEAVING, name) for name in self.roster.leavers]
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
        """The server that looks after the targets."""
        return self.roster.leader

    @property
    def candidates(self) -> Set[str]:
        """The servers that may be given shards."""
        return self.roster.candidates

    def refer(self, shard: int, asked: str) -> Refusal:
        """Return what the server `asked`, which has not got a shard, is to answer about it."""
        record = self.records[shard]
        for node in (record.current, record.target):
            if node == asked:
                break  # it is about to take it over
            if node in self.nodes:
                return Moved(shard, self.epochs[shard], node.encode())
        return NOT_YET

    def report(self, now: float) -> MapReport:
        """Return which server has which shard, or is to have it.

        It is made when somebody asks, and for all who ask until something has changed. While much
        changes it may be `REPORT_INTERVAL` old: a client that it sends astray is sent on.
        """
        if self._report is None or (not self._is_reported and now >= self._next_report):
            servers = {node: number for number, node in enumerate(sorted(self.nodes))}
            self._report = encode_map(
                {
                    "num_shards": len(self.records),
                    "servers": list(servers),
                    "shards": [
                        servers.get(r.current, servers.get(r.target, -1)) for r in self.records
                    ],
                    "epochs": self.epochs,
                }
            )
            self._is_reported, self._next_report = True, now + REPORT_INTERVAL
        return self._report


@lru_cache(1 << 12)
def _parse(value: bytes) -> tuple[ShardRecord, int]:
    """Return a record and its epoch. Thousands of shards have one value, and change it at a time."""
    record = parse_shard_value(value)
    epoch, _ = record.epoch, record.parts
    if max(epoch, record.clean or 0) > MAX_EPOCH:
        raise BadShardValueError(f"epoch {epoch} is over {MAX_EPOCH}")
    return record, epoch
