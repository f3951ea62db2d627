"""Who wants to be told of a turn, in few words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from dflockd.table import Effect, Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueue,
    Granted,
    Owner,
    Release,
    Request,
    Resume,
    Space,
    Status,
    Turn,
    Wait,
    YourTurn,
)
from tests.collector import collector_off

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE

HOLD = 2.0


def table_of(**limits: int) -> LockTable:
    return LockTable(Limits(max_locks=10_000, **limits), TokenIssuer(b"secret", 0), kept=True)


def ask(table: LockTable, peer: Peer, request: Request, now: float = 0.0) -> object:
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


def want(
    table: LockTable,
    now: float = 0.0,
    space: Space = LOCK,
    limit: int = 1,
    peer: Peer | None = None,
) -> tuple[Peer, object]:
    """Somebody who wants to be told."""
    peer = peer or table.connect()
    assert ask(table, peer, Turn(int(HOLD * 1000)), now) is Status.OK
    return peer, ask(table, peer, Enqueue(space, b"k", limit, 600), now)


def told(table: LockTable, now: float = 0.0) -> tuple[Peer, bytes]:
    """Somebody who was told at once."""
    peer, reply = want(table, now)
    assert isinstance(reply, YourTurn)
    return peer, reply.ticket


def blocked(table: LockTable, now: float = 0.0) -> Peer:
    """Somebody who waits to be told."""
    peer, reply = want(table, now)
    assert reply is Status.QUEUED
    assert ask(table, peer, Wait(LOCK, b"k", 60), now) is None
    return peer


def take_up(table: LockTable, ticket: bytes, now: float = 0.0, timeout: int = 60) -> object:
    peer = table.connect()
    ask(table, peer, Resume(ticket), now)
    return ask(table, peer, Acquire(LOCK, b"k", 1, timeout, 600), now)


def kinds(effects: list[Effect]) -> list[tuple[int, type]]:
    return [(number, type(reply)) for number, reply in effects]


def run(table: LockTable, attempt: int = 1, instance: bytes = b"") -> Peer:
    peer = table.connect()
    ask(table, peer, Owner(b"run", attempt, instance))
    return peer


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
