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
from functools import partial
from typing import Any

from celery import Task, signals
from celery.app.task import Context
from celery.exceptions import Retry
from celery.utils.dispatch import Signal
from celery.worker.consumer import Consumer
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


def _sends(signal: Signal, kind: str, fields: Callable[..., dict[str, Any]]) -> None:
    """Have an event sent whenever a signal is, with these fields of what that says."""

    def receive(sender: Task, request: Context, **said: Any) -> None:
        if _wanted[0]:
            _send(kind, sender, request, **fields(**said))

    signal.connect(receive, weak=False)


def _named(*names: str) -> Callable[..., dict[str, Any]]:
    return lambda **said: {name: said[name] for name in names}


def _waiting(
    key: str, group: str | None, holder: Callable[[], object], reason: Callable[[], str], **_: Any
) -> dict[str, Any]:
    return {"key": key, "holder": holder(), "reason": reason(), **_in_group(group)}


def _conflict(error: LockNotAcquiredError, **_: Any) -> dict[str, Any]:
    return {"key": error.key, "holder": error.holder, "reason": error.reason}


def _of_lock(lock: Any) -> dict[str, Any]:
    fields = {"key": lock.key, "fence": lock.fence, **_in_group(lock.group)}
    return fields if len(lock.keys) == 1 else {**fields, "fences": lock.fences}


def _in_group(group: str | None) -> dict[str, str]:
    return {} if group is None else {"group": group}


_sends(lock_waiting, "lock-waiting", _waiting)
_sends(
    *(lock_acquired, "lock-acquired"),
    lambda lock, **_: {**_of_lock(lock), "waited": round(lock.waited, 3)},
)
_sends(lock_released, "lock-released", lambda lock, **_: _of_lock(lock))
_sends(lock_conflict, "lock-conflict", _conflict)
_sends(task_requeued, "lock-requeued", _named("key", "reason", "countdown", "attempt"))
_sends(task_skipped, "lock-skipped", _named("key", "holder"))
_sends(task_superseded, "lock-superseded", _named("key", "by", "was_running"))


@lock_lost.connect
def send_lost(sender: Task, request: Context, key: str, lock: Any, **_: Any) -> None:
    """A task has lost a lock. On a thread of its own: this one has to renew the locks of others."""
    if _wanted[0]:
        fence, group = (None, None) if lock is None else (lock.fences[key], lock.group)
        said = {"key": key, "fence": fence, **_in_group(group)}
        send = partial(_send, "lock-lost", sender, request, **said)
        threading.Thread(target=send, name="dflock-event", daemon=True).start()


@task_superseded.connect
def send_revoked(sender: Task, request: Context, was_running: bool, **_: Any) -> None:
    """Send the event of Celery's own for a task that is superseded: it sends none for such an end."""
    if _wanted[0] and was_running:
        _send("task-revoked", sender, request, terminated=True, signum=None, expired=False)


@signals.task_retry.connect
def send_retried(
    sender: Task, request: Context, einfo: Any, reason: Retry | None = None, **_: Any
) -> None:
    """Send the event of Celery's own for a requeued task: it sends none for one that ends like this.

    A worker that cancels a task gives no reason.
    """
    if _wanted[0] and isinstance(reason, Requeued):
        said = {"exception": safe_repr(reason.exc), "traceback": safe_str(einfo.traceback)}
        _send("task-retried", sender, request, **said)


lock_acquired.for_events = lock_released.for_events = 1


def _send(kind: str, task: Task, request: Context, **fields: Any) -> None:
    """Send an event over a connection of the app's pool, which any process and thread may use."""
    app = task.app
    try:
        with app.amqp.producer_pool.acquire(block=True) as producer:
            connection = producer.connection
            connection.ensure_connection(**RETRY_POLICY)  # else the channel tries for seconds
            with app.events.Dispatcher(
                connection,
                request.hostname,
                channel=producer.channel,
                buffer_while_offline=False,  # what it keeps for later ends with it, unsaid
            ) as dispatcher:
                dispatcher.send(
                    kind,
                    uuid=request.id,
                    name=task.name,
                    retry=True,
                    retry_policy=RETRY_POLICY,
                    **fields,
                )
    except Exception as exc:
        # Whatever it is: an event does not end what it is about.
        logger.warning("event %s of task %s[%s] was not sent: %s", kind, task.name, request.id, exc)
