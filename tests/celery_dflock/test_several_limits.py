"""Several locks on one task, each with its own limits: ``lock_key=[Lock(...), ...]``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured

from celery_dflock import (
    Lock,
    LockedTask,
    LockKey,
    LockKeyError,
    LockNotAcquiredError,
    Skipped,
    dflock,
)
from celery_dflock.limits import MAX_LIMIT, Limits, Wanted
from dflockd.rates import RunRate
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster


def bind(*locks: Any, app: Celery | None = None, **options: Any) -> Task:
    app = app or Celery("several", set_as_current=False)

    @app.task(base=LockedTask, name="several", shared=False, lazy=False, lock_key=locks, **options)
    def task(account: int, vendor: str = "acme", seats: Any = 3) -> Any:
        return "ran"

    return task


def wanted_by(task: Task, *args: Any) -> list[Wanted]:
    return task._lock_options.wanted(task, args, {}, "")


def test_each_has_its_own_limits_and_the_narrowest_comes_first() -> None:
    task = bind(
        Lock("fleet", limit=50, weight="all"),
        Lock("vendor:{vendor}", limit="{seats}", rate="10/m"),
        Lock("tenant:{account}", None, group="{vendor}", group_limit=lambda *_: 2),
        "account:{account}",
        lock_rate="{seats}/s",
    )
    assert wanted_by(task, 7) == [
        (LockKey("account:7"), Limits(1, RunRate(3, 1), None), None),
        (LockKey("vendor:acme"), Limits(3, RunRate(10, 60), None), None),
        (LockKey("fleet"), Limits(50, None, None, "all"), None),
        (LockKey("tenant:7"), Limits(MAX_LIMIT, None, 2), "acme"),
    ]
    assert task.lock_keys(7) == ["account:7", "vendor:acme", "fleet", "tenant:7"]
    assert wanted_by(task, 7, "acme", 60)[1].key == "fleet"


def test_a_lock_takes_nothing_from_the_task_and_a_text_takes_all() -> None:
    task = bind(Lock("a"), "b", lock_limit=3, lock_weight=2, lock_group="{account}")
    [lock, text] = wanted_by(task, 1)
    assert lock == ("a", Limits(1, None, None), None)
    assert text == ("b", Limits(3, None, None, 2), "1")


def test_one_lock_is_a_key_as_any() -> None:
    task = bind(Lock("vendor:{vendor}", limit=3, group="{account}"))
    assert wanted_by(task, 1) == [("vendor:acme", Limits(3, None, None), "1")]
    assert task._bound().keys_of(task, (1,), {}) == ["vendor:acme"]
    assert task._lock_options.group is not None


def test_a_key_that_two_of_them_make_is_taken_once() -> None:
    task = bind(Lock("v:{vendor}", limit=3), Lock("v:acme", limit=3))
    assert [each.key for each in wanted_by(task, 1)] == ["v:acme"]
    different = bind(Lock("v:{vendor}", limit=3), Lock("v:acme"))
    assert len(wanted_by(different, 1, "other")) == 2
    with pytest.raises(LockKeyError, match="gives it twice, and not with the same"):
        different.apply((1,), throw=True)


@pytest.mark.parametrize(
    ("lock", "line"),
    [
        (Lock("v", limit=0), "limit of Lock('v') is 0: give a whole number, 1 or more"),
        (
            Lock("v", None),
            "limit of Lock('v') is None: give a whole number, 1 or more, or a rate or group_limit too",
        ),
        (Lock("v", rate="10"), "rate of Lock('v') is '10': give a text such as '10/m'"),
        (Lock("v", group_limit=2), "group_limit of Lock('v') is 2: give a group too, or remove it"),
        (Lock("v", weight=2), "weight of Lock('v') is 2: give a limit above 1 too, or remove it"),
        (
            Lock("v", 3, weight=4),
            "weight of Lock('v') is 4: give a whole number up to the limit, 3",
        ),
        (Lock("v", limit="{nobody}"), "limit of Lock('v') '{nobody}': {nobody} names no argument"),
        (Lock("v", group=5), "group of Lock('v') is 5: give a template over"),  # type: ignore[arg-type]
        (Lock("{nobody}"), "'{nobody}': {nobody} names no argument of the task"),
        (Lock(5), "is 5: give a template over the arguments"),  # type: ignore[arg-type]
        (Lock(Lock("a")), "is Lock(key='a'"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_one_stops_the_program_in_one_line(lock: Lock, line: str) -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        bind(lock, "other")
    text = str(refused.value)
    assert text.startswith("task several: lock_key")
    assert line in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lock_limit": 5}, "lock_limit is 5: give it to each Lock of lock_key"),
        ({"lock_rate": "5/m"}, "lock_rate is '5/m': give it to each Lock of lock_key"),
        ({"lock_group": "g"}, "lock_group is 'g': give it to each Lock of lock_key"),
        (
            {"lock_conflict": "supersede"},
            "lock_key is .*: give one key, since lock_conflict is 'supersede'",
        ),
        (
            {"lock_conflict": ("newest", "skip")},
            "lock_key is .*: give one key, since lock_conflict is 'newest'",
        ),
    ],
)
def test_what_makes_no_sense_with_them_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"^task several: {line}"):
        bind(Lock("a"), Lock("b", limit=2), **options)


@pytest.mark.parametrize("word", ["supersede", "newest"])
def test_the_newest_of_one_lock_needs_a_limit_of_1(word: str) -> None:
    bind(Lock("a", rate="5/m"), lock_conflict=word)
    with pytest.raises(ImproperlyConfigured, match=r"limit of Lock\('a'\) is 2: give 1, since"):
        bind(Lock("a", limit=2), lock_conflict=word)
    with pytest.raises(
        ImproperlyConfigured, match=r"group of Lock\('a'\) is 'g': give None, since"
    ):
        bind(Lock("a", group="g"), lock_conflict=word)


def test_a_bad_limit_of_a_call_names_its_lock() -> None:
    task = bind(Lock("v:{vendor}", limit="{seats}"))
    with pytest.raises(ImproperlyConfigured, match=r"limit of Lock\('v:\{vendor\}'\) is 0: give"):
        task.apply((1, "acme", 0), throw=True)


def test_a_place_of_a_rate_is_used_only_if_the_body_begins(
    lock_server: LockServer, key: str
) -> None:
    app = Celery("given back", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]
    options: dict[str, Any] = {"lock_timeout": 0, "lock_conflict": "fail", "app": app}
    task = bind(Lock(f"{key}:fleet", limit=3), Lock(key, limit=2, rate="5/h"), **options)
    vendor = DistributedLock(key, servers=[lock_server.address])
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(dflock(f"{key}:fleet", limit=3, app=app))
        with pytest.raises(LockNotAcquiredError, match=":fleet"):
            task.apply((1,), throw=True)
    assert vendor.inspect()["rate"]["free"] == 5
    assert task.apply((1,), throw=True).get() == "ran"
    assert vendor.inspect()["rate"]["free"] == 4


@pytest.mark.usefixtures("workers")
def test_each_limit_holds(cluster: Cluster, key: str, gate: Path) -> None:
    """One of an account, two of a vendor: the one that waits says for which."""
    running = [cluster.send(jobs.by_locks, f"{key}", gate=str(gate))]
    cluster.wait_event("start", running[0])
    same_account = cluster.send(jobs.by_locks, key)
    cluster.wait_waiters(key, 1)
    report = cluster.lock(f"{key}:vendor").inspect()
    assert len(report["holders"]) == 1
    assert report["limit"] == 2
    assert report["rate"]["free"] == 4
    assert len(cluster.lock(f"{key}:fleet").inspect()["holders"]) == 1
    gate.touch()
    for each in (*running, same_account):
        assert each.get(timeout=PATIENCE) == each.id
    for name in (key, f"{key}:vendor", f"{key}:fleet"):
        cluster.wait_free(name)


@pytest.mark.usefixtures("workers")
def test_who_does_not_get_one_of_them_in_time_gives_all_back(cluster: Cluster, key: str) -> None:
    headers = {"dflock": {"lock_timeout": 0, "lock_conflict": "skip"}}
    vendor = cluster.lock(f"{key}:vendor")
    assert cluster.send(jobs.by_locks, key).get(timeout=PATIENCE)
    assert vendor.inspect()["rate"]["free"] == 4
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(dflock(f"{key}:fleet", limit=3, app=jobs.app))
        sent = cluster.send(jobs.by_locks, key, headers=headers)
        skipped = Skipped.of(sent.get(timeout=PATIENCE))
    assert skipped is not None
    assert skipped.key == f"{key}:fleet"
    assert vendor.inspect()["rate"]["free"] == 4
    for name in (key, f"{key}:vendor", f"{key}:fleet"):
        cluster.wait_free(name)
