"""Why somebody waits, or has waited in vain, as people are told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_dflock import LockedTask, LockNotAcquiredError, current_lock, dflock
from celery_dflock.look import Look
from dflockd.sync_client import DistributedSemaphore
from examples.demo.stage import LockServer
from tests.celery_dflock.test_signals import locked, on_waiting

__all__ = ["on_waiting"]

Waits = Callable[[Callable[..., Any]], None]


def holder(label: str, group: str = "") -> dict[str, Any]:
    return {"label": label, "held_s": 3.2, "group": group}


def rate(free: int, next_s: float | None = 4.0) -> dict[str, Any]:
    return {"runs": 10, "window_s": 60, "free": free, "next_s": next_s}


PAUSED = {"by": "ann@w1", "reason": "the vendor is down", "paused_s": 12.3, "left_s": None}


@pytest.mark.parametrize(
    ("look", "by", "reason", "refusal"),
    [
        # Paused: with a slot that is free, and without one.
        (
            Look([], 1, None, PAUSED),
            None,
            "paused by ann@w1 for 12 s: the vendor is down",
            "waited 5 s, {}",
        ),
        (
            Look([holder("a")], 1, rate(0), PAUSED),
            "a, for 3 s",
            "paused by ann@w1 for 12 s: the vendor is down, held by a, for 3 s, rate: next in 4 s",
            "waited 5 s, paused by ann@w1 for 12 s: the vendor is down, "
            "rate: next in 4 s, still held",
        ),
        (Look(), None, "", "waited 5 s, still held"),
        (Look([holder("a")], 1), "a, for 3 s", "held by a, for 3 s", "waited 5 s, still held"),
        (
            Look([holder("a"), holder("")], 2),
            "a, for 3 s and 1 other",
            "held by a, for 3 s and 1 other",
            "waited 5 s, still held",
        ),
        (
            Look([holder("a"), holder(""), holder("")], 3),
            "a, for 3 s and 2 others",
            "held by a, for 3 s and 2 others",
            "waited 5 s, still held",
        ),
        # The rate alone: with any number of holders, or with a slot that is free.
        (Look([holder("a")], None, rate(0)), None, "rate: next in 4 s", "waited 5 s, {}"),
        (Look([holder("a")], 2, rate(0)), None, "rate: next in 4 s", "waited 5 s, {}"),
        (Look([], None, rate(0, None)), None, "rate: next when one begins", "waited 5 s, {}"),
        # Both.
        (
            Look([holder("a")], 1, rate(0)),
            "a, for 3 s",
            "held by a, for 3 s, rate: next in 4 s",
            "waited 5 s, rate: next in 4 s, still held",
        ),
        # A holder that takes all slots, and one that takes some.
        (
            Look([holder("a")], 8, rate(0), None, 8),
            "a, for 3 s",
            "held by a, for 3 s, rate: next in 4 s",
            "waited 5 s, rate: next in 4 s, still held",
        ),
        (Look([holder("a")], 8, rate(0), None, 7), None, "rate: next in 4 s", "waited 5 s, {}"),
        # Who needs more than is free: of the slots, of the places of a rate, or of neither.
        (
            Look([holder("a")], 8, rate(2), None, 6, 3),
            "a, for 3 s",
            "held by a, for 3 s, rate: 2 of 10 free",
            "waited 5 s, rate: 2 of 10 free, still held",
        ),
        (Look([holder("a")], 8, rate(2), None, 5, 3), None, "rate: 2 of 10 free", "waited 5 s, {}"),
        (Look([], 100, rate(9), None, None, "all"), None, "rate: 9 of 10 free", "waited 5 s, {}"),
        (
            Look([holder("a")], 8, rate(3), None, 1, "all"),
            "a, for 3 s",
            "held by a, for 3 s, rate: 3 of 10 free",
            "waited 5 s, rate: 3 of 10 free, still held",
        ),
        # The holder, for there are places.
        (
            Look([holder("a")], 1, rate(2)),
            "a, for 3 s",
            "held by a, for 3 s",
            "waited 5 s, still held",
        ),
    ],
)
def test_what_is_said(look: Look, by: str | None, reason: str, refusal: str) -> None:
    assert look.holder == by
    assert look.reason(None) == reason
    assert look.refusal("waited 5 s") == refusal.format(reason)


def test_who_has_tried_once() -> None:
    assert Look([holder("a")], 1).refusal() == "it is held"
    assert Look([], None, rate(0)).refusal() == "rate: next in 4 s"
    assert Look([holder("a")], 1, rate(0)).refusal() == "rate: next in 4 s, it is held"


def test_how_many_of_the_group_there_are() -> None:
    look = Look([holder("a", "blue"), holder("b", "red"), holder("c", "blue")], 3)
    assert look.reason("blue") == "held by a, for 3 s and 2 others, its group blue has 2"
    assert look.reason("green").endswith(", its group green has 0")


def test_who_takes_the_whole_limit_is_in_the_way(lock_server: LockServer, key: str) -> None:
    lock = DistributedSemaphore(key, 8, weight="all", servers=[lock_server.address], rate="1/h")
    with lock:
        look = Look.at(lock)
    assert look.used == 8
    assert re.fullmatch(r"held by .+, for 0 s, rate: next when one begins", look.reason(None))


def test_an_older_server_says_less() -> None:
    assert Look.of({"holders": [{"label": "a", "held_s": 1.0}]}).reason("g") == (
        "held by a, for 1 s, its group g has 0"
    )


def test_a_task_waits_for_its_rate(
    app: Celery, on_waiting: Waits, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    on_waiting(lambda holder, reason, group, **_: told.append((holder(), reason(), group)))
    task = locked(app, lock_rate="1/h", lock_timeout=0.1, lock_conflict="fail")
    assert task.delay(key).get()
    caplog.set_level("INFO", "celery_dflock")
    with pytest.raises(LockNotAcquiredError) as caught:
        task.delay(key)
    [(by, reason, group)] = told
    assert (by, group) == (None, None)
    assert reason.startswith("rate: next in 3")
    assert f"waits for lock {key!r}, rate: next in 3" in caplog.text
    assert str(caught.value).startswith(
        f"lock {key!r} was not acquired: waited 0.1 s (lock_timeout), rate: next in 3"
    )


def test_a_task_of_a_group_waits(app: Celery, on_waiting: Waits, key: str) -> None:
    told: list[Any] = []
    on_waiting(lambda reason, group, **_: told.append((reason(), group)))
    task = locked(app, lock_group="blue", lock_limit=2, lock_timeout=0.1, lock_conflict="skip")
    with dflock(key, limit=2, group="blue", app=app) as lock:
        assert lock.group == "blue"
        with dflock(key, limit=2, app=app) as other:
            assert other.group is None
            task.delay(key)
    [(reason, group)] = told
    assert group == "blue"
    assert reason.startswith("held by ")
    assert reason.endswith(" s and 1 other, its group blue has 1")


def test_a_task_knows_its_group(app: Celery, key: str) -> None:
    groups = []

    @app.task(base=LockedTask, lock_key="{key}", lock_group="g", shared=False)
    def task(key: str) -> None:
        lock = current_lock()
        groups.append(lock and lock.group)

    task.delay(key)
    assert groups == ["g"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_block_says_that_its_rate_has_no_place(app: Celery, key: str, is_async: bool) -> None:
    async def enter_async() -> None:
        async with dflock(key, 0.1, rate="1/h", app=app):
            pass

    def enter() -> None:
        with dflock(key, 0.1, rate="1/h", app=app):
            pass

    enter()
    with pytest.raises(LockNotAcquiredError, match=r"waited 0.1 s, rate: next in 3\d+ s$"):
        asyncio.run(enter_async()) if is_async else enter()
