"""What takes long is done in small steps, one at a time, and not for those who have gone."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Generator
from typing import TypeVar

import pytest

from dflockd.http import app, view
from dflockd.http.desk import BusyError, Desk
from dflockd.ranking import SORTS
from dflockd.table import Entry, Limits, LockTable, TokenIssuer
from dflockd.table.finding import Match
from dflockd.wire import Acquire, MapReport, Space, encode_map
from tests.dflockd.http.http_here import fill, site_here, until

T = TypeVar("T")


def a_table(keys: int) -> LockTable:
    table = LockTable(Limits(max_locks=100_000), TokenIssuer(b"x", 1))
    fill(table, keys)
    return table


class Done:
    """Counts steps, and how much was done in the fullest of them."""

    def __init__(self) -> None:
        self.steps = 0
        self.in_step = 0
        self.most = 0

    def all_of(self, steps: Generator[None, None, T]) -> T:
        while True:
            self.in_step = 0
            try:
                next(steps)
            except StopIteration as end:
                self.most = max(self.most, self.in_step)
                found: T = end.value
                return found
            self.steps += 1
            self.most = max(self.most, self.in_step)


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


@pytest.mark.parametrize("sort", SORTS)
def test_a_search_looks_at_few_keys_in_a_step(monkeypatch: pytest.MonkeyPatch, sort: str) -> None:
    table, done = a_table(2000), Done()
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
            done.in_step += len(found)  # all of them match
            return found

    monkeypatch.setattr(view, "Walk", Counted)
    found, matched, _ = done.all_of(view.search(table, "key", sort, 1500))
    assert matched == 2000
    assert [listed.entry.key for listed in found] == [
        b"key:%06d" % number for number in range(1500)
    ]
    assert done.steps >= 2000 / view.STEP
    assert done.most <= view.STEP


def test_a_search_finds_what_was_there_while_the_table_changes() -> None:
    table = a_table(1000)
    other = table.connect()
    search, found = view.search(table, "", "key", 2000), None
    for number in itertools.count():
        try:
            next(search)
        except StopIteration as end:
            found, _, _ = end.value
            break
        table.handle(other, Acquire(Space.LOCK, b"new:%06d" % number, 1, 0, 1000), 0)
        if number % 7 == 0:
            table.disconnect(other, 0, clean=True)
            other = table.connect()
    keys = [listed.entry.key for listed in found]
    assert keys == sorted(keys)
    assert {b"key:%06d" % number for number in range(1000)} <= set(keys)


def test_long_answers_are_made_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    table = LockTable(Limits(), TokenIssuer(b"x", 1))
    for _ in range(600):
        table.handle(table.connect(), Acquire(Space.SEMAPHORE, b"k", 500, 10, 1000), 0)
    entry = table.find(Space.SEMAPHORE, b"k")
    assert isinstance(entry, Entry)
    done = Done()
    for name in ("_holder", "_waiter"):
        made = getattr(view, name)

        def counted(one: object, now: float, made: object = made) -> view.Json:
            done.in_step += 1
            return made(one, now)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(view, name, counted)
    shown = json.loads(done.all_of(view.detail(Space.SEMAPHORE, b"k", entry, None, 0)))
    assert (len(shown["holders"]), len(shown["waiters"])) == (500, 100)
    assert done.steps >= 600 / view.STEP
    listed = [view.Found(entry, Match(entry, None, 0), 1)] * 100
    assert len(json.loads(done.all_of(view.rows(listed, 0)))) == 100
    assert done.most <= view.STEP


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
    async with site_here() as here:
        here.http._server.slices.look_for, here.http._server.slices.rest = -1.0, 0.01
        fill(here.table, 5000)
        steps = 0
        search = view.search

        def counted(*args: object, **options: object) -> Generator[None, None, object]:
            nonlocal steps
            for _ in search(*args, **options):  # type: ignore[arg-type]
                steps += 1
                yield
                peer.writer.transport.abort()

        monkeypatch.setattr(view, "search", counted)
        peer = await here.connect()
        peer.writer.write(SEARCH)
        desk = here.http._searches
        await until(desk._lock.locked)
        await until(lambda: not desk._lock.locked())
        assert steps < 5000 / view.STEP


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


async def test_all_shards_are_shown_without_looking_at_them() -> None:
    async with site_here() as here:
        here.http._cluster = OfThousands()
        here.http._server.slices.rest = 3600.0
        for _ in range(3):
            assert await here.ask(b"GET /api/shards HTTP/1.1\r\nHost: a\r\n\r\n") == 200
        assert await here.ask(b"GET /api/stats HTTP/1.1\r\nHost: a\r\n\r\n") == 200
        assert await here.ask() == 200
