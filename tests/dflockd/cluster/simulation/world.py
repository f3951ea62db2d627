"""Everything together: time, chance, faults, and the judge."""

from __future__ import annotations

import bisect
import copy
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from dflockd.client import routing
from dflockd.cluster import handover, transactions
from dflockd.cluster.claims import EPOCH_SHIFT
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.transactions import Kind
from dflockd.shards import Delete, KeySpace, get_shard_id
from dflockd.shards.errors import LeaseGoneError
from dflockd.wire import Rate, Space
from tests.dflockd.cluster.simulation.client import Client, Life
from tests.dflockd.cluster.simulation.library import LibraryClient, in_the_simulation
from tests.dflockd.cluster.simulation.machines import (
    CALM,
    FINALE,
    KEYS,
    KINDS,
    PREFIX,
    SERVERS,
    WALL,
    Clock,
    Key,
    Process,
    Rules,
    ViolationError,
)
from tests.dflockd.cluster.simulation.server import ServerProcess
from tests.dflockd.cluster.simulation.store import Etcd
from tests.dflockd.cluster.simulation.turns import Turns

STOPS = (4.0, 15.0, 26.0)
"""When all servers are stopped, in schedules of nothing else, and how many shards there are then."""
STOPS_SHARDS = 60

BACK = 5.0
"""How long after the last server has started every shard is to be served."""

SOON = 4.0
"""Seconds after which a server has found out that the store refuses."""

CLOCKS = 0.98
"""A window by the clock of one server may be this much of one by the clock of another."""

PER_SECOND = 1.0
"""Transactions with which it may try a store that refuses."""


