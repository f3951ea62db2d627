"""Worker events of locks, for ``celery events``, Flower and monitors of one's own.

They go out where Celery sends the events of tasks: with ``-E``, ``worker_send_task_events``, or
after ``celery control enable_events``. Nobody there knows the token.

Their types are ``lock-...`` and not ``task-lock-...``: `celery.events.state.State`, and Flower with
it, takes the text behind ``task-`` for the state of the task. A ``STARTED`` task would be shown as
``LOCK-ACQUIRED``. Types of an unknown group are only counted.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable
from typing import Any

from celery import Task, signals
from celery.app.task import Context
from celery.exceptions import Retry
from celery.worker.consumer import Consumer
from kombu.exceptions import OperationalError
from kombu.utils.encoding import safe_repr, safe_str

from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.outcome.requeue import Requeued
from celery_dflock.signals import (
    RunSignal,
    lock_acquired,
    lock_conflict,
    lock_lost,
    lock_released,
    lock_waiting,
    task_requeued,
    task_skipped,
    task_superseded,
)

RETRY_POLICY = {"max_retries": 1, "interval_start": 0}
"""A stale connection is replaced; for a broker that is away an event does not hold up its task."""

logger = logging.getLogger("celery_dflock")

_wanted = mmap.mmap(-1, 1)
"""Whether the worker sends events: one byte that the children of a prefork pool share with it."""


RunSignal.events_wanted = _wanted


def look_whether_wanted(consumer: Consumer) -> None:
    """Note whether the worker sends task events now. Called in its main process, for each task.

    Nothing else knows: neither ``-E`` nor ``enable_events`` changes a setting.
    """
    dispatcher = consumer.event_dispatcher
    _wanted[0] = bool(
        dispatcher and dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups)
    )


@lock_waiting.connect
def send_waiting(
    sender: Task,
    request: Context,
    key: str,
    group: str | None,
    holder: Callable[[], str | None],
    reason: Callable[[], str],
    **_: Any,
) -> None:
    """A task has a position in the queue of a lock."""
    if _wanted[0]:
        fields = {"key": key, "holder": holder(), "reason": reason(), **_in_group(group)}
        _send("lock-waiting", sender, request, **fields)


@lock_acquired.connect
def send_acquired(sender: Task, request: Context, lock: Any, **_: Any) -> None:
    """A task has its lock."""
    if _wanted[0]:
        waited = round(lock.waited, 3)
        _send("lock-acquired", sender, request, **_of_lock(lock), waited=waited)


@lock_released.connect
def send_released(sender: Task, request: Context, lock: Any, **_: Any) -> None:
    """A task has given its lock back."""
    if _wanted[0]:
        _send("lock-released", sender, request, **_of_lock(lock))


@lock_lost.connect
def send_lost(sender: Task, request: Context, key: str, lock: Any, **_: Any) -> None:
    """A task has lost a lock."""
    if _wanted[0]:
        fence = lock.fences[key] if lock is not None else None
        # On a thread of its own: this one has to renew the locks of other tasks.
        threading.Thread(
            target=_send,
            args=("lock-lost", sender, request),
            kwargs={"key": key, "fence": fence, **_in_group(None if lock is None else lock.group)},
            name="dflock-event",
            daemon=True,
        ).start()


@lock_conflict.connect
def send_conflict(sender: Task, request: Context, error: LockNotAcquiredError, **_: Any) -> None:
    """A task did not get its lock in time."""
    if _wanted[0]:
        fields = {"key": error.key, "holder": error.holder, "reason": error.reason}
        _send("lock-conflict", sender, request, **fields)


@task_requeued.connect
def send_requeued(
    sender: Task,
    request: Context,
    key: str,
    reason: str,
    countdown: float,
    attempt: int,
    **_: Any,
) -> None:
    """A task was sent again because of its lock."""
    if _wanted[0]:
        fields = {"key": key, "reason": reason, "countdown": countdown, "attempt": attempt}
        _send("lock-requeued", sender, request, **fields)


@task_skipped.connect
def send_skipped(sender: Task, request: Context, key: str, holder: str | None, **_: Any) -> None:
    """A task was skipped because of its lock."""
    if _wanted[0]:
        _send("lock-skipped", sender, request, key=key, holder=holder)


@task_superseded.connect
def send_superseded(
    sender: Task, request: Context, key: str, by: str, was_running: bool, **_: Any
) -> None:
    """A newer task has come, and the newest wins."""
    if _wanted[0]:
        _send("lock-superseded", sender, request, key=key, by=by, was_running=was_running)
        if was_running:
            # Of Celery's own: it sends none for a task that ends like this.
            _send("task-revoked", sender, request, terminated=True, signum=None, expired=False)


@signals.task_retry.connect
def send_retried(sender: Task, request: Context, reason: Retry, einfo: Any, **_: Any) -> None:
    """Send the event of Celery's own for a requeued task: it sends none for one that ends like this."""
    if _wanted[0] and isinstance(reason, Requeued):
        said = {"exception": safe_repr(reason.exc), "traceback": safe_str(einfo.traceback)}
        _send("task-retried", sender, request, **said)


lock_acquired.for_events = lock_released.for_events = 1


def _of_lock(lock: Any) -> dict[str, Any]:
    fields = {"key": lock.key, "fence": lock.fence, **_in_group(lock.group)}
    return fields if len(lock.keys) == 1 else {**fields, "fences": lock.fences}


def _in_group(group: str | None) -> dict[str, str]:
    return {} if group is None else {"group": group}


def _send(kind: str, task: Task, request: Context, **fields: Any) -> None:
    """Send an event over a connection of the app's pool, which any process and thread may use."""
    try:
        with task.app.events.default_dispatcher(hostname=request.hostname) as dispatcher:
            dispatcher.send(
                kind,
                uuid=request.id,
                name=task.name,
                retry=True,
                retry_policy=RETRY_POLICY,
                **fields,
            )
    except OperationalError as exc:
        logger.warning("event %s of task %s[%s] was not sent: %s", kind, task.name, request.id, exc)
