"""A task that cannot have its lock now is sent again, to run a while later."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from celery import Task
from celery.app.task import Context
from celery.exceptions import Retry

from celery_dflock.exceptions import LockError, LockNotAcquiredError
from celery_dflock.options import Backoff, LockOptions
from celery_dflock.outcome.header import HEADER, attempts, uncounted
from celery_dflock.signals import task_requeued
from dflockd.sync_client import Reservation

# The system's: no new seed after a fork, and nothing taken from a seed that somebody has set.
_chance = random.SystemRandom()

logger = logging.getLogger("celery_dflock")


class Ticket:
    """The place in the queue of its lock that a task has while it is requeued.

    Attributes:
        place: its name, if there is one to be taken up; then that under which it was kept.
        pause: seconds until the next attempt, if they have been said to the lock server.
    """

    def __init__(self, request: Context, backoff: Backoff, timeout: float | None) -> None:
        self._request = request
        self._backoff = backoff
        self._timeout = timeout or 0.0
        self.place: str | None = attempts(request).get("place")
        self.pause: float | None = None

    @classmethod
    def of(
        cls, request: Context, options: LockOptions, keys: int, timeout: float | None
    ) -> Ticket | None:
        """Return that of a task whose place is to be kept; ``None`` for others.

        Who decides with a function, once the wait is over, may decide for something else.
        """
        is_kept = options.conflict == "requeue" and options.requeue.hold is not None
        if not is_kept or keys > 1 or request.is_eager:
            return None
        return cls(request, options.requeue, timeout)

    def keep(self) -> Reservation | None:
        """Draw the pause, before a wait of `timeout` seconds; ``None`` if there will be none."""
        end = time.time() + self._timeout
        attempt, since = _attempt(attempts(self._request), end)
        if self._backoff.is_over(attempt, end - since):
            return None
        self.pause = pause(self._backoff, attempt)
        return Reservation(self.pause, self._backoff.hold or 0.0)


def requeue(
    task: Task, error: LockError, backoff: Backoff, ticket: Ticket | None = None
) -> NoReturn:
    """Send the task again, to run a while later, and end this run of it.

    The same task: id, group, chord, chain, headers, priority and queue stay, and no retry is used
    up. Published first, acknowledged after: it can be doubled by a crash, never lost.

    With a ticket it takes along its place in the queue of its lock. Without one it has not got to
    waiting: if it had a place from before, it will look for it the next time.

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
    attempt, since = _attempt(history, now)
    if backoff.is_over(attempt, now - since):
        why = f"gave up after {attempt} attempts in {now - since:.0f} s: {error.reason}"
        raise LockNotAcquiredError(error.key, why) from error
    countdown = pause(backoff, attempt)
    if ticket is not None:
        countdown = countdown if ticket.pause is None else ticket.pause
        history["place"] = ticket.place
    send_again(task, countdown, {**history, "attempt": attempt, "since": since})
    logger.info(
        "task %s[%s] requeued for %.1f s, attempt %d: %s",
        task.name,
        request.id,
        countdown,
        attempt,
        error,
    )
    tell_requeued(task, error, countdown, attempt)
    raise Retry(f"requeued for {countdown} s: {error}", exc=error, when=countdown)


def _attempt(history: Mapping[str, Any], now: float) -> tuple[int, float]:
    """Return the number of this attempt, and since when it has been tried."""
    return int(history.get("attempt", 0)) + 1, float(history.get("since", now))


def pause(backoff: Backoff, attempt: int) -> float:
    """Draw the seconds before the attempt that follows number `attempt`."""
    return round(backoff.pause(attempt - 1, _chance.random()), 3)


def send_again(task: Task, countdown: float, counters: dict[str, Any]) -> None:
    """Publish the task of the current request once more, with these counters."""
    request = task.request
    own = {**uncounted(request), **counters, "retries": request.retries}
    task.signature_from_request(
        request,
        retries=request.retries,
        countdown=countdown,
        headers={**(request.headers or {}), HEADER: own},
    ).apply_async()


def tell_requeued(task: Task, error: LockError, countdown: float, attempt: int) -> None:
    """Send the signal `task_requeued`."""
    task_requeued.send(
        sender=task,
        request=task.request,
        key=error.key,
        reason=error.reason,
        countdown=countdown,
        attempt=attempt,
    )
