"""The store: a real key space, and the ways to it, on which all sorts of things happen."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflockd.cluster.transactions import Kind, Transaction
from dflockd.shards import Outcome, Put, RevisionIs, StoreLease, format_shard_value
from dflockd.shards.errors import LeaseGoneError, StoreError
from dflockd.shards.memory import KeySpace
from dflockd.shards.values import ShardRecord, parse_shard_value
from tests.dflockd.cluster.simulation.machines import PATIENCE, PREFIX, SECRET

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.server import ServerProcess
    from tests.dflockd.cluster.simulation.world import World


class Watch:
    """What one process is told of the store's changes, in their order, some time after them."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.next = 0
        self.asked = 0
        """The highest revision that was known when everything was asked for."""
        self.cut = False
        self._last = 0.0

    def tell(self, handle: Callable[..., None], what: object) -> None:
        world = self.server.world
        lag = min(world.delay() * world.watch_lag, 6.0)
        self._last = max(self._last, world.time + lag)
        world.at(self._last, self.server.receive, handle, self, what)


class Etcd:
    """The store, and the ways to it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.space = KeySpace()
        self.is_up = True
        self.is_full = False
        self.refused: list[tuple[float, str]] = []
        """When it refused whose transactions, while it was full."""
        self.cut: set[str] = set()
        self.no_keep_alives: set[str] = set()
        self.held_up: dict[Kind, float] = {}
        """For how long the next transaction of a kind is on its way; its answer is lost."""
        self.unanswered: dict[Kind, str] = {}
        """Whose next transaction of a kind is carried out at once, while its answer is lost."""
        self.kept_back: list[Callable[[], None]] = []
        """Answers that were lost, for stories in which they come after all."""
        self.watches: list[Watch] = []
        self._told = self.space.revision
        self.copies: list[KeySpace] = []
        """Backups."""
        self._generation = 0
        self._founded = 0

    def agree(self) -> bytes:
        """Join the cluster, or found it: return its secret."""
        key = f"{PREFIX}.secret"
        record = self.space.load(key).records.get(key)
        if record is not None:
            return record.value
        self._founded += 1
        secret = SECRET + b"%d" % self._founded
        self.space.txn([], [Put(key, secret)])
        return secret

    @property
    def closed_by(self) -> bytes:
        """Who has said that the store was replaced."""
        key = f"{PREFIX}.closed"
        record = self.space.load(key).records.get(key)
        return record.value if record is not None else b""

    @property
    def has_floor(self) -> bool:
        """Whether somebody has said which epochs were used before the store was replaced."""
        return bool(self.space.load(f"{PREFIX}/floor/").records)

    def copy(self) -> None:
        """Make a backup."""
        self.copies.append(copy.deepcopy(self.space))

    def replace(self, space: KeySpace) -> None:
        """Have another store there: an empty one, or a backup."""
        self._generation += 1
        space._next_lease = 1000 * self._generation
        self.space = space
        self._told = space.revision
        for watch in self.watches:
            watch.cut = True
        self.watches = []

    def call(
        self,
        server: ServerProcess,
        execute: Callable[[], Any],
        answer: Callable[..., None],
        held_up: float = 0,
        unanswered: bool = False,
        is_judged: bool = True,
    ) -> None:
        """Send something; `answer` gets what comes back, or ``None`` once nothing came for long."""
        world, open_, generation = self.world, [True], self._generation
        asked = server.continuity.revision

        def give(result: object) -> None:
            if open_:
                open_.clear()
                handle = functools.partial(server.judge, asked) if is_judged else server.take
                server.receive(handle, answer, result)

        def run(*, answered: bool) -> None:
            if not self.is_up or generation != self._generation:
                return  # no request outlives the process that it was sent to
            try:
                result = execute()
            except StoreError:
                self.refused.append((world.time, server.name))
                world.counts["refused"] += 1
                world.after(world.delay(), give, None)
                return
            self.changed()
            if answered and not self._loses(server):
                world.after(world.delay(), give, result)
            else:
                world.counts["answers lost"] += 1
                if unanswered:
                    self.kept_back.append(lambda: give(result))

        world.after(PATIENCE, give, None)
        if not self._loses(server) and self.is_up:
            answered = not (held_up or unanswered)
            world.after(world.delay() + held_up, lambda: run(answered=answered))
        elif world.chance(0.5):
            # It hangs somewhere, and gets there when nobody thinks of it any more.
            world.counts["late transactions"] += 1
            world.after(world.random.uniform(0, 8), lambda: run(answered=False))

    def _loses(self, server: ServerProcess) -> bool:
        return server.address in self.cut or self.world.chance(self.world.losses)

    def grant(self, ttl: int) -> StoreLease:
        if self.is_full:
            raise StoreError("full")
        return self.space.grant(ttl, self.world.time)

    def txn(self, transaction: Transaction) -> Outcome:
        if self.is_full and any(isinstance(operation, Put) for operation in transaction.operations):
            raise StoreError("full")
        try:
            return self.space.txn(transaction.compares, transaction.operations)
        except LeaseGoneError:
            return Outcome(False, 0, {})

    def load(self, watch: Watch) -> None:
        """Begin a watch with all there is."""
        if self.is_up and not self._loses(watch.server):
            loaded = self.space.load(PREFIX + "/")
            watch.next = loaded.revision + 1
            self.watches = [w for w in self.watches if w.server is not watch.server]
            self.watches.append(watch)
            watch.asked = watch.server.continuity.revision
            watch.tell(watch.server.loaded, loaded)

    def changed(self) -> None:
        """Tell those who watch."""
        if self.space.revision == self._told:
            return
        self._told = self.space.revision
        for watch in self.watches:
            if watch.server.address in self.cut or not self.is_up:
                watch.cut = True
            if watch.cut:
                continue
            for events in self.space.since(PREFIX + "/", watch.next):
                watch.tell(watch.server.changed, events)
            watch.next = self.space.revision + 1

    def tick(self) -> None:
        """End leases whose time is over."""
        if self.is_up:
            self.space.expire(self.world.time)
            self.changed()

    def record(self, shard: int) -> ShardRecord:
        """Return what it says of a shard."""
        key = f"{PREFIX}/shard/{shard}"
        record = self.space.load(key).records.get(key)
        return parse_shard_value(record.value) if record is not None else ShardRecord()

    def edit(self, shard: int, change: Callable[[ShardRecord], ShardRecord]) -> None:
        """Change a shard's record as an operator does."""
        key = f"{PREFIX}/shard/{shard}"
        record = self.space.load(key).records.get(key)
        if record is not None and self.is_up:
            value = format_shard_value(change(parse_shard_value(record.value))).encode()
            self.space.txn([RevisionIs(key, record.revision)], [Put(key, value)])
            self.changed()
