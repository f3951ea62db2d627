"""Result backends that are slow to store ``RETRY``, and slow receivers: in a worker, for some tasks.

What is slow for the first run of a task is what its id begins with, one of `POINTS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import current_task, states
from celery.backends.database import DatabaseBackend
from celery.backends.redis import RedisBackend
from celery.backends.rpc import RPCBackend
from celery.signals import after_task_publish, before_task_publish, task_retry

from celery_dflock.outcome.header import Header
from celery_dflock.signals import task_requeued

POINTS = ("results", "before_publish", "after_publish", "task_requeued", "task_retry")
"""Between the end of a run that is requeued and the last of what it says."""

SECONDS = 1.0
"""Longer than the pauses of two requeues, and than the next runs."""


def stall(what: str, task_id: str) -> None:
    """Hold the first run of a task up there, while the next ones go on."""
    if task_id.startswith(f"{what}-") and not Header.read(current_task.request).attempt:
        time.sleep(SECONDS)


class StallingRedis(RedisBackend):
    """Slow where the value has been made, and Celery has looked whether there is one."""

    def set(self, key: Any, value: Any, **options: Any) -> Any:
        if '"RETRY"' in str(value):
            stall("results", bytes(key).decode().partition("-meta-")[2])
        return super().set(key, value, **options)


class StallingDatabase(DatabaseBackend):
    def _store_result(self, task_id: str, result: Any, state: str, *args: Any, **more: Any) -> Any:
        if state == states.RETRY:
            stall("results", task_id)
        return super()._store_result(task_id, result, state, *args, **more)


class StallingRPC(RPCBackend):
    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **more: Any) -> Any:
        if state == states.RETRY:
            stall("results", task_id)
        return super().store_result(task_id, result, state, *args, **more)


class BrokenBackend(RedisBackend):
    def set(self, key: Any, value: Any, **options: Any) -> Any:
        if '"RETRY"' in str(value):
            raise ValueError("as asked")
        return super().set(key, value, **options)


def publishes(what: str) -> Callable[..., None]:
    def receive(headers: Mapping[str, Any], **_: Any) -> None:
        if current_task:  # that of a task which is sent again
            stall(what, headers["id"])

    return receive


before_task_publish.connect(publishes("before_publish"), weak=False)
after_task_publish.connect(publishes("after_publish"), weak=False)
task_requeued.connect(lambda request, **_: stall("task_requeued", request.id), weak=False)
task_retry.connect(lambda request, **_: stall("task_retry", request.id), weak=False)
