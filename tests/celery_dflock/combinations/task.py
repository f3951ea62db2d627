"""The task of a row, as the worker and the sender make it."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, Task
from celery.signals import task_postrun

from celery_dflock import Lock, LockedTask
from tests.celery_dflock.bodies import LONG
from tests.celery_dflock.bodies import body as jobs_body
from tests.celery_dflock.combinations.pairs import Row
from tests.celery_dflock.jobs import AT_ONCE, app, decide
from tests.celery_dflock.record import note

ROW = "COMBINATION"
"""The environment variable with the row of a worker, as JSON."""

NAME = "combined"
TENANTS = 2
GROUP_LIMIT = 2
FLEET = 3
"""How many may have the second lock where a task has several."""


def bounds_of(row: Row) -> dict[str, Any]:
    """What bounds who has the key, as a `Lock` has it."""
    return {
        "limit": row["limit"],
        "rate": row["rate"] and tuple(row["rate"]),
        "group": row["group"] and "{tenant}",
        "group_limit": GROUP_LIMIT if row["group"] == "limited" else None,
        "weight": row["weight"],
    }


def make(app: Celery, row: Row) -> Task:
    """Make the task.

    Raises:
        ImproperlyConfigured: the plugin refuses these options together.
    """
    options: dict[str, Any] = {
        "lock_wait": row["wait"],
        "lock_timeout": row["timeout"],
        "lock_conflict": decide if row["conflict"] == "function" else row["conflict"],
        "lock_requeue": AT_ONCE,
        "lock_ttl": LONG,
        "lock_unique": row["unique"],
        "lock_unique_ttl": LONG,
        "acks_late": row["late"],
        "ignore_result": row["results"] == "none",
    }
    bounds = bounds_of(row)
    if row["keys"] == "locks":
        options["lock_key"] = [Lock("{key}", **bounds), Lock("fleet", limit=FLEET)]
    else:
        options["lock_key"] = "{key}" if row["keys"] == "one" else ["{key}", "{key}:second"]
        options |= {f"lock_{name}": value for name, value in bounds.items()}
    if row["retries"]:
        # kombu delays no message by less than a second with RabbitMQ's quorum queues.
        retry = {"countdown": 1 if row["broker"] == "quorum" else 0.1, "max_retries": 1}
        options |= {"autoretry_for": (ValueError,), "retry_kwargs": retry}

    def body(self: Task, key: str, number: int, tenant: int, weight: Any, **kwargs: Any) -> Any:
        return jobs_body(self, key, **kwargs)

    task: Task = app.task(bind=True, shared=False, base=LockedTask, name=NAME, **options)(body)
    return task


@task_postrun.connect
def note_done(task: Task, state: str | None, **_: Any) -> None:
    """A run is over, and its state is stored."""
    if task.name == NAME:
        note("done", task, state=state)


if ROW in os.environ:
    make(app, json.loads(os.environ[ROW]))
