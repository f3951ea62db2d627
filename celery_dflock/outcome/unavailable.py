"""No lock server answers, or it says no: ``dflock_unavailable`` decides what happens to the task."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from celery_dflock import gate
from celery_dflock.outcome import requeue
from celery_dflock.outcome.outage import outages
from celery_dflock.outcome.types import Unavailable
from celery_dflock.plan import Plan

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 5.0
"""Seconds: the pause doubles from one to the other, and a random half of it is cut off."""

logger = logging.getLogger("celery_dflock")


def decide(plan: Plan, it: Unavailable) -> Any:
    """Do what ``dflock_unavailable`` says, and return the result of the task.

    A redelivery never fails: the failure would be stored under the id of the other run.
    """
    verdict = plan.settings.unavailable
    if verdict == "requeue" or (verdict == "fail" and plan.header.redelivery):
        send_again_soon(plan, it)
    if verdict == "fail":
        raise it.error
    logger.warning("task %s runs without its lock: %s", plan.name, it.error)
    gate.waive(plan.request)
    return plan.body()


def send_again_soon(plan: Plan, it: Unavailable) -> NoReturn:
    """Send the task again, however often: an outage is not a conflict and does not count.

    Raises:
        Retry: which tells Celery that the task continues elsewhere.
        LockError: `it.error` itself, in eager mode; see `requeue.send_again`.
    """
    number = plan.header.outage + 1
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(number - 1, 32))
    seconds = requeue.countdown(plan.task, round(longest * (1 + requeue.chance.random()) / 2, 3))
    header = requeue.without_counting(plan, plan.header.ticket, outage=number)
    reason = it.error.reason.removeprefix(f"lock server {it.server} ")
    if not plan.request.is_eager:
        if it.refused:
            outages.refused(it.server, it.refused, reason)
        else:
            outages.requeued(it.server, reason)
    requeue.requeue(plan, seconds, header, it.error, number)
