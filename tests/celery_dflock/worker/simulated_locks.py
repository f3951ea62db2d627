"""The lock server's own table, and connections to it, without processes and without waiting."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from dflockd.client.pending import TURN_MS
from dflockd.table import Effect, Limits, LockTable, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueue,
    FairGroup,
    Granted,
    Hello,
    Next,
    Owner,
    Pass,
    Queued,
    Rate,
    Release,
    Reply,
    Request,
    Space,
    Status,
    Wait,
    YourTurn,
)

WIRE = 0.001
"""Seconds that anything takes to get from one to another."""

START = 0.01
"""Seconds from a process's accepting a task to its asking for the lock."""

LOCK = Space.LOCK


class Clock:
    """The time, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def after(self, seconds: float, function: Callable[..., object], *args: Any) -> SimpleNamespace:
        entry = SimpleNamespace(is_cancelled=False)
        job = partial(self._unless_cancelled, entry, partial(function, *args))
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), job))
        return entry

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Go on until something is so; `False` if it is not after so many seconds."""
        while self._events and not until():
            at, _, job = heapq.heappop(self._events)
            if at > seconds:
                return False
            self.now = max(self.now, at)
            job()
        return until()

    @staticmethod
    def _unless_cancelled(entry: SimpleNamespace, function: Callable[[], object]) -> None:
        if not entry.is_cancelled:
            function()


