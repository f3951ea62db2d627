"""A conflict: the lock was not free in time, and ``lock_conflict`` says what becomes of the task."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, NoReturn

from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.outcome import requeue
from celery_dflock.outcome.skipped import skip
from celery_dflock.outcome.types import TimedOut
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_conflict

logger = logging.getLogger("celery_dflock")


def decide(plan: Plan, it: TimedOut) -> Any:
    """Do as ``lock_conflict`` says; return the result of the task."""
    error, verdict = it.error, plan.options.conflict
    lock_conflict.send(
        sender=plan.task, request=plan.request, key=error.key, holder=error.holder, error=error
    )
    if callable(verdict):
        verdict = verdict(plan.task, error)
    match verdict:
        case "requeue":
            requeue_or_give_up(plan, it)
        case "skip":
            return skip(plan, error)
        case "fail":
            raise error
    logger.info("task %s ends without running: %s", plan.name, error)
    return verdict


def requeue_or_give_up(plan: Plan, it: TimedOut) -> NoReturn:
    """Send the task again with a pause, and with its position if that was kept.

    Raises:
        Retry: which tells Celery that the task goes on elsewhere.
        LockNotAcquiredError: it has been tried for too long.
    """
    error, kept, backoff, now = it.error, it.kept, plan.options.requeue, time.time()
    attempt, since = requeue.attempt_of(plan.header, plan.began, now)
    if not plan.request.is_eager and backoff.is_over(attempt, now - since):
        why = f"gave up after {attempt} attempts in {now - since:.0f} s: {error.reason}"
        raise LockNotAcquiredError(error.key, why) from error
    if kept is not None:
        ticket, seconds = kept.ticket, kept.pause
    else:
        ticket, seconds = None, requeue.countdown(plan.task, requeue.pause(backoff, attempt))
    header = replace(
        plan.header,
        attempt=attempt,
        since=since,
        ticket=ticket,
        paused=None,
        outage=0,
        waited=0.0,
    )
    requeue.send_again(plan, seconds, header, error)
    requeue.end(plan, error, seconds, attempt, logging.INFO)
