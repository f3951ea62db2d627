"""Which nodes are alive, which may be given shards, and which one leads: one rule for all of a store.

Pure. What it goes by are the entries under ``<prefix>/nodes/`` and ``<prefix>/leaving/``.
"""

from __future__ import annotations

from collections.abc import Set

from dflockd.errors import InvalidArgumentError
from dflockd.shards.mapping import sort_nodes
from dflockd.shards.store import NO_LEASE, Record


class Roster:
    """The nodes of a store, as far as they are known.

    A node is alive while its entry lives by a lease of the store: it ends when nobody renews it. An
    entry without a lease, or without the mark of its kind, was written by somebody else, by hand
    perhaps. Such a *stranger* neither leads nor gets shards. But its name is taken.

    Args:
        mark: what the entries of nodes begin with.

    Attributes:
        nodes: those that are alive.
        strangers: entries that are no node's.
        leavers: nodes that want to have no shards.
    """

    def __init__(self, mark: str = "") -> None:
        self._mark = mark.encode()
        self.nodes: dict[str, Record] = {}
        self.strangers: dict[str, Record] = {}
        self.leavers: dict[str, Record] = {}

    def see_node(self, name: str, record: Record | None) -> bool:
        """Take in what the entry of a node is; return whether that is news."""
        before, stranger = self.nodes.pop(name, None), self.strangers.pop(name, None)
        if record is None or not is_name(name):
            return before is not None or stranger is not None
        if record.lease == NO_LEASE or not record.value.startswith(self._mark):
            self.strangers[name] = record
            return stranger is None
        self.nodes[name] = record
        return before is None or before.value != record.value

    def see_leaver(self, name: str, record: Record | None) -> bool:
        """Take in whether a node wants to have no shards; return whether that is news."""
        before = self.leavers.pop(name, None)
        if record is None or not is_name(name):
            return before is not None
        self.leavers[name] = record
        return before is None or before.value != record.value

    @property
    def leader(self) -> str | None:
        """The node that looks after the targets: the smallest that is alive, compared as text."""
        return min(self.nodes, default=None)

    @property
    def candidates(self) -> Set[str]:
        """The nodes that may be given shards."""
        return self.nodes.keys() - self.leavers.keys() if self.leavers else self.nodes.keys()

    def is_gone(self, name: str) -> bool:
        """Whether there is no entry of that name, so that its shards can be taken over."""
        return name not in self.nodes and name not in self.strangers


def is_name(name: str) -> bool:
    """Whether a shard's record can name it. Anything else is no node."""
    try:
        sort_nodes([name])
    except InvalidArgumentError:
        return False
    return True
