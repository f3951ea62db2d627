"""Who wants to be told of a turn, in few words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from dflockd.table import Effect, Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueue,
    Granted,
    Hello,
    Next,
    Owner,
    Queued,
    Release,
    Renew,
    Request,
    Space,
    Wait,
    YourTurn,
)
from tests.collector import collector_off

LOCK = Space.LOCK

HOLD = 2.0


def table_of(**limits: int) -> LockTable:
    return LockTable(Limits(max_locks=10_000, **limits), TokenIssuer(b"secret", 0), kept=True)


class Run(NamedTuple):
    """An attempt of a run, on a connection of its process."""

    peer: Peer
    owner: Owner
    label: bytes = b""

    def by(self, request: Request) -> Request:
        """Have it ask."""
        if isinstance(request, Acquire | Enqueue | Renew):
            return request._replace(owner=self.owner, label=self.label)
        return request._replace(age=self.owner.age) if isinstance(request, Wait) else request


def ask(table: LockTable, who: Peer | Run, request: Request, now: float = 0.0) -> object:
    peer, request = (who.peer, who.by(request)) if isinstance(who, Run) else (who, request)
    replies = [reply for number, reply in table.handle(peer, request, now) if number == peer.id]
    return replies[-1] if replies else None


def lock(table: LockTable, now: float = 0.0, timeout: int = 60) -> tuple[Peer, object]:
    peer = table.connect()
    return peer, ask(table, peer, Acquire(LOCK, b"k", 1, timeout, 600), now)


def hold(table: LockTable) -> tuple[Peer, Release]:
    """A holder, and what ends that."""
    peer, reply = lock(table)
    assert isinstance(reply, Granted)
    return peer, Release(LOCK, b"k", reply.token)


def process(table: LockTable, instance: bytes = b"") -> Peer:
    """A connection of a process, by default of a new one."""
    peer = table.connect()
    assert table.greet(peer, Hello(instance or b"process-%d" % peer.id, b"0.1.0"))
    return peer


def want(
    table: LockTable,
    now: float = 0.0,
    limit: int = 1,
    who: Peer | Run | None = None,
    key: bytes = b"k",
) -> tuple[Peer, object]:
    """Somebody who wants to be told, by default of a process of its own."""
    who = who or process(table)
    reply = ask(table, who, Enqueue(LOCK, key, limit, 600, turn=int(HOLD * 1000)), now)
    return who.peer if isinstance(who, Run) else who, reply


def ticket_of(reply: object) -> bytes:
    assert isinstance(reply, Queued)
    return reply.ticket


def blocked(
    table: LockTable, now: float = 0.0, who: Peer | Run | None = None
) -> tuple[Peer, bytes]:
    """Somebody who waits, and the ticket of its position."""
    peer, reply = want(table, now, who=who)
    assert ask(table, peer, Wait(LOCK, b"k", 60), now) is None
    return peer, ticket_of(reply)


def asks(table: LockTable, peer: Peer, now: float = 0.0) -> tuple[Peer, object]:
    """Have the process of a connection ask whose turn it is: on which one, and what the answer is."""
    other = process(table, peer.instance)
    return other, ask(table, other, Next(), now)


def told(table: LockTable, now: float = 0.0) -> tuple[Peer, bytes]:
    """Somebody who is told at once."""
    peer, reply = want(table, now)
    ticket = ticket_of(reply)
    assert asks(table, peer, now)[1] == YourTurn(ticket)
    return peer, ticket


def take_up(table: LockTable, ticket: bytes, now: float = 0.0, timeout: int = 60) -> object:
    peer = table.connect()
    return ask(table, peer, Acquire(LOCK, b"k", 1, timeout, 600, ticket=ticket), now)


def kinds(effects: list[Effect]) -> list[tuple[int, type]]:
    return [(number, type(reply)) for number, reply in effects]


def run(table: LockTable, attempt: int = 1, instance: bytes = b"", name: bytes = b"run") -> Run:
    return Run(process(table, instance), Owner(name, attempt))


def calls(step: Callable[[], object]) -> int:
    """How many functions a step calls; not those that the garbage collector calls meanwhile."""
    count = 0

    def profile(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with collector_off():
        sys.setprofile(profile)
        try:
            step()
        finally:
            sys.setprofile(None)
    return count
