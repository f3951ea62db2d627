"""Those who want to be told of a turn, at a key where groups take turns."""

from __future__ import annotations

import pytest

from dflockd.table.state import Entry
from dflockd.wire import Acquire, Granted, Pass, Queued, Space, Status, Wait
from tests.dflockd.table.test_groups import Stage
from tests.dflockd.table.turns_support import asks

LOCK = Space.LOCK


@pytest.fixture
def lock() -> Stage:
    return Stage()


def test_who_is_told_of_a_turn_counts_for_the_limit_of_the_group() -> None:
    stage = Stage(4)
    stage.tell("a-0", limit=1)
    assert stage.come("a-1", limit=1) is None
    assert stage.come("b-0") is not None
    stage.say("a-0", Pass(b"k", b"none"))
    stage.now = 5.0
    stage.heard(stage.table.advance(stage.now))
    assert stage.order == ["b-0", "a-1"]


def test_all_who_are_told_of_a_turn_count_for_the_limit_of_the_group() -> None:
    stage = Stage(4)
    for name in ("a-0", "a-1"):
        stage.tell(name, limit=2)
    assert stage.come("a-2", limit=2, timeout=0) is Status.TIMEOUT
    assert isinstance(stage.come("b-0", timeout=0), Granted)


def test_a_group_that_cannot_start_is_passed_over_and_keeps_its_turn(lock: Stage) -> None:
    lock.come("-0")
    for name in ("a-1", "b-1", "a-2", "b-2"):
        assert isinstance(lock.enqueue(name, turn=1000), Queued)
        assert lock.say(name, Wait(LOCK, b"k", 600)) is None
    asking, _ = asks(lock.table, lock.peers["b-1"])
    lock.end("-0")
    assert asking.told is not None
    assert asking.told.peer is lock.peers["b-1"]
    asking, reply = asks(lock.table, lock.peers["a-1"])
    assert reply is None
    ticket = lock.table._partition.reserved
    b_1 = next(name for name, waiter in ticket.items() if waiter.peer is lock.peers["b-1"])
    lock.say("-9", Pass(b"k", b_1))
    assert asking.told is not None
    assert asking.told.peer is lock.peers["a-1"]


def test_who_lets_a_turn_pass_is_shown(lock: Stage) -> None:
    lock.say("a-0", Pass(b"k", lock.tell("a-0")))
    lock.come("b-0")
    lock.come("b-1")
    assert [waiter["group"] for waiter in lock.report()["waiters"]] == ["a", "b"]


def test_who_was_told_before_there_were_groups_is_in_none_of_them(lock: Stage) -> None:
    ticket = lock.tell("-0")
    lock.come("b-1")
    entry = lock.table.find(LOCK, b"k")
    assert isinstance(entry, Entry)
    queue = entry.grouped()
    assert set(queue._lanes) == {b"", b"b"}
    assert isinstance(lock.say("-9", Acquire(LOCK, b"k", 1, 600, 600, ticket=ticket)), Granted)
    assert set(queue._lanes) == {b"b"}
    assert lock.drain() == ["b-1"]


def test_who_lets_a_turn_run_out_has_used_it_up_for_the_group(lock: Stage) -> None:
    lock.come("-0")
    for name in ("a-1", "a-2"):
        assert isinstance(lock.enqueue(name, turn=1000), Queued)
        assert lock.say(name, Wait(LOCK, b"k", 600)) is None
    asks(lock.table, lock.peers["a-1"])
    lock.come("b-1")
    lock.end("-0")
    lock.now = 1.0
    lock.heard(lock.table.advance(lock.now))
    assert lock.order == ["-0", "b-1"]
