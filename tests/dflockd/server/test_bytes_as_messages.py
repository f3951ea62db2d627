"""A server does with bytes what the table does with the messages in them, one by one.

Sessions take requests for a slot from the bytes straight to the table. Here the same bytes go to a
second table by way of a message each, and after each step replies, changes, and all that the tables
hold are compared.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from dflockd.table import Limits, LockTable, ShardTable, TokenIssuer
from dflockd.wire import Moved
from tests.dflockd.server.both_ways import CONNECTIONS, Both, Clock, three_shards


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("dflockd.clock.now", clock)
    return clock


def some_limits(dice: random.Random) -> Limits:
    return Limits(
        default_lease=3,
        max_lease=20,
        max_locks=dice.choice([2, 100]),
        max_waiters=dice.choice([0, 0, 1]),
        max_holds=dice.choice([0, 1, 2, 10_000]),
        orphan_ttl=dice.choice([0, 1]),
    )


SEEN = [b"ok", b"acquired", b"queued", b"timeout", b"turn", b"error"]
SEEN += [b"error_owner", b"error_max_locks", b"error_max_waiters", b"error_max_holds"]
SEEN += [b"error_limit_mismatch", b"error_already_enqueued", b"error_not_enqueued"]
SEEN += [b"error_lease_expired", b"error_recovering", b"error_superseded", b"hello"]


def histories(number: int) -> list[Any]:
    """So many, and twenty times as many in the soak."""
    return [range(number), pytest.param(range(number, 20 * number), marks=pytest.mark.soak)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", histories(15), ids=len)
async def test_bytes_do_what_their_messages_do(clock: Clock, seeds: range) -> None:
    seen: Counter[bytes] = Counter()
    for seed in seeds:
        dice = random.Random(seed)
        limits = some_limits(dice)
        tables = [LockTable(limits, TokenIssuer(b"s", 1000), kept=seed % 3 > 0) for _ in "12"]
        if seed % 5 == 4:
            for table in tables:
                table.recover(clock.now + 20)
        both = Both(tables, clock, dice)
        for _ in range(CONNECTIONS):
            both.connect()
        for _ in range(400):
            both.step()
            await both.settle()
        # Who drains answers holders alone.
        both.server._dispatch(tables[0].drain(clock.now))
        both.messages.send(tables[1].drain(clock.now))
        for _ in range(30):
            both.step()
            await both.settle()
        seen += both.replies
        for transport in both.transports.values():
            transport.abort()
    assert not [reply for reply in [*SEEN, b"error_draining"] if seen[reply] < 5], seen


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", histories(20), ids=len)
async def test_bytes_do_what_their_messages_do_to_shards(clock: Clock, seeds: range) -> None:
    seen: Counter[bytes] = Counter()
    for seed in seeds:
        dice = random.Random(seed)
        limits = some_limits(dice)
        tables = [ShardTable(limits, TokenIssuer(b"s", 1000), three_shards()) for _ in "12"]
        for table in tables:
            table.serve_until(clock.now + 30, clock.now)
            for shard in (0, 1):
                table.open(shard, 1 << 40)
        both = Both([*tables], clock, dice)
        for _ in range(CONNECTIONS):
            both.connect()
        for _ in range(400):
            if dice.random() < 0.03:
                change(
                    both, tables, dice.choice(["freeze", "thaw", "serve", "move", "lapse"]), dice
                )
            both.step()
            await both.settle()
        seen += both.replies
        for transport in both.transports.values():
            transport.abort()
    assert not [reply for reply in [*SEEN, b"error_moved"] if seen[reply] < 5], seen


def change(both: Both, tables: list[ShardTable], what: str, dice: random.Random) -> None:
    """Let something happen to a shard, in both."""
    now, shard = both.clock.now, dice.choice([0, 1])
    for table, send in zip(tables, [both.server._dispatch, both.messages.send], strict=True):
        if what == "freeze":
            table.freeze(shard, now)
        elif what == "thaw":
            send(table.thaw(shard, now))
        elif what == "serve":
            send(table.serve_until(now + 30, now))
        elif what == "lapse":
            table.lapse()
        else:
            effects, _ = table.drop(shard, Moved(shard, 2, b"elsewhere:6388"))
            send(effects)
            table.open(shard, 2 << 40, opens_at=now + 0.3, recovers_until=now + 1)
