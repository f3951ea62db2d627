"""Clocks, processes that can be stopped and killed, connections; and what all parts know."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dflockd.client import connection, renewal
from dflockd.client.operations import Grant, Operation, Target, acquire
from dflockd.cluster.node import Node
from dflockd.shards.continuity import Continuity
from dflockd.table import ShardTable
from dflockd.table.state import Peer
from dflockd.wire import Reply, Request, Space

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.client import Client
    from tests.dflockd.cluster.simulation.server import ServerProcess
    from tests.dflockd.cluster.simulation.world import World


PREFIX = "/p"
SECRET = b"secret"
SERVERS = ("s1:1", "s2:1", "s3:1")
PATIENCE = 1.5
"""Seconds until a transaction to the store is given up."""

CALM = 36.0
"""When faults stop, and how long everything then has to come to rest."""
FINALE = 40.0

WALL = 1_700_000_000 * 10**9


KINDS = ("ages", "chains", "groups", "hangs", "parts", "rates", "replaces", "stops")
"""What schedules can be about beside the usual faults: fields of `Rules`."""


class Key(NamedTuple):
    """What clients want."""

    space: Space
    name: bytes
    limit: int


KEYS = (
    Key(Space.LOCK, b"shard#0/a", 1),
    Key(Space.LOCK, b"shard#1/b", 1),
    Key(Space.LOCK, b"shard#1/s", 2),
)


class ViolationError(AssertionError):
    """Something that must never be was."""


@dataclass(frozen=True)
class Rules:
    """What takes part. Tests put classes here from which one rule has been taken out."""

    node: type[Node] = Node
    table: type[ShardTable] = ShardTable
    counts_from_answer: bool = False
    """Whether clients count their leases from the answer."""
    confirms_by_renewal: bool = False
    """Whether clients renew a grant that took its time, to find out whether it still counts."""
    keeps_places: bool = False
    """Whether clients do something else while they wait, and have their places kept meanwhile."""
    wants_turns: bool = False
    """Whether clients are told of their turns mostly, and take locks elsewhere then."""
    ages: bool = False
    """Whether of the clients the newest wins."""
    groups: bool = False
    """Whether clients belong to groups, which take turns."""
    rates: bool = False
    """Whether only so many runs of a key may begin in a while."""
    chains: bool = False
    """Whether servers also end while those that they replaced may still serve."""
    parts: bool = False
    """Whether what is handed over goes in several parts mostly."""
    stops: bool = False
    """Whether nothing goes wrong but that all servers are stopped, and started again."""
    continuity: type[Continuity] = Continuity
    replaces: bool = False
    """Whether the store is also full, wiped, or restored from a backup."""
    hangs: bool = False
    """Whether servers hang, and clients wait by the rules of the client library."""
    acquires: Callable[[Target, float | None], Operation[Grant | None]] = acquire
    """What these clients do for a lock."""
    looks: bool = True
    """Whether they look at a server that says nothing."""
    gives_up: bool = True
    """Whether they have no more time for all answers together than for one."""
    rescue: type[Any] = renewal._Rescue
    """What they do for a lock whose server says nothing."""
    link: type[Any] = connection.Connection
    """What they ask on."""


class Clock:
    """A clock that is a little fast or slow."""

    def __init__(self, world: World, rate: float, offset: float) -> None:
        self._world, self.rate, self._offset = world, rate, offset

    def read(self) -> float:
        return self._offset + self.rate * self._world.time

    def true(self, local: float) -> float:
        """Return when it shows this."""
        return (local - self._offset) / self.rate


class Process:
    """What can be stopped, go on, and be killed. It handles one thing at a time."""

    def __init__(self, world: World, name: str, clock: Clock) -> None:
        self.world, self.name, self.clock = world, name, clock
        self.alive = True
        self.stopped = False
        self.outbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._backlog: deque[Callable[[], None]] = deque()
        self._wakes = math.inf
        self._timer = 0

    def receive(self, handle: Callable[..., None], *args: Any) -> None:
        """Have it handle something, as soon as it runs."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append(lambda: self.receive(handle, *args))
            return
        now = self.clock.read()
        if self.world.chance(self.world.stalls):
            # Stopped between a look at the clock and what is done on the strength of it.
            self.world.counts["stalls"] += 1
            self._backlog.appendleft(lambda: self._step(handle, args, now))
            self.stop(self.world.long_pause())
            return
        self._step(handle, args, now)

    def _step(self, handle: Callable[..., None], args: tuple[Any, ...], now: float) -> None:
        handle(now, *args)
        self.stepped(now)
        outbox, self.outbox = self.outbox, []
        if outbox and self.world.chance(self.world.stalls):
            # Stopped with its decisions made, and nothing of them sent.
            self.world.counts["stalls"] += 1
            self._backlog.appendleft(lambda: _send(outbox))
            self.stop(self.world.long_pause())
        else:
            _send(outbox)

    def stepped(self, now: float) -> None:
        """Do what follows from a step."""

    def stop(self, seconds: float) -> None:
        if self.alive and not self.stopped:
            self.world.log(self.name, "stopped for %.2f s", seconds)
            self.world.counts["pauses"] += 1
            self.stopped = True
            self.world.after(seconds, self.go_on)

    def go_on(self) -> None:
        if self.alive and self.stopped:
            self.world.log(self.name, "goes on")
            self.stopped = False
            self.world.went_on[self.name] = self.world.time
            backlog, self._backlog = self._backlog, deque()
            while backlog:
                if self.stopped:
                    self._backlog.extend(backlog)
                    return
                if not self.alive:
                    return
                backlog.popleft()()

    def kill(self) -> None:
        self.alive = False

    def wake_at(self, local: float) -> None:
        """Have `due` called then, unless it is to be called before."""
        if local >= self._wakes:
            return
        self._wakes = local
        self._timer += 1
        # A little late: what is rounded must not fall before it.
        time = max(self.clock.true(local), self.world.time) + 1e-6
        self.world.at(time, self._wake, self._timer)

    def _wake(self, timer: int) -> None:
        if timer == self._timer:
            self._wakes = math.inf
            self.receive(self.due)

    def due(self, now: float) -> None:
        """Do what is due."""


