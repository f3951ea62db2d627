"""What happens to a task that does not get its lock: a function for each reason.

One that sends the task again does not return: `requeue.requeue` raises what tells Celery so.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, NoReturn, assert_never

from celery_dflock import gate
from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.outcome import delivery, redelivery, requeue
from celery_dflock.outcome.header import Header
from celery_dflock.outcome.outage import outages
from celery_dflock.outcome.skipped import Skipped, skip
from celery_dflock.outcome.types import (
    Overtaken,
    Redelivered,
    Refusal,
    ShuttingDown,
    Superseded,
    TimedOut,
    Unavailable,
)
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_conflict, task_superseded
from dflockd import errors

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 5.0
"""Seconds before a task asks a server that is away again.

The pause doubles from one to the other, and a random half of it is cut off.
"""

_HAS_HOLDERS = {each.__name__ for each in (errors.LimitMismatchError, errors.MaxWaitersError)}
"""What a server says that does not grant a lock because others hold it; see `Unavailable.refused`."""

logger = logging.getLogger("celery_dflock")


def decide(plan: Plan, it: Refusal) -> Any:
    """Carry out the outcome: return the result of the task, or raise what tells Celery how it ends."""
    if plan.is_redelivered and not isinstance(it, Superseded):
        drop_ended(plan, it)
    match it:
        case TimedOut():
            return end_conflict(plan, it)
        case Unavailable():
            return end_unavailable(plan, it)
        case Overtaken():
            return wait_in_consumer_again(plan, it)
        case Redelivered():
            return redelivery.send_again(plan, it)
        case Superseded():
            if plan.is_redelivered:  # its first delivery may have run, and was stopped
                redelivery.look_for_result(plan)
            return skip_older(plan, it)
        case ShuttingDown():
            return send_elsewhere(plan, it)
        case _:
            assert_never(it)


def drop_ended(plan: Plan, it: Refusal) -> None:
    """End a redelivery if its task has ended, whatever else would happen to it."""
    if isinstance(it, Redelivered):
        # The run that has the lock may be a redelivery too, and only look for the result.
        redelivery.drop_if_ended(plan)
        redelivery.drop_if_run(plan)
    elif plan.header.redelivery:
        redelivery.drop_if_ended(plan)  # it is requeued, and looks again
    else:
        redelivery.look_twice(plan)


def end_conflict(plan: Plan, it: TimedOut) -> Any:
    """Do what ``lock_conflict`` says, and return the result of the task.

    It does not apply to a redelivery: the result would be stored under the id of the other run.
    """
    if plan.header.redelivery:
        requeue_redelivery(plan, it)
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


def requeue_redelivery(plan: Plan, it: TimedOut) -> NoReturn:
    """Send a redelivery again, however often: only a result or a free lock ends it."""
    number = plan.header.redelivery + 1
    header = requeue.without_counting(plan, None, redelivery=number, outage=0, waited=0.0)
    _send_again(plan, it, header, number)


def _send_again(plan: Plan, it: TimedOut, header: Header, number: int) -> NoReturn:
    if it.kept is not None:
        ticket, seconds = it.kept.ticket, it.kept.pause
    else:
        pause = requeue.pause(plan.options.requeue, number)
        ticket, seconds = None, delivery.pause(plan.task.app, pause)
    requeue.requeue(plan, seconds, replace(header, ticket=ticket), it.error, number)


def end_unavailable(plan: Plan, it: Unavailable) -> Any:
    """Do what ``dflock_unavailable`` says, and return the result of the task.

    A redelivery never fails: the failure would be stored under the id of the other run. Nor does it
    run without its lock, beside that run; and nobody does beside holders that the server knows.
    """
    verdict = plan.settings.unavailable
    has_holders = verdict == "run" and it.refused in _HAS_HOLDERS
    if verdict == "requeue" or plan.header.redelivery or has_holders:
        send_again_soon(plan, it)
    if verdict == "fail":
        raise it.error
    logger.warning("task %s runs without its lock: %s", plan.name, it.error)
    gate.waive(plan.request)
    return plan.body()


def send_again_soon(plan: Plan, it: Unavailable) -> NoReturn:
    """Send the task again, however often: an outage is not a conflict and does not count."""
    number = plan.header.outage + 1
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(number - 1, 32))
    seconds = delivery.pause(plan.task.app, round(longest * (1 + requeue.chance.random()) / 2, 3))
    header = requeue.without_counting(plan, plan.header.ticket, outage=number)
    reason = it.error.reason.removeprefix(f"lock server {it.server} ")
    if not plan.request.is_eager:
        if it.refused:
            outages.refused(it.server, it.refused, reason)
        else:
            outages.away(it.server, reason)
    requeue.requeue(plan, seconds, header, it.error, number)


def wait_in_consumer_again(plan: Plan, it: Overtaken) -> NoReturn:
    """Send a task again whose turn had passed before it had a slot, with its position.

    That is no conflict, for it was not the lock that was missing.
    """
    ticket = None if it.kept is None else it.kept.ticket
    seconds = requeue.at_once(plan.task.app) if it.kept is None else it.kept.pause
    header = requeue.without_counting(plan, ticket, outage=0, waited=plan.waited)
    requeue.requeue(plan, seconds, header, it.error, plan.header.attempt)


def skip_older(plan: Plan, it: Superseded) -> Skipped:
    """Return the result of a run that ends before it has begun."""
    error = it.error
    task_superseded.send(
        sender=plan.task, request=plan.request, key=error.key, by=error.holder, was_running=False
    )
    return skip(plan, error, superseded_by=error.holder)


def send_elsewhere(plan: Plan, it: ShuttingDown) -> NoReturn:
    """Send the task again, after the shortest pause: a shutdown says nothing about the lock."""
    seconds = requeue.at_once(plan.task.app)
    header = requeue.without_counting(plan, it.ticket)
    requeue.requeue(plan, seconds, header, it.error, plan.header.attempt)
