"""The counts of a table agree with what is in it, whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from dflockd.table import Histogram, Limits, LockTable, Peer, ShardTable, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueue,
    Evict,
    How,
    Next,
    Pass,
    Release,
    Renew,
    Request,
    Reserve,
    Space,
    Wait,
)
from tests.dflockd.table.sharded_support import AWAY, Shards
from tests.dflockd.table.turns_support import process

KEYS = [b"a", b"b", b"c"]


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert len(histogram) == 5
    assert histogram.sum == 8


def some_request(dice: random.Random, table: LockTable, peer: Peer) -> Request:
    space, key = dice.choice(list(Space)), dice.choice(KEYS)
    limit = dice.choice([1, 1, 1, 2]) if space is Space.LOCK else 2
    entries = [e for group in table.each_partition() for e in group.spaces[space].values()]
    held = [hold for entry in entries for hold in entry.holds.values()]
    token = dice.choice(held).token if held and dice.random() < 0.9 else b"0" * 32
    fence = dice.choice(held).fence if held else 1
    away = [name for group in table.each_partition() for name in group.reserved]
    entry_key = next((h.entry.key for h in held if h.token == token or h.fence == fence), key)
    placed = dice.choice(list(peer.enqueued) or [(space, key)])
    reserve = Reserve(dice.choice([0, 1000]), dice.choice([0, 1000]))
    more: dict[str, Any] = {}
    if space is Space.LOCK and dice.random() < 0.3:
        more["ticket"] = dice.choice(away) if away else b"0"
    wants_turn = space is Space.LOCK and dice.random() < 0.3
    turn = dice.choice([0, 500, 2000]) if wants_turn else None
    leaves = reserve if dice.random() < 0.7 else None
    return dice.choice(
        [
            *[Wait(*placed, dice.choice([0, 2]), leaves if placed[0] == 0 else None)] * 3,
            Acquire(space, key, limit, dice.choice([0, 1, 3]), dice.choice([1, 2, 5]), **more),
            Enqueue(space, key, limit, dice.choice([1, 5]), turn=turn, **more),
            Wait(space, key, dice.choice([0, 2])),
            Pass(key, dice.choice(away) if away else b"0"),
            Next(),
            Release(space, entry_key, token),
            Renew(space, entry_key, token, 3),
            Renew(space, entry_key, token, 4, How.DETACH),
            Evict(space, entry_key, fence),
        ]
    )


def agree(table: LockTable) -> None:
    entries = [e for g in table.each_partition() for space in g.spaces for e in space.values()]
    assert len(table) == len(entries)
    assert table.counts.holding == sum(len(entry.holds) for entry in entries)
    waiting = {waiter for entry in entries for waiter in entry.waiters or ()}
    waiting |= {waiter for group in table.each_partition() for waiter in group.reserved.values()}
    assert table.counts.waiting == len(waiting)
    queues = [entry.waiters for entry in entries if entry.waiters is not None]
    assert all(queue.away == sum(waiter.is_away for waiter in queue) for queue in queues)
    assert len(table.slots.reservations) == sum(waiter.is_away for waiter in waiting)


def step(dice: random.Random, table: LockTable, peers: list[Peer], now: float) -> None:
    peer = dice.choice(peers)
    if dice.random() < 0.03:
        table.disconnect(peer, now, clean=dice.random() < 0.5)
        peers.remove(peer)
        peers.append(process(table, dice.choice([b"here", b"there"])))
    elif peer.waiting is not None:
        table.advance(now)
    else:
        table.handle(peer, some_request(dice, table, peer), now)


COUNTED = (
    *("parted", "left", "released", "expired", "evicted", "timed_out", "busy", "unknown", "full"),
    "kept",
)


def test_what_is_counted_is_what_is_there() -> None:
    everything: Counter[str] = Counter()
    for seed in range(20):
        dice = random.Random(seed)
        limits = Limits(max_locks=4, max_waiters=3, orphan_ttl=dice.choice([0, 1]))
        table = LockTable(limits, TokenIssuer(b"secret", 1))
        now = 1000.0
        peers = [process(table, name) for name in (b"here", b"there") * 3]
        for _ in range(1000):
            now += dice.choice([0, 0.01, 0.3])
            step(dice, table, peers, now)
            agree(table)
        counts = table.counts
        for name in COUNTED:
            everything[name] += getattr(counts, name)
        everything["waited"] += len(counts.waited)
        everything["renewed"] += len(counts.renewed)
        assert len(counts.held) == sum(counts.held.counts)

        table.drain(now)
        table.advance(now + 100)
        assert (counts.holding, counts.waiting) == (0, 0)
        everything["forgotten"] += counts.forgotten
    assert min(everything.values()) > 10, everything


def test_shards_take_their_numbers_along() -> None:
    dice = random.Random(7)
    shards = Shards(KEYS.index)
    tables = [ShardTable(Limits(), TokenIssuer(b"secret", 1), shards) for _ in range(2)]
    now = 1000.0
    for table in tables:
        table.serve_until(now + 1e6, now)
    owners, epoch = dict.fromkeys(range(3), 0), 1
    for shard in owners:
        tables[0].open(shard, epoch << 40)
    everyone = [[table.connect() for _ in range(6)] for table in tables]
    handed_over = 0
    for _ in range(3000):
        now += dice.choice([0, 0.01, 0.3])
        table, peers = dice.choice(list(zip(tables, everyone, strict=True)))
        step(dice, table, peers, now)
        if dice.random() < 0.02:
            shard = dice.choice(list(owners))
            old, new = tables[owners[shard]], tables[1 - owners[shard]]
            snapshot = old.freeze(shard, now)
            old.drop(shard, AWAY)
            owners[shard] = 1 - owners[shard]
            epoch += 1
            new.open(shard, epoch << 40)
            new.load(shard, snapshot, now)
            handed_over += len(snapshot.holds) + len(snapshot.waiters)
        for table in tables:
            agree(table)
    assert handed_over > 20
    assert all(table.counts.dropped and table.counts.returned for table in tables)
