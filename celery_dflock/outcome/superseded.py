"""A task that is older than another one that has asked for its lock: the newest wins."""

from __future__ import annotations

from celery_dflock.outcome.skipped import Skipped, skip
from celery_dflock.outcome.types import Superseded
from celery_dflock.plan import Plan
from celery_dflock.signals import task_superseded


def skip_older(plan: Plan, it: Superseded) -> Skipped:
    """Return the result of a run that ends before it has begun."""
    error = it.error
    task_superseded.send(
        sender=plan.task, request=plan.request, key=error.key, by=error.holder, was_running=False
    )
    return skip(plan, error, superseded_by=error.holder)
