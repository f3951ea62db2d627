"""The lock that keeps others like a task from being sent, and the mark of those that were replaced."""

from __future__ import annotations

import re
from typing import NamedTuple

from celery import Task

from celery_dflock import identity, keys
from celery_dflock.config import Settings
from celery_dflock.limits import MAX_LIMIT
from celery_dflock.locks import MOMENT
from celery_dflock.look import describe
from dflockd.sync_client import DistributedLock, DistributedSemaphore

MAX_NAME = 160
"""Bytes of a task's name in a label, which has 256: the id must be in it."""

_LABEL = re.compile(r".*\[([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\] ")
"""What holders of this kind are labelled with, and the id in it."""


class First(NamedTuple):
    """The task that was there before."""

    task_id: str
    """Empty if the label does not say."""
    fence: int
    holder: str
    is_a_run: bool
    """Whether a process has it; else it is on its way to one."""


def lock_on(key: str, app_settings: Settings, ttl: int, label: str) -> DistributedLock:
    """Return the lock of that name."""
    return DistributedLock(key, 0, ttl, **app_settings.connection_options(), label=label)


def label_of(task: Task, task_id: str, does: str = "") -> str:
    """Return what holders of it are labelled with: the id is looked up in it."""
    name = task.name.encode("utf-8", "replace")[:MAX_NAME].decode("utf-8", "ignore")
    return identity.label_of(name, task_id, does)


def mark_of(task_id: str, app_settings: Settings, label: str) -> DistributedSemaphore:
    """The mark that tells the worker which receives a task that it was replaced, while it is held.

    Several may set out to replace one task. Each has a slot, and releases it if another was first.
    """
    key = keys.finish(f"replaced:{task_id or 'unknown'}", app_settings.key_prefix)
    options = app_settings.connection_options()
    return DistributedSemaphore(key, MAX_LIMIT, 0, MOMENT, **options, label=label)


def first_of(lock: DistributedLock) -> First | None:
    """Return who holds it; ``None`` if nobody does."""
    for holder in lock.inspect()["holders"]:
        task_id = _LABEL.match(holder["label"])
        return First(
            task_id[1] if task_id else "",
            holder["fence"],
            describe(holder),
            bool(holder["conn_id"]),
        )
    return None