class World:
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
        (story or (_stops if self.rules.stops else _trouble))(self)
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
        with in_the_simulation(self), mock.patch.object(routing, "random", self.random), small:
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

    # Faults; also for stories.

    def stop(self, name: str, seconds: float) -> None:
        process = self.servers.get(name) or self.clients[name]
        process.stop(seconds)

    def hang(self, shard: int, seconds: float) -> None:
        """Have the server of a shard do nothing for so long, and not end."""
        name = self.etcd.record(shard).current
        if name:
            self.counts["hangs"] += 1
            self.stop(name, seconds)

    def crash(self, name: str, back_after: float = 1.0) -> None:
        self.counts["crashes"] += 1
        process = self.servers.get(name) or self.clients[name]
        self.log(process.name, "is killed")
        process.kill()
        self.after(back_after, self._start, name, process)

    def start(self, name: str) -> None:
        """Start what has been killed, sooner than it was to."""
        self._start(name, self.servers.get(name) or self.clients[name])

    def _start(self, name: str, former: Process) -> None:
        if (self.servers.get(name) or self.clients[name]) is not former:
            return
        if isinstance(former, ServerProcess) and self.time < self._closed_until:
            self.at(self._closed_until, self._start, name, former)
        elif isinstance(former, ServerProcess):
            if self._is_replaced and not self.etcd.has_floor:
                # Nobody has noticed, for none was left: then the manual says how long to wait.
                self._is_replaced = False
                self.wall += 64 << EPOCH_SHIFT
            process = ServerProcess(self, name, former.clock, next(self._lives))
            self.servers[name] = process
            self.log(process.name, "starts")
            if self.rules.stops:
                self.after(BACK, self._judge_return, self.time)
        else:
            self.clients[name] = self._client(name)

    def end_server(self, process: ServerProcess) -> None:
        """A server that was drained ends."""
        if process.alive:
            left = process.node.has_left
            self.counts["clean ends" if left else "ends that were not clean"] += 1
            self.log(process.name, "ends")
            lease = process.node.membership.lease
            process.kill()
            self.after(self.delay(), self.revoke, lease)
            away = self.random.uniform(0.5, 4)
            if self.rules.stops:
                away = self.random.choice((0.1, away / 2, 3.0))
                self._disturbed_at = self.time
                if not left:
                    raise self.violation(f"{process.name} has not handed everything over in time")
            self.after(away, self._start, process.address, process)

    def end_for_good(self, process: ServerProcess) -> None:
        """A server whose store was replaced ends, and is started again."""
        if process.alive:
            self.log(process.name, "ends, for the store was replaced")
            process.kill()
            self.after(self.random.uniform(0.1, 2), self._start, process.address, process)

    def end_at_once(self, name: str, back_after: float = 1.0) -> None:
        """Have a server end without handing anything over, and revoke its lease."""
        self.counts["ends at once"] += 1
        process = self.servers[name]
        self.log(process.name, "ends at once")
        process.kill()
        self.revoke(process.node.membership.lease)
        self.after(back_after, self._start, name, process)

    def replace(self, shard: int, by: str, cut: float = 10.0) -> None:
        """Have a server replaced that is cut off from the store, and may serve on for a while."""
        former = self.etcd.record(shard).current
        if former and former != by:
            self.cut_store([former], cut)
            self.move(shard, by)
            self.take_for_dead(former)

    def drain(self, name: str) -> None:
        self._disturbed_at = self.time
        process = self.servers[name]
        process.receive(process.leave)

    def revoke(self, lease: int) -> None:
        try:
            self.etcd.space.revoke(lease)
        except LeaseGoneError:
            return
        self.etcd.changed()

    def take_for_dead(self, name: str) -> None:
        """End a server's lease before its time."""
        self.counts["early ends of leases"] += 1
        self.log(name, "its lease ends early")
        self.revoke(self.servers[name].node.membership.lease)

    def delete_entry(self, name: str) -> None:
        """Delete a server's entry by hand."""
        self.counts["entries deleted"] += 1
        self.log(name, "its entry is deleted")
        self.etcd.space.txn([], [Delete(f"{PREFIX}/nodes/{name}")])
        self.etcd.changed()

    def delete(self, key: str) -> None:
        """Delete a key by hand."""
        self.counts["keys deleted"] += 1
        self.log("etcd", "%s is deleted", key)
        self.etcd.space.txn([], [Delete(key)])
        self.etcd.changed()

    def cut_store(self, names: Iterable[str], seconds: float) -> None:
        names = set(names)
        self.counts["cuts from the store"] += 1
        self.log("etcd", "is cut off from %s for %.1f s", sorted(names), seconds)
        self.etcd.cut |= names
        self.after(seconds, self.etcd.cut.difference_update, names)

    def cut(self, client: str, server: str, seconds: float) -> None:
        pair = frozenset((client, server))
        self._cut.add(pair)
        self.after(seconds, self._cut.discard, pair)

    def stop_store(self, seconds: float) -> None:
        self.counts["store stopped"] += 1
        self.log("etcd", "is away for %.1f s", seconds)
        self.etcd.is_up = False
        self.after(seconds, self._start_store)

    def _start_store(self) -> None:
        self.etcd.is_up = True
        for watch in self.etcd.watches:
            watch.cut = True

    def fill_store(self, seconds: float) -> None:
        """Have the store take nothing new for some time."""
        self.counts["store full"] += 1
        self.log("etcd", "is full for %.1f s", seconds)
        self.etcd.is_full = True
        self.after(seconds, self._empty_store, self.time)

    def _empty_store(self, since: float) -> None:
        self.etcd.is_full = False
        for who in {who for _, who in self.etcd.refused}:
            # Who was stopped finds it out once he goes on.
            knows = max(since, self.went_on.get(who, 0.0)) + SOON
            number = sum(time > knows for time, by in self.etcd.refused if by == who)
            if number > PER_SECOND * max(0.0, self.time - knows) + 2:
                raise self.violation(f"{who} asked a full store {number} times")

    def wipe_store(self, seconds: float, revision: int = 1) -> None:
        """Have the store away for some time, and empty then."""
        self.counts["wipes"] += 1
        space = KeySpace()
        space.revision = revision
        self._replace_store(seconds, space)

    def start_at_once(self, name: str) -> None:
        """Start a server although the store was replaced: against the manual."""
        self._closed_until = 0.0
        self.start(name)

    def restore_store(self, seconds: float) -> None:
        """Have the store away for some time, and in an earlier state then."""
        if self.etcd.copies and not self.calm:
            self.counts["restores"] += 1
            self._replace_store(seconds, copy.deepcopy(self.random.choice(self.etcd.copies)))

    def _replace_store(self, seconds: float, space: KeySpace) -> None:
        self.log("etcd", "is replaced, by one at revision %d", space.revision)
        # For so long nobody starts a server: the manual says so.
        self._closed_until = self.time + seconds + self.parameters.grace * 1.03
        self.stop_store(seconds)
        self.etcd.replace(space)
        self._is_replaced = True
        self.etcd.copies.clear()

    def interrupt(self, name: str) -> None:
        process = self.servers[name]
        self.counts["watches interrupted"] += 1
        process.receive(process.lose_watch, self.random.uniform(0, 1))

    def hold_up(self, kind: Kind, seconds: float) -> None:
        """Have the next transaction of a kind take so long that nobody waits for it any more."""
        self.etcd.held_up[kind] = seconds

    def lose_answer(self, name: str, kind: Kind) -> None:
        """Have a server's next transaction of a kind carried out, and its answer lost."""
        self.etcd.unanswered[kind] = name

    def blind(self, name: str, seconds: float) -> None:
        """Have a server hear nothing from the store, while its transactions go through."""
        process = self.servers[name]
        self.counts["watches silent"] += 1
        self.log(process.name, "hears nothing for %.1f s", seconds)
        process.receive(process.lose_watch, seconds)

    def lose_keep_alives(self, name: str, seconds: float) -> None:
        self.counts["keep-alives lost"] += 1
        self.etcd.no_keep_alives.add(name)
        self.after(seconds, self.etcd.no_keep_alives.discard, name)

    def move(self, shard: int, server: str) -> None:
        self.counts["moves"] += 1
        self.log("etcd", "shard %d is to be at %s", shard, server)
        self.etcd.edit(shard, lambda record: record._replace(target=server))

    def pin(self, shard: int, *, pinned: bool = True) -> None:
        self.etcd.edit(
            shard,
            lambda r: r.with_flag("pinned") if pinned else r.without_flag("pinned"),
        )

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

    # The judge.

    def believe(self, client: Client, key: Key, fence: int, until: float) -> None:
        """A client takes itself for a holder until then, unless it says that it is not any more."""
        if until <= self.time:
            return  # it was stopped since it looked at its clock, and looks again before it acts
        former = self._beliefs.get(client)
        self._beliefs[client] = key, fence, until
        holders = [
            other for other, (k, _, end) in self._beliefs.items() if k == key and end > self.time
        ]
        if len(holders) > key.limit:
            others = " and ".join(sorted(other.name for other in holders))
            raise self.violation(f"{others} hold {key.name.decode()} at a time")
        if former is not None and former[:2] == (key, fence):
            return
        latest, holder = self._fences.get(key, (0, None))
        if (fence, client) == (latest, holder):
            return  # it was in doubt
        self.counts["grants"] += 1
        self.granted[client.name] = self.time
        self.log(client.name, "holds %s, fence ...%x", key.name, fence & 0xFFFFFFFFFFFFF)
        if key.space is Space.LOCK and fence <= latest:
            raise self.violation(f"fence {fence:x} of {key.name.decode()} has not grown")
        if fence > latest:
            self._fences[key] = fence, client

    def forget(self, client: Client) -> None:
        self._beliefs.pop(client, None)

    def begin(self, client: Client, key: Key, time: float) -> None:
        """A run begins; in no window, wherever it starts, may more have begun than the rate says."""
        self.counts["begun"] += 1
        self.log(client.name, "begins")
        runs, window = self.rates[key]
        begun = self._begun.setdefault(key, [])
        bisect.insort(begun, time)
        for first, last in zip(begun, begun[runs:], strict=False):
            if last - first < window / 1000 * CLOCKS:
                raise self.violation(
                    f"{runs + 1} runs of {key.name.decode()} began within {last - first:.3f} s, "
                    f"and {runs} may in {window / 1000:g} s"
                )

    def forget_ages(self, shard: int) -> None:
        """A server has begun anew: older ones that come may be granted a lock."""
        for key in list(self.newest):
            if get_shard_id(key.name, self.parameters.num_shards) == shard:
                del self.newest[key]

    def judge_servers(self, process: ServerProcess) -> None:
        """No two servers may serve one shard at a time."""
        able = process.able()
        for other in self.running():
            if able and other is not process and (both := able & other.able()):
                raise self.violation(f"{process.name} and {other.name} both serve shards {both}")

    def _judge_return(self, started: float) -> None:
        """Some time after all have been stopped and started, nobody is to wait any more."""
        if self._disturbed_at < started:
            served = {shard for process in self.running() for shard in process.grants()}
            if missing := set(range(self.parameters.num_shards)) - served:
                raise self.violation(f"{BACK:g} s after the last start nobody serves {missing}")

    def _unrest(self) -> str:
        """Return what is still to come once the faults are over."""
        for client in self.clients.values():
            if not client.done:
                return f"{client.name} got no lock"
        for process in self.running():
            counts = process.node.counts()
            if counts.total() != counts["serving"]:
                return f"{process.name} has not come to rest: {dict(counts)}"
        served = sorted(shard for process in self.running() for shard in process.grants())
        if served != list(range(self.parameters.num_shards)):
            return f"only the shards {served} are served"
        return ""

    def log(self, who: str, text: str, *args: Any) -> None:
        self._trace.append((self.time, who, text, args))

    def timeline(self) -> str:
        return "\n".join(
            f"{time:8.3f}  {who:5} {text % args if args else text}"
            for time, who, text, args in self._trace
        )

    def violation(self, what: str) -> ViolationError:
        option = "".join(f"--{kind} " for kind in KINDS if getattr(self.rules, kind))
        return ViolationError(
            f"{what}\n\n{self.timeline()}\n{self.time:8.3f}  {what}\n\n"
            f"replay: python -m tests.dflockd.cluster.simulation {option}{self.seed}"
        )


