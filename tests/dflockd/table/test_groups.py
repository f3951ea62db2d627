"""Groups take turns at a key; within one it is first come, first served."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from dflockd.table import Effect, LockTable, Peer
from dflockd.table.blocking import DeadlockSearch
from dflockd.table.state import Entry
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    FairGroup,
    Granted,
    Inspect,
    Queued,
    Release,
    Renew,
    Report,
    Request,
    Reserve,
    Space,
    Status,
    TimedOut,
    Wait,
    YourTurn,
)
from tests.dflockd.table.turns_support import asks, calls, process, table_of

LOCK = Space.LOCK


class Stage:
    """A key of some slots, and who has come to it: by name, the group before the dash."""

    def __init__(self, limit: int = 1, table: LockTable | None = None) -> None:
        self.table = table or table_of()
        self.limit = limit
        self.peers: dict[str, Peer] = {}
        self.names: dict[int, str] = {}
        self.tokens: dict[str, bytes] = {}
        self.order: list[str] = []
        """Who has had a slot, in that order."""
        self.now = 0.0

    def say(self, name: str, request: Request) -> object:
        peer = self.peers.get(name)
        if peer is None:
            peer = self.peers[name] = process(self.table)
            self.names[peer.id] = name
        return self.heard(self.table.handle(peer, request, self.now), peer.id)

    def heard(self, effects: list[Effect], number: int = 0) -> object:
        mine: object = None
        for to, reply in effects:
            if isinstance(reply, Granted | Enqueued):
                self.tokens[self.names[to]] = reply.token
                self.order.append(self.names[to])
            mine = reply if to == number else mine
        return mine

    @staticmethod
    def group_of(name: str, limit: int) -> FairGroup | None:
        group = name.partition("-")[0]
        return FairGroup(group.encode(), limit) if group else None

    def come(self, name: str, limit: int = 0, timeout: int = 600, **more: Any) -> object:
        group = self.group_of(name, limit)
        return self.say(name, Acquire(LOCK, b"k", self.limit, timeout, 600, group=group, **more))

    def enqueue(self, name: str, limit: int = 0, turn: int | None = None) -> object:
        group = self.group_of(name, limit)
        return self.say(name, Enqueue(LOCK, b"k", self.limit, 600, group=group, turn=turn))

    def tell(self, name: str, limit: int = 0, turn: int = 5000) -> bytes:
        """Have somebody told of its turn; return the ticket."""
        assert isinstance(self.enqueue(name, limit, turn), Queued)
        reply = asks(self.table, self.peers[name], self.now)[1]
        assert isinstance(reply, YourTurn)
        return reply.ticket

    def end(self, name: str) -> None:
        token = self.tokens.pop(name)
        assert self.say(name, Release(LOCK, b"k", token)) is Status.OK

    def drain(self) -> list[str]:
        """Let all have their turns, and say in which order."""
        before = len(self.order)
        while self.tokens:
            self.end(next(iter(self.tokens)))
        assert len(self.table) == 0
        return self.order[before:]

    def report(self) -> dict[str, list[dict[str, object]]]:
        report = self.table.handle(self.table.connect(), Inspect(LOCK, b"k"), self.now)[0][1]
        assert isinstance(report, Report)
        found: dict[str, list[dict[str, object]]] = json.loads(report.json)
        return found


@pytest.fixture
def lock() -> Stage:
    return Stage()


def test_groups_take_turns_and_their_members_come_in_order(lock: Stage) -> None:
    for name in ("a-1", "a-2", "a-3", "a-4", "b-1", "b-2", "c-1"):
        lock.come(name)
    assert lock.drain() == ["a-2", "b-1", "c-1", "a-3", "b-2", "a-4"]


@pytest.mark.parametrize("limit", [1, 4])
def test_the_one_task_of_a_tenant_waits_for_a_round_at_most(limit: int) -> None:
    stage = Stage(limit)
    for number in range(10_000):
        stage.come(f"heavy-{number}")
    for number in range(100):
        stage.come(f"middle-{number}")
    for _ in range(20):
        stage.end(next(iter(stage.tokens)))
    before = len(stage.order)
    stage.come("one-0")
    for _ in range(3):
        stage.end(next(iter(stage.tokens)))
    assert "one-0" in stage.order[before:]
    shares = Counter(name.partition("-")[0] for name in stage.drain()[:150])
    assert shares["middle"] in (75, 76)


def test_who_has_waited_longest_may_be_none_of_the_next() -> None:
    stage = Stage(2)
    for now, (name, limit) in enumerate(
        [("a-1", 1), ("a-2", 1), ("b-1", 0), ("b-2", 0), ("c-1", 0), ("-1", 0)]
    ):
        stage.now = now
        stage.come(name, limit)
    waited = [waiter["waited_s"] for waiter in stage.report()["waiters"]]
    assert waited == [2, 1, 0, 4], "the one whose group has all that it may is the last"
    look = DeadlockSearch(stage.table.each_partition())
    while not look.step():
        pass
    assert look.since == 1
    assert look.groups == 4
    stage.end("a-1")
    stage.end("b-1")
    look = DeadlockSearch(stage.table.each_partition())
    while not look.step():
        pass
    assert (look.since, look.groups) == (1, 2)
    assert stage.drain()


def test_who_names_no_group_is_in_one_with_all_others_who_do_not(lock: Stage) -> None:
    for name in ("-1", "-2", "-3", "a-1", "-4", "a-2"):
        lock.come(name)
    assert lock.drain() == ["-2", "a-1", "-3", "a-2", "-4"]


def test_holders_and_waiters_are_shown_with_their_groups_in_the_order_of_turns() -> None:
    stage = Stage(2)
    for name in ("a-1", "-1", "a-2", "a-3", "b-1", "-2"):
        stage.come(name)
    report = stage.report()
    assert [holder["group"] for holder in report["holders"]] == ["a", ""]
    assert [waiter["group"] for waiter in report["waiters"]] == ["a", "b", "", "a"]


# Limits of groups.


def test_a_group_has_no_more_slots_than_its_limit() -> None:
    stage = Stage(4)
    for number in range(6):
        stage.come(f"a-{number}", limit=2)
    assert stage.order == ["a-0", "a-1"]
    stage.come("b-0")  # who is at the limit keeps nobody else waiting
    stage.come("-0")
    assert stage.order == ["a-0", "a-1", "b-0", "-0"]
    stage.come("b-1")
    stage.end("b-0")
    assert stage.order[4:] == ["b-1"]
    stage.end("a-0")
    assert stage.order[5:] == ["a-2"]
    assert stage.come("c-0", timeout=0) is Status.TIMEOUT


def test_who_waits_for_a_group_at_its_limit_is_shown_last() -> None:
    stage = Stage(2)
    for name in ("a-0", "-0", "a-1", "a-2", "b-0"):
        stage.come(name, limit=1 if name.startswith("a") else 0)
    assert [waiter["group"] for waiter in stage.report()["waiters"]] == ["b", "a", "a"]


# Positions.


def test_who_comes_back_after_the_turn_is_first_of_the_group_and_waits_for_its_turn(
    lock: Stage,
) -> None:
    lock.come("-0")
    lock.enqueue("a-1")
    kept = lock.say("a-1", Wait(LOCK, b"k", 0, reserve=Reserve(5000, 0)))
    assert isinstance(kept, TimedOut)
    for name in ("a-2", "b-1", "a-3", "b-2"):
        lock.come(name)
    lock.end("-0")
    assert lock.order == ["-0", "a-2"]  # others have passed it, which costs the group no turn
    assert lock.say("a-9", Acquire(LOCK, b"k", 1, 600, 600, ticket=kept.ticket)) is None
    assert lock.drain() == ["b-1", "a-9", "b-2", "a-3"]


# What outlives the process.


def test_the_group_of_a_holder_is_kept() -> None:
    stage = Stage(3)
    stage.come("a-0", limit=1)
    stage.come("-0")
    assert stage.table.changes is not None
    kept = [hold.kept() for hold in stage.table.changes]
    assert [record.group for record in kept] == [b"a", b""]
    after = Stage(3, table_of())
    after.table.restore(kept, 0.0)
    assert after.come("a-1", limit=1, timeout=0) is Status.TIMEOUT
    assert after.come("b-0") is not None
    renewed = after.say("a-0", Renew(LOCK, b"k", stage.tokens["a-0"], 600))
    assert renewed is not Status.ERROR
    assert after.say("a-0", Release(LOCK, b"k", stage.tokens["a-0"])) is Status.OK
    assert isinstance(after.come("a-1", limit=1, timeout=0), Granted)


# What it costs.


def test_nothing_takes_longer_the_more_groups_and_waiters_there_are() -> None:
    """A grant looks at none of those who wait, nor at other groups, at their limit or not."""

    def looked_at(groups: int, each: int) -> int:
        stage = Stage(2)
        stage.come("-0")
        stage.come("-1")
        for number in range(each):
            for group in range(groups):
                stage.come(f"{group}-{number}", limit=1 if group % 2 else 0)
        return calls(lambda: stage.end("-0"))

    assert looked_at(300, 10) == looked_at(3, 2)


# Those who want to be told of a turn.

LOCK = Space.LOCK


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
