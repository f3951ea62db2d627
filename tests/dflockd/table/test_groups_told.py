"""Those who want to be told of a turn, at a key where groups take turns."""

from __future__ import annotations

import pytest

from dflockd.table.state import Entry
from dflockd.wire import Acquire, Granted, Pass, Space, Status, Wait, YourTurn
from tests.dflockd.table.test_groups import Stage

LOCK = Space.LOCK


@pytest.fixture
def lock() -> Stage:
    return Stage()


def test_who_is_told_of_a_turn_counts_for_the_limit_of_the_group() -> None:
    stage = Stage(4)
    assert isinstance(stage.enqueue("a-0", limit=1, turn=5000), YourTurn)
    assert stage.come("a-1", limit=1) is None
    assert stage.come("b-0") is not None
    stage.say("a-0", Pass(b"k", b"none"))
    stage.now = 5.0
    stage.heard(stage.table.advance(stage.now))
    assert stage.order == ["b-0", "a-1"]


def test_all_who_are_told_of_a_turn_count_for_the_limit_of_the_group() -> None:
    stage = Stage(4)
    for name in ("a-0", "a-1"):
        assert isinstance(stage.enqueue(name, limit=2, turn=5000), YourTurn)
    assert stage.come("a-2", limit=2, timeout=0) is Status.TIMEOUT
    assert isinstance(stage.come("b-0", timeout=0), Granted)


def test_who_lets_a_turn_pass_is_shown(lock: Stage) -> None:
    told = lock.enqueue("a-0", turn=5000)
    assert isinstance(told, YourTurn)
    lock.say("a-0", Pass(b"k", told.ticket))
    lock.come("b-0")
    lock.come("b-1")
    assert [waiter["group"] for waiter in lock.report()["waiters"]] == ["a", "b"]


def test_who_was_told_before_there_were_groups_is_in_none_of_them(lock: Stage) -> None:
    told = lock.enqueue("-0", turn=5000)
    assert isinstance(told, YourTurn)
    lock.come("b-1")
    entry = lock.table.find(LOCK, b"k")
    assert isinstance(entry, Entry)
    queue = entry.grouped()
    assert set(queue._lanes) == {b"", b"b"}
    assert isinstance(lock.say("-9", Acquire(LOCK, b"k", 1, 600, 600, ticket=told.ticket)), Granted)
    assert set(queue._lanes) == {b"b"}
    assert lock.drain() == ["b-1"]


def test_who_lets_a_turn_run_out_has_used_it_up_for_the_group(lock: Stage) -> None:
    lock.come("-0")
    for name in ("a-1", "a-2"):
        assert lock.enqueue(name, turn=1000) is Status.QUEUED
        assert lock.say(name, Wait(LOCK, b"k", 600)) is None
    lock.come("b-1")
    lock.end("-0")
    lock.now = 1.0
    lock.heard(lock.table.advance(lock.now))
    assert lock.order == ["-0", "b-1"]