class Server:
    """The table, with the timer of its server."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.table = LockTable(Limits(max_locks=1000), TokenIssuer(b"secret", 0))
        self.connections: dict[int, Connection] = {}
        self._timer: SimpleNamespace | None = None

    def carry_out(self, effects: list[Effect]) -> None:
        for number, reply in effects:
            self.clock.after(WIRE, self.connections[number].hear, reply)
        if self._timer is not None:
            self._timer.is_cancelled = True
        due = self.table.next_deadline()
        if due is not None:
            self._timer = self.clock.after(max(0.0, due - self.clock.now), self._advance)

    def _advance(self) -> None:
        self.carry_out(self.table.advance(self.clock.now))


class Connection:
    """One connection of a client: one request after the other."""

    def __init__(self, server: Server, instance: str) -> None:
        self.server, self.peer = server, server.table.connect()
        server.connections[self.peer.id] = self
        server.table.greet(self.peer, Hello(instance.encode(), b"0.1.0"))
        self.is_closed = False
        self._asked: deque[tuple[Request, Callable[[Any], object]]] = deque()

    def ask(self, request: Request, then: Callable[[Any], object] = bool) -> None:
        self._asked.append((request, then))
        if len(self._asked) == 1:
            self.server.clock.after(WIRE, self._arrive)

    def hear(self, reply: Reply) -> None:
        if self.is_closed:
            return
        _, then = self._asked.popleft()
        if self._asked:
            self.server.clock.after(WIRE, self._arrive)
        then(reply)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.server.clock.after(WIRE, self._end)

    def _arrive(self) -> None:
        if not self.is_closed:
            server, (request, _) = self.server, self._asked[0]
            server.carry_out(server.table.handle(self.peer, request, server.clock.now))

    def _end(self) -> None:
        table, now = self.server.table, self.server.clock.now
        self.server.carry_out(table.disconnect(self.peer, now, clean=True))


class Wanted:
    """What a task says of the lock that it wants."""

    def __init__(
        self,
        key: bytes,
        limit: int,
        group: bytes | None,
        rate: int | None,
        owner: Owner | None,
        weight: int = 1,
    ) -> None:
        self.key, self.limit = key, limit
        self.group = None
        if group is not None or weight > 1:
            self.group = FairGroup(group or b"", weight=weight)
        self.slots = min(weight, limit)
        self.rate = None if rate is None else Rate(rate, 1000)
        self.owner = owner

    def said(self) -> dict[str, Any]:
        return {"rate": self.rate, "owner": self.owner, "group": self.group}


class Lock:
    """One lock of a task that needs several, as its worker has it."""

    ticket = ""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.key = wanted.key.decode()
        self.token = b""
        self.connection: Connection | None = None

    @property
    def held(self) -> bool:
        return bool(self.token)

    def lend(self) -> str:
        token, self.token = self.token.decode(), b""
        return token

    def give_back(self) -> None:
        if self.token and self.connection is not None:
            self.connection.ask(Release(LOCK, self.wanted.key, self.token))
            self.token = b""

    def abandon(self) -> None:
        if self.connection is not None:
            self.connection.server.clock.after(2 * WIRE, self.connection.close)


class Pending:
    """One position of a worker's consumer."""

    def __init__(
        self, waits: Waits, lock: Any, told: Any, ended: Any, ticket: str, takes: bool = False
    ) -> None:
        wanted = lock.wanted
        self.waits, self.wanted, self._told, self._ended = waits, wanted, told, ended
        self.lock = lock
        self.ticket, self.is_told, self.is_handed, self.left = ticket, False, False, False
        self.connection = Connection(waits.server, waits.instance)
        if takes:
            request = Acquire(LOCK, wanted.key, wanted.limit, 100_000, 600, **wanted.said())
            self.connection.ask(request, self._granted)
            return
        more = {**wanted.said(), "ticket": ticket.encode(), "turn": TURN_MS}
        request = Enqueue(LOCK, wanted.key, wanted.limit, 60, **more)
        self.connection.ask(request, self._queued)

    def _granted(self, reply: Reply) -> None:
        if not isinstance(reply, Granted):
            self._end(reply)
        elif self.left:
            self.connection.close()
        else:
            self.lock.token, self.lock.connection = reply.token, self.connection
            self._told()

    def _queued(self, reply: Reply) -> None:
        if not isinstance(reply, Queued):
            self._end(reply)
            return
        self.ticket = reply.ticket.decode()
        self.waits.positions[self.ticket] = self
        self.connection.ask(Wait(LOCK, self.wanted.key, 100_000), self._end)
        if self.ticket in self.waits.early:
            self.waits.early.discard(self.ticket)
            self.tell()

    def _end(self, reply: Reply) -> None:
        self.waits.positions.pop(self.ticket, None)
        if not self.is_handed and not self.left:
            assert reply is not Status.NOT_ENQUEUED
            self._ended(reply)

    def tell(self) -> None:
        self.is_told = True
        self._told()

    def hand_over(self) -> str | None:
        self.is_handed = self.is_told
        return self.ticket if self.is_told else None

    def pass_on(self) -> None:
        if self.is_told and not self.is_handed:
            self.is_told = False
            self.waits.passed += 1
            request = Pass(self.wanted.key, self.ticket.encode())
            Connection(self.waits.server, self.waits.instance).ask(request)

    def leave(self) -> None:
        self.left = True
        self.waits.positions.pop(self.ticket, None)
        if getattr(self.lock, "connection", None) is not self.connection:  # else it is held
            self.connection.close()


class Waits:
    """`PendingAcquires` of one worker: what it promises, in this world."""

    def __init__(self, server: Server, instance: str) -> None:
        self.server, self.instance = server, instance
        self.control: Connection | None = None
        self.positions: dict[str, Pending] = {}
        self.early: set[str] = set()
        self.is_asked = False
        self.passed = 0
        """Turns that could not be used."""

    def join(
        self, lock: Any, _timeout: object, *, told: Any, ended: Any, takes: bool, **_: Any
    ) -> Pending:
        return Pending(self, lock, told, ended, lock.ticket, takes)

    def ask(self) -> None:
        if not self.is_asked:
            self.is_asked = True
            if self.control is None:
                self.control = Connection(self.server, self.instance)
            self.control.ask(Next(), self._hear)

    def _hear(self, reply: Reply) -> None:
        assert isinstance(reply, YourTurn)
        self.is_asked = False
        pending = self.positions.get(reply.ticket.decode())
        if pending is None:
            self.early.add(reply.ticket.decode())
        if pending is None or pending.left or pending.is_handed:
            self.ask()
        else:
            pending.tell()

    def close(self) -> None:
        pass
