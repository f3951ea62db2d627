"""A message that the broker delivers again, under the same id, while its task runs: a redelivery."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Ignore

from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.options import Backoff
from celery_dflock.outcome.header import attempts
from celery_dflock.outcome.requeue import pause, send_again, tell_requeued
from celery_dflock.signals import task_deduplicated

RESULT_PATIENCE = 0.2
"""Seconds between a copy's finding the lock free and its running: a result is stored after that."""

logger = logging.getLogger("celery_dflock")


class CopyRequeued(Ignore):
    """A copy was sent again. It is not the end of the task, whose other run goes on."""


def run_name(task: Task, request: Any = None) -> str:
    """Return what every run of a message calls itself, copies included; by default the current one."""
    return f"{task.name}[{(request or task.request).id}] "


def is_known_copy(request: Context) -> bool:
    """Whether the broker says that it delivered this before, or an earlier attempt found out."""
    redelivered = (request.delivery_info or {}).get("redelivered")
    return bool(redelivered) or is_marked_copy(request)


def is_marked_copy(request: Context) -> bool:
    """Whether an earlier attempt found a run of its own message under way."""
    return "copy" in attempts(request)


def is_copy_of_holder(task: Task, error: LockNotAcquiredError) -> bool:
    """Whether it was a run of this very message that refused the lock; in doubt it was."""
    if error.holder is None:
        return is_known_copy(task.request)
    return error.holder.startswith(run_name(task))


def requeue_copy(task: Task, error: LockNotAcquiredError, backoff: Backoff) -> NoReturn:
    """Send a copy of a task that runs again, and end this run of it without any result.

    The result under the id they share is that of the run that holds the lock. It never gives up:
    that would be a result.

    Raises:
        CopyRequeued: which tells Celery to store nothing.
        LockError: `error` itself, in eager mode.
    """
    request = task.request
    if request.is_eager:
        raise error
    number = int(attempts(request).get("copy", 0)) + 1
    countdown = pause(backoff, number)
    send_again(task, countdown, {"copy": number})
    logger.log(
        logging.WARNING if number == 1 else logging.INFO,
        "task %s[%s] was delivered again while it runs; the copy is requeued for %.1f s: %s%s",
        task.name,
        request.id,
        countdown,
        error,
        ". Is visibility_timeout shorter than the task?" if number == 1 else "",
    )
    tell_requeued(task, error, countdown, number)
    raise CopyRequeued


def drop_ended_copy(task: Task, key: str) -> None:
    """End this run if it is a copy that has waited for another, and that has ended with a result.

    Raises:
        Ignore: it is; nothing is stored, so that the result stays as the sender knows it.
        CopyRequeued: it is too early to say.
    """
    request = task.request
    if not is_marked_copy(request):
        return
    state = _stored_state(task)
    if state not in states.READY_STATES and "free" not in attempts(request):
        # The run may have ended this very moment: it gives its lock back, then stores its result.
        send_again(task, RESULT_PATIENCE, {**attempts(request), "free": True})
        logger.info("task %s[%s]: its copy looks for a result once more", task.name, request.id)
        raise CopyRequeued
    if state not in states.READY_STATES:
        logger.warning(
            "task %s[%s] runs again: it was delivered twice, and no result (%s) says that the "
            "other run has ended",
            task.name,
            request.id,
            state,
        )
        return
    logger.info("task %s[%s] ended as %s: its copy is dropped", task.name, request.id, state)
    task_deduplicated.send(
        sender=task, request=request, key=key, task_id=request.id, verdict="copy"
    )
    raise Ignore


def _stored_state(task: Task) -> str:
    if not task.backend.persistent:
        return "not stored"
    try:
        return str(task.AsyncResult(task.request.id).state)
    except Exception as exc:  # whatever it is, nobody has said that the task has ended
        return repr(exc)
