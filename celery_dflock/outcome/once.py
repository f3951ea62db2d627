"""A task that has run does not run again: the second copy of a firing, or a redelivery."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from celery.exceptions import Ignore, Reject, Retry

from celery_dflock.identity import process_label
from celery_dflock.keys import encode, finish
from celery_dflock.locks import MOMENT, try_once
from celery_dflock.outcome import redelivery
from celery_dflock.outcome.requeue import CopyDropped
from celery_dflock.plan import Plan
from dflockd import errors
from dflockd.sync_client import DistributedSemaphore

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


@contextmanager
def once(plan: Plan) -> Iterator[None]:
    """Run a firing that has not been run, in this block, under the lock of its task.

    The lock keeps two copies apart, so that the second finds what the first has left: a hold on the
    lock server that outlives it. So it is for a message that the broker has delivered again, of any
    task, for the sake of its own redeliveries.

    Raises:
        CopyDropped: it has been run; the result stays as it is.
        RedeliveryRequeued: it has been run, but has no result yet. It is looked for once more: its
            process may have been killed before it stored one.
    """
    if drop_if_run(plan):
        redelivery.look_for_result(plan)
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
    """End this run if the task has run already; ``True`` if it has, but should have a result.

    Raises:
        CopyDropped: it has; nothing is stored.
    """
    run, found = _run_of(plan), _found(plan)
    is_told_by_result = plan.is_redelivered and redelivery.leaves_result(plan)
    if run + WITHOUT_RESULT in found or (run in found and not is_told_by_result):
        logger.info("task %s has run already, its copy is dropped", plan.name)
        redelivery.tell_dropped(plan)
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


def _found(plan: Plan) -> set[str]:
    """Return the runs of a task that are remembered."""
    try:
        return {each["label"].split(" ")[0] for each in _marks(plan).inspect()["holders"]}
    except errors.RemoteError as exc:
        logger.warning("cannot tell whether a task has run already: %s", exc)
        return set()


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
