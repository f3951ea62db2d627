"""A large cluster on one machine: a hundred servers, a million locks, and all that happens to them.

The real nodes and lock tables over a store in memory and under a clock that is turned. What is counted
is exact: transactions, changes, what watches are told. Times come out of a model: a message takes so
long, etcd carries out one transaction after the other, and a server is busy for as long as its node
takes on this machine. What nodes do not do costs nothing here: sockets, gRPC, etcd's disk.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from dflockd.cluster.node import Node
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.transactions import Transaction
from dflockd.shards import Event, Outcome, Put, RevisionIs, rebalance_shard_mapping
from dflockd.shards.errors import LeaseGoneError
from dflockd.shards.memory import KeySpace
from dflockd.shards.values import format_shard_value
from dflockd.table import Limits
from dflockd.wire import Acquire, Space

PREFIX = "/dflockd"
WALL = 1_700_000_000 * 10**9

WAY = 0.001
"""Seconds that a message takes."""

SERVICE = 0.0005
"""Seconds that etcd takes for a transaction, and beside that for each of its operations."""
SERVICE_EACH = 0.00002

LEASE = 30

AWAY = 3.0
"""Seconds between the end of a server and its next start."""

REST = 30.0
"""Seconds for which nothing happens."""


class Host:
    """A server: its node, and since when it has had something to do."""

    def __init__(self, scale: Scale, address: str) -> None:
        self.scale, self.address = scale, address
        self.node = Node(
            address,
            Limits(default_lease=LEASE, max_lease=scale.parameters.max_lease, max_locks=1 << 30),
            b"secret",
            scale.parameters,
            prefix=PREFIX,
            wall=lambda: WALL,
        )
        self.alive = True
        self._free_at = 0.0
        self._wakes = 0
        self._has_left = False
        loaded = scale.space.load(PREFIX + "/")
        self.told = loaded.revision
        self._work(lambda now: self.node.loaded(loaded, now))
        self._live()

    def _live(self) -> None:
        """What `Member` does about the lease of the store."""
        if not self.alive:
            return
        space, membership = self.scale.space, self.node.membership
        if membership.wants_lease:
            lease = space.grant(self.scale.parameters.serving_lease, self.scale.now).id
            name = f"{self.address} at {self.scale.now}"
            self._work(lambda now: self.node.enlist(name, lease, now))
        elif membership.lease:
            with suppress(LeaseGoneError):
                space.keep_alive(membership.lease, self.scale.now)
        self.scale.after(self.scale.parameters.serving_lease / 3, self._live)

    def changed(self, events: list[Event]) -> None:
        if self.alive:
            self.scale.counts["watched"] += len(events)
            self._work(lambda now: self.node.changed(events, now))

    def leave(self) -> None:
        self._work(lambda now: self.node.leave(now, 6.0))

    def answered(self, transaction: Transaction, outcome: Outcome) -> None:
        if self.alive:
            self._work(lambda now: self.node.answered(transaction, outcome, now))

    def _due(self, number: int) -> None:
        if self.alive and number == self._wakes:
            self._work(self.node.advance)

    def _work(self, step: Callable[[float], None]) -> None:
        """Do something once all that came before is done, and what follows from it."""
        scale = self.scale
        if self._free_at > scale.now:
            scale.at(self._free_at, self._work_again, step)
            return
        begun = time.thread_time()
        step(scale.now)
        _, _, transactions = self.node.output()
        deadline = self.node.next_deadline()
        took = time.thread_time() - begun
        self._free_at = scale.now + took
        for transaction in transactions:
            scale.at(self._free_at + WAY, scale.carry_out, self, transaction)
        self._wakes += 1
        if deadline < scale.now + 3600:
            scale.at(max(deadline, self._free_at), self._due, self._wakes)
        if self.node.has_left and not self._has_left:
            self._has_left = True
            scale.at(self._free_at + WAY, scale.end, self)

    def _work_again(self, step: Callable[[float], None]) -> None:
        if self.alive:
            self._work(step)


class Scale:
    """All servers, their store and the clock."""

    def __init__(self, servers: int, locks: int, num_shards: int) -> None:
        self.parameters = ClusterParameters(num_shards=num_shards)
        self.space = KeySpace(history=1 << 12)
        self.space.txn([], [Put(f"{PREFIX}.secret", b"secret")])
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.locks = locks
        self.hosts: dict[str, Host] = {}
        self.names = [f"10.0.{n // 250}.{n % 250}:6388" for n in range(servers + 1)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._etcd_free_at = 0.0
        self._told = self.space.revision
        self.at(self.now, self._expire)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call, args = heapq.heappop(self._events)
            call(*args)
        self.now = max(self.now, until)

    def run_until(self, condition: Callable[[], bool], most: float = 600.0) -> float:
        """Return how long it took; looked at ten times a second."""
        begun = self.now
        while not condition():
            if self.now > begun + most:
                raise RuntimeError(f"not within {most:g} s: {self.unserved()} shards unserved")
            self.run(self.now + 0.1)
        return self.now - begun

    # The store.

    def _expire(self) -> None:
        self.space.expire(self.now)
        self._tell()
        self.after(0.25, self._expire)

    def carry_out(self, host: Host, transaction: Transaction) -> None:
        service = SERVICE + SERVICE_EACH * len(transaction.operations)
        self._etcd_free_at = max(self._etcd_free_at, self.now) + service
        self.counts["transactions"] += 1
        self.at(self._etcd_free_at, self._carried_out, host, transaction)

    def _carried_out(self, host: Host, transaction: Transaction) -> None:
        try:
            outcome = self.space.txn(transaction.compares, transaction.operations)
        except LeaseGoneError:
            outcome = Outcome(False, 0, {})
        for operation in transaction.operations if outcome.succeeded else ():
            if isinstance(operation, Put):
                self.counts["written"] += len(operation.key) + len(operation.value)
        self.after(WAY, host.answered, transaction, outcome)
        self._tell()

    def _tell(self) -> None:
        if self.space.revision > self._told:
            news = self.space.since(PREFIX + "/", self._told + 1)
            self._told = self.space.revision
            for events in news:
                for host in self.hosts.values():
                    if events[0].revision > host.told:
                        self.after(WAY, host.changed, events)

    # Servers.

    def start(self, name: str) -> None:
        self.hosts[name] = Host(self, name)

    def end(self, host: Host) -> None:
        """A server ends; its lease is revoked, unless it is killed."""
        self.kill(host)
        self.space.revoke(host.node.membership.lease)
        self._tell()

    def kill(self, host: Host) -> None:
        host.alive = False
        if self.hosts.get(host.address) is host:
            del self.hosts[host.address]

    def unserved(self) -> int:
        return self.parameters.num_shards - sum(
            not group.frozen and group.recovers_until is None
            for host in self.hosts.values()
            for group in host.node.table.partitions.values()
        )

    def unclaimed(self) -> int:
        return self.parameters.num_shards - sum(
            len(h.node.table.partitions) for h in self.hosts.values()
        )

    def lock(self, hosts: Iterable[Host]) -> None:
        """Have each shard of these servers hold as many locks as there are for it."""
        each = self.locks // self.parameters.num_shards
        for host in hosts:
            table = host.node.table
            for shard in table.partitions:
                peer = table.connect()
                for number in range(each):
                    key = b"shard#%d/account:%d" % (shard, number)
                    table.handle(peer, Acquire(Space.LOCK, key, 1, 0, LEASE), self.now)
            host.node.output()

    def rebalance(self) -> int:
        """Write what ``dflockd cluster rebalance`` writes; return how many shards move."""
        view = next(iter(self.hosts.values())).node.view
        mapping, nodes = view.mapping, sorted(self.hosts)
        decided = rebalance_shard_mapping(mapping, nodes, threshold=0, batch=8192)
        moves = [(shard, format_shard_value(decided[shard])) for shard in sorted(decided.unsaved)]
        for begin in range(0, len(moves), 64):
            batch = [
                (f"{PREFIX}/shard/{s}", mapping.revisions[s], v) for s, v in moves[begin:][:64]
            ]
            compares = [RevisionIs(key, revision) for key, revision, _ in batch]
            self.space.txn(compares, [Put(key, value.encode()) for key, _, value in batch])
            self._tell()
        return len(moves)


class Phase(NamedTuple):
    """What happened, and what it took of the store and of the servers."""

    name: str
    seconds: float
    transactions: int
    changes: float
    """That each server was told of."""
    megabytes: float
    """That the store wrote."""


def run(servers: int, locks: int, restarts: int, num_shards: int = 8192) -> list[Phase]:
    """Let servers with so many locks start, rest, get one more, restart, crash, and start again.

    Args:
        restarts: how many of them are restarted one after the other.
    """
    # Else the collector, which knows all locks of all servers, takes the time of whoever is at it.
    gc.freeze()
    scale = Scale(servers, locks, num_shards)
    phases: list[Phase] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begun = scale.now
        scale.counts.clear()
        yield
        counts = scale.counts
        told = counts["watched"] / (len(scale.hosts) or servers)
        megabytes = counts["written"] / 1e6
        phases.append(Phase(name, scale.now - begun, counts["transactions"], told, megabytes))

    names = scale.names[:servers]
    with phase("first start of all"):
        for number, name in enumerate(names):
            scale.after(number * 3.0 / servers, scale.start, name)
        scale.run_until(lambda: len(scale.hosts) == servers and not scale.unserved())
    scale.lock(list(scale.hosts.values()))
    scale.run(scale.now + 5)
    with phase(f"{REST:g} s of rest"):
        scale.run(scale.now + REST)
    with phase("a server joins, and `rebalance`"):
        scale.start(scale.names[-1])
        scale.run(scale.now + 1)
        moved = scale.rebalance()
        scale.run_until(lambda: len(scale.hosts[scale.names[-1]].node.table.partitions) >= moved)
    with phase(f"{restarts} are restarted one by one"):
        for name in names[:restarts]:
            host = scale.hosts[name]
            host.leave()
            scale.run_until(lambda host=host: not host.alive)  # type: ignore[misc]
            scale.run(scale.now + AWAY)
            scale.start(name)
            scale.run_until(lambda name=name: scale.hosts[name].node.membership.joined)  # type: ignore[misc]
            scale.run_until(lambda: not scale.unserved())
    with phase("a server crashes"):
        scale.kill(scale.hosts[names[-1]])
        scale.run_until(lambda: not scale.unclaimed())
    scale.run(scale.now + scale.parameters.grace)
    for host in scale.hosts.values():
        for group in host.node.table.partitions.values():
            group.recovers_until = None
    scale.run(scale.now + 5)
    with phase("all are stopped and started"):
        for host in list(scale.hosts.values()):
            host.leave()
        scale.run_until(lambda: not scale.hosts)
        for name in names:
            scale.start(name)
        scale.run_until(lambda: not scale.unserved())
    return phases
