"""One table of bad values for everything public that takes some: one line each, and nothing happens."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from click.testing import CliRunner

from celery_dflock import LockedTask, LockKey, Skipped, dflock
from celery_dflock.beat.config import beat_settings
from celery_dflock.context import AsyncLock
from celery_dflock.held import TaskLock
from celery_dflock.locks import Locks
from celery_dflock.testing import assert_locked, assert_not_locked
from celery_dflock.testing.calls import supersede, turn_order, use_up_rate
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import PATIENCE

HUGE = 10**12
NO_TEXT = [None, 7, True, b"key", ["key"], "", LockKey(""), LockKey("a\0b"), LockKey("a b")]
NO_COUNT = [0, -1, 1.5, math.nan, math.inf, True, "1", HUGE, [1]]
NO_TIME = [False, -1, -0.1, math.nan, math.inf, True, "5", HUGE, b"5", [1], "a\nb"]
NO_RATE = [7, "7", "0/s", "7/d", (0, 1), (1, 0), (1, math.nan), True, b"7/m", (1,), "a\nb"]
NO_RATE += ["", [1, 2, 3]]
NO_APP = [7, "proj", Celery, object()]
NO_CALL = [7, None, "render", {"task": "render"}, Celery]

BAD: dict[str, tuple[Callable[[Any, Celery], Any], list[Any]]] = {
    "key": (lambda bad, app: dflock(bad, app=app), NO_TEXT),
    "timeout": (lambda bad, app: dflock("k", timeout=bad, app=app), NO_TIME),
    "ttl": (lambda bad, app: dflock("k", ttl=bad, app=app), [None, *NO_COUNT]),
    "limit": (lambda bad, app: dflock("k", limit=bad, app=app), [None, *NO_COUNT]),
    "rate": (lambda bad, app: dflock("k", rate=bad, app=app), NO_RATE),
    "group": (lambda bad, app: dflock("k", group=bad, app=app), NO_TEXT[1:6]),
    "group_limit": (lambda bad, app: dflock("k", group="g", group_limit=bad, app=app), NO_COUNT),
    "weight": (lambda bad, app: dflock("k", limit=9, weight=bad, app=app), [None, 10, *NO_COUNT]),
    "weight alone": (lambda bad, app: dflock("k", weight=bad, app=app), [2, "all"]),
    "group_limit alone": (lambda bad, app: dflock("k", group_limit=bad, app=app), [1]),
    "app": (lambda bad, _: dflock("k", app=bad), NO_APP),
    "key held": (assert_locked, NO_TEXT),
    "key free": (assert_not_locked, NO_TEXT),
    "app held": (lambda bad, _: assert_locked("k", bad), NO_APP),
    "app free": (lambda bad, _: assert_not_locked("k", bad), NO_APP),
    "call superseded": (lambda bad, _: supersede(bad), NO_CALL),
    "call rated": (lambda bad, _: use_up_rate(bad), NO_CALL),
    "call in turn": (lambda bad, _: turn_order(bad), NO_CALL),
    "timeout_s": (lambda bad, app: supersede(call_in(app), bad), [None, *NO_TIME]),
    "leave": (lambda bad, app: use_up_rate(call_in(app), bad), [None, *NO_COUNT[1:]]),
    "seconds": (lambda bad, app: TaskLock(locks_in(app)).extend(bad), NO_COUNT),
    "seconds awaited": (
        lambda bad, app: asyncio.run(AsyncLock(locks_in(app)).extend(bad)),
        NO_COUNT,
    ),
    "dflock_beat_lock_ttl": (
        lambda bad, app: app.conf.update(dflock_beat_lock_ttl=bad) or beat_settings(app),
        NO_COUNT,
    ),
    "dflock_beat_lock_key": (
        lambda bad, app: app.conf.update(dflock_beat_lock_key=bad) or beat_settings(app),
        [7, True, b"key", ["key"], "a b", "a\0b"],
    ),
    "lock_limit": (lambda bad, app: bound_in(app, lock_limit=bad), [None, *NO_COUNT]),
    "lock_weight": (
        lambda bad, app: bound_in(app, lock_limit=9, lock_weight=bad),
        [None, 10, *NO_COUNT],
    ),
    "lock_ttl": (lambda bad, app: bound_in(app, lock_ttl=bad), [None, *NO_COUNT]),
    "lock_timeout": (lambda bad, app: bound_in(app, lock_timeout=bad), NO_TIME),
    "lock_rate": (lambda bad, app: bound_in(app, lock_rate=bad), NO_RATE),
}


def bound_in(app: Celery, **options: Any) -> Any:
    def body() -> None: ...

    return app.task(base=LockedTask, shared=False, lazy=False, **options)(body)


def call_in(app: Celery) -> Any:
    return bound_in(app, name="call", lock_rate="1/h").s()


def locks_in(app: Celery) -> Any:
    return dflock("k", app=app)._make(Locks)[0]


@pytest.fixture
def app() -> Iterator[Celery]:
    """One whose server would notice who comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        app = Celery("bad", set_as_current=False)
        app.conf.dflock_servers = [f"127.0.0.1:{server.getsockname()[1]}"]
        yield app
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        pytest.param(name, bad, id=f"{name} {number}")
        for name in BAD
        for number, bad in enumerate(BAD[name][1])
    ],
)
def test_a_bad_value_is_refused_in_one_line(app: Celery, name: str, bad: Any) -> None:
    call, _ = BAD[name]
    with pytest.raises((ValueError, ImproperlyConfigured)) as failure:
        call(bad, app)
    text = str(failure.value)
    argument = name.split()[0]
    assert "\n" not in text
    assert len(text) < 250
    assert f"{argument} is " in text or f"{argument} {str(bad)!r} " in text
    assert ": give " in text or ": use " in text


@pytest.mark.parametrize("command", [["release", "--yes"], ["waiters"]])
@pytest.mark.parametrize("key", ["", "a b", "a\nb", "x" * 300])
def test_the_command_line_refuses_a_bad_key(
    app: Celery, command: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery.bin.base import CLIContext

    from celery_dflock.cli import dflock as group

    context = CLIContext(app=app, no_color=True, workdir=None)
    result = CliRunner().invoke(group, [*command, key], obj=context)
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: key ")
    assert ": use " in line


@pytest.mark.parametrize("result", [None, 7, "skipped", {}, {"dflock": "skipped"}, [1]])
def test_what_is_no_skipped_result(result: Any) -> None:
    assert Skipped.of(result) is None


def test_with_in_a_coroutine_is_refused(app: Celery) -> None:
    made = dflock("k", app=app)

    async def enter() -> None:
        with pytest.raises(RuntimeError, match=r"^with dflock\('k', .*: use async with$"):
            made.__enter__()

    asyncio.run(enter())
    assert "_locks" not in vars(made), "nobody has it"


def test_with_in_a_thread_of_a_coroutine(lock_server: LockServer, key: str) -> None:
    app = Celery("threads", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]

    def hold() -> bool:
        with dflock(key, PATIENCE, app=app) as lock:
            return lock.held

    assert hold()
    assert asyncio.run(in_thread(hold))


async def in_thread(function: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(function)


def test_with_in_a_greenlet_beside_a_loop(
    lock_server: LockServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_dflock.context.detect_environment", lambda: "gevent")
    app = Celery("greenlets", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]

    async def enter() -> bool:
        with dflock(key, PATIENCE, app=app) as lock:
            return lock.held

    assert asyncio.run(enter())
