"""A table, and what is asked of it, in few words."""

from __future__ import annotations

import json

from dflockd.table import Effect, HoldRecord, Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import Acquire, Granted, Inspect, Request, Space

LOCK = Space.LOCK

SEMAPHORE = Space.SEMAPHORE


def table_of(**limits: int) -> LockTable:
    return LockTable(Limits(**limits), TokenIssuer(b"secret", 0))


def take(table: LockTable, peer: Peer, key: bytes, lease: int | None = None) -> bytes:
    ((_, reply),) = table.handle(peer, Acquire(LOCK, key, 1, 0, lease), 0.0)
    assert isinstance(reply, Granted)
    return reply.token


def answers(effects: list[Effect]) -> list[tuple[int, type]]:
    return [(peer, type(reply)) for peer, reply in effects]


def inspected(table: LockTable, peer: Peer, key: bytes, now: float, space: Space = LOCK) -> dict:
    [(_, reply)] = table.handle(peer, Inspect(space, key), now)
    return json.loads(reply.json)


def recovering(
    seconds: float = 10.0, holds: tuple[HoldRecord, ...] = ()
) -> tuple[LockTable, Peer, Peer]:
    """Return a table that has forgotten holds, and two peers."""
    table = LockTable(Limits(), TokenIssuer(b"secret", 1000), kept=True)
    table.restore(holds, 0.0)
    table.recover(seconds)
    return table, table.connect(), table.connect()


def reply_to(table: LockTable, peer: Peer, request: Request, now: float = 1.0) -> object:
    ((number, reply),) = table.handle(peer, request, now)
    assert number == peer.id
    return reply
