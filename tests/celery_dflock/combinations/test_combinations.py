"""Whatever a task has, in whatever pool, on whatever broker: each pair of it, with real workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from tests.celery_dflock.combinations.judge import History, Sent, Stop, faults
from tests.celery_dflock.combinations.matrix import (
    FACTORS,
    REFUSED,
    Refusal,
    is_refused,
    named,
    rows,
)
from tests.celery_dflock.combinations.pairs import Row, all_pairs
from tests.celery_dflock.combinations.task import make
from tests.celery_dflock.combinations.trial import Trial
from tests.celery_dflock.outcome.table.expected import EXPECTED
from tests.rabbitmq import RabbitMQ, missing

SEED = int(os.environ.get("COMBINATIONS_SEED", "1"))
USUAL: Row = {name: values[0] for name, values in FACTORS.items()}


def usual(**values: Any) -> Row:
    return {**USUAL, **values}


KILLED = usual(wait="consumer", limit=3, weight="{weight}", late=True, end="kill")
NEWEST = usual(conflict="newest", unique="until_executed", pool="threads", retries=True, end="warm")
LOCKS = usual(
    timeout=None, rate=(5, 1.0), group="limited", limit=None, keys="locks", pool="threads"
)
SAMPLE = [{**row, "results": "redis"} for row in (KILLED, NEWEST, LOCKS)]
"""Rows of `make test`."""


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    if why := missing():
        pytest.skip(why)
    with RabbitMQ(tmp_path_factory.mktemp("rabbitmq")) as broker:
        yield broker


@pytest.mark.usefixtures("needs_redis")
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", [pytest.param(row, id=named(row)) for row in rows(SEED)])
def test_row(row: Row, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    broker = None if row["broker"] == "redis" else request.getfixturevalue("rabbitmq")
    assert not faults(Trial(row, tmp_path, broker).run())


@pytest.mark.usefixtures("needs_redis")
@pytest.mark.parametrize("row", SAMPLE, ids=named)
def test_row_of_the_sample(row: Row, tmp_path: Path) -> None:
    assert not faults(Trial(row, tmp_path, None).run())


@pytest.mark.usefixtures("needs_redis")
def test_a_worker_without_locks_is_found_out(tmp_path: Path) -> None:
    found = faults(Trial(usual(pool="threads"), tmp_path, None, dflock_enabled=False).run())
    assert any("at once, 1 for the key" in line for line in found), found


def test_each_pair_is_in_some_row() -> None:
    factors = {name: FACTORS[name] for name in ("pool", "conflict", "limit", "rate", "group")}
    found, never = all_pairs(factors, is_refused, 1)
    for one, two in combinations(factors, 2):
        for m, first in enumerate(factors[one]):
            for n, second in enumerate(factors[two]):
                there = any(row[one] == first and row[two] == second for row in found)
                assert there != (frozenset([(one, m), (two, n)]) in never), (first, second)
    assert len(found) < 2 * 5 * 6
    assert not any(map(is_refused, found))


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: "-".join(refusal.values))
def test_what_the_matrix_leaves_out_is_refused_or_in_the_manual(refusal: Refusal) -> None:
    for row in _refused_only_by(refusal):
        if refusal.outcome:
            cells = EXPECTED[refusal.outcome]
            assert refusal.says in cells.get(row["pool"], cells[""])
        else:
            with pytest.raises(ImproperlyConfigured, match=refusal.says):
                assert make(Celery("refused", set_as_current=False), row).name  # which binds it


def _refused_only_by(refusal: Refusal) -> list[Row]:
    """A row for each pair of the refused values: nothing else is wrong with it."""
    others = [other for other in REFUSED if other is not refusal]
    names = {name for each in REFUSED for name in each.values}
    factors = {name: list(refusal.values.get(name, FACTORS[name])) for name in names}
    found, _ = all_pairs(factors, lambda row: any(other.applies(row) for other in others), 1)
    return [usual(**row) for row in found]


# Histories, each with one thing that is wrong.


def _events(id: str, at: float, key: str = "k0") -> list[dict[str, Any]]:
    """A task that is asked for, runs for a second, and succeeds."""
    about = {"id": id, "pid": 1, "worker": "w", "key": key, "retries": 0}
    kwargs = {"tenant": 0, "weight": 1}
    return [
        {**about, "what": "asked", "at": at},
        {**about, "what": "start", "at": at + 0.1, "acquired": at, "kwargs": kwargs},
        {**about, "what": "end", "at": at + 1, "error": None},
        {**about, "what": "done", "at": at + 1.1, "state": "SUCCESS"},
    ]


def _history(**row: Any) -> History:
    """Two tasks that ran one after another, in a worker that was killed later."""
    sent = [Sent(id, {"key": "k0"}, 9.0, 9.1) for id in ("a", "b")]
    sent[1].before, sent[1].after = 14.0, 14.1
    return History(
        usual(**{"results": "redis", "end": "kill", **row}),
        sent,
        _events("a", 10) + _events("b", 15),
        {"a": "SUCCESS", "b": "SUCCESS"},
        Stop("w", 20.0, 20.5),
    )


def _change(history: History, id: str, what: str, **more: Any) -> None:
    next(e for e in history.of[id] if e["what"] == what).update(more)


def _late(history: History, id: str, after: str) -> None:
    """Nothing is heard of a task from then on."""
    last = next(n for n, e in enumerate(history.of[id]) if e["what"] == after)
    del history.of[id][last + 1 :]


PLANTED: dict[str, tuple[dict[str, Any], Callable[[History], Any], str]] = {
    "a second holder": ({}, lambda h: _change(h, "b", "start", at=10.5), "2 slots of k0 at once"),
    "too soon": ({"rate": (1, 6.0)}, lambda h: None, "2 starts of k0 in 6.0 s, 1 allowed"),
    "run twice": ({"late": True}, lambda h: h.of["a"].extend(_events("a", 30)), "a ran 2 times"),
    "lost though acknowledged late": (
        {"late": True},
        lambda h: _late(h, "b", "start"),
        "b was lost after start",
    ),
    "lost by a worker that ended well": (
        {"end": "warm"},
        lambda h: h.of["b"].clear(),
        "b was lost after None",
    ),
    "too many lost": (
        {"broker": "classic", "late": True},
        lambda h: h.of["b"].clear(),
        "1 tasks were lost before they began, 0 may be",
    ),
    "a wrong final state": (
        {},
        lambda h: h.fates.update(b="FAILURE ValueError"),
        "b is FAILURE ValueError, not SUCCESS",
    ),
    "sent though one was on its way": (
        {"unique": "until_expired"},
        lambda h: None,
        "b was sent while a was on its way",
    ),
    "not sent though none was": (
        {"unique": "until_executed"},
        lambda h: h.sent.append(Sent("b", {"key": "k0"}, 40.0, 40.1)),
        "b was not sent again though it was over",
    ),
    "left": ({}, lambda h: h.left.append("left in the broker: 1 messages"), "left in the broker"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str) -> None:
    row, plant, line = PLANTED[name]
    history = _history(**row)
    plant(history)
    history.events[:] = [event for events in history.of.values() for event in events]
    [found] = faults(history)
    assert line in found


def test_a_history_without_a_fault() -> None:
    for row in ({}, {"late": True}, {"unique": "until_executed"}, {"rate": (1, 4.0)}):
        assert faults(_history(**row)) == []
