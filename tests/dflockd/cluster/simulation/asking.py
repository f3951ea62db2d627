"""How a simulated client asks: whom, on what connection, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from dflockd.shards import get_shard_id
from dflockd.wire import Acquire, Moved, Recovering, Reply, Request
from tests.dflockd.cluster.simulation.machines import PATIENCE, SERVERS, Connection, Key, Process


class Answer(NamedTuple):
    """A reply, with the local times at which the request left and it came."""

    reply: Reply
    sent: float
    received: float


Life = Generator[float, "tuple[Connection, Reply | None] | None", Any]
"""Waits until a local time; resumed with what came before, or with ``None`` at that time."""


class Asking(Process):
    """A process that asks servers, and follows where they send it."""

    def _ask_on(self, key: Key, request: Request, until: float) -> Life:
        return (yield from self._pursue(key, lambda: request, until, [b""]))

    def _pursue(
        self, key: Key, begin: Callable[[], Request], until: float, place: list[bytes]
    ) -> Life:
        """Ask whoever is in charge; return the answer, or ``None`` when there was none in time."""
        refusals = 0
        while True:
            asked = begin()
            waits = asked.timeout if isinstance(asked, Acquire) else 0
            answer = yield from self._ask(self._connect(key), asked, waits + PATIENCE)
            if answer is None:
                self.owners.pop(self._shard(key), None)
                if self._connection is not None:
                    self._old.append(self._connection)
                    self._connection = None
            elif isinstance(answer.reply, Moved):
                self.world.counts["moved"] += 1
                place[0] = answer.reply.ticket or place[0]
                if self._learn(answer.reply) and refusals < 5:
                    refusals += 1
                    if self.now < until:
                        continue
            elif isinstance(answer.reply, Recovering):
                self.world.counts["told to wait"] += 1
                refusals += 1
                if refusals % 4 == 0:
                    self.owners.pop(self._shard(key), None)
            else:
                return answer
            if self.now >= until:
                return None
            yield from self._sleep(min(self.world.random.uniform(0.05, 0.2), until - self.now))

    def _ask(self, connection: Connection, request: Request, patience: float) -> Life:
        sent = self.now
        self.outbox.append((connection.send, (request,)))
        while self.now < sent + patience:
            event = yield sent + patience
            if event is not None and event[0] is connection:
                return Answer(event[1], sent, self.now) if event[1] is not None else None
        return None

    def _shard(self, key: Key) -> int:
        return get_shard_id(key.name, self.world.parameters.num_shards)

    def _learn(self, moved: Moved) -> bool:
        server, epoch = moved.server.decode(), moved.epoch
        if epoch < self.owners.get(moved.shard, ("", 0))[1]:
            return False
        self.owners[moved.shard] = server, epoch
        return True

    def _connect(self, key: Key) -> Connection:
        shard = self._shard(key)
        if shard not in self.owners:
            # Any server knows, or seems to.
            record = self.world.random.choice(self.world.running()).node.view.records[shard]
            self.owners[shard] = (record.node or self.world.random.choice(SERVERS)), 0
        server = self.world.servers[self.owners[shard][0]]
        if self._connection is None or self._connection.server is not server:
            if self._connection is not None:
                self._old.append(self._connection)
            self._connection = Connection(self, server)
            if not server.alive:
                self._connection.broken = True
        return self._connection

    def _hang_up(self) -> None:
        self.world.forget(self)
        for connection in [*self._old, *filter(None, [self._connection])]:
            self.outbox.append((connection.close, ()))
        self._old.clear()
        self._connection = None
