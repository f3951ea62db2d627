"""A message that the broker delivers again, under the same id: a redelivery; or the copy of a firing.

A task that has run does not run again. A run that finds this out ends with `Ignore`. Nothing
is stored then, so that the result stays as the sender knows it. Where it is too early to say, the run
ends with `RedeliveryRequeued`: a process may have been killed before it stored a result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from celery import states
from celery.backends.base import Backend, DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Reject, Retry

from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.identity import process_label
from celery_dflock.keys import encode, finish
from celery_dflock.locks import MOMENT, try_once
from celery_dflock.outcome import delivery, requeue
from celery_dflock.outcome.header import Header
from celery_dflock.outcome.requeue import CopyDropped, RedeliveryRequeued
from celery_dflock.outcome.types import Redelivered
from celery_dflock.plan import Plan
from celery_dflock.signals import task_deduplicated
from dflockd import errors
from dflockd.sync_client import DistributedSemaphore

RESULT_PAUSE = 1.0
"""Seconds from a redelivery's finding the lock free to its running: a result is stored after that."""

FIRST_LOOK = 0.1
"""Seconds for which one that has met no other run waits for the result of one, or for its lock."""

DONE_TTL = 120
"""Seconds for which the workers remember that a firing, or what was delivered again, has been run.

The copy of a firing is sent within a fail-over of the first. It arrives later by what it spends in
the queue and in the pauses of ``requeue``. Of a redelivery that comes later its result tells.
"""

DONE_LIMIT = 1000
"""How many of these runs of one task the workers remember: all of them, up to 8 a second.

They are the holders of one semaphore, so that all together are one key of the lock server: it has
``--max-locks`` of them, and they are for those who lock something.
"""

WITHOUT_RESULT = "-without-result"
"""Behind the name of a run that has stored no result: it goes on elsewhere, or none was wanted."""

logger = logging.getLogger("celery_dflock")


def send_again(plan: Plan, it: Redelivered) -> NoReturn:
    """Send a redelivery of a task that runs again, and end this run of it without any result.

    The result under the id they share is that of the run that holds the lock. It never gives up:
    that would be a result.
    """
    number = plan.header.redelivery + 1
    seconds = delivery.pause(plan.task.app, requeue.pause(plan.options.requeue, number))
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


def look_before_it_runs(plan: Plan, waited: float) -> str:
    """End this run of a redelivery if another run has its result; else return its state.

    It looks twice, since a run stores its result after it has released its lock. One that has met the
    other run is sent again in between. One that has met nobody waits here, and for a moment only:
    mostly the worker of the other was killed, or had not begun. Where it has waited for its lock that
    was the moment: many may come again together, when their worker ends.

    Args:
        plan: the run, which has its locks.
        waited: seconds until it had them.
    """
    header = plan.header
    if header.redelivery:
        return look_for_result(plan)
    # A kept position meets nobody. So after an absence the moment begins now.
    return look_twice(plan, 0.0 if header.ticket or header.waited else waited)


def say_why_it_runs(plan: Plan, state: str) -> None:
    """Log that a redelivery runs, though another run may have."""
    text = (
        "task %s runs: it was delivered before, and its result (%s) does not say that it has ended"
    )
    if plan.header.redelivery:
        text = (
            "task %s runs again: it was delivered twice, and its result (%s) does not say that "
            "the other run has ended"
        )
    logger.log(logging.WARNING if plan.header.redelivery else logging.INFO, text, plan.name, state)


def look_twice(plan: Plan, waited: float = 0.0) -> str:
    """End this run of a redelivery if the task has its result, now or in a moment; else its state.

    Args:
        plan: the run.
        waited: seconds of that moment that are over.
    """
    state = drop_if_ended(plan)
    if waited < FIRST_LOOK and leaves_result(plan):
        time.sleep(FIRST_LOOK - waited)
        state = drop_if_ended(plan)
    return state


def look_for_result(plan: Plan) -> str:
    """End this run of a redelivery if the task has its result, or look again in a moment.

    Returns:
        The state of the task, where there was no result the second time either.
    """
    state = drop_if_ended(plan)
    ended = _found(plan).count(_run_of(plan))
    # A run may have ended at this moment: it releases its lock, then stores its result. That holds
    # the second time as well, of one that has run between the two.
    if plan.header.is_free and plan.header.ended >= ended:
        return state
    error = LockNotAcquiredError(plan.keys[0], "another run of this task has just ended")
    number = plan.header.redelivery or 1
    header = replace(plan.header, redelivery=number, is_free=True, ended=ended)
    requeue.send_again(plan, RESULT_PAUSE, header, error)
    logger.info("task %s: its redelivery looks for a result once more", plan.name)
    raise RedeliveryRequeued


def drop_if_ended(plan: Plan) -> str:
    """End this run of a redelivery if the task has its result; else return its state."""
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


@contextmanager
def once(plan: Plan) -> Iterator[None]:
    """Run a firing that has not been run, in this block, under the lock of its task.

    The lock keeps two copies apart, so that the second finds what the first has left: a hold on the
    lock server that outlives it. So it is for a message that the broker has delivered again, of any
    task, for the sake of its own redeliveries.
    """
    if drop_if_run(plan):
        look_for_result(plan)
    try:
        yield
    except Reject:
        raise
    except (Ignore, Retry):
        _leave(plan, WITHOUT_RESULT)
        raise
    except Exception:
        _leave(plan)
        raise
    _leave(plan)


def drop_if_run(plan: Plan) -> bool:
    """End this run if the task has run already; ``True`` if it has, but should have a result."""
    run, found = _run_of(plan), _found(plan)
    is_told_by_result = plan.is_redelivered and leaves_result(plan)
    if run + WITHOUT_RESULT in found or (run in found and not is_told_by_result):
        logger.info("task %s has run already, its copy is dropped", plan.name)
        tell_dropped(plan)
        raise CopyDropped
    return run in found


def _run_of(plan: Plan) -> str:
    request = plan.request
    run = f"{request.id}:{request.retries}"
    # What a task has put in its own place (`Task.replace`) has its id and its number of retries.
    replaced = request.replaced_task_nesting
    return finish(encode(f"{run}:{replaced}" if replaced else run))


def _marks(plan: Plan, label: str = "") -> DistributedSemaphore:
    done = finish(f"celery-done:{encode(plan.task.name)}", plan.settings.key_prefix)
    options = plan.settings.connection_options()
    return DistributedSemaphore(done, DONE_LIMIT, 0, MOMENT, label=label, **options)


def _found(plan: Plan) -> list[str]:
    """Return the runs of a task that are remembered."""
    try:
        return [each["label"].split(" ")[0] for each in _marks(plan).inspect()["holders"]]
    except errors.RemoteError as exc:
        logger.warning("cannot tell whether a task has run already: %s", exc)
        return []


def _leave(plan: Plan, more: str = "") -> None:
    mark = _marks(plan, f"{_run_of(plan)}{more} {process_label()}")
    try:
        if try_once(mark):
            mark.detach(DONE_TTL)
        else:
            logger.warning(
                "a copy of task %s would run again: %d are remembered", plan.name, DONE_LIMIT
            )
    except errors.RemoteError as exc:
        logger.warning("a copy of task %s would run again: %s", plan.name, exc)