def _trouble(world: World) -> None:
    """Have a lot go wrong."""
    rng = world.random
    shards = range(world.parameters.num_shards)

    def server() -> str:
        return rng.choice(SERVERS)

    def client() -> str:
        return rng.choice(list(world.clients))

    def bounce() -> None:
        shard = rng.choice(shards[:2])
        for number in range(rng.randint(2, 6)):
            world.after(number * rng.uniform(0.01, 0.5), world.move, shard, server())

    faults: list[Callable[[], None]] = [
        lambda: world.crash(server(), rng.choice((0.1, 1, 6, 12))),
        lambda: world.crash(client(), rng.uniform(0.1, 3)),
        lambda: world.stop(server(), world.long_pause()),
        lambda: world.stop(client(), world.long_pause()),
        lambda: world.cut_store([server()], rng.uniform(1, 20)),
        lambda: world.cut_store([server()], rng.uniform(8, 20)),
        lambda: world.cut_store(SERVERS, rng.uniform(1, 8)),
        lambda: world.stop_store(rng.uniform(1, 8)),
        lambda: world.take_for_dead(server()),
        lambda: world.delete_entry(server()),
        lambda: world.lose_keep_alives(server(), rng.uniform(3, 8)),
        lambda: world.interrupt(server()),
        lambda: world.blind(server(), rng.uniform(2, 12)),
        lambda: world.cut(client(), server(), rng.uniform(1, 8)),
        lambda: world.drain(server()),
        lambda: world.move(rng.choice(shards), server()),
        lambda: world.pin(rng.choice(shards), pinned=rng.random() < 0.5),
        bounce,
        bounce,
    ]
    # A few kinds at a time: with all of them each is rare. (Groce et al., "Swarm testing", 2012.)
    chosen = rng.sample(faults, rng.randint(2, 6))
    if world.rules.chains:
        chosen += [lambda: _chain(world), lambda: world.end_at_once(server(), rng.uniform(0.1, 4))]
    if world.rules.replaces:
        world.at(rng.uniform(4, CALM - 15), world.fill_store, rng.choice((0.5, 3, 8, 14)))
        if rng.random() < 0.7:
            _replace(world)
    if world.rules.hangs:
        for _ in range(4):
            chosen.append(lambda: world.hang(rng.choice(shards), rng.uniform(1, 15)))
    for _ in range(rng.randint(3, 20)):
        world.at(rng.uniform(4, CALM - 3), rng.choice(chosen))


