"""What takes long is done in small pieces, one at a time, and not for those who have gone."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter

import pytest

from dflockd.http import app, pace, view
from dflockd.http.pace import BusyError, Desk, Pace
from dflockd.table import Entry, Limits, LockTable, TokenIssuer
from dflockd.table.finding import Match
from dflockd.wire import Acquire, MapReport, Space, encode_map
from tests.dflockd.http.http_here import fill, site_here, until
from tests.dflockd.raw_server import PATIENCE


def a_table(keys: int) -> LockTable:
    table = LockTable(Limits(max_locks=100_000), TokenIssuer(b"x", 1))
    fill(table, keys)
    return table


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds that the turn is over."""
    monkeypatch.setattr(pace, "SLICE", -1.0)
    monkeypatch.setattr(pace, "REST", 0.0)


class Turns(Pace):
    """Counts turns, and how much was done in the fullest of them."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.number = 0
        self.done = 0
        self.most = 0

    async def turn(self) -> float:
        self.most, self.done = max(self.most, self.done), 0
        self.number += 1
        return await super().turn()


# Turns.


async def test_turns_are_given_one_by_one_in_order(no_time: None) -> None:
    given: list[int] = []
    shared = Pace(asyncio.get_running_loop())

    async def work(number: int) -> None:
        for _ in range(3):
            await shared.turn()
            given.append(number)

    await asyncio.gather(*(work(number) for number in range(4)))
    assert given == [0, 1, 2, 3] * 3


async def test_between_turns_the_loop_does_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "REST", 0.02)
    shared, others = Pace(asyncio.get_running_loop()), 0
    rounds = []

    async def else_() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(else_())
    started = time.monotonic()
    for _ in range(4):
        await shared.turn()
        rounds.append(others)
    task.cancel()
    assert all(b > a for a, b in itertools.pairwise(rounds))
    assert time.monotonic() - started >= 0.05


async def test_who_has_gone_takes_no_turn(no_time: None) -> None:
    shared = Pace(asyncio.get_running_loop())
    waiting = [asyncio.create_task(shared.turn()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    async with asyncio.timeout(PATIENCE):
        await waiting[2]
        await shared.turn()


async def test_a_desk_serves_one_and_lets_few_wait() -> None:
    desk, inside, most = Desk(2), 0, 0
    counts: Counter[str] = Counter()

    async def visit() -> None:
        nonlocal inside, most
        try:
            async with desk:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1
                counts["served"] += 1
        except BusyError:
            counts["sent away"] += 1

    await asyncio.gather(*(visit() for _ in range(10)))
    assert most == 1
    assert counts == {"served": 3, "sent away": 7}
    await visit()
    gone = asyncio.create_task(visit())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await visit()
    assert counts["served"] == 5


# What is done in them.


@pytest.mark.parametrize("sort", view.SORTS)
async def test_a_search_looks_at_few_keys_in_a_turn(
    no_time: None, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    table, turns = a_table(2000), Turns()
    made = view.Walk

    class Counted:
        def __init__(self, *args: object, **options: object) -> None:
            self.walk = made(*args, **options)  # type: ignore[arg-type]
            self.left_out = 0

        @property
        def is_done(self) -> bool:
            return self.walk.is_done

        def step(self) -> list[Match]:
            found = self.walk.step()
            turns.done += len(found)  # all of them match
            return found

    monkeypatch.setattr(view, "Walk", Counted)
    found, matched, _ = await view.search(table, "key", sort, 1500, turns)
    assert matched == 2000
    assert [listed.entry.key for listed in found] == [
        b"key:%06d" % number for number in range(1500)
    ]
    assert turns.number >= 2000 / view.STEP
    assert turns.most <= view.STEP


async def test_a_search_finds_what_was_there_while_the_table_changes(no_time: None) -> None:
    table, turns = a_table(1000), Turns()
    other = table.connect()
    search = asyncio.create_task(view.search(table, "", "key", 2000, turns))
    number = 0
    while not search.done():
        table.handle(other, Acquire(Space.LOCK, b"new:%06d" % number, 1, 0, 1000), 0)
        number += 1
        if number % 7 == 0:
            table.disconnect(other, 0, clean=True)
            other = table.connect()
        await asyncio.sleep(0)
    found, _, _ = search.result()
    keys = [listed.entry.key for listed in found]
    assert keys == sorted(keys)
    assert {b"key:%06d" % number for number in range(1000)} <= set(keys)


async def test_long_answers_are_made_in_turns(
    no_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = LockTable(Limits(), TokenIssuer(b"x", 1))
    for _ in range(600):
        table.handle(table.connect(), Acquire(Space.SEMAPHORE, b"k", 500, 10, 1000), 0)
    entry = table.find(Space.SEMAPHORE, b"k")
    assert isinstance(entry, Entry)
    turns = Turns()
    for name in ("_holder", "_waiter"):
        made = getattr(view, name)

        def counted(one: object, now: float, made: object = made) -> view.Json:
            turns.done += 1
            return made(one, now)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(view, name, counted)
    shown = json.loads(await view.detail(Space.SEMAPHORE, b"k", entry, None, 0, turns))
    assert (len(shown["holders"]), len(shown["waiters"])) == (500, 100)
    assert turns.number >= 600 / view.STEP
    assert turns.most <= view.STEP
    listed = [view.Listed(entry, Match(entry, None, 0), 1)] * 100
    rows = json.loads(await view.rows(listed, 0, turns))
    assert len(rows) == 100
    assert turns.most <= view.STEP


# Over HTTP.

SEARCH = b"GET /api/locks?search=key HTTP/1.1\r\nHost: a\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_too_many_searches_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_SEARCHES", 2)
    async with site_here() as here:
        fill(here.table, 1000)
        desk = here.http._searches
        peers = [await here.connect() for _ in range(5)]
        async with desk:
            for peer in peers[:2]:
                peer.writer.write(SEARCH)
            await until(lambda: desk._waiting == 2)
            for peer in peers[2:]:
                assert await peer.ask(SEARCH) == 503
                assert b"Retry-After: 1" in peer.head
            assert await here.ask() == 200
        assert [await peer.status() for peer in peers[:2]] == [200, 200]


async def test_a_search_ends_with_the_connection_that_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "REST", 3600.0)
    async with site_here() as here:
        fill(here.table, 5000)
        monkeypatch.setattr(pace, "SLICE", -1.0)
        peer = await here.connect()
        peer.writer.write(SEARCH)
        desk = here.http._searches
        await until(desk._lock.locked)
        peer.writer.transport.abort()
        await until(lambda: not desk._lock.locked())


async def test_metrics_are_made_once_for_all_who_ask_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site_here() as here:
        made = 0
        make = here.http._exposition._make
        go_on = asyncio.Event()

        async def counted() -> bytes:
            nonlocal made
            made += 1
            await go_on.wait()
            return await make()

        monkeypatch.setattr(here.http._exposition, "_make", counted)
        peers = [await here.connect() for _ in range(5)]
        for peer in peers:
            peer.writer.write(METRICS)
        house = here.http._house
        await until(lambda: sum(not gate.is_idle for gate in house._inside) == 5)
        peers[0].writer.transport.abort()
        go_on.set()
        assert [await peer.status() for peer in peers[1:]] == [200] * 4
        assert made == 1
        assert await here.ask(METRICS) == 200
        assert made == 2


class OfThousands:
    """A cluster of which one server is seen."""

    address = "a:1"
    leaving = False

    def counts(self) -> dict[str, int]:
        return {"serving": 8192}

    def report(self, now: float) -> MapReport:
        return encode_map({})


async def test_all_shards_are_shown_without_looking_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site_here() as here:
        here.http._cluster = OfThousands()
        monkeypatch.setattr(pace, "REST", 3600.0)
        for _ in range(3):
            assert await here.ask(b"GET /api/shards HTTP/1.1\r\nHost: a\r\n\r\n") == 200
        assert await here.ask(b"GET /api/stats HTTP/1.1\r\nHost: a\r\n\r\n") == 200
        assert await here.ask() == 200
