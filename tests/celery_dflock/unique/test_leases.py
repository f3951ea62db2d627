"""For how long the lock of `lock_unique` is asked for."""

from __future__ import annotations

import datetime as dt
import math

import pytest
from celery import Celery

from celery_dflock import LockedTask
from celery_dflock.unique.publish import CLOCK_MARGIN, _lease


@pytest.mark.parametrize(
    ("until", "expires", "seconds"),
    [
        ("until_executed", None, 3600),
        ("until_executed", 100, 100 + CLOCK_MARGIN),
        ("until_executed", 99.5, 100 + CLOCK_MARGIN),
        ("until_executed", -5, CLOCK_MARGIN),
        ("until_executed", 3600, 3600),
        ("until_executed", 3599, 3600),
        ("until_executed", math.inf, 3600),
        ("until_executed", dt.timedelta(hours=-1), CLOCK_MARGIN),
        ("until_executed", dt.timedelta(hours=9), 3600),
        ("until_expired", 100, 3600),
    ],
)
def test_a_task_that_expires_counts_no_longer_than_that(
    until: str, expires: float | dt.timedelta | None, seconds: int
) -> None:
    app = Celery("expires", set_as_current=False)

    @app.task(base=LockedTask, lock_key="k", lock_unique=until, shared=False)
    def task() -> None: ...

    said = app.now() + expires if isinstance(expires, dt.timedelta) else expires
    assert _lease(task, task._lock_options, {"expires": said}) == seconds
