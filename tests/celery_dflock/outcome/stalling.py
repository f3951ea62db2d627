"""A result backend that is slow to store ``RETRY``, and receivers that are slow: for a worker."""

from __future__ import annotations

import os
import time
from typing import Any

from celery.backends.redis import RedisBackend
from celery.signals import task_retry

from celery_dflock.signals import task_requeued

STALLED = "JOBS_STALLED"
"""The variable that says what is slow."""

SECONDS = 1.0
"""Longer than the pause of a requeue, and than the next run."""


def stall(what: str) -> None:
    if os.environ.get(STALLED) == what:
        time.sleep(SECONDS)


class StallingBackend(RedisBackend):
    def set(self, key: Any, value: Any, **options: Any) -> Any:
        if '"RETRY"' in str(value):
            stall("results")
        return super().set(key, value, **options)


class BrokenBackend(RedisBackend):
    def set(self, key: Any, value: Any, **options: Any) -> Any:
        if '"RETRY"' in str(value):
            raise ValueError("as asked")
        return super().set(key, value, **options)


def requeued(**_: Any) -> None:
    stall("task_requeued")


def retried(**_: Any) -> None:
    stall("task_retry")


task_requeued.connect(requeued)
task_retry.connect(retried)
