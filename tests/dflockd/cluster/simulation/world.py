"""Everything together: time, chance, faults, and the judge."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from dflockd.client import routing
from dflockd.cluster import handover, transactions
from dflockd.cluster.parameters import ClusterParameters
from dflockd.wire import Rate
from tests.dflockd.cluster.simulation.chance import stops, trouble
from tests.dflockd.cluster.simulation.client import Client, Life
from tests.dflockd.cluster.simulation.faults import Faults
from tests.dflockd.cluster.simulation.judge import Judge
from tests.dflockd.cluster.simulation.library import LibraryClient, in_the_simulation
from tests.dflockd.cluster.simulation.machines import (
    CALM,
    FINALE,
    KEYS,
    SERVERS,
    WALL,
    Clock,
    Key,
    Rules,
    ViolationError,
)
from tests.dflockd.cluster.simulation.server import ServerProcess
from tests.dflockd.cluster.simulation.store import Etcd
from tests.dflockd.cluster.simulation.turns import Turns

STOPS_SHARDS = 60
"""How many shards there are in schedules in which all servers are stopped."""


class World(Faults, Judge):
    """Everything there is, and the judge of it.

    Args:
        seed: decides everything.
        rules: what takes part.
        story: what goes wrong, and when; without it, chance says so.
    """

    def __init__(
        self, seed: int, rules: Rules | None = None, story: Callable[[World], None] | None = None
    ) -> None:
        self.seed = seed
        self.rules = rules or Rules()
        self.random = rng = random.Random(seed)
        self.time = 0.0
        self.acting: LibraryClient
        """The client whose clock the library reads."""
        self.calm = False
        self._is_over = False
        self.counts: Counter[str] = Counter()
        self.granted: dict[str, float] = {}
        """When each client was last granted a lock."""
        self.numbers = itertools.count(1)
        self.places: dict[bytes, int] = {}
        self.newest: dict[Key, tuple[int, str, float]] = {}
        """The largest age with which each key was asked for, at which server, and its time then."""
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._trace: deque[tuple[float, str, str, tuple[Any, ...]]] = deque(maxlen=250)
        self._beliefs: dict[Client, tuple[Key, int, float]] = {}
        self._fences: dict[Key, tuple[int, Client]] = {}
        self.went_on: dict[str, float] = {}
        """When processes that were stopped have gone on."""
        self._cut: set[frozenset[str]] = set()
        self.parameters = ClusterParameters(
            num_shards=rng.randint(2, 4), serving_lease=2, max_lease=rng.choice((3, 8))
        )
        self.keys = rng.choice((KEYS, KEYS[:1], KEYS[1:], KEYS[:2]))
        self.balances = rng.random() < 0.3
        self.losses = rng.choice((0, 0.01, 0.05))
        self.stalls = rng.choice((0, 0, 0.0005, 0.002))
        self.slow = rng.choice((0.01, 0.05, 0.2))
        self.watch_lag = rng.choice((1, 1, 5, 20))
        self.etcd = Etcd(self)
        self._closed_until = 0.0
        self._is_replaced = False
        self.wall = WALL
        self._lives = itertools.count(1)
        if story is not None:
            self.parameters = ClusterParameters(num_shards=2, serving_lease=2, max_lease=8)
            self.keys = KEYS
            self.balances = False
            self.losses = self.stalls = self.slow = 0
            self.watch_lag = 1
        self.rates: dict[Key, Rate] = {}
        if self.rules.rates:
            # One of them is longer than the locks of a server that crashed are waited for.
            rates = (Rate(1, 1000), Rate(1, 3000), Rate(2, 3000), Rate(3, 9000))
            self.rates = {key: rng.choice(rates) for key in self.keys}
        self._begun: dict[Key, list[float]] = {}
        """When runs have begun, in order."""
        self.turns = Turns(self)
        self.leave_timeout = 7.0
        if self.rules.stops:
            self.parameters = ClusterParameters(STOPS_SHARDS, serving_lease=2, max_lease=8)
            self.losses = self.stalls = self.slow = 0
            self.balances = False
            self.watch_lag = min(self.watch_lag, 5)
            self.leave_timeout = 2.5
        self._disturbed_at = 0.0
        """When a server last began to leave, or ended."""
        self.clocks = {
            name: Clock(self, rng.uniform(0.99, 1.01), rng.uniform(0, 1000))
            for name in (*SERVERS, *(f"c{number}" for number in range(1, 6)))
        }
        self.servers = {
            address: ServerProcess(self, address, self.clocks[address], next(self._lives))
            for address in SERVERS
        }
        names = [name for name in self.clocks if name.startswith("c")]
        self.clients = {}
        if story is None:
            self.clients = {name: self._client(name) for name in names}
        self.after(0.25, self._tick)
        (story or (stops if self.rules.stops else trouble))(self)
        self.at(CALM, self._calm_down)

    # Time.

    def at(self, time: float, transaction: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), transaction, args))

    def after(self, seconds: float, transaction: Callable[..., Any], *args: Any) -> None:
        self.at(self.time + seconds, transaction, *args)

    def run(self) -> World:
        """Let everything happen.

        Raises:
            ViolationError: something did that must not.
        """
        # Servers whose store was replaced end and start again, at their leisure.
        until = CALM + FINALE * (2 if self.rules.replaces else 1)
        small = _small_batches() if self.rules.stops else nullcontext()
        part = 70 if self.rules.parts else handover.PART
        parts = mock.patch.object(handover, "PART", part)
        randomness = mock.patch.object(routing, "random", self.random)
        with in_the_simulation(self), randomness, small, parts:
            return self._run(until)

    def _run(self, until: float) -> World:
        while self._events and self._events[0][0] <= until:
            self.time, _, transaction, args = heapq.heappop(self._events)
            try:
                transaction(*args)
            except ViolationError:
                raise
            except Exception as exc:
                raise self.violation(f"{type(exc).__name__}: {exc}") from exc
            if self._is_over:
                break
        if self.calm and not self._is_over:
            raise self.violation(f"in the end: {self._unrest()}")
        self.counts["milliseconds"] = int(self.time * 1000)
        return self

    def _tick(self) -> None:
        self.etcd.tick()
        for process in self.running():
            self.judge_servers(process)
        if self.calm:
            self._is_over = not self._unrest()
        self.after(0.25, self._tick)

    # Chance.

    def chance(self, share: float) -> bool:
        return share > 0 and not self.calm and self.random.random() < share

    def delay(self) -> float:
        if self.chance(self.slow):
            return self.random.uniform(0.1, 2.0)
        return self.random.expovariate(100)

    def long_pause(self) -> float:
        return self.random.choice((0.5, 2, 4, 8, 12)) * self.random.uniform(0.8, 1.2)

    def is_lost(self, client: str, server: str) -> bool:
        return frozenset((client, server)) in self._cut or self.chance(self.losses / 10)

    # What stories have clients do.

    def visit(
        self,
        name: str,
        at: float,
        *,
        lease: int,
        hold: float,
        timeout: float = 30,
        via: str = SERVERS[0],
    ) -> None:
        """Have a client take the first lock at some time, and keep it for so long."""

        def errand(client: Client) -> Life:
            client.remember(0, via)
            yield from client.use(client.acquire, KEYS[0], timeout, lease, hold)

        self.at(at, self.come, name, errand)

    def come(self, name: str, errand: Callable[[Client], Life]) -> None:
        """Have a client come, for an errand."""
        self.clients[name] = self._client(name, errand)

    def when(self, condition: Callable[[], bool], act: Callable[..., Any], *args: Any) -> None:
        """Do something once a condition holds."""
        if condition():
            act(*args)
        else:
            self.after(0.01, self.when, condition, act, *args)

    def _client(self, name: str, errand: Callable[[Client], Life] | None = None) -> Client:
        kind = LibraryClient if self.rules.hangs else Client
        return kind(self, name, self.clocks[name], errand)

    def _calm_down(self) -> None:
        self.log("", "faults are over")
        self.calm = True
        self.etcd.is_up = True
        self.etcd.cut.clear()
        self.etcd.no_keep_alives.clear()
        self._cut.clear()
        for shard in range(self.parameters.num_shards):
            self.pin(shard, pinned=False)
        for name, process in [*self.servers.items(), *self.clients.items()]:
            process.go_on()
            if not process.alive:
                self._start(name, process)

    def running(self) -> list[ServerProcess]:
        return list(self.servers.values())


@contextmanager
def _small_batches() -> Iterator[None]:
    """Have few shards in one transaction, so that a few shards take as many as thousands do."""
    with mock.patch.object(transactions, "BATCH", 2), mock.patch.object(handover, "MAX_HANDED", 2):
        yield
