"""The keys of one cluster in a store that many may share: everything that a prefix stands before."""

from __future__ import annotations

from dflockd.errors import InvalidArgumentError

SERVERS_PREFIX = "/dflockd"
"""Where the lock servers keep their cluster, unless they are told otherwise."""

SERVERS_MARK = "dflockd/"
"""What the entry of a lock server begins with."""

PREFIX = "/dflockd-shards"
"""Where this library keeps a mapping of yours: never by default among the lock servers."""

FOLDERS = SHARDS, NODES, LEAVING, HANDED_OVER = "shard", "nodes", "leaving", "handoff"
"""The folders of the store: records by shard, incarnations by address (twice), snapshots by shard."""

FLOORS = "floor"
"""The folder of what servers say of epochs that were used before the store was wiped or restored."""


class Keys:
    """The names of a cluster's keys.

    A prefix that is part of another cluster's keys is refused: its owner would write among them.
    And one prefix is either lock servers' (`meta`) or nodes' of this library (`library`).

    Args:
        prefix: what they begin with; a slash at its end does not count.

    Raises:
        InvalidArgumentError: the prefix is a part of a cluster's own keys.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.rstrip("/")
        parts = self.prefix.split("/")
        taken = {SHARDS, NODES, LEAVING, FLOORS}.intersection(parts)
        if taken or any(part.endswith((f".{HANDED_OVER}", ".secret", ".closed")) for part in parts):
            raise InvalidArgumentError(
                f"prefix {prefix!r} is a part of a cluster's own keys: choose another one, such as "
                f"{SERVERS_PREFIX}-2"
            )
        self.meta = f"{self.prefix}/meta"
        """What lock servers have agreed upon."""
        self.secret = f"{self.prefix}.secret"
        """What they make tokens with."""
        self.closed = f"{self.prefix}.closed"
        """It is there while shards may be held of which a store that was replaced does not know."""
        self.library = f"{self.prefix}/library"
        """That nodes of this library have the prefix."""

    @staticmethod
    def shard(name: str, num_shards: int) -> int | None:
        """Return the shard whose record has this name in its folder; ``None`` if it is no shard's."""
        # There is no end to the digits that can be written.
        if name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name:
            return int(name) if int(name) < num_shards else None
        return None

    def key(self, folder: str, name: object) -> str:
        """Return a key in one of the folders; with an empty name, what all of them begin with."""
        if folder == HANDED_OVER:
            # Beside the rest: it can be long, and nobody watches it.
            return f"{self.prefix}.{folder}/{name}"
        return f"{self.prefix}/{folder}/{name}"
