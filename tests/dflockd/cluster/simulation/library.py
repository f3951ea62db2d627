"""A client that waits by the rules of the client library itself: its paths, looks and operations.

What drives them here is in `dflockd.client`, where the sockets are: how bytes travel, who is asked how
long. What is held is kept as any other client does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflockd import errors
from dflockd.address import Seeds, parse_servers
from dflockd.client import operations
from dflockd.client.connection import LEAST_PATIENCE, SILENCE
from dflockd.client.operations import (
    GRACE,
    Answer,
    Exchange,
    Grant,
    Operation,
    Progress,
    ShardReport,
    Target,
)
from dflockd.client.routing import (
    Ask,
    Load,
    Outcome,
    Path,
    Pause,
    Ping,
    ShardMap,
    glance,
    pursue,
)
from dflockd.wire import (
    Reply,
    Request,
    RequestReader,
    Status,
    TimedOut,
    encode_reply,
    fence_from_token,
)
from tests.dflockd.cluster.simulation.client import Client, Life
from tests.dflockd.cluster.simulation.machines import SERVERS, Clock, Connection, Key

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.world import World

LATE = GRACE + 3.0
"""Seconds beyond a client's time that its wait may take: several servers may hang."""


class LibraryClient(Client):
    """Takes locks as the library does, and is told that one is held only by a server."""

    timeouts = (0, 0.4, 2.3, 8)

    def __init__(
        self, world: World, name: str, clock: Clock, errand: Callable[..., Life] | None = None
    ) -> None:
        super().__init__(world, name, clock, errand)
        seeds = parse_servers("cluster://" + ",".join(SERVERS[:2]))
        assert isinstance(seeds, Seeds)
        self._map = ShardMap(seeds)
        self._replies: dict[Connection, Reply | None] = {}
        self._was_told = False
        self._stops = 0

    def remember(self, shard: int, server: str) -> None:
        super().remember(shard, server)
        owners = [0] * self.world.parameters.num_shards
        self._map.update(ShardReport([parse(server)], owners, owners), parse(server), self.now)

    def stop(self, seconds: float) -> None:
        self._stops += 1
        super().stop(seconds)

    def _sleep(self, seconds: float) -> Life:
        until = self.now + seconds
        while self.now < until:
            event = yield until
            if event is not None:
                self._replies[event[0]] = event[1]

    def _use(self, key: Key, timeout: float, lease: int) -> Life:
        hold = self.world.random.choice((0.1, 0.5, 3, 9) if not self.world.calm else (0.2,))
        return (yield from self.use(self.acquire, key, timeout, lease, hold))

    def use(
        self, take: Callable[..., Life], key: Key, timeout: float, lease: int, hold: float
    ) -> Life:
        grant: Grant | None = yield from take(key, timeout, lease)
        if grant is None or self.now >= grant.deadline:
            self._hang_up()
            return False
        until = self.clock.true(grant.deadline)
        self.world.believe(self, key, fence_from_token(grant.token), until)
        sent = grant.deadline - grant.lease
        yield from self._hold(key, grant.token, lease, sent, grant.deadline, self.now + hold)
        self._hang_up()
        return True

    def acquire(self, key: Key, timeout: float, lease: int) -> Life:
        """Take a lock; judge what this side makes of what servers say, and how long it takes."""
        started, stops, world = self.clock.read(), self._stops, self.world
        self._was_told = False
        self._replies.clear()
        grant = None
        try:
            grant = yield from self._acquire(key, timeout, lease)
        except errors.RemoteError as exc:
            world.counts["not answered"] += 1
            world.log(self.name, "%s", exc)
        else:
            if grant is None:
                world.counts["told that it is held"] += 1
                if not self._was_told:
                    raise world.violation(
                        f"{self.name} takes {key.name.decode()} for held, and no server has said so"
                    )
        took = self.clock.read() - started
        if stops == self._stops and took > timeout + LATE:
            raise world.violation(f"{self.name} was to wait for {timeout} s, and took {took:.1f}")
        return grant

    def _acquire(self, key: Key, timeout: float, lease: int) -> Life:
        progress, until = Progress(), self.now + timeout + GRACE
        target = Target(*key, lease, "", progress=progress)

        def look(is_waiting: bool) -> Life:
            server = parse(self.owners[self._shard(key)][0])
            path = glance(self._map, key.name, server, is_waiting, self.now)
            return (yield from self._follow(path, found))

        def attempt(step: Ask) -> Life:
            self.owners[self._shard(key)] = str(step.server), 0
            rules = self.world.rules
            operation = rules.acquires(target, step.timeout)
            looks, limit = look if rules.looks else None, until if rules.gives_up else None
            running = self._run(operations.kept(operation), self._connect(key), limit, looks)
            return operations.raised((yield from running))

        path = pursue(self._map, key.name, self.now + timeout, self.now)
        return (yield from self._follow(path, attempt))

    def _follow(self, path: Path, attempt: Callable[[Ask], Life]) -> Life:
        step = next(path)
        while True:
            error, report = None, None
            try:
                if isinstance(step, Ask):
                    return (yield from attempt(step))
                if isinstance(step, Pause):
                    yield from self._sleep(step.seconds)
                else:
                    report = yield from self._question(step)
            except errors.RemoteError as exc:
                error = exc
            step = path.send(Outcome(self.now, error, report))

    def _question(self, step: Load | Ping) -> Life:
        server = self.world.servers[str(step.server)]
        connection = Connection(self, server)
        connection.broken = not server.alive
        operation: Operation[Any] = operations.ping(str(step.server))
        patience = operations.PING_PATIENCE
        if isinstance(step, Load):
            operation, patience = operations.shards(str(step.server)), step.patience
        try:
            return (yield from self._run(operation, connection, self.now + patience, None))
        finally:
            self.outbox.append((connection.close, ()))

    def _run(
        self,
        operation: Operation[Any],
        connection: Connection,
        until: float | None,
        look: Callable[[bool], Life] | None,
    ) -> Life:
        try:
            exchange = next(operation)
            while True:
                exchange = operation.send(
                    (yield from self._exchange(exchange, connection, until, look))
                )
        except StopIteration as stop:
            return stop.value
        except errors.RemoteError:
            self._close(connection)
            raise

    def _exchange(
        self,
        exchange: Exchange,
        connection: Connection,
        until: float | None,
        look: Callable[[bool], Life] | None,
    ) -> Life:
        sent = self.now
        self._replies.pop(connection, None)
        self.outbox.append((connection.send, (_requests(exchange.request),)))
        limit = math.inf if exchange.patience is None else sent + exchange.patience
        if until is not None:
            limit = min(limit, max(until, sent + LEAST_PATIENCE))
        look_at = math.inf if look is None else sent + SILENCE
        while connection not in self._replies:
            if self.now >= limit:
                self.world.counts["silence"] += 1
                if exchange.timeout_is_reply:
                    self._close(connection)
                    return Answer(b"timeout", self.now, self.now)
                raise errors.UnreachableError(f"{connection.server.name} says nothing")
            if look is not None and self.now >= look_at:
                look_at = (yield from look(exchange.waits)) + self.now
                continue
            event = yield min(limit, look_at)
            if event is not None:
                self._replies[event[0]] = event[1]
        reply = self._replies.pop(connection)
        if reply is None:
            raise errors.UnreachableError(f"the connection to {connection.server.name} broke")
        self._was_told |= reply is Status.TIMEOUT or isinstance(reply, TimedOut)
        return Answer(encode_reply(reply).removesuffix(b"\n"), sent, self.now)

    def _close(self, connection: Connection) -> None:
        self.outbox.append((connection.close, ()))
        if self._connection is connection:
            self._connection = None


def parse(server: str) -> Any:
    """Return an address."""
    [address] = parse_servers([server])
    return address


def found(step: Ask) -> Life:
    """Return what a look has found, without asking anybody."""
    return step.timeout
    yield


def _requests(data: bytes) -> list[Request]:
    reader, requests = RequestReader(), []
    reader.receive(data)
    while (request := reader.next_request()) is not None:
        requests.append(request)
    return requests
