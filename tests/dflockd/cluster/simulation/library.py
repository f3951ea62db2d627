"""A client that is the client library itself, with all its rules, over sockets that are simulated.

Sessions, renewals and rescues, the pool, the map of the cluster, and what carries steps out on
connections are those of `dflockd.client`. What is simulated is below: sockets, the clock, and the
thread that drives what goes on without the caller.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from dflockd import clock, errors
from dflockd.address import Seeds, parse_server, parse_servers
from dflockd.client import connection, operations, release, renewal
from dflockd.client import lease as leases
from dflockd.client.connection import Route, _known_by_number
from dflockd.client.flow import Flow, Pause, Signal
from dflockd.client.lease import Lease
from dflockd.client.operations import GRACE, ShardReport, Target
from dflockd.client.pool import Pool
from dflockd.client.routing import Pursuit, ShardMap
from dflockd.client.session import LockSession
from dflockd.wire import Reply, Status, TimedOut, encode_reply, fence_from_token
from tests.collector import collector_off
from tests.dflockd.client_support import in_this_thread
from tests.dflockd.cluster.simulation.client import Client, Life
from tests.dflockd.cluster.simulation.machines import SERVERS, Clock, Connection, Key

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.world import World
from tests.dflockd.cluster.simulation.flows import Socket, Task

LATE = GRACE + 3.0
"""Seconds beyond a client's time that its wait may take: several servers may hang."""

has_come = connection.Connection.has_come

ADOPTED = 0.15
"""Seconds after which the reactor looks after a lock."""

SPINS = 1000
"""Steps in one moment that say that there is no end to them."""

_Step = Generator[Any, Any, Any]


@contextmanager
def in_the_simulation(world: World) -> Iterator[None]:
    """Have the library read the clock of whoever acts, open simulated sockets, and follow the rules.

    What other tests have left is not collected here: the flows among it would end by this clock.
    """
    rules = world.rules

    def look_away(*_: object) -> Flow[float]:
        return math.inf
        yield

    with ExitStack() as stack:
        stack.enter_context(collector_off())
        for owner, name, value in (
            (clock, "now", in_this_thread(lambda: world.acting.now, clock.now)),
            (leases, "_chance", world.random),
            (connection, "socket", _socket_module(world)),
            (connection, "_known_by_number", in_this_thread(_found, _known_by_number)),
            (operations, "acquire", rules.acquires),
            *([] if rules.looks else [(Pursuit, "glance", look_away)]),
            *([] if rules.gives_up else [(operations, "give_up_at", lambda *_: None)]),
            (renewal, "_Rescue", rules.rescue),
            (connection, "Connection", rules.link),
            (connection.Connection, "has_come", in_this_thread(_has_come, has_come)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _has_come(link: connection.Connection) -> bool:
    return link.closed or link._sock.is_ready(writes=False)  # type: ignore[attr-defined]


def _found(host: str, port: int) -> Any:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, (host, port))]


def _socket_module(world: World) -> SimpleNamespace:
    """Return what the library knows as the module `socket`."""
    simulated = in_this_thread(lambda *_: Socket(world.acting), socket.socket)
    return SimpleNamespace(**vars(socket) | {"socket": simulated})


