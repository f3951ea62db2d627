"""A task runs under its lock, or ends as its outcome says."""

from __future__ import annotations

import logging
from typing import Any

from celery_dflock.acquire import Granted, acquire, locks_of
from celery_dflock.held import TaskLock, running
from celery_dflock.loss import Loss
from celery_dflock.outcome.apply import apply
from celery_dflock.outcome.once import once
from celery_dflock.outcome.redelivery import drop_ended
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_acquired, lock_released
from celery_dflock.unique.run import carried

logger = logging.getLogger("celery_dflock")


def run_locked(plan: Plan) -> Any:
    """Ask for the lock of a task, run its body if it is granted, and give the lock back."""
    loss = Loss(plan)
    locks = locks_of(plan, loss.happened)
    held = None
    try:
        with carried(plan) as brought:
            result = acquire(plan, locks)
            if not isinstance(result, Granted):
                return apply(plan, result)
            drop_ended(plan)
            with once(plan):
                if brought is not None:
                    brought.begin(plan.options, plan.is_tried_again)
                held = TaskLock(locks, result.waited, running.get())
                return _run(plan, held, loss)
    finally:
        locks.release()
        if held is not None:
            _tell_released(plan, held)


def _run(plan: Plan, held: TaskLock, loss: Loss) -> Any:
    token = running.set(held)
    try:
        _tell_acquired(plan, held)
        with loss.watched(held):
            loss.check(held)
            return plan.body()
    finally:
        running.reset(token)


def _tell_acquired(plan: Plan, held: TaskLock) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        about = plan.name, ", ".join(held.keys), held.waited, held.fence
        logger.debug("task %s has lock %r after %.3f s, fence %s", *about)
    lock_acquired.send(sender=plan.task, request=plan.request, lock=held)


def _tell_released(plan: Plan, held: TaskLock) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("task %s has released lock %r", plan.name, ", ".join(held.keys))
    lock_released.send(sender=plan.task, request=plan.request, lock=held)
