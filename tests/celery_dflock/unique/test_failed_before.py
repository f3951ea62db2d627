"""A task that fails before it can ask for its lock does not keep others like it from being sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Task
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult
from celery.signals import after_task_publish

from celery_dflock import LockedTask
from celery_dflock.outcome.header import HEADER, RUN
from dflockd import admin
from examples.demo.stage import LockServer
from tests.celery_dflock.unique.support import own_app

WHERE = ["lock_key", "before_start", "ignore", "reject", "header"]


class Away(LockedTask):
    """Its key comes from a database that is away, or what it does before it starts does."""

    abstract = True
    is_away: str = ""

    def before_start(self, *_: Any) -> None:
        if self.is_away == "before_start":
            raise ConnectionError("the database is away")
        if self.is_away == "ignore":
            raise Ignore
        if self.is_away in ("reject", "reject to the queue"):
            raise Reject("as asked", requeue=self.is_away != "reject")
        if self.is_away == "retry":
            raise Retry


def make_key(task: Any, args: Any, _: Any) -> str:
    if task.is_away == "lock_key":
        raise ConnectionError("the database is away")
    return str(args[0])


def send(task: Task, key: str) -> tuple[AsyncResult, dict[str, Any]]:
    """Send it, and return what its message says of it too."""
    brought: list[dict[str, Any]] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        brought.append(headers)

    after_task_publish.connect(note)
    try:
        return task.apply_async((key,)), brought[0] if brought else {}
    finally:
        after_task_publish.disconnect(note)


def run(task: Task, sent: AsyncResult, key: str, headers: dict[str, Any], **info: Any) -> None:
    """Run it as a process of a worker does."""
    ours = {name: headers[name] for name in (HEADER, RUN) if name in headers}
    request = {"id": sent.id, "args": [key], "kwargs": {}, "headers": ours, "retries": 0}
    build_tracer(task.name, task, app=task.app)(
        sent.id, (key,), {}, {**request, "delivery_info": info, "is_eager": False}
    )


@pytest.fixture
def task(lock_server: LockServer, key: str) -> Task:
    app = own_app(lock_server, result_backend="cache+memory://")
    options = {"base": Away, "lock_key": make_key, "lock_unique": "until_executed"}

    @app.task(name="failed." + key.replace(":", "-"), shared=False, **options)
    def failed(_: str) -> None: ...

    return app.tasks[failed.name]


def holders(server: LockServer, task: Task) -> list[Any]:
    return [e for e in admin.stats(server.address)["locks"] if task.name in e["key"]]


@pytest.mark.parametrize("where", WHERE)
def test_another_can_be_sent(where: str, task: Task, lock_server: LockServer, key: str) -> None:
    first, headers = send(task, key)
    assert send(task, key)[0].id == first.id
    assert holders(lock_server, task)
    if where == "header":
        headers[HEADER] = {"lock_tiemout": 5}
    type(task).is_away = where
    run(task, first, key, headers)
    assert first.state == {"ignore": "PENDING", "reject": "PENDING"}.get(where, "FAILURE")
    assert not holders(lock_server, task)
    type(task).is_away = ""
    assert send(task, key)[0].id != first.id


@pytest.mark.parametrize("where", ["reject to the queue", "retry"])
def test_it_stays_with_a_task_that_goes_on(
    where: str, task: Task, lock_server: LockServer, key: str
) -> None:
    first, headers = send(task, key)
    type(task).is_away = where
    run(task, first, key, headers)
    assert holders(lock_server, task)
    type(task).is_away = ""
    run(task, first, key, headers)
    assert first.state == "SUCCESS"
    assert not holders(lock_server, task)


def test_a_redelivery_that_fails_so_takes_it_from_nobody(
    task: Task, lock_server: LockServer, key: str
) -> None:
    first, headers = send(task, key)
    type(task).is_away = "lock_key"
    run(task, first, key, headers, redelivered=True)
    assert holders(lock_server, task)
    headers[RUN] |= {"redelivery": 1, "retries": 0}
    run(task, first, key, headers)
    assert holders(lock_server, task)


def test_one_that_failed_in_its_run_asks_no_server_again(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has given its lock back, and the server may be away by now."""
    server = LockServer(tmp_path)
    app = own_app("127.0.0.1:1", result_backend="cache+memory://")

    class ServerEnds(LockedTask):
        abstract = True

        def on_failure(self, *_: Any) -> None:
            server.kill()

    @app.task(name="fails", base=ServerEnds, lock_unique="until_executed", shared=False)
    def fails(_: str) -> None:
        raise ConnectionError("the database is away")

    with server:
        app.conf.dflock_servers = [server.address]
        first, headers = send(app.tasks["fails"], key)
        run(app.tasks["fails"], first, key, headers)
    assert first.state == "FAILURE"
    assert "goes on without lock_unique" not in caplog.text
