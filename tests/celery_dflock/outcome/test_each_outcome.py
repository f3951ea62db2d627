"""What becomes of a task for each outcome: what it returns, sends, signals and logs."""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Retry
from kombu.message import Message
from kombu.utils.uuid import uuid

from celery_dflock import LockedTask, LockNotAcquiredError, LockUnavailableError, Skipped, signals
from celery_dflock.outcome import redelivery, requeue
from celery_dflock.outcome.decide import decide
from celery_dflock.outcome.header import HEADER, RUN
from celery_dflock.outcome.redelivery import RESULT_PAUSE
from celery_dflock.outcome.requeue import (
    LEAST_PAUSE,
    CopyDropped,
    RedeliveryRequeued,
    UnmetRequeued,
)
from celery_dflock.outcome.types import (
    Kept,
    Overtaken,
    Redelivered,
    Refusal,
    ShuttingDown,
    Superseded,
    TimedOut,
    Unavailable,
)
from celery_dflock.plan import Plan
from tests.celery_dflock.outcome.test_requeue import as_request, received
from tests.celery_dflock.record import RECORD

ERROR = LockNotAcquiredError("the-key", "it is held", holder="another")
KEPT = Kept("0123abcd", 7.5)
HEARD = (
    *("lock_conflict", "task_requeued", "task_skipped", "task_superseded"),
    "task_deduplicated",
)


class Stage:
    """A task whose broker and results are in memory, and what is heard of it."""

    def __init__(self, app: Celery, **options: Any) -> None:
        self.app = app

        @app.task(base=LockedTask, lock_key="the-key", name="the-task", shared=False, **options)
        def task() -> str:
            return "it has run"

        self.task: Any = app.tasks["the-task"]
        self.id = uuid()
        self.ignores: bool | None = None
        """Whether the call wants no result, if it says so."""
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.before = datetime.now(UTC)

    def hear(self, name: str) -> Callable[..., None]:
        def receive(sender: Any, signal: Any, request: Any = None, **more: Any) -> None:
            assert sender is self.task
            assert request is not None
            assert request.id == self.id
            self.heard.append((name, more))

        return receive

    def end(self, it: Refusal, *, redelivered: bool = False, **headers: Any) -> Any:
        """Let a run with these headers come to that, and return its result."""
        if RUN in headers:
            headers[RUN] = {"id": self.id, "retries": 0, **headers[RUN]}
        said = {} if self.ignores is None else {"ignore_result": self.ignores}
        self.task.apply_async(task_id=self.id, headers=headers, **said)
        request = as_request(received(self.app))
        request["delivery_info"]["redelivered"] = redelivered
        self.task.push_request(**request)
        self.before = datetime.now(UTC)
        try:
            return decide(
                Plan(self.task, self.task.request, self.task.run, (), {}, self.task._bound()), it
            )
        finally:
            self.task.pop_request()

    def sent(self, seconds: float) -> Message:
        """Return the message that was sent, to be run in so many seconds."""
        message = received(self.app)
        assert message.headers["id"] == self.id
        due = datetime.fromisoformat(message.headers["eta"])
        passed = (due - self.before).total_seconds() - seconds
        assert 0 <= passed <= (datetime.now(UTC) - self.before).total_seconds()
        return message


