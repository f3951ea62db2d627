"""A soft time limit, or another exception of a signal handler, at each possible point of a run."""

from __future__ import annotations

from pathlib import Path
from traceback import clear_frames
from types import FrameType
from typing import Any

import pytest
from celery import Celery, states
from celery.signals import task_postrun

import celery_dflock
from celery_dflock import Lock, LockedTask, current_lock
from celery_dflock.config import settings
from celery_dflock.held import TaskLock
from celery_dflock.outcome.header import RUN
from celery_dflock.signals import lock_acquired, lock_released
from celery_dflock.unique.lock import lock_on
from celery_dflock.worker import interrupt
from celery_dflock.worker.interrupt import Interruptible
from celery_dflock.worker.shutdown import shutdown
from examples.demo.stage import LockServer, wait_until
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE
from tests.dflockd.client.interruptions import Interrupted, Reached

PLUGIN = str(Path(celery_dflock.__file__).parent)


def is_of_plugin(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PLUGIN)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lock_rate": "1000/s"},
        {"lock_conflict": "supersede"},
        {"lock_conflict": "newest"},
        {"lock_limit": 8, "lock_weight": "all"},
        {"lock_key": ["{key}", Lock("{key}:b", limit=8, weight=3)]},
        {"lock_unique": "until_executed"},
    ],
    ids=["plain", "rate", "supersede", "newest", "weight", "several", "unique"],
)
def test_nothing_is_left_behind(options: dict[str, Any], lock_server: LockServer, key: str) -> None:
    """The lock is free though the exception is kept, and the process knows of no run any more.

    Who was told that it is held is told that it is free.
    """
    app = Celery("interrupted", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]

    @app.task(base=LockedTask, shared=False, **{"lock_key": "{key}", **options})
    def task(key: str) -> None:
        assert current_lock()

    sent = lock_on(f"{key}:unique", settings(app), jobs.LONG, "")
    held: set[int | None] = set()

    def note_held(lock: TaskLock, **_: Any) -> None:
        held.add(lock.fence)

    def note_free(lock: TaskLock, **_: Any) -> None:
        held.discard(lock.fence)

    def run() -> None:
        message = {"id": key, "delivery_info": {}, "called_directly": False, "is_eager": True}
        if "lock_unique" in options:
            assert sent.acquire()
            brought = {"key": sent.key, "token": sent.token, "until": options["lock_unique"]}
            message["headers"] = {RUN: {"id": key, "unique": brought}}
            sent.detach(jobs.LONG)
        task.push_request(**message)
        state = states.FAILURE
        try:
            task(key)
            state = states.SUCCESS
        finally:
            task_postrun.send(sender=task, state=state, retval=None)
            while task.request_stack.top is not None:
                task.pop_request()

    lock_acquired.connect(note_held, sender=task)
    lock_released.connect(note_free, sender=task)
    run()
    reached = Reached(is_of_plugin)
    reached.call(run)
    locks = [sent, *map(task._bound().make_lock, task.lock_keys(key))]

    def found() -> list[Any]:
        return [holder for lock in locks for holder in lock.inspect()["holders"]]

    def told() -> str:
        return f"{point}: {found()}"

    came = 0
    for point in reached.points:
        with Interrupted(point, is_of_plugin) as interrupted:
            exc = interrupted.call(run)
        came += exc is not None
        if exc is not None and "lock_unique" in options:
            clear_frames(exc.__traceback__)  # as Celery does: it is not kept for longer
        assert current_lock() is None, point
        assert not shutdown.waiting, point
        wait_until(lambda: None if found() else True, PATIENCE, told)
        assert not held, point
        with Interruptible() as stretch:
            assert stretch._outer is None, point
        assert interrupt._innermost is None
    assert came > 100
