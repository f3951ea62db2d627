"""Looking for somebody in the table: who is found, in what order, and what becomes of it meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.table.finding import MOST_FOUND, Search, as_wanted
from dflockd.wire import (
    ALL,
    Acquire,
    Enqueue,
    FairGroup,
    Find,
    How,
    Rate,
    Release,
    Renew,
    Report,
    Space,
    Stats,
    Wait,
)
from dflockd.wire.notes import is_note

LOCK = Space.LOCK


class Stage:
    """A table, and people in it by their labels."""

    def __init__(self) -> None:
        self.table = LockTable(Limits(max_locks=10_000), TokenIssuer(b"secret", 0))
        self.peers: dict[str, Any] = {}

    def ask(self, label: str, key: str, now: float = 0.0, limit: int = 1) -> Any:
        """Have somebody take a key, or wait for it."""
        peer = self.peers[label] = self.table.connect()
        request = Acquire(LOCK, key.encode(), limit, 3600, 3000, label=label.encode())
        effects = self.table.handle(peer, request, now)
        return dict(effects).get(peer.id)

    def find(self, text: str, now: float = 100.0, **flags: bool) -> dict[str, Any]:
        [(_, reply)] = self.table.handle(self.table.connect(), Find(text.encode(), **flags), now)
        found: dict[str, Any] = json.loads(reply.json)  # type: ignore[union-attr]
        return found

    def names(self, text: str, **flags: bool) -> list[str]:
        return [name_of(each) for each in self.find(text, **flags)["found"]]


def name_of(row: dict[str, Any]) -> str:
    """Who it is about: the waiter, the holder, or the key alone."""
    if row["waiter"]:
        return str(row["waiter"]["label"])
    return str(row["holder"]["label"])


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_waiter_is_found_by_id_name_and_host(stage: Stage) -> None:
    stage.ask("sync[11-aa] w1 pid 1", "account:7", 0)
    stage.ask("sync[22-bb] w2 pid 2", "account:7", 10)
    stage.ask("mail[33-cc] w3 pid 3", "account:7", 20)
    for text in ("33-cc", "MAIL", "w3 pid"):
        [row] = stage.find(text)["found"]
        assert row["waiter"]["label"] == "mail[33-cc] w3 pid 3"
        assert (row["key"], row["position"], row["waiters"]) == ("account:7", 2, 2)
        assert row["waiter"]["waited_s"] == 80
        assert row["holder"]["label"] == "sync[11-aa] w1 pid 1"
        assert row["holder"]["held_s"] == 100


def test_what_cannot_be_encoded_is_looked_for_as_a_question_mark() -> None:
    assert as_wanted("Sync[\udcff") == b"sync[?"


def test_who_has_waited_longest_is_first_then_holders_then_keys(stage: Stage) -> None:
    stage.ask("sync[1] h", "a", 5)
    stage.ask("sync[2] h", "b", 1)
    stage.ask("sync[3] h", "a", 9)
    stage.ask("sync[4] h", "b", 7)
    assert stage.names("sync") == ["sync[4] h", "sync[3] h", "sync[2] h", "sync[1] h"]
    stage.ask("other", "sync:key", 0)
    rows = stage.find("sync")["found"]
    assert [row["key"] for row in rows][-1] == "sync:key"
    assert rows[-1]["waiter"] is None


def test_waiters_alone(stage: Stage) -> None:
    stage.ask("one", "a", 3)
    stage.ask("two", "a", 4)
    stage.ask("three", "b", 0)
    stage.ask("four", "b", 2)
    assert stage.names("", waiters=True) == ["four", "two"]
    assert stage.names("b", waiters=True) == [], "nobody's label has it"


def test_notes_are_left_out(stage: Stage) -> None:
    for key in ("celery-done:task", "shop:celery-done:task", "replaced:0a1b2c3d-1234"):
        stage.ask("note", key)
    stage.ask("note", "my-replaced:thing")
    assert stage.find("note")["matched"] == 1
    assert stage.find("note", notes=True)["matched"] == 4
    assert stage.find("celery-done")["matched"] == 0


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("celery-done:shop.tasks.sync", True),
        ("prefix-celery-done:shop", True),
        ("xcelery-done:shop", False),
        ("celery-beat:shop", False),
        ("replaced:7", False),
        ("replaced:3f2a9c10-aaaa-bbbb", True),
        ("account:7", False),
    ],
)
def test_what_a_note_is(key: str, expected: bool) -> None:
    assert is_note(key.encode()) is expected


def test_a_lock_with_a_limit_has_all_its_holders(stage: Stage) -> None:
    for number in range(3):
        stage.ask(f"call[{number}]", "vendor", number, limit=3)
    [row] = stage.find("call[2]")["found"]
    assert (row["space"], row["limit"], row["holders"]) == ("lock", 3, 3)
    assert row["holder"]["label"] == "call[2]", "the one that was looked for"


def test_all_are_counted_and_the_first_are_told(stage: Stage) -> None:
    stage.ask("holder", "k", 0)
    many = MOST_FOUND + 50
    for number in range(many):
        since = number * 7 % many  # in no order
        stage.ask(f"task[{since}]", "k", since)
    found = stage.find("task[", now=600)
    assert found["matched"] == many
    labels = [row["waiter"]["label"] for row in found["found"]]
    assert labels == [f"task[{since}]" for since in range(MOST_FOUND)]


def test_the_pace_is_that_of_the_last_grants(stage: Stage) -> None:
    tokens = [stage.ask("task[0]", "k", 0).token]
    for number in range(1, 5):
        stage.ask(f"task[{number}]", "k", 0)
    assert stage.find("task[4]")["found"][0]["pace_s"] is None, "nobody has been served yet"
    for number in range(3):
        now = 10.0 * (number + 1)
        effects = stage.table.handle(
            stage.peers[f"task[{number}]"], Release(LOCK, b"k", tokens[-1]), now
        )
        [granted] = [reply for peer, reply in effects if peer != stage.peers[f"task[{number}]"].id]
        tokens.append(granted.token)  # type: ignore[union-attr]
    assert stage.find("task[4]", now=31)["found"][0]["pace_s"] == 10
    assert stage.find("task[4]", now=130)["found"][0]["pace_s"] == 100, "the next is overdue"


def test_when_a_rate_lets_each_of_them_begin(stage: Stage) -> None:
    """Two in ten seconds: one has begun at 3, one at 5, and five wait."""
    rate = Rate(2, 10_000)
    for number, now in enumerate((3.0, 5.0, 6.0, 6.0, 6.0, 6.0, 6.0)):
        peer = stage.table.connect()
        asked = Acquire(LOCK, b"k", 9, 3600, 3000, rate, label=b"run %d" % number)
        for _, reply in stage.table.handle(peer, asked, now):
            stage.table.handle(peer, Renew(LOCK, b"k", reply.token, None, How.BEGUN), now)  # type: ignore[union-attr]
    rows = stage.find("run", 7.0, waiters=True)["found"]
    assert [row["rate_wait_s"] for row in rows] == [6, 8, 16, 18, 26]
    assert {row["rate"]["next_s"] for row in rows} == {6}
    [row] = stage.find("run 0", 7.0)["found"]
    assert row["rate"]["free"] == 0
    assert "rate_wait_s" not in row
    # One that has its lock and has not begun makes that uncertain from its place on.
    stage.table.advance(13.1)
    rows = stage.find("run", 13.1, waiters=True)["found"]
    assert [row["rate_wait_s"] for row in rows] == [1.9, None, 11.9, None]
    assert stage.find("k", 13.1)["found"][0]["rate"]["pending"] == 1
    stage.ask("without", "other")
    assert stage.find("without", 13.1)["found"][0]["rate"] is None
    [(_, reply)] = stage.table.handle(stage.table.connect(), Stats(), 13.1)
    assert isinstance(reply, Report)
    shown = {row["key"]: row.get("rate", "nothing") for row in json.loads(reply.json)["locks"]}
    assert shown["other"] == "nothing"
    assert shown["k"]["pending"] == 1


def test_a_waiter_with_a_weight_needs_as_many_places_of_a_rate(stage: Stage) -> None:
    """Five in ten seconds: three places are taken at 0 and two at 5; each waits for several."""
    rate = Rate(5, 10_000)
    for number, (now, weight) in enumerate(
        ((0.0, 3), (5.0, 2), (6.0, 2), (6.0, 2), (6.0, 4), (6.0, ALL))
    ):
        peer, share = stage.table.connect(), FairGroup(b"", 0, weight)
        asked = Acquire(LOCK, b"k", 99, 3600, 3000, rate, label=b"run %d" % number, group=share)
        for _, reply in stage.table.handle(peer, asked, now):
            stage.table.handle(peer, Renew(LOCK, b"k", reply.token, None, How.BEGUN), now)  # type: ignore[union-attr]
    rows = stage.find("run", 7.0, waiters=True)["found"]
    assert [row["rate_wait_s"] for row in rows] == [3, 8, 18, 28]


def test_what_ends_while_it_is_looked_for(stage: Stage) -> None:
    """The search goes on with what it had, and says nothing of those that are gone."""
    for number in range(100):
        stage.ask(f"task[{number}]", f"key-{number:03}", 0)
        stage.ask(f"wait[{number}]", f"key-{number:03}", 1)
    search = Search(stage.table.each_partition(), "t[")
    search.step(2.0)
    for number in range(0, 100, 2):
        stage.table.disconnect(stage.peers[f"wait[{number}]"], 2.0, clean=True)
    while not search.step(3.0):
        pass
    rows = json.loads(search.text())["found"]
    assert {name_of(row) for row in rows} == {f"wait[{number}]" for number in range(1, 100, 2)}


def test_who_was_granted_meanwhile_is_no_waiter_any_more(stage: Stage) -> None:
    token = stage.ask("first", "k", 0).token
    peer = stage.table.connect()
    stage.table.handle(peer, Enqueue(LOCK, b"k", 1, 30, label=b"second"), 0)
    search = Search(stage.table.each_partition(), "second")
    while not search._walk.is_done:
        search.step(0.0)
    stage.table.handle(stage.peers["first"], Release(LOCK, b"k", token), 1)
    while not search.step(1.0):
        pass
    assert json.loads(search.text())["found"] == []
    stage.table.handle(peer, Wait(LOCK, b"k", 0), 2)


labels = st.text("abAB1", min_size=1, max_size=4)


@given(
    st.lists(st.tuples(labels, st.text("abc", min_size=1, max_size=2)), max_size=40),
    st.text("abAB1", max_size=2),
)
def test_it_finds_what_a_look_at_everything_finds(people: list[tuple[str, str]], text: str) -> None:
    stage, holding, expected = Stage(), set(), []
    for at, (label, key) in enumerate(people):
        name = f"{label}{at}"
        stage.ask(name, key, at)
        waits = key in holding
        holding.add(key)
        if text.lower() in name.lower():
            expected.append((not waits, at, name))
    rows = [row for row in stage.find(text, now=100)["found"] if row["position"] or text]
    found = [row["waiter"]["label"] for row in rows if row["waiter"]]
    assert found == [name for holds, _, name in sorted(expected) if not holds]
    keys = sum(1 for key in holding if text.lower() in key)
    assert stage.find(text)["matched"] == len(expected) + keys