def _stops(world: World) -> None:
    """Have all servers stopped again and again, within more or less time, and started."""
    rng = world.random

    def stop() -> None:
        world.counts["stops of all"] += 1
        within = rng.choice((0.0, 0.05, 0.5, 2.5))
        for name in SERVERS:
            world.after(rng.uniform(0, within), world.drain, name)

    for at in STOPS:
        world.at(at + rng.uniform(0, 1.5), stop)


@contextmanager
def _small_batches() -> Iterator[None]:
    """Have few shards in one transaction, so that a few shards take as many as thousands do."""
    with mock.patch.object(transactions, "BATCH", 2), mock.patch.object(handover, "MAX_HANDED", 2):
        yield


def _replace(world: World) -> None:
    """Have the store wiped, or restored from a backup."""
    rng = world.random
    for _ in range(2):
        world.at(rng.uniform(3, 20), world.etcd.copy)
    away = rng.choice((0.0, 0.5, 3.0, 6.0))
    if rng.random() < 0.5:
        world.at(rng.uniform(6, 24), world.wipe_store, away)
        return

    def is_fine() -> bool:
        # The manual says that no other server is to run when a backup is restored.
        servers = world.servers.values()
        return all(s.alive and not s.stopped and s.keeps_up for s in servers) or world.calm

    world.at(rng.uniform(6, 24), world.when, is_fine, world.restore_store, away)


def _chain(world: World) -> None:
    """Have a shard taken over by one server after the other, within the first serving lease."""
    rng = world.random
    shard, links = rng.randrange(world.parameters.num_shards), rng.sample(SERVERS, len(SERVERS))
    world.counts["chains"] += 1

    def follow() -> None:
        if not links or world.calm:
            return
        successor, until = links.pop(), world.time + 1.5
        former = world.etcd.record(shard).current
        if rng.random() < 0.3:
            world.lose_answer(successor, Kind.CLAIM)
        how = rng.choice(("replaced", "ends", "hands over"))
        if how == "replaced":
            world.replace(shard, successor, rng.uniform(1, 10))
        else:
            world.move(shard, successor)
        if how == "ends" and former not in ("", successor):
            world.end_at_once(former, rng.uniform(0.1, 4))

        def is_taken() -> bool:
            return world.etcd.record(shard).current == successor or world.time > until

        pause = rng.choice((0.0, 0.05, 0.3))
        world.when(is_taken, world.after, pause, follow)

    world.after(0, follow)