Make = Callable[..., Stage]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Celery:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    app = Celery("outcomes", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = uuid()  # all apps of the process share what is in memory
    return app


@pytest.fixture
def make(app: Celery, caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    connected = []
    caplog.set_level(logging.INFO, "celery_dflock")

    def make(**options: Any) -> Stage:
        stage = Stage(app, **options)
        for name in HEARD:
            signal = getattr(signals, name)
            receiver = stage.hear(name)
            signal.connect(receiver, weak=False)
            connected.append((signal, receiver))
        return stage

    # Celery itself says some things once a process.
    with caplog.filtering(logging.Filter("celery_dflock")):
        yield make
    for signal, receiver in connected:
        signal.disconnect(receiver)


CONFLICT = ("lock_conflict", {"key": "the-key", "holder": "another", "error": ERROR})


def requeued(countdown: float, attempt: int) -> tuple[str, dict[str, Any]]:
    said = {"key": "the-key", "reason": "it is held", "countdown": countdown, "attempt": attempt}
    return "task_requeued", said


def test_a_conflict_sends_the_task_again_with_its_position(make: Make) -> None:
    stage = make()
    with pytest.raises(Retry) as caught:
        stage.end(TimedOut(ERROR, KEPT))
    assert caught.value.message == f"requeued for 7.5 s, attempt 1: {ERROR}"
    assert (caught.value.when, caught.value.exc) == (7.5, ERROR)
    assert stage.heard == [CONFLICT, requeued(7.5, 1)]
    header = stage.sent(7.5).headers[RUN]
    assert (header["attempt"], header["ticket"]) == (1, "0123abcd")
    assert stage.app.AsyncResult(stage.id).state == "RETRY"


def test_a_conflict_without_a_position_has_the_pause_of_its_attempt(make: Make) -> None:
    stage = make(lock_requeue={"base": 60, "cap": 60})
    before = {RUN: {"attempt": 0, "ticket": "old", "waited": 9.0, "outage": 2, "paused": 1.0}}
    with pytest.raises(Retry) as caught:
        stage.end(TimedOut(ERROR), **before)
    headers = stage.sent(caught.value.when).headers
    since = headers[RUN].pop("since")
    assert since >= stage.before.timestamp()
    assert headers[RUN] == {"id": stage.id, "retries": 0, "attempt": 1}, "the others count anew"


def test_a_conflict_gives_up_in_the_end_and_says_after_how_long(make: Make) -> None:
    stage = make(lock_requeue={"max_attempts": 3})
    with pytest.raises(LockNotAcquiredError) as caught:
        stage.end(TimedOut(ERROR, KEPT), **{RUN: {"attempt": 2, "since": 1.0}})
    assert caught.value.__cause__ is ERROR
    assert caught.value.key == "the-key"
    said = re.fullmatch(r"gave up after 3 attempts in (\d+) s: it is held", caught.value.reason)
    assert said
    assert stage.before.timestamp() - 2 < int(said[1]) < datetime.now(UTC).timestamp()


@pytest.mark.parametrize(("outage", "longest"), [(0, 1.0), (1, 2.0), (2, 4.0), (3, 5.0), (99, 5.0)])
def test_while_no_server_answers_the_pause_grows_to_five_seconds(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    outage: int,
    longest: float,
) -> None:
    server = f"{uuid()}:1"
    error = LockUnavailableError("the-key", f"lock server {server} cannot be reached")
    stage = make()
    pauses = []
    for drawn in (0.0, 0.33333333):
        monkeypatch.setattr(requeue.chance, "random", lambda drawn=drawn: drawn)
        stage.heard.clear()
        before = {RUN: {"ticket": "0123", "attempt": 2, "outage": outage}}
        with pytest.raises(Retry) as caught:
            stage.end(Unavailable(error, server), **before)
        pauses.append(caught.value.when)
        [(name, said)] = stage.heard
        assert (name, said["attempt"], said["reason"]) == (
            "task_requeued",
            outage + 1,
            error.reason,
        )
        headers = stage.sent(caught.value.when).headers
        assert headers[RUN]["outage"] == outage + 1
        assert (headers[RUN]["ticket"], headers[RUN]["attempt"]) == ("0123", 2)
    assert pauses == [longest / 2, pytest.approx(longest * 2 / 3, abs=0.0006)]
    assert round(pauses[1], 3) == pauses[1]
    [line] = [line for line in caplog.messages if server in line]
    assert line.endswith(
        f"lock server {server} is unavailable, its tasks are requeued until it "
        "answers: cannot be reached"
    )


def test_without_a_server_a_task_fails_or_runs_if_it_is_to(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    error = LockUnavailableError("the-key", "it is down")
    stage = make()
    stage.app.conf.dflock_unavailable = "fail"
    with pytest.raises(LockUnavailableError) as caught:
        stage.end(Unavailable(error, "its:1"))
    assert caught.value is error
    stage.app.conf.dflock_unavailable = "run"
    assert stage.end(Unavailable(error, "its:1")) == "it has run"
    assert caplog.messages == [f"task the-task[{stage.id}] runs without its lock: {error}"]


def test_a_skipped_task_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    stage = make(lock_conflict="skip")
    result = stage.end(TimedOut(ERROR, KEPT))
    assert (result.key, result.task_id, result.holder) == ("the-key", stage.id, "another")
    assert result.superseded_by is None
    assert result == {
        "dflock": "skipped",
        "key": "the-key",
        "task_id": stage.id,
        "holder": "another",
    }
    assert stage.heard == [CONFLICT, ("task_skipped", {"key": "the-key", "holder": "another"})]
    assert caplog.messages == [f"task the-task[{stage.id}] skipped: {ERROR}"]
    for stored in (json.loads(json.dumps(result)), pickle.loads(pickle.dumps(result))):
        again = Skipped.of(stored)
        assert again == result
        assert isinstance(again, Skipped)
    assert Skipped.of(["dflock"]) is Skipped.of({"dflock": "done"}) is Skipped.of({}) is None


def test_a_failure_is_the_error_itself(make: Make) -> None:
    stage = make(lock_conflict="fail")
    with pytest.raises(LockNotAcquiredError) as caught:
        stage.end(TimedOut(ERROR, KEPT))
    assert caught.value is ERROR
    assert stage.heard == [CONFLICT]


def test_a_callable_decides_or_says_the_result(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts, asked = ["skip", "instead"], []

    def conflict(task: Any, error: Exception) -> str:
        asked.append((task, error))
        return verdicts.pop(0)

    stage = make(lock_conflict=conflict)
    assert isinstance(stage.end(TimedOut(ERROR)), Skipped)
    caplog.clear()
    assert stage.end(TimedOut(ERROR)) == "instead"
    assert asked == [(stage.task, ERROR)] * 2
    assert caplog.messages == [f"task the-task[{stage.id}] ends without running: {ERROR}"]


@pytest.mark.parametrize(("kept", "pause"), [(KEPT, 7.5), (None, LEAST_PAUSE)])
def test_who_was_overtaken_waits_again_at_its_position(
    make: Make, kept: Kept | None, pause: float
) -> None:
    stage = make()
    before = {RUN: {"attempt": 3, "outage": 2}}
    with pytest.raises(Retry) as caught:
        stage.end(Overtaken(ERROR, kept), **before)
    assert caught.value.when == pause
    assert stage.heard == [requeued(pause, 3)], "it is no conflict, and no other attempt"
    headers = stage.sent(pause).headers
    assert headers[RUN]["attempt"] == 3
    assert headers[RUN].get("ticket") == (kept and kept.ticket)
    assert "outage" not in headers[RUN]


@pytest.mark.parametrize("ticket", ["0123abcd", None])
def test_a_shutdown_sends_the_task_on_with_its_position(make: Make, ticket: str | None) -> None:
    stage = make()
    with pytest.raises(Retry):
        stage.end(ShuttingDown(ERROR, ticket), **{RUN: {"attempt": 3}})
    assert stage.heard == [requeued(LEAST_PAUSE, 3)]
    header = stage.sent(LEAST_PAUSE).headers[RUN]
    assert (header["attempt"], header.get("ticket")) == (3, ticket)


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("number", [1, 2])
def test_a_redelivery_is_sent_again_and_says_so_aloud_once(
    make: Make, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    stage = make(lock_requeue={"base": 60, "cap": 60})
    before = {HEADER: {"lock_timeout": 3}, RUN: {"attempt": 5, "redelivery": number - 1, "age": 7}}
    with pytest.raises(RedeliveryRequeued):
        stage.end(Redelivered(ERROR), **before)
    [(name, said)] = stage.heard
    assert (name, said) == requeued(said["countdown"], number)
    headers = stage.sent(said["countdown"]).headers
    assert headers[HEADER] == {"lock_timeout": 3}
    assert headers[RUN] == {"redelivery": number, "age": 7, "id": stage.id, "retries": 0}
    [record] = caplog.records
    assert record.levelno == (logging.WARNING if number == 1 else logging.INFO)
    assert ("visibility_timeout" in record.getMessage()) == (number == 1)
    assert str(ERROR) in record.getMessage()


def test_who_is_older_is_skipped_and_says_for_whom(make: Make) -> None:
    stage = make()
    result = stage.end(Superseded(ERROR))
    assert (result.holder, result.superseded_by) == ("another", "another")
    assert Skipped.of(dict(result)) == pickle.loads(pickle.dumps(result)) == result
    assert stage.heard == [
        ("task_superseded", {"key": "the-key", "by": "another", "was_running": False}),
        ("task_skipped", {"key": "the-key", "holder": "another"}),
    ]


@pytest.mark.usefixtures("nothing_remembered")
def test_who_is_older_and_was_delivered_twice_looks_for_a_result_first(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    stage = make()
    with pytest.raises(RedeliveryRequeued):
        stage.end(Superseded(ERROR), redelivered=True, **{RUN: {"attempt": 2}})
    assert caplog.messages == [
        f"task the-task[{stage.id}]: its redelivery looks for a result once more"
    ]
    header = stage.sent(RESULT_PAUSE).headers[RUN]
    assert (header["attempt"], header["redelivery"], header["is_free"]) == (2, 1, True)
    assert isinstance(stage.end(Superseded(ERROR), redelivered=True, **{RUN: header}), Skipped)


@pytest.mark.parametrize("it", [TimedOut(ERROR), Overtaken(ERROR), ShuttingDown(ERROR)])
def test_a_redelivery_of_a_task_that_has_ended_is_dropped(
    make: Make, caplog: pytest.LogCaptureFixture, it: Refusal
) -> None:
    stage = make()
    stage.app.backend.mark_as_failure(stage.id, ValueError("as asked"))
    with pytest.raises(Ignore):
        stage.end(it, **{RUN: {"redelivery": 1}})
    said = {"key": "the-key", "task_id": stage.id, "verdict": "copy"}
    assert stage.heard == [("task_deduplicated", said)]
    assert caplog.messages == [f"task the-task[{stage.id}] ended as FAILURE: its copy is dropped"]


# What the broker has delivered before looks for a result, however it is refused, and stays what it is.

DOWN = Unavailable(LockUnavailableError("the-key", "it is down"), "its:1")

REFUSED: dict[str, tuple[Refusal, dict[str, Any]]] = {
    "requeued": (TimedOut(ERROR), {}),
    "given up": (TimedOut(ERROR), {"lock_requeue": {"max_attempts": 1}}),
    "skipped": (TimedOut(ERROR), {"lock_conflict": "skip"}),
    "failed": (TimedOut(ERROR), {"lock_conflict": "fail"}),
    "decided": (TimedOut(ERROR), {"lock_conflict": lambda *_: "other"}),
    "outage": (DOWN, {}),
    "overtaken": (Overtaken(ERROR, None), {}),
    "shutdown": (ShuttingDown(ERROR, None), {}),
    "met": (Redelivered(ERROR), {}),
    "superseded": (Superseded(ERROR), {}),
}
REFUSALS = pytest.mark.parametrize("how", REFUSED)

ONCE_MORE: dict[str, dict[str, Any]] = {
    "by the broker": {"redelivered": True},
    "by the broker, an attempt before": {RUN: {"was_redelivered": True}},
    "and has met its run": {RUN: {"redelivery": 1}},
}
DELIVERED_AGAIN = pytest.mark.parametrize("again", ONCE_MORE.values(), ids=ONCE_MORE)


@pytest.mark.usefixtures("nothing_remembered", "pauses")
@DELIVERED_AGAIN
@REFUSALS
@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE", "REVOKED"])
def test_one_that_was_delivered_before_is_dropped_if_its_task_has_ended(
    make: Make, how: str, again: dict[str, Any], state: str
) -> None:
    it, options = REFUSED[how]
    stage = make(**options)
    result = "it has run" if state == "SUCCESS" else ValueError("as it was")
    stage.task.backend.store_result(stage.id, result, state)
    done = stage.task.AsyncResult(stage.id).date_done
    with pytest.raises(Ignore) as caught:
        stage.end(it, **again)
    assert type(caught.value) is Ignore
    [(name, said)] = stage.heard
    assert (name, said["verdict"]) == ("task_deduplicated", "copy")
    after = stage.task.AsyncResult(stage.id)
    assert (after.state, after.date_done) == (state, done)


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("how", sorted(REFUSED.keys() - {"met", "superseded"}))
def test_one_that_has_met_nobody_waits_a_moment_for_a_result(
    make: Make, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, options = REFUSED[how]
    stage = make(**options)
    monkeypatch.setattr(
        redelivery.time,
        "sleep",
        lambda _: stage.task.backend.store_result(stage.id, "it has run", "SUCCESS"),
    )
    with pytest.raises(Ignore) as caught:
        stage.end(it, redelivered=True)
    assert type(caught.value) is Ignore


@pytest.mark.usefixtures("nothing_remembered", "pauses")
@pytest.mark.parametrize("again", list(ONCE_MORE.values())[:2], ids=list(ONCE_MORE)[:2])
@pytest.mark.parametrize("how", ["requeued", "outage", "overtaken", "shutdown"])
def test_one_that_has_met_nobody_is_requeued_without_a_result_and_says_what_it_is(
    make: Make, how: str, again: dict[str, Any]
) -> None:
    """A result may come at this moment: `RETRY` in its place would be nobody's."""
    it, options = REFUSED[how]
    stage = make(**options)
    with pytest.raises(UnmetRequeued):
        stage.end(it, **again)
    assert [name for name, _ in stage.heard if name == "task_requeued"]
    assert stage.task.AsyncResult(stage.id).state == "PENDING"
    message = received(stage.app)
    assert message.headers[RUN]["was_redelivered"] is True
    assert message.headers[RUN]["id"] == stage.id
    assert "redelivery" not in message.headers[RUN]


@pytest.mark.usefixtures("nothing_remembered", "pauses")
def test_one_that_has_met_nobody_may_be_all_that_is_left_and_ends_like_others(make: Make) -> None:
    """The worker of the first was killed."""
    skipped = make(lock_conflict="skip").end(TimedOut(ERROR), redelivered=True)
    assert isinstance(skipped, Skipped)


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("how", ["requeued", "outage", "overtaken", "shutdown", "met"])
def test_one_that_has_met_its_run_leaves_all_to_that(make: Make, how: str) -> None:
    it, options = REFUSED[how]
    stage = make(**options)
    with pytest.raises(RedeliveryRequeued) as caught:
        stage.end(it, **{RUN: {"redelivery": 1}})
    assert type(caught.value) is RedeliveryRequeued


@pytest.mark.parametrize("of", ["the task", "the call"])
def test_one_that_meets_another_redelivery_is_dropped_if_its_task_has_run_without_a_result(
    make: Make, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setattr(redelivery, "_found", lambda plan: {redelivery._run_of(plan)})
    stage = make(ignore_result=of == "the task")
    stage.ignores = of == "the call"
    with pytest.raises(CopyDropped):
        stage.end(Redelivered(ERROR), redelivered=True)
    assert [name for name, _ in stage.heard] == ["task_deduplicated"]


def test_a_child_with_the_headers_of_its_parent_was_not_delivered_before(make: Make) -> None:
    stage = make()
    with pytest.raises(Retry):
        stage.end(TimedOut(ERROR), **{RUN: {"was_redelivered": True, "id": "its-parent"}})
