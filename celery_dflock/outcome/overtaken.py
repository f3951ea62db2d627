"""A task whose turn in the consumer has passed before it had a slot: it waits again."""

from __future__ import annotations

from typing import NoReturn

from celery_dflock.outcome import requeue
from celery_dflock.outcome.types import Overtaken
from celery_dflock.plan import Plan


def wait_again(plan: Plan, it: Overtaken) -> NoReturn:
    """Send the task again with its position: no conflict, for it was not the lock that was missing.

    Raises:
        Retry: which tells Celery that the task goes on elsewhere.
    """
    ticket = None if it.kept is None else it.kept.ticket
    seconds = requeue.at_once(plan.task) if it.kept is None else it.kept.pause
    overtaken = plan.header.overtaken + 1
    header = requeue.without_counting(
        plan, ticket, outage=0, waited=plan.waited, overtaken=overtaken
    )
    requeue.requeue(plan, seconds, header, it.error, plan.header.attempt)
