"""`lock_limit`, `lock_rate` and `lock_group_limit` that are made of the arguments of a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, states
from celery.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

from celery_dflock import LockedTask, LockKeyError
from celery_dflock.keys import finish
from celery_dflock.limits import MAX_LIMIT, Limits, Wanted, in_order
from dflockd.rates import RunRate
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters


def bind(task_name: str = "made", **options: Any) -> Task:
    app = Celery("limits", set_as_current=False)

    @app.task(base=LockedTask, name=task_name, shared=False, lazy=False, **options)
    def task(account: int, seats: Any = 3, *, plan: str = "free") -> None: ...

    return task


def limits_of(task: Task, *args: Any, **kwargs: Any) -> Limits:
    [wanted] = task._lock_options.wanted(task, args, kwargs, "")
    return wanted.limits


def by_plan(_task: Task, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 10 if kwargs.get("plan") == "premium" else 1


@pytest.mark.parametrize(
    ("options", "call", "limits"),
    [
        ({"lock_limit": by_plan}, {"plan": "premium"}, (10, None, None)),
        ({"lock_limit": by_plan}, {}, (1, None, None)),
        ({"lock_limit": "{seats}"}, {"seats": 7}, (7, None, None)),
        ({"lock_limit": "{seats}"}, {"seats": "7"}, (7, None, None)),
        ({"lock_limit": "{seats}0"}, {}, (30, None, None)),
        ({"lock_limit": lambda *_: MAX_LIMIT}, {}, (MAX_LIMIT, None, None)),
        ({"lock_rate": "{seats}/m"}, {}, (1, RunRate(3, 60), None)),
        ({"lock_rate": lambda *_: (5, 0.5)}, {}, (1, RunRate(5, 0.5), None)),
        ({"lock_rate": lambda *_: None}, {}, (1, None, None)),
        (
            {"lock_rate": lambda *_: "5/h", "lock_limit": lambda *_: None},
            {},
            (MAX_LIMIT, RunRate(5, 3600), None),
        ),
        ({"lock_group": "{plan}", "lock_group_limit": "{seats}"}, {}, (1, None, 3)),
        ({"lock_group": "{plan}", "lock_group_limit": lambda *_: None}, {}, (1, None, None)),
    ],
)
def test_a_function_or_a_template_says_what_the_limits_of_a_call_are(
    options: dict[str, Any], call: dict[str, Any], limits: tuple[Any, ...]
) -> None:
    assert limits_of(bind(**options), 1, **call) == Limits(*limits)


BAD = [
    ({"lock_limit": "{seats}"}, {"seats": 0}, "lock_limit is 0: give a whole number, 1 or more"),
    ({"lock_limit": "{seats}"}, {"seats": "all"}, "lock_limit is 'all': give a whole number,"),
    ({"lock_limit": "{seats}"}, {"seats": 10**12}, "lock_limit is '1000000000000': give a whole"),
    ({"lock_limit": lambda *_: True}, {}, "lock_limit is True: give a whole number, 1 or more"),
    ({"lock_limit": lambda *_: "7"}, {}, "lock_limit is '7': give a whole number, 1 or more"),
    ({"lock_limit": lambda *_: 2.5}, {}, "lock_limit is 2.5: give a whole number, 1 or more"),
    (
        {"lock_limit": lambda *_: None},
        {},
        "lock_limit is None: give a whole number, 1 or more, or a lock_rate or lock_group_limit too",
    ),
    (
        {"lock_limit": None, "lock_rate": lambda *_: None},
        {},
        "lock_limit is None: give a whole number, 1 or more, or a lock_rate or lock_group_limit too",
    ),
    ({"lock_rate": "{seats}/m"}, {"seats": 0}, "lock_rate is '0/m': give a text such as '10/m'"),
    ({"lock_rate": lambda *_: "a\nb"}, {}, r"lock_rate is 'a\\nb': give a text such as '10/m'"),
    (
        {"lock_group": "{plan}", "lock_group_limit": "{seats}"},
        {"seats": -1},
        "lock_group_limit is '-1': give a whole number, 1 or more",
    ),
]


@pytest.mark.parametrize(("options", "call", "line"), BAD)
def test_a_bad_one_fails_the_task_in_one_line(
    options: dict[str, Any], call: dict[str, Any], line: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"^task made: {line}") as refused:
        bind(**options).apply((1,), call, throw=True)
    assert "\n" not in str(refused.value)


def test_a_template_that_does_not_fit_the_call_names_its_option() -> None:
    with pytest.raises(LockKeyError, match="lock_rate does not fit the arguments"):
        bind(lock_rate="{seats.number}/m").apply((1,), throw=True)


class Odd:
    """An argument that raises where somebody looks at it."""

    def __format__(self, _: str) -> str:
        raise RuntimeError("no format")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_an_argument_that_raises_in_a_template_names_the_option() -> None:
    with pytest.raises(LockKeyError, match="lock_limit does not fit the arguments: Runtime"):
        bind(lock_limit="{seats}").apply((1,), {"seats": Odd()}, throw=True)


LONG_TEXT = "x" * 1_000_000


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lock_limit", LONG_TEXT),
        ("lock_rate", LONG_TEXT),
        ("lock_group", [LONG_TEXT, LONG_TEXT]),
        ("lock_group", {LONG_TEXT}),
        ("lock_limit", Odd()),
        ("lock_group", Odd()),
    ],
    ids=["limit", "rate", "groups", "set", "odd limit", "odd group"],
)
def test_the_line_is_short_whatever_the_value_is(option: str, value: object) -> None:
    with pytest.raises((ImproperlyConfigured, LockKeyError), match=option) as refused:
        bind(**{option: lambda *_: value}).apply((1,), throw=True)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lock_limit": "{nobody}"}, r"lock_limit '\{nobody\}': \{nobody\} names no argument"),
        ({"lock_limit": "7"}, "lock_limit is '7': give a whole number, 1 or more"),
        ({"lock_rate": "{seats"}, r"lock_rate '\{seats': expected '\}'"),
        ({"lock_rate": "{seats}{plan}"}, "lock_rate .*: put a text between them"),
        ({"lock_group_limit": "{seats}"}, "lock_group_limit is .*: give a lock_group too"),
        ({"lock_limit": "{seats}", "lock_rate": "5"}, "lock_rate is '5': give a text such as"),
        (
            {"lock_limit": "{seats}", "lock_conflict": "supersede"},
            "lock_limit is .*: give 1, since lock_conflict is 'supersede'",
        ),
    ],
)
def test_what_is_known_to_be_bad_stops_the_program(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"^task made: {line}"):
        bind(**options)


def test_they_are_made_once_for_each_run(lock_server: LockServer, key: str) -> None:
    app = Celery("once", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]
    asked: list[str] = []

    def limit(*_: Any) -> int:
        asked.append("limit")
        return 2

    def group(*_: Any) -> str:
        asked.append("group")
        return "all"

    @app.task(base=LockedTask, shared=False, lock_key="{key}", lock_limit=limit, lock_group=group)
    def task(key: str) -> Any:
        return DistributedLock(key, servers=[lock_server.address]).inspect()

    report = task.apply((key,), throw=True).get()
    assert report["limit"] == 2
    assert report["holders"][0]["group"] == "all"
    assert sorted(asked) == ["group", "limit"]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.by_template, jobs.by_function, jobs.parked_by_function])
def test_the_latest_call_sets_the_limit(cluster: Cluster, key: str, gate: Path, task: Task) -> None:
    """Two of two run; the third waits since its own call says two, and a call with three has room."""
    first = [cluster.send(task, key, limit=2, gate=str(gate)) for _ in range(2)]
    for each in first:
        cluster.wait_event("start", each)
    third = cluster.send(task, key, limit=2)
    cluster.wait_waiters(key, 1)
    gate.touch()
    assert third.get(timeout=PATIENCE) == third.id
    ends = [cluster.wait_event("end", each)["at"] for each in first]
    assert cluster.wait_event("start", third)["at"] >= min(ends)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.by_function, jobs.parked_by_function])
def test_a_call_with_a_larger_limit_has_room_where_others_have_none(
    cluster: Cluster, key: str, gate: Path, task: Task
) -> None:
    first = cluster.send(task, key, limit=1, gate=str(gate))
    cluster.wait_event("start", first)
    second = cluster.send(task, key, limit=2)
    assert second.get(timeout=PATIENCE) == second.id
    assert not cluster.events(what="end", id=first.id)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.by_template, jobs.by_function, jobs.parked_by_function])
def test_a_bad_limit_fails_the_task_and_locks_nothing(
    cluster: Cluster, key: str, task: Task
) -> None:
    sent = cluster.send(task, key, limit=0)
    with pytest.raises(ImproperlyConfigured, match="lock_limit is 0: give a whole number"):
        sent.get(timeout=PATIENCE)
    assert sent.state == states.FAILURE
    assert cluster.events(id=sent.id, what="start") == []
    assert waiters(cluster.lock_server, key) is None


def test_a_header_may_name_a_template(lock_server: LockServer, key: str) -> None:
    task = bind(lock_key=key)
    bound = task._bound({"lock_limit": "{seats}", "lock_rate": "{account}/m"})
    [wanted] = bound.options.wanted(task, (5,), {"seats": 4}, "")
    assert wanted.limits == Limits(4, RunRate(5, 60), None)


keys = st.text(st.characters(codec="ascii", min_codepoint=97, max_codepoint=102), min_size=1)


@given(st.lists(keys, min_size=1, max_size=4))
def test_keys_of_one_limit_are_in_the_order_of_all_locks(names: list[str]) -> None:
    task = bind(lock_key=lambda *_: names, lock_limit=2)
    wanted = {Wanted(finish(name), Limits(2, None, None), None) for name in names}
    assert task._bound().keys_of(task, (1,), {}) == [each.key for each in in_order(wanted)]


def test_the_narrowest_comes_first() -> None:
    wanted = [
        Wanted(finish(key), Limits(limit, None, None), None)
        for key, limit in [("b", 3), ("z", 1), ("a", 3), ("c", MAX_LIMIT), ("y", 1)]
    ]
    assert [each.key for each in in_order(wanted)] == ["y", "z", "a", "b", "c"]
