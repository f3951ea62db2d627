"""Clients that go away from a queue, and come back."""

from __future__ import annotations

from dflockd.table import LockTable, Peer
from dflockd.wire import Acquire, Enqueue, Release, Request, Reserve, Status, TimedOut, Wait
from tests.dflockd.table.rules_support import LOCK, reply_to, table_of, take


def go_away(
    table: LockTable, now: float = 0.0, *, away: int = 5000, hold: int = 2000, key: bytes = b"k"
) -> bytes:
    """Queue for a lock that is held, leave until `away` has passed; return the name of the position."""
    peer = table.connect()
    assert reply_to(table, peer, Enqueue(LOCK, key, 1, None), now) is Status.QUEUED
    kept = reply_to(table, peer, Wait(LOCK, key, 0, reserve=Reserve(away, hold)), now)
    assert isinstance(kept, TimedOut)
    assert table.disconnect(peer, now, clean=True) == []
    return kept.ticket


def come_back(table: LockTable, ticket: bytes, now: float, key: bytes = b"k") -> object:
    return come_back_as(table, table.connect(), ticket, now, key)


def come_back_as(
    table: LockTable, peer: Peer, ticket: bytes, now: float, key: bytes = b"k"
) -> object:
    return reply_to(table, peer, Enqueue(LOCK, key, 1, None, ticket=ticket), now)


def queue_up(table: LockTable, now: float = 0.0, timeout: int = 100) -> Peer:
    peer = table.connect()
    assert table.handle(peer, Acquire(LOCK, b"k", 1, timeout, None), now) == []
    return peer


def held_table(**limits: int) -> tuple[LockTable, Peer, Request]:
    """Return a table with a lock that is held, its holder and the end of that."""
    table = table_of(**limits)
    holder = table.connect()
    return table, holder, Release(LOCK, b"k", take(table, holder, b"k", 1000))
