"""What becomes of a task that cannot have its lock."""

from __future__ import annotations

import logging
import random
import time
from typing import Any, NoReturn

from celery import Task
from celery.app.task import Context
from celery.exceptions import Retry

from celery_dflock.exceptions import LockError, LockNotAcquiredError
from celery_dflock.options import Backoff
from celery_dflock.signals import task_requeued, task_skipped

HEADER = "dflock"
"""The message header of a call's own options, and of the counters of a requeued task: a dict."""

COUNTERS = ("attempt", "since", "retries")

logger = logging.getLogger("celery_dflock")


class Skipped(dict[str, Any]):
    """The result of a task that was skipped because its lock was held.

    A task that is skipped ends as ``SUCCESS`` with this value: nobody waits for ever, and a chord
    goes on. It is a dict, so that every serialiser can store it and readers need not know the
    plugin; `Skipped.of` recognises it again.
    """

    MARK = "dflock"

    def __init__(self, key: str, task_id: str | None, holder: str | None = None) -> None:
        super().__init__({self.MARK: "skipped", "key": key, "task_id": task_id, "holder": holder})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments."""
        return type(self), (self.key, self.task_id, self.holder)

    @property
    def key(self) -> str:
        """The lock that was not free."""
        return str(self["key"])

    @property
    def task_id(self) -> str | None:
        """The task that was skipped."""
        task_id: str | None = self["task_id"]
        return task_id

    @property
    def holder(self) -> str | None:
        """Who held the lock, as the holder describes itself, if that could be learned."""
        holder: str | None = self["holder"]
        return holder

    @classmethod
    def of(cls, result: object) -> Skipped | None:
        """Return `result` as `Skipped` if that is what a task returned, else ``None``."""
        if isinstance(result, dict) and result.get(cls.MARK) == "skipped":
            return cls(result["key"], result["task_id"], result.get("holder"))
        return None


def attempts(request: Context) -> dict[str, Any]:
    """Return what the header says of earlier attempts, or nothing at the first.

    A retry inherits the header of the run that sent it. That run had its lock, so counting starts
    anew.
    """
    history = _header(request)
    if history.get("retries") != request.retries:
        return {}
    return {name: history[name] for name in COUNTERS if name in history}


def options_of_call(request: Context) -> dict[str, Any]:
    """Return the options that this call names itself."""
    return {name: value for name, value in _header(request).items() if name not in COUNTERS}


def _header(request: Context) -> dict[str, Any]:
    return dict((request.headers or {}).get(HEADER) or {})


def requeue(task: Task, error: LockError, backoff: Backoff) -> NoReturn:
    """Send the task again, to run a while later, and end this run of it.

    The same task: id, group, chord, chain, headers, priority and queue stay, and no retry is used
    up. Published first, acknowledged after: it can be doubled by a crash, never lost.

    Raises:
        Retry: which tells Celery that the task goes on elsewhere.
        LockNotAcquiredError: it has been tried for too long.
        LockError: `error` itself, in eager mode: there is nowhere to send the task to.
    """
    request = task.request
    if request.is_eager:
        raise error
    history = attempts(request)
    now = time.time()
    attempt = int(history.get("attempt", 0)) + 1
    since = float(history.get("since", now))
    if backoff.is_over(attempt, now - since):
        why = f"gave up after {attempt} attempts in {now - since:.0f} s: {error.reason}"
        raise LockNotAcquiredError(error.key, why) from error
    countdown = round(backoff.pause(attempt - 1, random.random()), 3)
    counted = {"attempt": attempt, "since": since, "retries": request.retries}
    headers = {**(request.headers or {}), HEADER: {**_header(request), **counted}}
    task.signature_from_request(
        request, retries=request.retries, countdown=countdown, headers=headers
    ).apply_async()
    logger.info(
        "task %s[%s] requeued for %.1f s, attempt %d: %s",
        task.name,
        request.id,
        countdown,
        attempt,
        error,
    )
    task_requeued.send(
        sender=task,
        request=request,
        key=error.key,
        reason=error.reason,
        countdown=countdown,
        attempt=attempt,
    )
    raise Retry(f"requeued for {countdown} s: {error}", exc=error, when=countdown)


def skip(task: Task, error: LockNotAcquiredError) -> Skipped:
    """Return the result of a skipped run."""
    request = task.request
    logger.info("task %s[%s] skipped: %s", task.name, request.id, error)
    task_skipped.send(sender=task, request=request, key=error.key)
    return Skipped(error.key, request.id, error.holder)
