"""A task that has run does not run again: the second copy of a firing, or a redelivery."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from celery.exceptions import Ignore, Reject

from celery_dflock.identity import process_label
from celery_dflock.keys import encode, finish
from celery_dflock.locks import MOMENT, try_once
from celery_dflock.outcome.redelivery import tell_dropped
from celery_dflock.plan import Plan
from dflockd import errors
from dflockd.sync_client import DistributedSemaphore

DONE_TTL = 120
"""Seconds for which the workers remember that a firing has been run.

A copy is sent within a fail-over of the first. It arrives later by what it spends in the queue and
in the pauses of ``requeue``.
"""

DONE_LIMIT = 1000
"""How many firings of one task the workers remember: all of them, up to 8 a second.

They are the holders of one semaphore, so that all together are one key of the lock server: it has
``--max-locks`` of them, and they are for those who lock something.
"""

logger = logging.getLogger("celery_dflock")


@contextmanager
def once(plan: Plan) -> Iterator[None]:
    """Run a firing that has not been run, in this block, under the lock of its task.

    The lock keeps two copies apart, so that the second finds what the first has left: a hold on the
    lock server that outlives it. So it is for a message that the broker has delivered again, of any
    task, for the sake of its own redeliveries.

    Raises:
        Ignore: it has been run; the result stays as it is.
    """
    request, prefix = plan.request, plan.settings.key_prefix
    done = finish(f"celery-done:{encode(plan.task.name)}", prefix)
    run = finish(encode(f"{request.id}:{request.retries}"))
    label = f"{run} {process_label()}"
    options = plan.settings.connection_options()
    mark = DistributedSemaphore(done, DONE_LIMIT, 0, MOMENT, label=label, **options)
    if _is_among(mark, run):
        logger.info("task %s has run already, its copy is dropped", plan.name)
        tell_dropped(plan)
        raise Ignore
    try:
        yield
    except Reject:
        raise
    except Exception:
        _leave(mark, plan.name)
        raise
    _leave(mark, plan.name)


def _is_among(marks: DistributedSemaphore, run: str) -> bool:
    try:
        return any(holder["label"].split(" ")[0] == run for holder in marks.inspect()["holders"])
    except errors.RemoteError as exc:
        logger.warning("cannot tell whether a task has run already: %s", exc)
        return False


def _leave(mark: DistributedSemaphore, name: str) -> None:
    try:
        if try_once(mark):
            mark.detach(DONE_TTL)
        else:
            logger.warning("a copy of task %s would run again: %d are remembered", name, DONE_LIMIT)
    except errors.RemoteError as exc:
        logger.warning("a copy of task %s would run again: %s", name, exc)
