"""A task runs under its lock, or ends as its outcome says."""

from __future__ import annotations

import logging
from typing import Any

from celery_dflock import gate, superseding
from celery_dflock.acquire import acquire, locks_of
from celery_dflock.exceptions import SupersededError
from celery_dflock.held import TaskLock, running
from celery_dflock.locks import Locks
from celery_dflock.loss import Loss
from celery_dflock.outcome.decide import decide
from celery_dflock.outcome.header import is_firing
from celery_dflock.outcome.once import once
from celery_dflock.outcome.redelivery import look_before_it_runs, say_why_it_runs
from celery_dflock.outcome.types import Refusal
from celery_dflock.plan import Plan
from celery_dflock.signals import lock_acquired, lock_released
from celery_dflock.unique.run import Carried, carried

logger = logging.getLogger("celery_dflock")


def run_locked(plan: Plan) -> Any:
    """Ask for the lock of a task, run its body if it is granted, and release the lock."""
    refusal = superseding.prepare(plan) if plan.options.supersedes else None
    loss = Loss(plan)
    locks = locks_of(plan, loss.happened)
    run = gate.Run(type(plan.task), locks)
    try:
        gate.begin(plan.request, run)
        try:
            locks.outer = running.get()
            if plan.header.unique is None:
                return _run(plan, locks, loss, None, refusal)
            with carried(plan) as brought:
                return _run(plan, locks, loss, brought, refusal)
        finally:
            _release(plan, run, loss)
    except BaseException as exc:
        # An exception that a signal handler raises may have kept the release above from beginning.
        if gate.end(run):
            locks.release()
        if not isinstance(exc, SupersededError) or not loss.has_superseded(exc):
            raise  # the latter is of the task that has called this one
        superseding.revoke(plan, exc)
    finally:
        gate.forget(plan.request, run)


def _run(
    plan: Plan, locks: Locks, loss: Loss, brought: Carried | None, refusal: Refusal | None
) -> Any:
    refusal = refusal or acquire(plan, locks)
    if refusal is not None:
        return decide(plan, refusal)
    if plan.is_redelivered:
        state = look_before_it_runs(plan)
        with once(plan):
            say_why_it_runs(plan, state)
            return _run_body(plan, locks, loss, brought)
    if is_firing(plan.request):
        with once(plan):
            return _run_body(plan, locks, loss, brought)
    return _run_body(plan, locks, loss, brought)


def _run_body(plan: Plan, locks: Locks, loss: Loss, brought: Carried | None) -> Any:
    if brought is not None:
        brought.begin(plan.options, plan.is_tried_again)
    try:
        loss.concerns(locks)
        running.set(locks)
        if logger.isEnabledFor(logging.DEBUG):
            about = plan.name, ", ".join(plan.keys), locks.waited, TaskLock.of(locks).fence
            logger.debug("task %s has lock %r after %.3f s, fence %s", *about)
        if lock_acquired.is_heard:
            lock_acquired.send(sender=plan.task, request=plan.request, lock=TaskLock.of(locks))
        with loss:
            if plan.options.supersedes:
                locks.listen(loss.supersede)
            if loss.is_raised:
                locks.check()  # what came too early to interrupt anything
            if plan.options.rate is not None:
                locks.begin()
            return plan.body()
    finally:
        loss.is_open = False
        running.set(locks.outer)


def _release(plan: Plan, run: gate.Run, loss: Loss) -> None:
    held, locks = None, run.locks
    try:
        if loss.has_begun and lock_released.is_heard:
            held = TaskLock.of(locks)  # while it knows its fence
    finally:
        if gate.end(run):
            locks.release()
    if loss.has_begun and logger.isEnabledFor(logging.DEBUG):
        logger.debug("task %s has released lock %r", plan.name, ", ".join(plan.keys))
    if held is not None:
        lock_released.send(sender=plan.task, request=plan.request, lock=held)
