"""Nodes over a store that answers at once: nothing takes time but what a test lets pass."""

from __future__ import annotations

from collections.abc import Iterable

from dflockd.cluster.leader import SETTLE
from dflockd.cluster.node import Node
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.transactions import Kind, Transaction
from dflockd.shards import Outcome, Put, ShardRecord
from dflockd.shards.memory import KeySpace
from dflockd.shards.values import format_shard_value, parse_shard_value
from dflockd.table import Limits, Peer
from dflockd.wire import Acquire, Granted, Renew, Reply, Request, Space

KEY = b"shard#0/a"
WALL = 1_700_000_000 * 10**9


class Cluster:
    """Nodes and their store. Nothing takes time but what `pass_` lets pass."""

    def __init__(self, *addresses: str, num_shards: int = 4, wall: int = WALL) -> None:
        self.store = KeySpace(history=1 << 20)
        self.store.txn([], [Put("/p.secret", b"secret")])
        self.parameters = ClusterParameters(num_shards=num_shards, serving_lease=3, max_lease=4)
        self.now = 1000.0
        self.nodes: dict[str, Node] = {}
        self.transactions: list[Transaction] = []
        self.unanswered: set[Kind] = set()
        """The next transaction of each of these kinds is carried out, and nobody is told so."""
        self.refused: set[Kind] = set()
        """Calls of these kinds are not carried out."""
        self.most_under_way = 0
        self._wall = wall
        self._told: dict[str, int] = {}
        for address in addresses:
            self.start(address)
        self.pass_(SETTLE + 0.1)

    def start(self, address: str) -> Node:
        node = self.nodes[address] = Node(
            address,
            Limits(default_lease=4, max_lease=4, max_locks=1 << 20),
            b"secret",
            self.parameters,
            prefix="/p",
            wall=lambda: self._wall,
        )
        loaded = self.store.load("/p/")
        self._told[address] = loaded.revision
        node.loaded(loaded, self.now)
        assert node.next_deadline() > self.now
        node.enlist(f"{address} at {self.now}", self.store.grant(3, self.now).id, self.now)
        self.settle()
        return node

    def kill(self, address: str) -> None:
        """End a server, and its lease with it."""
        self.store.revoke(self.nodes.pop(address).membership.lease)
        self.settle()

    def settle(self) -> None:
        """Deliver everything there is."""
        busy = True
        while busy:
            busy = False
            for address, node in list(self.nodes.items()):
                changes = self.store.since("/p/", self._told[address] + 1)
                self._told[address] = self.store.revision
                for events in changes:
                    node.changed(events, self.now)
                effects, _, transactions = node.output()
                assert effects == [] or changes or transactions
                self.most_under_way = max(self.most_under_way, len(transactions))
                for transaction in transactions:
                    self.transactions.append(transaction)
                    if transaction.kind in self.refused:
                        node.answered(transaction, None, self.now)
                        continue
                    outcome: Outcome | None = self.store.txn(
                        transaction.compares, transaction.operations
                    )
                    if transaction.kind in self.unanswered:
                        self.unanswered.remove(transaction.kind)
                        outcome = None
                    node.answered(transaction, outcome, self.now)
                busy = busy or bool(changes or transactions)

    def pass_(self, seconds: float, step: float = 0.25) -> None:
        """Let time pass; all that live keep their leases."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for node in self.nodes.values():
                if node.membership.lease:  # else its store was replaced
                    self.store.keep_alive(node.membership.lease, self.now)
                node.advance(self.now)
                assert node.next_deadline() > self.now
            self.settle()

    def record(self, shard: int) -> ShardRecord:
        return parse_shard_value(
            self.store.load(f"/p/shard/{shard}").records[f"/p/shard/{shard}"].value
        )

    def write(self, shard: int, record: ShardRecord | str) -> None:
        text = record if isinstance(record, str) else format_shard_value(record)
        self.store.txn([], [Put(f"/p/shard/{shard}", text.encode())])
        self.settle()

    def move(self, shard: int, address: str) -> None:
        self.write(shard, self.record(shard)._replace(target=address))

    def serving(self) -> dict[str, set[int]]:
        return {
            address: {s for s, group in node.table.partitions.items() if not group.frozen}
            for address, node in self.nodes.items()
        }

    def ask(self, address: str, request: Request, peer: Peer | None = None) -> Reply:
        table = self.nodes[address].table
        ((_, reply),) = table.handle(peer or table.connect(), request, self.now)
        return reply

    def take(self, address: str, key: bytes = KEY, peer: Peer | None = None) -> bytes:
        reply = self.ask(address, Acquire(Space.LOCK, key, 1, 0, 4), peer)
        assert isinstance(reply, Granted)
        return reply.token

    def renew(self, address: str, token: bytes, key: bytes = KEY) -> Reply:
        return self.ask(address, Renew(Space.LOCK, key, token, 4))


def of_kind(transactions: Iterable[Transaction], kind: Kind) -> list[Transaction]:
    return [transaction for transaction in transactions if transaction.kind is kind]


def dirty(cluster: Cluster) -> list[int]:
    """The shards whose next server would have to wait for holders."""
    records = map(cluster.record, range(cluster.parameters.num_shards))
    return [shard for shard, r in enumerate(records) if r.current or r.clean != r.epoch]