def _send(outbox: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for transaction, args in outbox:
        transaction(*args)


class Connection:
    """Between a client and a server; what is sent one way arrives in order, or the rest is lost."""

    def __init__(self, client: Client, server: ServerProcess) -> None:
        self.client, self.server = client, server
        self.peer: Peer | None = None
        self.key: Key | None = None
        """What was asked for last."""
        self.ticket = 0
        self.group = b""
        """To whose turns what is asked belongs..."""
        self.age = 0
        """... and the age with which it is asked."""
        self.told: set[bytes] = set()
        """The tickets of the positions of which it was told that it is their turn."""
        self.broken = False
        """Whether nothing gets through any more, without either side knowing."""
        self.closed = False
        """Whether the client has ended it."""
        self.ended = False
        """Whether the server has."""
        self._up = self._down = 0.0

    def send(self, request: Request) -> None:
        self._up = self._pass(self._up, self.server.handle, self, request)

    def reply(self, reply: Reply) -> None:
        self._down = self._pass(self._down, self.client.heard, self, reply)

    def _pass(self, after: float, handle: Callable[..., None], *args: Any) -> float:
        world, process = self.client.world, handle.__self__  # type: ignore[attr-defined]
        at = max(after, world.time + world.delay())
        if self.broken or world.is_lost(self.client.name, self.server.address):
            self._break()
        else:
            world.at(at, self._arrive, process, handle, args)
        return at

    def _arrive(self, process: Process, handle: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.broken:
            process.receive(handle, *args)

    def _break(self) -> None:
        if not self.broken:
            self.broken = True
            world = self.client.world
            world.counts["connections lost"] += 1
            world.after(world.random.uniform(1, 10), self.server.receive, self.server.silent, self)

    def close(self, *, clean: bool = True) -> None:
        """End it, from the client's side."""
        if not self.closed:
            self.closed = True
            self._up = self._pass(self._up, self.server.part, self, clean)

    def end(self) -> None:
        """End it, from the server's side."""
        if not self.ended:
            self.ended = True
            self._down = self._pass(self._down, self.client.heard, self, None)
