"""What the next attempt is told in its headers, and what signal, log and error say of this one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import Retry
from kombu.message import Message
from kombu.utils.uuid import uuid

from celery_dflock import LockedTask, LockNotAcquiredError, Skipped
from celery_dflock.outcome.decide import decide
from celery_dflock.outcome.header import RUN, Header
from celery_dflock.outcome.redelivery import RedeliveryRequeued
from celery_dflock.outcome.types import (
    Kept,
    Overtaken,
    Redelivered,
    Refusal,
    ShuttingDown,
    Superseded,
    TimedOut,
)
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_conflict, task_requeued
from tests.celery_dflock.outcome.test_requeue import as_request, received
from tests.celery_dflock.record import RECORD

ERROR = LockNotAcquiredError("the-key", "it is held", "somebody")
SINCE = 1_000_000_000.0
PATIENCE = 60.0


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Task:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    app = Celery("next", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = uuid()  # all apps of the process share what is in memory

    @app.task(base=LockedTask, lock_key="the-key", lock_requeue={"max_wait": 0}, shared=False)
    def task() -> None: ...

    return task


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """What receivers of the signals are told."""
    found: list[dict[str, Any]] = []

    def note(**said: Any) -> None:
        found.append(said)

    for signal in (task_requeued, lock_conflict):
        signal.connect(note)
    yield found
    for signal in (task_requeued, lock_conflict):
        signal.disconnect(note)


def refuse(task: Task, it: Refusal, **said: Any) -> tuple[Any, Message, Message]:
    """Refuse a run with these counters the lock; return what ends it, its message and the next."""
    name = uuid()
    task.apply_async(task_id=name, headers={RUN: {"id": name, "retries": 0, **said}})
    before = received(task.app)
    task.push_request(**as_request(before))
    try:
        run = Plan(task, task.request, task.run, (), {}, task._bound())
        with pytest.raises((Retry, RedeliveryRequeued)) as raised:
            decide(run, it)
    finally:
        task.pop_request()
    return raised.value, before, received(task.app)


def header_of(message: Message, task: Task) -> Header:
    task.push_request(**as_request(message))
    try:
        return Header.read(task.request)
    finally:
        task.pop_request()


def test_a_conflict_is_the_next_attempt(task: Task, told: list[dict[str, Any]]) -> None:
    kept = Kept("1ticket1", 7.0)
    ended, _, again = refuse(task, TimedOut(ERROR, kept), attempt=2, since=SINCE)
    header = header_of(again, task)
    assert (header.attempt, header.since, header.ticket) == (3, SINCE, "1ticket1")
    assert ended.when == 7.0
    assert str(ERROR) in ended.message
    assert "requeued for 7.0 s, attempt 3" in ended.message
    conflict, requeued = told
    assert (conflict["key"], conflict["holder"], conflict["error"]) == (
        "the-key",
        "somebody",
        ERROR,
    )
    assert (requeued["key"], requeued["reason"]) == ("the-key", "it is held")
    assert (requeued["countdown"], requeued["attempt"]) == (7.0, 3)


@pytest.mark.parametrize(
    "it",
    [ShuttingDown(ERROR, "1ticket1"), Overtaken(ERROR, Kept("1ticket1", 7.0))],
    ids=["shutdown", "overtaken"],
)
def test_what_is_no_conflict_does_not_count(
    task: Task, told: list[dict[str, Any]], it: Refusal
) -> None:
    began = time.time()
    _, _, again = refuse(task, it, attempt=2, since=SINCE)
    header = header_of(again, task)
    assert (header.attempt, header.since, header.ticket) == (2, SINCE, "1ticket1")
    assert header.paused is not None
    assert header.paused >= began, "from now on the time does not count"
    (requeued,) = told
    assert requeued["attempt"] == 2


def test_time_that_did_not_count_before_it_is_left_out(task: Task) -> None:
    paused = time.time() - 100
    _, _, again = refuse(task, TimedOut(ERROR, None), attempt=2, since=SINCE, paused=paused)
    header = header_of(again, task)
    assert header.since == pytest.approx(SINCE + 100, abs=PATIENCE)
    assert header.paused is None


@pytest.mark.usefixtures("nothing_remembered")
def test_a_redelivery_is_asked_about_once(
    task: Task, told: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_dflock")
    for number in (1, 2):
        _, _, again = refuse(task, Redelivered(ERROR), redelivery=number - 1)
        header = header_of(again, task)
        assert (header.redelivery, header.waited) == (number, 0.0)
        assert told[-1]["attempt"] == number
        assert told[-1]["countdown"] > 0
    first, second = (each for each in caplog.records if each.name == "celery_dflock")
    assert (first.levelname, second.levelname) == ("WARNING", "INFO")
    assert first.getMessage().endswith("Is visibility_timeout shorter than the task?")
    assert second.getMessage().endswith(str(ERROR))
    for record, requeued in zip((first, second), told, strict=True):
        assert f"{requeued['countdown']:.1f} s" in record.getMessage()


def test_an_older_one_is_skipped_with_the_name_of_the_newer(task: Task) -> None:
    task.push_request(id="older", called_directly=False)
    try:
        run = Plan(task, task.request, task.run, (), {}, task._bound())
        skipped = decide(run, Superseded(ERROR))
    finally:
        task.pop_request()
    assert isinstance(skipped, Skipped)
    assert (skipped.key, skipped.task_id) == ("the-key", "older")
    assert skipped.superseded_by == skipped.holder == "somebody"


def test_a_skipped_result_is_recognised_again() -> None:
    result = Skipped("the-key", "older", "somebody", "newer")
    again = Skipped.of(dict(result))
    assert again == result
    assert (again.key, again.task_id, again.holder, again.superseded_by) == (
        ("the-key", "older", "somebody", "newer")
    )
    for other in ({}, {"dflock": "else"}, {"key": "the-key"}, None, "skipped"):
        assert Skipped.of(other) is None


def test_a_count_of_0_is_a_count(task: Task) -> None:
    said = {"id": "1", "retries": 0, "attempt": 0, "since": 0}
    task.apply_async(task_id="1", headers={RUN: said})
    header = header_of(received(task.app), task)
    assert (header.attempt, header.since) == (0, 0)
