"""The application: one job as a plain Celery task and as a locked one.

The job is a deposit: read the balance, work a little, write the balance plus one. Two at once on
one account lose one of the two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.signals import task_prerun

from celery_dflock import LockedTask, current_lock
from examples.demo import record
from examples.demo.ledger import Ledger

# The environment variables that tell a worker where everything is.
BROKER = "DEMO_BROKER_URL"
LOCK_SERVERS = "DEMO_LOCK_SERVERS"
RECORD = "DEMO_RECORD"

app = Celery("examples.demo.tasks")


def configure(env: Mapping[str, str]) -> None:
    app.conf.update(
        broker_url=env.get(BROKER, "memory://"),
        result_backend=env.get(BROKER, "cache+memory://"),
        dflock_servers=env.get(LOCK_SERVERS, "127.0.0.1:6388").split(","),
        # A waiting task occupies its worker process: it should not hold back others as well.
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
    )


configure(os.environ)


@app.task(bind=True, ignore_result=True)
def plain(self: Task, account: int, seconds: float) -> None:
    deposit(self, account, seconds)


@app.task(
    bind=True,
    ignore_result=True,
    base=LockedTask,
    lock_key="account:{account}",
    lock_timeout=20,
    lock_ttl=10,
    lock_conflict="requeue",
)
def locked(self: Task, account: int, seconds: float) -> None:
    deposit(self, account, seconds)


def deposit(task: Task, account: int, seconds: float) -> None:
    """Add one to the account; `seconds` is how long the work in between takes."""
    lock = current_lock()  # None in a plain task
    fence = lock.fence if lock else None
    ledger = Ledger(record_file().parent, book=task.name)
    note(task, "start", account, fence)
    balance = ledger.balance(account)
    time.sleep(seconds)  # stands for the work
    ledger.write(account, balance + 1)
    note(task, "end", account, fence)


@task_prerun.connect
def note_asked(task: Task, kwargs: Mapping[str, Any], **_: object) -> None:
    """A process has taken the task up; a locked task asks for its lock now."""
    note(task, "asked", kwargs["account"], None)


def note(task: Task, what: record.What, account: int, fence: int | None) -> None:
    record.append(
        record_file(),
        what,
        task=task.request.id,
        key=f"account:{account}",
        worker=task.request.hostname.partition("@")[0],
        fence=fence,
    )


def record_file() -> Path:
    return Path(os.environ[RECORD])
