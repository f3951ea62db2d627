"""Who waits for whom: chains and circles, in a table and in the log of a server."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.server import SparingLog
from dflockd.server import deadlocks as watching
from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.table.blocking import STEP, DeadlockSearch, in_words
from dflockd.wire import Acquire, Granted, How, Owner, Renew, Reply, Space
from tests.dflockd.raw_server import StartServer, eventually
from tests.dflockd.server.server_support import takes_seconds
from tests.dflockd.server.session_support import make_server


class Stage:
    """Runs of tasks, with a connection for each lock as clients have them."""

    def __init__(self) -> None:
        self.table = LockTable(Limits(), TokenIssuer(b"secret", 0))

    def ask(
        self, run: str, key: str, limit: int = 1, label: str | None = None, attempt: int = -1
    ) -> tuple[Any, Reply | None]:
        peer = self.table.connect()
        text = f"task[{run}] host pid {peer.id}" if label is None else label
        owner = Owner(run.encode(), attempt) if attempt >= 0 else None
        request = Acquire(
            *(Space.LOCK, key.encode(), limit, 3600, 3000), owner=owner, label=text.encode()
        )
        return peer, dict(self.table.handle(peer, request, 0)).get(peer.id)

    def look(self) -> DeadlockSearch:
        look = DeadlockSearch(self.table.each_partition())
        while not look.step():
            pass
        return look

    def circles(self) -> list[str]:
        return sorted(map(in_words, self.look().circles))


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_circle_of_two(stage: Stage) -> None:
    stage.ask("a", "one")
    stage.ask("b", "two")
    stage.ask("a", "two")
    assert stage.circles() == []
    stage.ask("b", "one")
    [said] = stage.circles()
    assert said in (
        "task[a] waits for two, held by task[b], which waits for one, held by task[a]",
        "task[b] waits for one, held by task[a], which waits for two, held by task[b]",
    )


def test_chains_are_measured(stage: Stage) -> None:
    assert stage.look().longest == 0
    stage.ask("a", "k0")
    assert stage.look().longest == 0
    for number in range(20):
        stage.ask(f"r{number}", f"k{number + 1}")
        stage.ask(f"r{number}", f"k{number}")
        assert stage.look().longest == number + 1
    assert stage.circles() == []


def test_of_a_semaphore_with_many_holders_a_few_are_looked_at(stage: Stage) -> None:
    """In each step: so no step is long, however many there are."""
    for number in range(2 * STEP):
        stage.ask(f"holder-{number}", "many", 2 * STEP)
    stage.ask("waiter", "many", 2 * STEP)
    assert len(stage.look()._holds) == STEP


def test_a_semaphore_with_somebody_who_goes_on_is_no_circle(stage: Stage) -> None:
    stage.ask("a", "pool", 2)
    stage.ask("c", "pool", 2)
    stage.ask("b", "one")
    stage.ask("a", "one")
    stage.ask("b", "pool", 2)
    assert stage.circles() == [], "c gives its slot back"
    stage.ask("c", "one")
    assert len(stage.circles()) == 1, "now nobody does"


@pytest.mark.parametrize("keys", [("two", "three"), ("three", "two")])
def test_a_run_may_wait_in_several_places(stage: Stage, keys: tuple[str, str]) -> None:
    stage.ask("a", "one")
    for key in keys:  # in the order in which a look comes to them
        stage.ask({"two": "b", "three": "c"}[key], key)
    for key in keys:
        stage.ask("a", key)
    assert stage.circles() == []
    stage.ask("b", "one")
    [said] = stage.circles()
    assert "task[a] waits for two, held by task[b]" in said


def test_a_retry_that_waits_for_its_own_run_is_no_circle(stage: Stage) -> None:
    stage.ask("a", "one", attempt=0)
    stage.ask("a", "one", attempt=1)
    assert stage.circles() == []
    assert stage.look().longest == 1


def test_who_waits_for_what_it_holds_is_a_circle(stage: Stage) -> None:
    stage.ask("a", "one")
    stage.ask("a", "one")
    assert stage.circles() == ["task[a] waits for one, held by task[a]"]


def test_what_nobody_works_under_is_no_link(stage: Stage) -> None:
    peer, granted = stage.ask("a", "one")
    assert isinstance(granted, Granted)
    stage.ask("b", "two")
    stage.ask("a", "two")
    stage.ask("b", "one")
    assert len(stage.circles()) == 1
    stage.table.handle(peer, Renew(Space.LOCK, b"one", granted.token, 600, How.DETACH), 0)
    assert stage.circles() == []


def test_programs_that_do_not_say_who_they_are_are_no_links(stage: Stage) -> None:
    for run, key in (("a", "one"), ("b", "two"), ("a", "two"), ("b", "one")):
        stage.ask(run, key, label="python host pid 7")
    assert stage.circles() == []
    for run, key in (("c", "three"), ("d", "four"), ("c", "four"), ("d", "three")):
        stage.ask(run, key, label="", attempt=0)
    assert len(stage.circles()) == 1, "an owner says it as well as a label"


def test_what_has_ended_during_the_look_is_no_circle(stage: Stage) -> None:
    for number in range(106):  # with the rest as much as 7 steps look at
        stage.ask(f"x{number}", f"key-{number}")
    stage.ask("a", "one")
    peer, _ = stage.ask("b", "two")
    waiting, _ = stage.ask("a", "two")
    stage.ask("b", "one")
    look = DeadlockSearch(stage.table.each_partition())
    for _ in range(7):
        assert not look.step()
    assert len(look._waits) == 2, "it has seen both of them wait"
    stage.table.disconnect(waiting, 1, clean=True)
    while not look.step():
        pass
    assert look.circles == []
    assert peer.holds


runs = st.integers(0, 5)


@given(st.lists(st.tuples(runs, st.integers(0, 5)), max_size=25), st.randoms())
def test_circles_are_those_of_the_graph(asked: list[tuple[int, int]], dice: random.Random) -> None:
    """Locks alone, each run waiting for one thing at a time: as in a program of one thread."""
    stage = Stage()
    holder: dict[int, int] = {}
    waits: dict[int, int] = {}
    for run, key in asked:
        if run in waits or holder.get(key) == run:
            continue
        stage.ask(f"r{run}", f"k{key}")
        if key in holder:
            waits[run] = key
        else:
            holder[key] = run
    expected, longest = set(), 0
    for run in waits:
        way, each = [run], run
        while each in waits and (each := holder[waits[each]]) not in way:
            way.append(each)
        if each in waits:
            expected.add(frozenset(way[way.index(each) :]))
        longest = max(longest, len([one for one in way if one in waits]))
    look = stage.look()
    found = {
        frozenset(int(link.waiter.label[6:].split(b"]")[0]) for link in circle)
        for circle in look.circles
    }
    assert found == expected
    if not expected:
        assert look.longest == longest


async def test_a_server_says_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    stage = Stage()
    server.table = stage.table
    for run, key in (("a", "one"), ("b", "two"), ("a", "two")):
        stage.ask(run, key)
    waiting, _ = stage.ask("b", "one")
    seen = watching.Deadlocks(stage.table)
    for _ in range(3):
        server.log = SparingLog(server.loop, logging.getLogger("dflockd.server"))
        for _ in seen.look(server.log):
            pass
    lines = [each.getMessage() for each in caplog.records if "deadlock" in each.getMessage()]
    assert len(lines) == 1
    assert caplog.records[-1].levelname == "WARNING"
    assert (seen.number, seen.longest) == (1, 2) or seen.number == 1
    assert stage.table.about["circles"] == seen.circles
    stage.table.disconnect(waiting, 1, clean=True)
    for _ in seen.look(server.log):
        pass
    assert seen.circles == []
    assert "circles" not in stage.table.about


@takes_seconds
def test_in_the_log_the_stats_and_nowhere_broken(start_server: StartServer) -> None:
    server = start_server()
    clients = []
    for run, key, waits in (
        ("a", "one\x1b[31m", False),
        ("b", "two", False),
        ("a", "two", True),
        ("b", "one\x1b[31m", True),
    ):
        client = server.connect()
        client.request("acquire", key, f"timeout=60 label=task[{run}] host pid 1")
        if not waits:
            assert client.line().startswith("ok ")
        clients.append(client)
    eventually(lambda: any("deadlock, which only a timeout" in line for line in server.log))
    assert r"waits for one\x1b[31m, held by" in " ".join(server.log), "it colours no terminal"
    stats = json.loads(server.connect().ask("stats")[3:])
    assert len(stats["circles"]) == 1
    assert sorted((row["key"], row["waiters"]) for row in stats["locks"]) == [
        ("one\x1b[31m", 1),
        ("two", 1),
    ], "nobody has been sent away"
    assert watching.INTERVAL <= 5
