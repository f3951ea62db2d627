"""Single rules of paused keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.table.sharded import LAPSED
from dflockd.wire import (
    Acquire,
    Granted,
    Moved,
    Pause,
    Release,
    Renew,
    Renewed,
    Report,
    Resume,
    Space,
    Stats,
    Status,
)
from tests.dflockd.table.rules_support import LOCK, answers, inspected, reply_to, table_of, take
from tests.dflockd.table.sharded_support import (
    AWAY,
    FOR_LONG,
    ask,
    assert_empty,
    hand_over,
    resume,
    tickets_of,
    wait_for,
)
from tests.dflockd.table.sharded_support import table_of as shards_of


def wait(table: LockTable, now: float = 0.0, timeout: int = 60, **more: Any) -> Peer:
    peer = table.connect()
    assert table.handle(peer, Acquire(LOCK, b"k", 1, timeout, None, **more), now) == []
    return peer


def test_who_holds_goes_on_and_who_waits_is_granted_in_order_at_the_end() -> None:
    table = table_of()
    holder, operator = table.connect(), table.connect()
    token = take(table, holder, b"k")
    waiters = [wait(table)]
    assert reply_to(table, operator, Pause(b"k")) is Status.OK
    waiters.append(wait(table))
    assert reply_to(table, holder, Renew(LOCK, b"k", token, 10)) == Renewed(10)
    assert answers(table.handle(holder, Release(LOCK, b"k", token), 1.0)) == [(holder.id, Status)]
    assert len(table) == 1
    for waiter in waiters:
        [(_, done), *others] = table.handle(operator, Resume(b"k"), 2.0)
        assert done is Status.OK
        [(number, granted)] = others
        assert number == waiter.id
        assert isinstance(granted, Granted)
        assert reply_to(table, operator, Pause(b"k"), 2.0) is Status.OK
        assert answers(table.handle(waiter, Release(LOCK, b"k", granted.token), 2.0)) == [
            (waiter.id, Status)
        ]


def test_it_ends_by_itself_to_the_millisecond_and_the_latest_counts() -> None:
    table = table_of()
    operator, waiter = table.connect(), table.connect()
    reply_to(table, operator, Pause(b"k", 9000), 0.0)
    reply_to(table, operator, Pause(b"k", 1500), 1.0)
    table.handle(waiter, Acquire(LOCK, b"k", 1, 60, None), 1.0)
    assert table.next_deadline() == 2.5
    assert table.advance(2.499) == []
    assert answers(table.advance(2.5)) == [(waiter.id, Granted)]
    assert reply_to(table, operator, Resume(b"k"), 3.0) is Status.ERROR


def test_a_paused_key_counts_as_one_that_is_held() -> None:
    table = LockTable(Limits(max_locks=1), TokenIssuer(b"secret", 0))
    operator = table.connect()
    assert reply_to(table, operator, Pause(b"k")) is Status.OK
    assert reply_to(table, operator, Pause(b"other")) is Status.MAX_LOCKS
    assert reply_to(table, operator, Acquire(LOCK, b"other", 1, 0, None)) is Status.MAX_LOCKS
    assert reply_to(table, operator, Pause(b"k")) is Status.OK
    assert (len(table), table.slots.paused, table.counts.full) == (1, 1, 2)
    assert reply_to(table, operator, Resume(b"k")) is Status.OK
    assert (len(table), table.slots.paused, len(table.deadlines)) == (0, 0, 0)


def test_it_is_of_the_lock_and_not_of_the_semaphore_of_that_name() -> None:
    table = table_of()
    operator = table.connect()
    reply_to(table, operator, Pause(b"k"))
    of_semaphore = Acquire(Space.SEMAPHORE, b"k", 2, 0, None)
    assert isinstance(reply_to(table, operator, of_semaphore), Granted)


def test_what_is_said_of_it() -> None:
    table = table_of()
    operator = table.connect()
    reply_to(table, operator, Pause(b"k", 60_000, b"ann@w1", b"the vendor is down"), 0.0)
    said = {
        "by": "ann@w1",
        "reason": "the vendor is down",
        "paused_s": 2.5,
        "left_s": 57.5,
    }
    assert inspected(table, operator, b"k", 2.5)["paused"] == said
    stats = reply_to(table, operator, Stats(), 2.5)
    assert isinstance(stats, Report)
    assert json.loads(stats.json)["locks"][0]["paused"] == said
    assert json.loads(stats.json)["status"] == "serving"
    assert inspected(table, operator, b"other", 2.5)["paused"] is None


@pytest.mark.parametrize("span", [None, 5000])
def test_it_goes_with_its_shard_and_with_all_who_wait(span: int | None) -> None:
    old, new = shards_of(), shards_of(FOR_LONG, 1)
    operator = old.connect()
    assert ask(old, operator, Pause(b"a", span, b"me", b"why")) is Status.OK
    waiters = [wait_for(old, b"a") for _ in range(300)]
    tickets = tickets_of(hand_over(old, new, 0, 1.0))
    assert_empty(old)
    assert old.slots.paused == 0
    assert list(tickets) == [waiter.id for waiter in waiters]
    back = [resume(new, tickets[waiter.id], b"a", 1.5) for waiter in waiters]
    assert [effects for _, effects in back if effects] == []
    operator = new.connect()
    ended = new.handle(operator, Resume(b"a"), 3.0)[1:] if span is None else new.advance(5.1)
    order = []
    now = 5.1
    while ended:
        [(number, granted)] = ended
        assert isinstance(granted, Granted)
        order.append(number)
        [_, *ended] = new.handle(operator, Release(LOCK, b"a", granted.token), now)
    assert order == [peer.id for peer, _ in back]
    assert_empty(new)


def test_a_shard_that_is_elsewhere_is_not_paused_here() -> None:
    table = shards_of()
    table.drop(0, AWAY)
    assert isinstance(ask(table, table.connect(), Pause(b"a")), Moved)
    assert isinstance(ask(table, table.connect(), Resume(b"a")), Moved)


def test_a_server_that_may_have_lost_its_shards_pauses_nothing() -> None:
    table = shards_of(10.0)
    assert ask(table, table.connect(), Pause(b"a"), 11.0) == LAPSED
    assert len(table) == 0
