"""Tables with shards, and what moves one from one to the other."""

from __future__ import annotations

from collections.abc import Callable

from dflockd.table import Effect, Limits, Peer, ShardTable, TokenIssuer
from dflockd.wire import Acquire, Granted, MapReport, Moved, Refusal, Report, Space
from tests.dflockd.table.turns_support import ask

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE

AWAY = Moved(1, 7, b"other:1")

FOR_LONG = 1e9


class Shards:
    """Which shard a key is of, and who has those that are not here."""

    def __init__(self, shard_of: Callable[[bytes], int], elsewhere: Refusal = AWAY) -> None:
        self._shard_of = shard_of
        self.elsewhere = elsewhere

    def shard_of(self, key: bytes) -> int:
        return self._shard_of(key)

    def refer(self, shard: int) -> Refusal:
        return self.elsewhere

    def report(self, now: float) -> MapReport:
        return MapReport(b"%d" % now, Report(b"{}"), Report(b'{"zlib":""}'))


def two_shards(elsewhere: Refusal = AWAY) -> Shards:
    """Keys that begin with ``1`` are in shard 1, all others in shard 0."""
    return Shards(lambda key: int(key.startswith(b"1")), elsewhere)


def table_of(serving_lease: float = FOR_LONG, *shards: int, **limits: int) -> ShardTable:
    table = ShardTable(Limits(**limits), TokenIssuer(b"secret", 0), two_shards())
    table.serve_until(serving_lease, 0)
    for shard in shards or (0, 1):
        table.open(shard, 1 << 40)
    return table


def take(table: ShardTable, peer: Peer, key: bytes, lease: int = 10, now: float = 0) -> bytes:
    reply = ask(table, peer, Acquire(LOCK, key, 1, 0, lease), now)
    assert isinstance(reply, Granted)
    return reply.token


def wait_for(table: ShardTable, key: bytes, *, timeout: int = 60, now: float = 0) -> Peer:
    peer = table.connect()
    assert ask(table, peer, Acquire(LOCK, key, 1, timeout, 10), now) is None
    return peer


def hand_over(old: ShardTable, new: ShardTable, shard: int, now: float = 0) -> list[Effect]:
    snapshot = old.freeze(shard, now)
    effects, _ = old.drop(shard, AWAY)
    new.open(shard, 2 << 40)
    new.load(shard, snapshot, now)
    return effects


def tickets_of(effects: list[Effect]) -> dict[int, bytes]:
    found = {}
    for number, reply in effects:
        assert isinstance(reply, Moved)
        found[number] = reply.ticket
    return found


def resume(
    table: ShardTable, ticket: bytes, key: bytes, now: float = 0
) -> tuple[Peer, list[Effect]]:
    peer = table.connect()
    return peer, table.handle(peer, Acquire(LOCK, key, 1, 60, 10, ticket=ticket), now)


def assert_empty(table: ShardTable) -> None:
    assert len(table) == 0
    assert len(table.slots.reservations) == 0
    assert not table.slots.withheld
    assert not any(group.reserved for group in table.each_partition())
    assert len(table.deadlines) == 0
    assert all(not any(group.spaces) for group in table.partitions.values())
    for peer in table.connections.peers.values():
        assert (peer.holds, peer.enqueued, peer.waiting) == ({}, {}, None)


def forget_all(table: ShardTable) -> None:
    for peer in list(table.connections.peers.values()):
        table.disconnect(peer, 1e6, clean=True)
    table.advance(2e6)
    assert not table.connections.peers
    assert_empty(table)


def queue_of(table: ShardTable) -> list[bytes | Peer]:
    """Who is in the queue: the names of positions that nobody is at, and peers."""
    waiters = table.partitions[0].spaces[LOCK][b"a"].waiters or ()
    return [waiter.ticket if waiter.reservation else waiter.peer for waiter in waiters]
