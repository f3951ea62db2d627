"""A conflict: the lock was not free in time, and ``lock_conflict`` decides what happens."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, NoReturn

from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.outcome import requeue
from celery_dflock.outcome.header import Header
from celery_dflock.outcome.skipped import skip
from celery_dflock.outcome.types import TimedOut
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_conflict

logger = logging.getLogger("celery_dflock")


def decide(plan: Plan, it: TimedOut) -> Any:
    """Do what ``lock_conflict`` says, and return the result of the task.

    It does not apply to a redelivery: the result would be stored under the id of the other run.
    """
    if plan.header.redelivery:
        wait_again(plan, it)
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
    error, backoff, now = it.error, plan.options.requeue, time.time()
    attempt, since = requeue.attempt_of(plan.header, plan.began, now)
    if not plan.request.is_eager and backoff.is_over(attempt, now - since):
        why = f"gave up after {attempt} attempts in {now - since:.0f} s: {error.reason}"
        raise LockNotAcquiredError(error.key, why) from error
    header = replace(plan.header, attempt=attempt, since=since, paused=None, outage=0, waited=0.0)
    _send_again(plan, it, header, attempt)


def wait_again(plan: Plan, it: TimedOut) -> NoReturn:
    """Send a redelivery again, however often: only a result or a free lock ends it.

    Raises:
        RedeliveryRequeued: which tells Celery to store nothing.
    """
    number = plan.header.redelivery + 1
    header = requeue.without_counting(plan, None, redelivery=number, outage=0, waited=0.0)
    _send_again(plan, it, header, number)


def _send_again(plan: Plan, it: TimedOut, header: Header, number: int) -> NoReturn:
    if it.kept is not None:
        ticket, seconds = it.kept.ticket, it.kept.pause
    else:
        pause = requeue.pause(plan.options.requeue, number)
        ticket, seconds = None, requeue.countdown(plan.task, pause)
    requeue.requeue(plan, seconds, replace(header, ticket=ticket), it.error, number)