class LibraryClient(Client):
    """Takes locks with the library, and is told that one is held only by a server."""

    timeouts = (0, 0.4, 2.3, 8)

    def __init__(
        self, world: World, name: str, clock: Clock, errand: Callable[..., Life] | None = None
    ) -> None:
        super().__init__(world, name, clock, errand)
        seeds = parse_servers("cluster://" + ",".join(SERVERS[:2]))
        assert isinstance(seeds, Seeds)
        self._map = ShardMap(seeds)
        self._route = Route(seeds[0])
        self.pool = Pool()
        self.sockets: dict[Connection, Socket] = {}
        self._tasks: list[Task] = []
        self._session: LockSession | None = None
        self._believed = (b"", 0.0)
        self._was_told = False
        self._wrong = ""
        self._stops = 0

    def remember(self, shard: int, server: str) -> None:
        super().remember(shard, server)
        owners = [0] * self.world.parameters.num_shards
        address = parse_server(server)
        self._map.update(ShardReport([address], owners, owners), address, self.now)

    def stop(self, seconds: float) -> None:
        self._stops += 1
        super().stop(seconds)

    def kill(self) -> None:
        super().kill()
        for sock in list(self.sockets.values()):
            sock.connection.close(clean=False)

    # How it is driven.

    def _begin(self, now: float) -> None:
        self.now = now
        self.run(self._life)
        self.due(now)

    def heard(self, now: float, connection: Connection, reply: Reply | None) -> None:
        sock = self.sockets.get(connection)
        if sock is not None:
            self._was_told |= reply is Status.TIMEOUT or isinstance(reply, TimedOut)
            sock.hear(b"" if reply is None else encode_reply(reply))
        self.due(now)

    def due(self, now: float) -> None:
        self.now, self.world.acting = now, self
        for _ in range(SPINS):
            if not sum([task.step(now) for task in list(self._tasks)]):
                break
            self._tasks = [task for task in self._tasks if not task.ended]
        else:
            raise self.world.violation(f"{self.name} spins: it waits for what is there")
        if self._wrong:
            raise self.world.violation(self._wrong)
        self._declare()
        self.done = all(task.waits is not self._life for task in self._tasks)
        until = min((task.until for task in self._tasks), default=math.inf)
        if until < math.inf:
            self.wake_at(max(until, now))

    def run(self, waits: _Step) -> Task:
        task = Task(self, waits)
        self._tasks.append(task)
        return task

    def _declare(self) -> None:
        """Say what this client believes, for it to be judged."""
        session = self._session
        lease = None if session is None else session.lease
        if session is None or lease is None or not lease.held:
            self.world.forget(self)
            return
        token, until = self._believed
        if lease.token == token and lease.deadline > until:
            self.world.counts["renewals"] += 1
        self._believed = lease.token, lease.deadline
        target = session.target
        key = Key(target.space, target.key, target.limit)
        self.world.believe(
            self, key, fence_from_token(lease.token), self.clock.true(lease.deadline)
        )

    # The reactor, as far as sessions go.

    @property
    def reactor(self) -> LibraryClient:
        return self

    def keep(self, lease: Lease) -> None:
        self._call(partial(self._look_after, lease), ADOPTED)

    def renew(self, lease: Lease) -> None:
        self._call(partial(renewal.renew_now, lease, self._look_after))

    def read(self, lease: Lease, seen: Signal) -> None:
        self._call(partial(renewal.read_now, lease, self._look_after, seen))

    def forget(self, lease: Lease) -> None:
        if lease.task is not None:
            self._call(lease.poke)

    def _call(self, function: Callable[[], object], seconds: float = 0) -> None:
        """Have the reactor do something: not at this moment, for its thread is another one."""

        def job() -> _Step:
            yield Pause(seconds)
            function()

        self.run(job())

    def _look_after(self, lease: Lease) -> None:
        if not lease.is_over and lease.task is None:
            task = lease.task = self.run(renewal.keep(lease, self.pool))
            task.step(self.now)

    def end_later(self, lease: Lease, operation: release.Ends) -> None:
        self.run(release.end_later(lease, self.pool, operation))

    def cannot_be_awaited(self) -> bool:
        return False

    # What it does.

    def _sleep(self, seconds: float) -> Life:
        yield Pause(seconds)  # type: ignore[misc]

    def _use(self, key: Key, timeout: float, lease: int) -> Life:
        hold = self.world.random.choice((0.1, 0.5, 3, 9) if not self.world.calm else (0.2,))
        return (yield from self.use(self.acquire, key, timeout, lease, hold))

    def use(
        self, take: Callable[..., Life], key: Key, timeout: float, lease: int, hold: float
    ) -> Life:
        session: LockSession | None = yield from take(key, timeout, lease)
        if session is None:
            return False
        rng, until = self.world.random, self.now + hold
        while self.now < until and session.lease is not None and not session.lease.is_over:
            yield from self._sleep(min(until - self.now, rng.choice((0.3, 1, 9))))
            if rng.random() < 0.3:
                yield from self._act(session)
        if session.lease is None or session.lease.is_over:
            self.world.log(self.name, "knows that its lease of %s has ended", key.name)
            self.world.counts["leases ended"] += 1
        else:
            self.world.log(self.name, "releases %s", key.name)
        claim = object()
        yield from self._let_go_if_it_fails(session, claim, session.release(claim))
        self._session = None
        return True

    def _act(self, session: LockSession) -> Life:
        """Do what the holder of a lock may do meanwhile."""
        if self.world.random.random() < 0.5:
            try:
                yield from session.renew(None)
            except errors.RemoteError as exc:
                self.world.log(self.name, "%s", exc)
            return
        try:
            yield from session.check()
        except errors.LockLostError:
            is_held = False
        else:
            is_held = True
        lease = session.lease
        if is_held != (lease is not None and lease.held):
            raise self.world.violation(f"{self.name} is told that it is certain, and it is not")

    def acquire(self, key: Key, timeout: float, lease: int) -> Life:
        """Take a lock; judge what this side makes of what servers say, and how long it takes."""
        started, stops, world = self.clock.read(), self._stops, self.world
        self._was_told = False
        target = Target(*key, lease, str(self._map.seeds))
        session = LockSession(target, self._route, 0.5, self._map, lambda: self, lambda: self._lost)
        self._session, claim, is_granted = session, object(), False
        try:
            is_granted = yield from self._let_go_if_it_fails(
                session, claim, session.acquire(claim, timeout)
            )
        except errors.RemoteError as exc:
            world.counts["not answered"] += 1
            world.log(self.name, "%s", exc)
        else:
            if not is_granted:
                world.counts["told that it is held"] += 1
                if not self._was_told:
                    raise world.violation(
                        f"{self.name} takes {key.name.decode()} for held, and no server has said so"
                    )
        took = self.clock.read() - started
        if stops == self._stops and took > timeout + LATE:
            raise world.violation(f"{self.name} was to wait for {timeout} s, and took {took:.1f}")
        if is_granted:
            return session
        self._session = None
        return None

    @staticmethod
    def _let_go_if_it_fails(session: LockSession, claim: object, flow: Flow[Any]) -> Life:
        try:
            return (yield from flow)  # type: ignore[misc]
        except BaseException:
            session.let_go(claim)
            raise

    def _lost(self) -> None:
        session = self._session
        lease = None if session is None else session.lease
        self.world.counts["losses"] += 1
        if session is not None and lease is not None and self.now < lease.deadline:
            # Whoever calls this may be a generator that nobody needs any more.
            self._wrong = (
                f"{self.name} held {session.target.name}, and was told in time that it did not"
            )
