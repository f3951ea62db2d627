"""Rates, groups, limits and the newest wins at one key: each holds as it does alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from dflockd.table import Effect
from dflockd.wire import (
    Acquire,
    Enqueue,
    Granted,
    How,
    Listen,
    Owner,
    Queued,
    Rate,
    Release,
    Renew,
    Request,
    Space,
    Status,
    Superseded,
    Unbegun,
    YourTurn,
)
from tests.dflockd.table.rates_support import Site
from tests.dflockd.table.test_groups import Stage
from tests.dflockd.table.turns_support import Run, asks, process

LOCK = Space.LOCK
WINDOW = 1.0
TICK = 0.251
"""Seconds: no whole number of them is a window, nor as near to one as a place may come late."""


class RatedStage(Stage):
    """A stage at which only some runs may begin in a second."""

    def __init__(self, limit: int, runs: int) -> None:
        super().__init__(limit)
        self.rate = Rate(runs, int(WINDOW * 1000))

    def heard(self, effects: list[Effect], number: int = 0) -> object:
        before = len(self.order)
        mine = super().heard(effects, number)
        # Who has asked is answered first: in which order slots were given the fences say.
        self.order[before:] = sorted(self.order[before:], key=self.tokens.__getitem__)
        return mine

    def come(self, name: str, limit: int = 0, timeout: int = 600, **more: Any) -> object:
        return super().come(name, limit, timeout, rate=self.rate, **more)

    def begin(self, *names: str) -> None:
        for name in names:
            assert self.say(name, Renew(LOCK, b"k", self.tokens[name], 600, How.BEGUN))

    def end_unbegun(self, name: str) -> None:
        token = self.tokens.pop(name)
        assert self.say(name, Unbegun(b"k", token)) is Status.OK

    def pass_time(self, seconds: float) -> list[str]:
        """Return who has had a slot meanwhile."""
        before, until = len(self.order), self.now + seconds
        while (due := self.table.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.heard(self.table.advance(self.now))
        self.now = until
        return self.order[before:]


# Groups with a rate.


def test_the_group_whose_turn_it_is_waits_for_a_place_and_nobody_goes_before_it() -> None:
    stage = RatedStage(limit=4, runs=1)
    for name in ("a-1", "b-1", "a-2", "c-1"):
        stage.come(name)
    stage.begin("a-1")
    assert stage.come("c-2", timeout=0) is Status.TIMEOUT  # slots are free, and no place
    assert [waiter["group"] for waiter in stage.report()["waiters"]] == ["b", "a", "c"]
    assert stage.pass_time(0.99) == []
    # Each that begins is followed one window later by the next in the round.
    for name in ("b-1", "a-2", "c-1"):
        assert stage.pass_time(0.02) == [name]
        stage.begin(name)
        assert stage.pass_time(0.99) == []


def test_a_place_given_back_is_that_of_the_group_whose_turn_it_is() -> None:
    stage = RatedStage(limit=4, runs=1)
    for name in ("a-1", "a-2", "b-1", "a-3"):
        stage.come(name)
    stage.end_unbegun("a-1")
    stage.end_unbegun("a-2")
    stage.end_unbegun("b-1")
    assert stage.order == ["a-1", "a-2", "b-1", "a-3"]
    assert stage.now == 0.0


def test_the_limit_of_a_group_and_the_window_both_hold() -> None:
    stage = RatedStage(limit=4, runs=3)
    for name in ("a-1", "a-2", "a-3", "b-1", "b-2", "b-3"):
        stage.come(name, limit=1 if name.startswith("a") else 0)
    assert stage.order == ["a-1", "b-1", "b-2"]
    stage.begin("a-1", "b-1", "b-2")
    stage.end("a-1")  # the group may have a slot again, and there is no place
    assert stage.pass_time(0.99) == []
    assert stage.pass_time(0.02) == ["b-3", "a-2"]  # there are places, and four slots
    stage.end("b-1")
    assert stage.order[5:] == []  # a place and a slot, but the group has what it may
    stage.end("a-2")
    assert stage.order[5:] == ["a-3"]


def test_a_larger_limit_of_a_group_makes_no_place() -> None:
    stage = RatedStage(limit=4, runs=2)
    stage.come("a-1", limit=1)
    stage.come("a-2", limit=1)
    stage.come("b-1")
    stage.begin("a-1", "b-1")
    assert stage.come("a-3", limit=3) is None
    assert stage.order == ["a-1", "b-1"]
    assert stage.pass_time(1.01) == ["a-2", "a-3"]


class Naive:
    """The rules of slots, places and turns at one key, in the plainest way."""

    def __init__(self, limit: int, runs: int) -> None:
        self.limit, self.runs = limit, runs
        self.lines: dict[str, list[str]] = {}
        self.limits: dict[str, int] = {}
        self.ring: list[str] = []
        """The groups that have somebody who may have a turn: whose is next first."""
        self.held: list[str] = []
        self.pending: set[str] = set()
        self.begun: list[float] = []
        self.order: list[str] = []
        self.seen: Counter[str] = Counter()

    def is_ready(self, group: str) -> bool:
        most = self.limits.get(group, 0)
        has = sum(group_of(name) == group for name in self.held)
        return bool(self.lines.get(group)) and (not most or has < most)

    def serve(self, now: float) -> None:
        while True:
            self.ring = [group for group in self.ring if self.is_ready(group)]
            self.ring += [g for g in self.lines if g not in self.ring and self.is_ready(g)]
            counted = sum(time > now - WINDOW for time in self.begun)
            has_slot = len(self.held) < self.limit
            has_place = len(self.pending) + counted < self.runs
            if not (has_slot and has_place and self.ring):
                self.seen["a turn without a place"] += bool(self.ring and has_slot)
                self.seen["a place, and groups that have all they may"] += (
                    has_slot and has_place and any(self.lines.values())
                )
                return
            group = self.ring.pop(0)
            self.ring.append(group)
            name = self.lines[group].pop(0)
            self.held.append(name)
            self.pending.add(name)
            self.order.append(name)

    def come(self, name: str, limit: int, now: float, *, waits: bool) -> None:
        group = group_of(name)
        self.limits[group] = limit
        self.serve(now)  # those who wait may have what the group may have now
        line = self.lines.setdefault(group, [])
        line.append(name)
        self.serve(now)
        if not waits and name in line:
            line.remove(name)
            self.serve(now)

    def begin(self, name: str, now: float) -> None:
        if name in self.pending:
            self.pending.remove(name)
            self.begun.append(now)

    def end(self, name: str, now: float, *, has_begun: bool) -> None:
        if has_begun:
            self.begin(name, now)
        self.pending.discard(name)
        self.held.remove(name)
        self.serve(now)


def group_of(name: str) -> str:
    return name.partition("-")[0]


def history(seed: int) -> Counter[str]:
    """Do 200 things at random, with the table and with the naive rules: all are served alike."""
    dice = random.Random(seed)
    limit, runs = dice.choice([(1, 2), (2, 3), (4, 6), (6, 12)])
    stage, naive = RatedStage(limit, runs), Naive(limit, runs)
    for number in range(200):
        now = stage.now
        what = dice.choices(["come", "begin", "end", "pass time"], [5, 4, 4, 6])[0]
        if what == "come":
            name = f"{dice.choice(['a', 'a', 'a', 'b', 'c', ''])}-{number}"
            most = dice.choice([0, 1, 1, 1, 2]) if group_of(name) in ("a", "b") else 0
            waits = dice.random() < 0.8
            naive.come(name, most, now, waits=waits)
            reply = stage.come(name, most, 600 if waits else 0)
            assert isinstance(reply, Granted) == (name in naive.held)
        elif what == "pass time":
            stage.pass_time(TICK)
            naive.serve(stage.now)
        elif naive.held:
            name = dice.choice(naive.held)
            if what == "begin":
                naive.begin(name, now)
                stage.begin(name)
            else:
                has_begun = dice.random() < 0.6
                naive.end(name, now, has_begun=has_begun)
                (stage.end if has_begun else stage.end_unbegun)(name)
        assert stage.order == naive.order, (seed, number, what)
        assert sorted(stage.tokens) == sorted(naive.held)
    for first, last in zip(naive.begun, naive.begun[runs:], strict=False):
        assert last - first >= WINDOW
    return naive.seen


def test_random_histories_of_groups_with_a_limit_and_a_rate_are_as_the_naive_rules_say() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += history(seed)
    assert len(seen) == 2
    assert min(seen.values()) > 100, seen


# The newest wins at a key with a rate.

ONE = Rate(1, 1000)


def run(site: Site, age: int) -> Run:
    owner = Owner(b"run-%d" % age, 0, age)
    return Run(process(site.table), owner, b"task-%d" % age)


def want(who: Run, timeout: int = 60) -> Request:
    return who.by(Acquire(LOCK, b"k", 1, timeout, 600, ONE))


def test_the_newest_waits_for_the_window_of_the_one_that_it_stopped() -> None:
    site = Site()
    older, newer, newest = run(site, 1), run(site, 2), run(site, 3)
    held = site.ask(older.peer, want(older))
    site.ask(older.peer, Renew(LOCK, b"k", held.token, 600, How.BEGUN))
    ear = site.table.connect()
    assert site.ask(ear, Listen(b"k", held.token)) is None
    assert site.ask(newer.peer, want(newer)) is None
    assert site.told == [(ear.id, Superseded(2, b"task-2"))]
    site.go_to(100.5)
    site.ask(older.peer, Release(LOCK, b"k", held.token))
    assert site.granted() == []  # it is free, and its next run may not begin yet
    assert site.ask(newest.peer, want(newest)) is None
    assert site.told == [(newer.peer.id, Superseded(3, b"task-3"))]
    site.told.clear()
    site.go_to(100.99)
    assert site.granted() == []
    site.go_to(101.01)
    assert site.granted() == [newest.peer.id]


def test_who_is_stopped_before_it_begins_costs_the_newest_nothing() -> None:
    site = Site()
    older, newer = run(site, 1), run(site, 2)
    held = site.ask(older.peer, want(older))
    assert site.ask(newer.peer, want(newer)) is None
    assert site.ask(older.peer, Unbegun(b"k", held.token)) is Status.OK
    assert site.granted() == [newer.peer.id]
    assert site.now == 100.0


@pytest.mark.parametrize("others", [0, 1])
def test_a_place_that_was_set_aside_for_somebody_older_is_the_next_ones(others: int) -> None:
    """Nobody who is sent away takes a place along, whether told of a turn or waiting."""
    site = Site()
    told = run(site, 1)
    turn = told.by(Enqueue(LOCK, b"k", 1, 600, ONE, turn=60_000))
    assert isinstance(site.ask(told.peer, turn), Queued)
    assert isinstance(asks(site.table, told.peer, site.now)[1], YourTurn)
    plain = [site.take(ONE, limit=1, timeout=60)[0].id for _ in range(others)]
    newest = run(site, 2)
    reply = site.ask(newest.peer, want(newest))
    if others:
        assert site.granted() == plain
        assert reply is None
    else:
        assert isinstance(reply, Granted)
    rate = site.table._partition.rates.open[LOCK, b"k"]
    assert (len(rate.pending), rate.begun) == (1, 0)


def test_who_is_older_and_sent_away_at_once_takes_no_place() -> None:
    site = Site()
    newest = run(site, 2)
    held = site.ask(newest.peer, want(newest))
    assert site.ask(newest.peer, Unbegun(b"k", held.token)) is Status.OK
    assert site.ask((older := run(site, 1)).peer, want(older)) == Superseded(2, b"task-2")
    assert isinstance(site.ask((newer := run(site, 3)).peer, want(newer, 0)), Granted)
