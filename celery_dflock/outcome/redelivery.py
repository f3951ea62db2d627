"""A message that the broker delivers again, under the same id, while its task runs: a redelivery."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import NoReturn

from celery import states
from celery.backends.base import Backend, DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore

from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.outcome import requeue
from celery_dflock.outcome.header import Header
from celery_dflock.outcome.requeue import RedeliveryRequeued
from celery_dflock.outcome.types import Redelivered
from celery_dflock.plan import Plan
from celery_dflock.signals import task_deduplicated

RESULT_PAUSE = 1.0
"""Seconds from a redelivery's finding the lock free to its running: a result is stored after that."""

MOMENT = 0.1
"""Seconds for which one that has met no other run holds the lock and waits for the result of one."""

logger = logging.getLogger("celery_dflock")


def send_again(plan: Plan, it: Redelivered) -> NoReturn:
    """Send a redelivery of a task that runs again, and end this run of it without any result.

    The result under the id they share is that of the run that holds the lock. It never gives up:
    that would be a result.

    Raises:
        RedeliveryRequeued: which tells Celery to store nothing.
        LockError: the error of `it`, in eager mode.
    """
    number = plan.header.redelivery + 1
    seconds = requeue.countdown(plan.task, requeue.pause(plan.options.requeue, number))
    before = plan.header
    header = Header(before.options, before.unique, redelivery=number, age=before.age)
    requeue.send_again(plan, seconds, header, it.error)
    logger.log(
        logging.WARNING if number == 1 else logging.INFO,
        "task %s was delivered again while it runs; the redelivery is requeued for %.1f s: %s%s",
        plan.name,
        seconds,
        it.error,
        ". Is visibility_timeout shorter than the task?" if number == 1 else "",
    )
    requeue.tell_requeued(plan, it.error, seconds, number)
    raise RedeliveryRequeued


def look_before_it_runs(plan: Plan) -> str:
    """End this run of a redelivery if another run has its result; else return its state.

    It looks twice, since a run stores its result after it has released its lock. One that has met the
    other run is sent again in between. One that has met nobody waits here, and for a moment only:
    mostly the worker of the other was killed, or had not begun.

    Raises:
        Ignore: it is; nothing is stored, so that the result stays as the sender knows it.
        RedeliveryRequeued: it is too early to say.
    """
    if plan.header.redelivery:
        return look_for_result(plan)
    return look_twice(plan)


def say_why_it_runs(plan: Plan, state: str) -> None:
    """Log that a redelivery runs, though another run may have."""
    if plan.header.redelivery:
        logger.warning(
            "task %s runs again: it was delivered twice, and its result (%s) does not say that "
            "the other run has ended",
            plan.name,
            state,
        )
    else:
        logger.info(
            "task %s runs: it was delivered before, and its result (%s) does not say that it has ended",
            plan.name,
            state,
        )


def look_twice(plan: Plan) -> str:
    """End this run of a redelivery if the task has its result, now or in a moment; else its state.

    Raises:
        Ignore: it has; nothing is stored.
    """
    state = drop_if_ended(plan)
    if leaves_result(plan):
        time.sleep(MOMENT)
        state = drop_if_ended(plan)
    return state


def look_for_result(plan: Plan) -> str:
    """End this run of a redelivery if the task has its result, or look again in a moment.

    Returns:
        The state of the task, where there was no result the second time either.

    Raises:
        Ignore: it has its result; nothing is stored.
        RedeliveryRequeued: it is too early to say.
    """
    state = drop_if_ended(plan)
    if plan.header.is_free:
        return state
    # The run may have ended at this moment: it releases its lock, then stores its result.
    seconds = requeue.countdown(plan.task, RESULT_PAUSE)
    error = LockNotAcquiredError(plan.keys[0], "another run of this task has just ended")
    number = plan.header.redelivery or 1
    requeue.send_again(plan, seconds, replace(plan.header, redelivery=number, is_free=True), error)
    logger.info("task %s: its redelivery looks for a result once more", plan.name)
    raise RedeliveryRequeued


def drop_if_ended(plan: Plan) -> str:
    """End this run of a redelivery if the task has its result; else return its state.

    Raises:
        Ignore: it has; nothing is stored.
    """
    state = _stored_state(plan)
    if state in states.READY_STATES:
        logger.info("task %s ended as %s: its copy is dropped", plan.name, state)
        tell_dropped(plan)
        raise Ignore
    return state


def leaves_result(plan: Plan) -> bool:
    """Whether its result says that it has ended, however it does."""
    is_ignored = plan.task.ignore_result or plan.request.ignore_result
    return _keeps_results(plan.task.backend) and not is_ignored


def tell_dropped(plan: Plan) -> None:
    """Send the signal `task_deduplicated` of a run that is over before it has begun."""
    task_deduplicated.send(
        sender=plan.task,
        request=plan.request,
        key=plan.keys[0],
        task_id=plan.request.id,
        verdict="copy",
    )


def _keeps_results(backend: Backend) -> bool:
    """Whether another process than the sender can look a result up."""
    return bool(backend.persistent) and not isinstance(backend, DisabledBackend | RPCBackend)


def _stored_state(plan: Plan) -> str:
    task = plan.task
    if not _keeps_results(task.backend):
        return "not stored"
    try:
        return str(task.AsyncResult(plan.request.id).state)
    except Exception as exc:  # whatever it is, nobody has said that the task has ended
        return repr(exc)
