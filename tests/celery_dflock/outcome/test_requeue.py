"""A task that is sent again is the same message, but for what has to be another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Signature, Task
from celery.exceptions import Ignore, Reject, Retry
from celery.worker.request import Request
from kombu.exceptions import OperationalError
from kombu.message import Message
from kombu.utils.uuid import uuid

from celery_dflock import LockedTask, LockNotAcquiredError, LockUnavailableError
from celery_dflock.options import Backoff
from celery_dflock.outcome.decide import decide
from celery_dflock.outcome.header import HEADER, RUN
from celery_dflock.outcome.requeue import LEAST_PAUSE, RedeliveryRequeued, pause
from celery_dflock.outcome.types import (
    Overtaken,
    Refusal,
    ShuttingDown,
    TimedOut,
    Unavailable,
    prepare,
)
from celery_dflock.plan import Plan
from celery_dflock.worker.shutdown import Shutdown, shutdown
from tests.celery_dflock.record import RECORD

OPTIONS: dict[str, Any] = {
    "task_id": "the-id",
    "argsrepr": "<hidden>",
    "kwargsrepr": "<hidden>",
    "priority": 6,
    "shadow": "another name",
    "expires": 300,
    "ignore_result": True,
    "time_limit": 60,
    "soft_time_limit": 50,
    "headers": {"x-tenant": "blue", HEADER: {"lock_timeout": 0}},
    "reply_to": "somebody",
    "root_id": "root",
    "parent_id": "parent",
    "group_id": "group",
    "group_index": 3,
    "replaced_task_nesting": 2,
    "origin": "gen1@there",
    "compression": "gzip",
    "delivery_mode": 1,
    "stamped_headers": ["stamp"],
    "stamp": "value",
}

DIFFERENT = {("headers", "eta"), ("headers", RUN)} | {
    # It expires at the same time, in less of it; and what is said in the headers is repeated there.
    ("properties", name)
    for name in ("delivery_tag", "expiration", "argsrepr", "kwargsrepr", "origin")
}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Celery:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    app = Celery("again", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = uuid()  # all apps of the process share what is in memory
    return app


def received(app: Celery) -> Message:
    with app.connection_for_read() as connection:
        name, accept = app.conf.task_default_queue, app.conf.accept_content
        message = connection.SimpleQueue(name, accept=accept).get(timeout=1)
        message.ack()
        return message


def as_request(message: Message) -> dict[str, Any]:
    """As a worker makes it."""
    args, kwargs, embedded = message.payload
    info = {**message.delivery_info, "priority": message.properties.get("priority")}
    return {
        **message.headers,
        "properties": message.properties,
        "reply_to": message.properties.get("reply_to"),
        "correlation_id": message.properties.get("correlation_id"),
        "delivery_info": {**info, "redelivered": False},
        "args": args,
        "kwargs": kwargs,
        "called_directly": False,
        "is_eager": False,
        **embedded,
    }


ERROR = LockNotAcquiredError("the-key", "it is held")


@pytest.mark.parametrize("outcome", [TimedOut(ERROR), ShuttingDown(ERROR)], ids=["late", "ends"])
@pytest.mark.parametrize("options", [OPTIONS, {}], ids=["all", "none"])
def test_nothing_is_lost(app: Celery, options: dict[str, Any], outcome: Refusal) -> None:
    @app.task(shared=False)
    def then(result: object) -> None: ...

    @app.task(base=LockedTask, lock_key="the-key", shared=False)
    def task(one: int, two: int) -> None: ...

    linked = {"link": then.s(), "link_error": then.s()} if options else {}
    task.apply_async((1,), {"two": 2}, **options, **linked)
    before = received(app)
    requeue(task, before, outcome)
    after = received(app)

    assert after.payload == before.payload
    assert (after.content_type, after.content_encoding) == (
        before.content_type,
        before.content_encoding,
    )
    for part in ("headers", "properties"):
        ours, theirs = getattr(before, part), getattr(after, part)
        for name in {*ours, *theirs}:
            if (part, name) not in DIFFERENT:
                assert theirs.get(name) == ours.get(name), (part, name)


def requeue(
    task: Task, message: Message, outcome: Refusal, ends: type[Exception] = Retry, **more: Any
) -> None:
    task.push_request(**{**as_request(message), **more})
    try:
        run = Plan(task, task.request, task.run, (1,), {"two": 2}, task._bound())
        with pytest.raises(ends):
            decide(run, outcome)
    finally:
        task.pop_request()


@pytest.mark.parametrize("serializer", ["json", "yaml", "msgpack"])
def test_arguments_stay_written_as_they_were(app: Celery, serializer: str) -> None:
    """What is no JSON could be sent no more, or would be something else."""

    @app.task(base=LockedTask, lock_key="the-key", name="task", shared=False)
    def _task(one: int, two: int) -> None: ...

    app.conf.accept_content = [serializer]
    task = app.tasks["task"]
    task.apply_async((1,), {"two": 2}, serializer=serializer)
    before = received(app)
    request = Request(before, app=app, decoded=False)
    prepare(request)
    requeue(task, before, TimedOut(ERROR), properties=request.request_dict["properties"])
    after = received(app)
    assert (after.payload, after.content_type) == (before.payload, before.content_type)


UNAVAILABLE = Unavailable(LockUnavailableError("the-key", "it is down"), "its-server")


@pytest.mark.parametrize("conflict", ["requeue", "skip", "fail", lambda _task, _error: "instead"])
@pytest.mark.parametrize(
    "outcome",
    [TimedOut(ERROR), Overtaken(ERROR), ShuttingDown(ERROR), UNAVAILABLE],
    ids=["late", "overtaken", "ends", "outage"],
)
def test_a_redelivery_stores_nothing_whatever_becomes_of_it(
    app: Celery, outcome: Refusal, conflict: Any
) -> None:
    """What it would store is the result of the other run, and counts for its chord."""
    app.conf.dflock_unavailable = "fail"

    @app.task(
        base=LockedTask,
        lock_key="the-key",
        lock_conflict=conflict,
        lock_requeue={"max_attempts": 1},
        shared=False,
    )
    def task(one: int, two: int) -> None: ...

    name = uuid()
    headers = {RUN: {"id": name, "redelivery": 1, "retries": 0}}
    task.apply_async((1,), {"two": 2}, task_id=name, headers=headers)
    requeue(task, received(app), outcome, RedeliveryRequeued)
    again = received(app)
    assert again.headers["id"] == name
    assert again.headers[RUN]["redelivery"] >= 1

    app.backend.mark_as_failure(name, ValueError("as asked"))
    requeue(task, again, outcome, Ignore)
    with app.connection_for_read() as connection:
        assert connection.SimpleQueue(app.conf.task_default_queue).qsize() == 0, (
            "the task has ended"
        )


@pytest.mark.parametrize(("cap", "least"), [(30.0, LEAST_PAUSE), (0.05, 0.05), (0.0, 0.0)])
def test_this_run_stores_its_state_before_the_next_has_a_result(cap: float, least: float) -> None:
    """What is drawn is from 0 on; who wants less than that says so by the cap."""
    drawn = [pause(Backoff(cap=cap), 1) for _ in range(100)]
    assert min(drawn) == least
    assert max(drawn) <= cap


@pytest.mark.parametrize("late", [True, False])
def test_after_an_outage_of_the_broker_it_may_come_twice_if_it_was_not_acknowledged(
    app: Celery, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The broker may deliver by itself what was not acknowledged in time."""

    @app.task(base=LockedTask, lock_key="the-key", shared=False, acks_late=late)
    def task(one: int, two: int) -> None: ...

    task.delay(1, two=2)
    before = received(app)
    publish, failures = Signature.apply_async, [OperationalError("away")]

    def away_once(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return publish(*args, **options)

    monkeypatch.setattr(Signature, "apply_async", away_once)
    monkeypatch.setattr("celery_dflock.outcome.requeue.PUBLISH_PAUSE", 0)
    requeue(task, before, ShuttingDown(ERROR))
    assert not failures
    assert received(app).headers[RUN].get("redelivery", 0) == (1 if late else 0)


@pytest.mark.parametrize(
    ("late", "ends", "said"),
    [
        (False, OperationalError, "is lost: its worker ends without a broker: away"),
        (True, Reject, None),
    ],
)
def test_a_worker_that_ends_without_a_broker_says_what_is_lost(
    app: Celery,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    late: bool,
    ends: type[Exception],
    said: str | None,
) -> None:
    """What was not acknowledged goes back, and is not lost."""

    @app.task(base=LockedTask, lock_key="the-key", shared=False, acks_late=late, name="lost-or-not")
    def task(one: int, two: int) -> None: ...

    task.delay(1, two=2)
    before = received(app)

    def away(*_: Any, **__: Any) -> Any:
        raise OperationalError("away")

    monkeypatch.setattr(Signature, "apply_async", away)
    monkeypatch.setattr(shutdown, "begun", True)
    requeue(task, before, ShuttingDown(ERROR), ends)
    lines = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    name = f"task lost-or-not[{before.headers['id']}]"
    assert lines == ([] if said is None else [f"{name} {said}"])


def test_a_child_that_has_waited_for_no_lock_yet_hears_that_its_worker_ends(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for the broker, and its worker for it, for as long as that is away."""

    @app.task(base=LockedTask, lock_key="the-key", shared=False)
    def task(one: int, two: int) -> None: ...

    task.delay(1, two=2)
    before = received(app)
    child, attempts = Shutdown(), []
    child.prepare()
    child._mark = 0
    child._close(1)  # as the main process does when the worker ends

    def away(*_: Any, **__: Any) -> Any:
        attempts.append(1)
        assert len(attempts) < 1000, "it has not heard of it"
        raise OperationalError("away")

    monkeypatch.setattr(Signature, "apply_async", away)
    monkeypatch.setattr("celery_dflock.outcome.requeue.PUBLISH_PAUSE", 0.01)
    monkeypatch.setattr("celery_dflock.outcome.requeue.shutdown", child)
    requeue(task, before, ShuttingDown(ERROR), OperationalError)
    child._close(0)
