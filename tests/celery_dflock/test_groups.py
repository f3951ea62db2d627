"""`lock_group`: groups of calls take turns at a key."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery import Celery

from celery_dflock import LockedTask, LockKeyError, dflock, require_lock
from dflockd.errors import InvalidArgumentError
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import PATIENCE
from tests.celery_dflock.test_eager import locked
from tests.dflockd.raw_server import eventually


def shown(key: str, server: LockServer, limit: int = 1) -> dict[str, list[dict[str, Any]]]:
    if limit > 1:
        return DistributedSemaphore(key, limit, servers=[server.address]).inspect()
    return DistributedLock(key, servers=[server.address]).inspect()


@pytest.mark.usefixtures("eager_in_threads")
@pytest.mark.parametrize("limit", [1, 2])
def test_the_one_call_of_a_tenant_waits_for_a_round_at_most(
    app: Celery, lock_server: LockServer, key: str, limit: int
) -> None:
    order: list[tuple[int, str]] = []

    @locked(
        app, lock_group="tenant:{tenant}", lock_limit=limit, lock_timeout=PATIENCE, name="render"
    )
    def render(key: str, tenant: str) -> None:
        order.append((require_lock().fence, tenant))  # threads go on in no order

    def begin(tenant: str, waiting: int) -> threading.Thread:
        thread = threading.Thread(target=render.delay, args=(key, tenant))
        thread.start()
        eventually(lambda: len(shown(key, lock_server, limit)["waiters"]) == waiting)
        return thread

    holds = [
        dflock(key, limit=limit, group="tenant:heavy", app=app).__enter__ for _ in range(limit)
    ]
    holders = [enter.__self__ for enter in holds]  # type: ignore[attr-defined]
    for enter in holds:
        enter()
    threads = [begin("heavy", number + 1) for number in range(5)]
    threads.append(begin("one", 6))
    report = shown(key, lock_server, limit)
    assert {holder["group"] for holder in report["holders"]} == {"tenant:heavy"}
    assert [waiter["group"] for waiter in report["waiters"]][:3] == [
        "tenant:heavy",
        "tenant:one",
        "tenant:heavy",
    ]
    for holder in holders:
        holder.__exit__(None, None, None)
    for thread in threads:
        thread.join(PATIENCE)
    assert len(order) == 6
    assert "one" in [tenant for _, tenant in sorted(order)][: 2 * limit]


def test_a_group_holds_as_many_as_its_limit(app: Celery, lock_server: LockServer, key: str) -> None:
    inside: list[list[Any]] = []

    @locked(app, lock_group=lambda *_: "a b", lock_group_limit=1, lock_limit=3, lock_timeout=0)
    def task(key: str) -> None:
        inside.append(shown(key, lock_server, 3)["holders"])

    task.delay(key)
    assert [holder["group"] for holder in inside[0]] == ["a%20b"]
    with pytest.raises(InvalidArgumentError, match="group_limit is 1: give a group too"):
        dflock(key, limit=3, group_limit=1, app=app)
    with dflock(key, limit=3, group="a b", group_limit=1, timeout=0, app=app):
        assert task.apply((key,), headers={"dflock": {"lock_conflict": "skip"}}).ready()
        assert len(inside) == 1, "the group has its slot"


def test_a_group_that_the_arguments_do_not_make(app: Celery, key: str) -> None:
    @locked(app, lock_group=lambda *_: ["a", "b"])
    def several(key: str) -> None:
        raise AssertionError

    with pytest.raises(LockKeyError, match=r"lock_group returned .*, not a text"):
        several.delay(key)
    assert LockedTask.lock_group is None
