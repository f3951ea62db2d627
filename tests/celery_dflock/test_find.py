"""``celery -A proj dflock find ID``: where a task is, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_dflock import finding
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import Waiter
from tests.celery_dflock.test_cli import Run, run, semaphore, server  # noqa: F401 - fixtures


@pytest.fixture
def contention(server: LockServer) -> Iterator[str]:  # noqa: F811 - the fixture
    """Three tasks of three hosts at one key, with four more behind them."""
    key = "account:7"
    with ExitStack() as stack:
        label = "shop.sync_account[11-aaaa] w1 pid 1"
        stack.enter_context(DistributedLock(key, 5, servers=[server.address], label=label))
        for number in range(2, 7):
            label = f"shop.sync_account[{number}{number}-aaaa] w{number % 3} pid {number}"
            waiting = DistributedLock(key, 60, servers=[server.address], label=label)
            stack.enter_context(Waiter(waiting))
        yield key


def test_a_waiter_in_words(run: Run, contention: str) -> None:  # noqa: F811
    found = run("find", "44-aaaa")
    assert found.exit_code == 0
    assert re.fullmatch(
        r"shop\.sync_account\[44-aaaa\] on w1 waits for account:7, third of 5, for \d+ s; "
        r"held by shop\.sync_account\[11-aaaa\] on w1 for \d+ s; "
        r"the lock has not changed hands yet, so there is no estimate\n",
        found.stdout,
    )


def test_a_holder_in_words(run: Run, contention: str) -> None:  # noqa: F811
    found = run("find", "11-AAAA")
    assert re.fullmatch(
        r"shop\.sync_account\[11-aaaa\] on w1 holds account:7 for \d+ s; "
        r"its lease ends in \d+ s; 5 wait for it\n",
        found.stdout,
    )


def test_by_name_host_and_key(run: Run, contention: str) -> None:  # noqa: F811
    assert len(run("find", "sync_account").stdout.splitlines()) == 6
    assert len(run("find", " w0 ").stdout.splitlines()) == 2
    assert run("find", "account:7").stdout.startswith("shop.sync_account[11-aaaa] on w1 holds ")


def test_nobody(run: Run, server: LockServer) -> None:  # noqa: F811
    found = run("find", "no such task")
    assert (found.exit_code, found.stdout) == (1, "")
    assert "no holder, waiter or key matches 'no such task'" in found.stderr


def test_for_programs(run: Run, contention: str) -> None:  # noqa: F811
    rows = json.loads(run("find", "sync_account", "--json").stdout)
    assert [row["position"] for row in rows] == [1, 2, 3, 4, 5, 0]
    assert {row["key"] for row in rows} == {contention}


def test_what_cannot_be_looked_for(run: Run, server: LockServer) -> None:  # noqa: F811
    assert "the text to look for" in run("find", "a\nb").stderr
    assert "256 are allowed" in run("find", "a" * 257).stderr


def test_notes_are_not_listed(run: Run, server: LockServer) -> None:  # noqa: F811
    with semaphore(server, "celery-done:task", "id w1 pid 1"):
        assert run("locks").stdout == "no key is held\n"
        assert "celery-done:task" in run("locks", "--all").stdout
        assert run("find", "celery-done").exit_code == 1
        assert run("find", "celery-done", "--all").exit_code == 0


def test_a_chain_over_two_servers_is_followed(run: Run, tmp_path: Any, server: LockServer) -> None:  # noqa: F811
    """A waits for what B holds, B for what C holds; and each says so."""
    with LockServer(tmp_path) as other, ExitStack() as stack:
        for name, at, key in (("b", server, "one"), ("c", other, "two")):
            label = f"task[{name}] w pid 1"
            lock = DistributedLock(key, 5, servers=[at.address], label=label)
            stack.enter_context(lock)
        for name, at, key in (("a", server, "one"), ("b", other, "two")):
            label = f"task[{name}] w pid 1"
            waiting = DistributedLock(key, 60, servers=[at.address], label=label)
            stack.enter_context(Waiter(waiting))
        servers = f"{server.address},{other.address}"
        lines = run("find", "task[a]", servers=servers).stdout.splitlines()
    assert lines[0].startswith("task[a] on w waits for one, the only one, ")
    assert lines[1].startswith("  task[b] on w waits for two, the only one, ")
    assert len(lines) == 2


def test_a_circle_over_two_servers_is_named(run: Run, tmp_path: Any, server: LockServer) -> None:  # noqa: F811
    with LockServer(tmp_path) as other, ExitStack() as stack:
        for name, at, key in (("a", server, "one"), ("b", other, "two")):
            label = f"task[{name}] w pid 1"
            stack.enter_context(DistributedLock(key, 5, servers=[at.address], label=label))
        for name, at, key in (("a", other, "two"), ("b", server, "one")):
            label = f"task[{name}] w pid 1"
            waiting = DistributedLock(key, 60, servers=[at.address], label=label)
            stack.enter_context(Waiter(waiting))
        servers = f"{server.address},{other.address}"
        lines = run("find", "task[a]", servers=servers).stdout.splitlines()
    assert lines[-1].strip() == (
        "deadlock, which only a timeout or the end of a lease resolves: "
        "task[a] waits for task[b], which waits for task[a]"
    )


@pytest.mark.parametrize(
    ("number", "word"),
    [(1, "first"), (10, "tenth"), (11, "11th"), (12, "12th"), (21, "21st"), (112, "112th")],
)
def test_positions(number: int, word: str) -> None:
    assert finding.ordinal(number) == word


def row_of(**changes: Any) -> dict[str, Any]:
    waiter = {"label": "t[1] h pid 1", "owner": "", "group": "", "waited_s": 12.3}
    waiter |= {"away": False, "told": False}
    holder = {"label": "t[2] h2 pid 2", "group": "", "held_s": 40.0, "lease_expires_in_s": 20.0}
    row = {"key": "k", "space": "lock", "limit": 1, "holders": 1, "waiters": 5, "position": 3}
    row |= {"rate": None}
    return {**row, "holder": holder, "waiter": waiter, "pace_s": 10.0, **changes}


def test_words() -> None:
    assert finding.in_words(row_of()) == (
        "t[1] on h waits for k, third of 5, for 12 s; held by t[2] on h2 for 40 s; "
        "about 30 s at the current pace"
    )
    away = {**row_of()["waiter"], "away": True}
    assert "it is requeued and keeps its position" in finding.in_words(row_of(waiter=away))
    assert "nobody holds it yet" in finding.in_words(row_of(holder=None, holders=0))
    told = {**row_of()["waiter"], "told": True}
    assert "it has been told that its turn has come" in finding.in_words(row_of(waiter=told))
    free = row_of(waiter=None, holder=None, holders=0, waiters=1)
    assert finding.in_words(free) == "k is not held; 1 waits for it"
    assert " and 2 more for 40 s" in finding.in_words(row_of(holders=3, limit=3))
    escape = {**row_of()["waiter"], "label": "t[\x1b[31m] h pid 1"}
    assert "\x1b" not in finding.in_words(row_of(waiter=escape, key="k\x1b"))


def test_a_rate_in_words() -> None:
    rate = {"runs": 2, "window_s": 8.0, "free": 0, "pending": 0, "next_s": 4.0}
    more = {"limit": 9, "holders": 0, "holder": None, "waiters": 3, "rate": rate}
    row = row_of(**more, rate_wait_s=12.0)
    assert finding.in_words(row).endswith(
        "third of 3, for 12 s; nobody holds it yet; the rate lets the next begin in 4 s; about 12 s"
    )
    assert finding.in_words({**row, "limit": 1, "holders": 1}).endswith("; about 30 s")
    # Who has a place has not begun, so that nobody knows when it will be free.
    unknown = {**row, "rate": {**rate, "next_s": None, "pending": 2}, "rate_wait_s": None}
    assert finding.in_words(unknown).endswith("one window after a run that has its lock begins")
    pending = {**row, "rate": {**rate, "pending": 1}, "rate_wait_s": None}
    assert finding.in_words(pending).endswith("the rate lets the next begin in 4 s")
    # With free places it is slots that are waited for.
    free = {**row, "rate": {**rate, "free": 1}}
    assert finding.in_words(free).endswith("about 30 s at the current pace")


def test_words_of_rates_groups_and_the_newest() -> None:
    rate = {"runs": 10, "window_s": 60, "free": 0, "next_s": 4.2}
    unlimited = {"limit": 1 << 20, "holders": 3}
    paced = {"rate": rate, "rate_wait_s": None}
    # Who holds it is in nobody's way where the rate alone is.
    assert "for 12 s; the rate lets the next begin in 4 s" in finding.in_words(
        row_of(**paced, **unlimited)
    )
    assert "; held by t[2] on h2 for 40 s; the rate lets" in finding.in_words(row_of(**paced))
    grouped = {**row_of()["waiter"], "group": "tenant:\x1b7"}
    assert r"12 s; in group tenant:\x1b7; held by" in finding.in_words(row_of(waiter=grouped))
    held = {**row_of()["holder"], "group": "tenant:7", "superseded_by": "t[3] h3 pid 1"}
    assert finding.in_words(row_of(waiter=None, holder=held, waiters=0)) == (
        "t[2] on h2 holds k for 40 s, in group tenant:7, superseded by t[3] on h3; "
        "its lease ends in 20 s; nobody waits"
    )
    assert "for 40 s, 3 hold it; its" in finding.in_words(row_of(waiter=None, **unlimited))


def test_weights_in_words() -> None:
    rate = {"runs": 10, "window_s": 60, "free": 0, "next_s": 4.0}
    row = row_of(limit=8, used=6, rate=rate, rate_wait_s=12.0)
    held = "; held by t[2] on h2 for 40 s; the rate lets the next begin in 4 s; about "
    waiter = row["waiter"]
    # Two slots are free: enough for one that takes two, and too few for three, or for all.
    assert "held by" not in finding.in_words({**row, "waiter": {**waiter, "weight": 2}})
    said = finding.in_words({**row, "waiter": {**waiter, "weight": 3}})
    assert said.endswith(f"it needs 3 of 8 slots{held}30 s")
    said = finding.in_words({**row, "waiter": {**waiter, "weight": "all"}})
    assert said.endswith(f"it needs all of 8 slots{held}30 s")
    # A weight above what the limit has become takes all, and an empty key has that.
    free = {**row, "used": 0, "holders": 0, "holder": None, "waiter": {**waiter, "weight": 9}}
    assert finding.in_words(free).endswith("about 12 s")
    # Places of the rate count in the same units.
    some = {**row, "used": 1, "rate": {**rate, "free": 2, "next_s": 0.0}}
    said = finding.in_words({**some, "waiter": {**waiter, "weight": 3}})
    assert said.endswith("it needs 3 of 8 slots; 2 of 10 places of the rate are free")
    assert "places" not in finding.in_words({**some, "waiter": {**waiter, "weight": 2}})
    assert ", 6 of 8 slots taken; its lease" in finding.in_words({**row, "waiter": None})


def test_who_waits_for_several_slots(run: Run, server: LockServer) -> None:  # noqa: F811
    def share(name: str, weight: int) -> DistributedSemaphore:
        label = f"shop.train[{name}] w1 pid 1"
        return DistributedSemaphore(
            "gpu", 8, 60, servers=[server.address], weight=weight, label=label
        )

    with share("11-aaaa", 6), Waiter(share("22-aaaa", 3)):
        assert ", 6 of 8 slots taken; " in run("find", "11-aaaa").stdout
        assert "; it needs 3 of 8 slots; held by shop.train[11-aaaa] " in run(
            "find", "22-aaaa"
        ).stdout.replace("\n", " ")


def test_who_waits_for_itself_is_a_circle_but_its_retry_is_not() -> None:
    own = row_of(holder={**row_of()["holder"], "label": "t[1] h pid 9"})
    [(said, is_circle)] = finding.chain(own, lambda _: [])
    assert is_circle
    assert "t[1] waits for what it holds itself" in said
    retried = {**own, "waiter": {**own["waiter"], "owner": "3f2a", "attempt": 1}}
    assert not list(finding.chain(retried, lambda _: []))


def test_a_chain_of_changing_answers_ends() -> None:
    """The servers are asked one after the other, and what they say need not fit together."""
    numbers = iter(range(10, 1000))

    def find(text: str) -> list[dict[str, Any]]:
        waiter = {**row_of()["waiter"], "label": f"{text} h pid 1"}
        holder = {**row_of()["holder"], "label": f"t[{next(numbers)}] h pid 1"}
        return [row_of(waiter=waiter, holder=holder)]

    assert len(list(finding.chain(row_of(), find))) < finding.LONGEST_CHAIN
