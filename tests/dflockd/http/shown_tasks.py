"""A task that holds a lock for as long as it is told to, as a module that workers import."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

from celery_dflock import LockedTask

URL = os.environ.get("SHOWN_BROKER_URL", "memory://")

app = Celery(
    "shown", broker=URL, backend=URL.replace("memory", "cache+memory"), set_as_current=False
)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_cancel_long_running_tasks_on_connection_loss = False


@app.task(
    base=LockedTask, name="shop.sync", shared=False, lock_key="{key}", lock_ttl=2, lock_timeout=60
)
def sync(key: str, gate: str) -> None:
    while not Path(gate).exists():
        time.sleep(0.01)
