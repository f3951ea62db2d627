"""No lock server can be asked: ``dflock_unavailable`` says what becomes of the task."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

from celery_dflock.outcome import requeue
from celery_dflock.outcome.types import Unavailable
from celery_dflock.plan import Plan

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 5.0
"""Seconds: the pause doubles from one to the other, and a random half of it is cut off."""

REMIND_AFTER = 60.0
"""Seconds after which a process says again that a server is away."""

logger = logging.getLogger("celery_dflock")

away: dict[str, float] = {}
"""The servers that this process could not ask the last time: when it has said so."""


def decide(plan: Plan, it: Unavailable) -> Any:
    """Do as ``dflock_unavailable`` says; return the result of the task.

    A redelivery does not fail: that would be stored under the id of the other run.
    """
    verdict = plan.settings.unavailable
    if verdict == "requeue" or (verdict == "fail" and plan.header.redelivery):
        send_again_soon(plan, it)
    if verdict == "fail":
        raise it.error
    logger.warning("task %s runs unlocked: %s", plan.name, it.error)
    return plan.body()


def send_again_soon(plan: Plan, it: Unavailable) -> NoReturn:
    """Send the task again, however often: an outage is no conflict, and uses nothing up.

    Raises:
        Retry: which tells Celery that the task goes on elsewhere.
    """
    _warn(it)
    number = plan.header.outage + 1
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(number - 1, 32))
    seconds = requeue.countdown(plan.task, round(longest * (1 + requeue.chance.random()) / 2, 3))
    header = requeue.without_counting(plan, plan.header.ticket, outage=number)
    requeue.requeue(plan, seconds, header, it.error, number, logging.DEBUG)


def _warn(it: Unavailable) -> None:
    """Say it once for all tasks of this process, and then now and then."""
    now, said = time.monotonic(), away.get(it.server)
    if said is None or now - said >= REMIND_AFTER:
        away[it.server] = now
        still = "" if said is None else "still "
        logger.warning("tasks are %srequeued until they can be locked: %s", still, it.error)


def is_over(server: str) -> None:
    """A server has granted a lock, after it could not be asked."""
    if away.pop(server, None) is not None:
        logger.warning("lock server %s is there again", server)
