"""The tasks of roll-outs, for workers of this release and of an older one; and their sender.

``python -m`` this reads what to send, a line of JSON each, and answers with the task id. It knows
nothing that the older release does not have.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from celery import Task, chord
from celery.signals import task_failure

import celery_dflock
import dflockd
from celery_dflock import LockedTask
from celery_dflock.signals import task_deduplicated, task_requeued
from tests.celery_dflock import mixed

app = mixed.app

AT_ONCE = {"base": 0.1, "cap": 0.1}
PATIENCE = 60


def body(
    self: Task,
    key: str,
    gate: str | None = None,
    retry_on: str | None = None,
    lingers: float = 0.0,
) -> str:
    """Work until the file `gate` is there; or, at first, send a retry to the queue `retry_on`.

    A run that lingers still holds its lock when its retry is under way.
    """
    mixed.note(self, "begin", [key])
    try:
        if retry_on is not None and self.request.retries == 0:
            raise self.retry(queue=retry_on, countdown=0)
        while gate is not None and not Path(gate).exists():
            time.sleep(0.005)
        return str(self.request.id)
    finally:
        time.sleep(lingers)
        mixed.note(self, "end", [key])


def job(name: str, **options: Any) -> Task:
    options = {"lock_key": "{key}", "lock_requeue": AT_ONCE, **options}
    return app.task(bind=True, base=LockedTask, name=name, shared=False, **options)(body)


patient = job("rolled.patient", lock_timeout=PATIENCE, lock_wait="slot")
parked = job("rolled.parked", lock_timeout=PATIENCE, lock_wait="consumer")
ticket = job("rolled.ticket", lock_timeout=0, lock_requeue={**AT_ONCE, "hold": 30})
requeued = job("rolled.requeued", lock_timeout=0)
NEWEST = "supersede" if hasattr(celery_dflock, "SupersededError") else "requeue"
latest = job("rolled.latest", lock_timeout=PATIENCE, lock_conflict=NEWEST)
late = job("rolled.late", lock_timeout=0, acks_late=True)
late_parked = job("rolled.late_parked", lock_timeout=30, lock_wait="consumer", acks_late=True)
executed = job("rolled.executed", lock_timeout=0, lock_unique="until_executed")
executing = job("rolled.executing", lock_timeout=0, lock_unique="until_executing")


@app.task(name="rolled.collect", shared=False)
def collect(results: list[str]) -> list[str]:
    return sorted(results)


@task_failure.connect
def note_failed(sender: Task, exception: Exception, **_: Any) -> None:
    mixed.note(sender, "failed", [repr(exception)])


@task_requeued.connect
def note_requeued(sender: Task, key: str, **_: Any) -> None:
    mixed.note(sender, "requeued", [key])


@task_deduplicated.connect
def note_deduplicated(sender: Task, key: str, request: Any, **_: Any) -> None:
    if request is not None:
        mixed.note(sender, "deduplicated", [key])


def send(task: str, each: list[dict[str, Any]], **options: Any) -> str:
    """Send a task; if there are arguments for several, as a chord."""
    if len(each) == 1:
        return str(app.tasks[task].apply_async((), each[0], **options).id)
    header = [app.tasks[task].s(**kwargs).set(**options) for kwargs in each]
    return str(chord(header)(collect.s().set(**options)).id)


def main() -> None:
    print(json.dumps([celery_dflock.__file__, dflockd.__file__]), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(send(**asked)), flush=True)


if __name__ == "__main__":
    os.environ.setdefault(mixed.RECORD, os.devnull)
    main()
