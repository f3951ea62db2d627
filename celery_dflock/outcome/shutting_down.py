"""The worker is shutting down: a task without its lock goes to another worker."""

from __future__ import annotations

from typing import NoReturn

from celery_dflock.outcome import requeue
from celery_dflock.outcome.types import ShuttingDown
from celery_dflock.plan import Plan


def send_elsewhere(plan: Plan, it: ShuttingDown) -> NoReturn:
    """Send the task again, after the shortest pause: a shutdown says nothing about the lock.

    Raises:
        Retry: which tells Celery that the task goes on elsewhere.
    """
    seconds = requeue.at_once(plan.task)
    header = requeue.without_counting(plan, it.ticket)
    requeue.requeue(plan, seconds, header, it.error, plan.header.attempt)
