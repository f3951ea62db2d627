"""The store: a real key space, and the ways to it, on which all sorts of things happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflockd.cluster.calls import Call, Kind
from dflockd.shards import Outcome, Put, RevisionIs, format_shard_value
from dflockd.shards.errors import LeaseGoneError
from dflockd.shards.memory import KeySpace
from dflockd.shards.values import ShardRecord, parse_shard_value
from tests.dflockd.cluster.simulation.machines import (
    PATIENCE,
    PREFIX,
)

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.server import ServerProcess
    from tests.dflockd.cluster.simulation.world import World


class Watch:
    """What one process is told of the store's changes, in their order, some time after them."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.next = 0
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
        self.cut: set[str] = set()
        self.no_keep_alives: set[str] = set()
        self.held_up: dict[Kind, float] = {}
        """For how long the next call of a kind is on its way; its answer is lost."""
        self.unanswered: dict[Kind, str] = {}
        """Whose next call of a kind is carried out at once, while its answer is lost."""
        self.kept_back: list[Callable[[], None]] = []
        """Answers that were lost, for stories in which they come after all."""
        self.watches: list[Watch] = []
        self._told = self.space.revision

    def call(
        self,
        server: ServerProcess,
        execute: Callable[[], Any],
        answer: Callable[..., None],
        held_up: float = 0,
        unanswered: bool = False,
    ) -> None:
        """Send something; `answer` gets what comes back, or ``None`` once nothing came for long."""
        world, open_ = self.world, [True]

        def give(result: object) -> None:
            if open_:
                open_.clear()
                server.receive(answer, result)

        def run(*, answered: bool) -> None:
            if not self.is_up:
                return
            result = execute()
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

    def txn(self, call: Call) -> Outcome:
        try:
            return self.space.txn(call.compares, call.operations)
        except LeaseGoneError:
            return Outcome(False, 0, {})

    def load(self, watch: Watch) -> None:
        """Begin a watch with all there is."""
        if self.is_up and not self._loses(watch.server):
            loaded = self.space.load(PREFIX + "/")
            watch.next = loaded.revision + 1
            self.watches = [w for w in self.watches if w.server is not watch.server]
            self.watches.append(watch)
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
