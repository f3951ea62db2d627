"""Firings of singleton beat: what beat and the workers agree on.

A firing is one entry of the schedule falling due once. Its task id follows from the entry and the
due time, so that every beat that sends it gives it the same.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from celery import Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from celery.schedules import crontab, solar
from celery.schedules import schedule as interval
from celery.utils.time import maybe_make_aware

from celery_dflock.config import Settings
from celery_dflock.keys import encode, finish
from celery_dflock.locks import MOMENT, process_label, try_once
from celery_dflock.signals import task_deduplicated
from dflockd import errors
from dflockd.sync_client import DistributedSemaphore

HEADER = "dflock_firing"
"""The message header of a firing: a dict of its ``id``, ``entry`` and ``due`` and the ``fence``."""

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

NAMESPACE = uuid.UUID("0d6b54c5-3d5d-5f1b-8c0b-64ad1c5f0f43")

logger = logging.getLogger("celery_dflock")


class Firing(NamedTuple):
    """One entry of the schedule falling due once.

    Attributes:
        beat: the lock of the beats that may send it: it keeps applications apart.
        entry: the name of the entry.
        due: when it should be sent; UTC.
    """

    beat: str
    entry: str
    due: datetime

    @property
    def id(self) -> str:
        """The task id."""
        name = "\0".join((self.beat, self.entry, self.due.isoformat()))
        return str(uuid.uuid5(NAMESPACE, name))

    def options(self, given: dict[str, Any], fence: int | None) -> dict[str, Any]:
        """Return what to send it with: the options of its entry, its id and its header."""
        about = {"id": self.id, "entry": self.entry, "due": self.due.isoformat(), "fence": fence}
        headers = {**(given.get("headers") or {}), HEADER: about}
        return {"task_id": self.id, **given, "headers": headers}

    def __str__(self) -> str:
        """For logs."""
        return f"{self.entry!r} due {self.due.isoformat(' ', 'milliseconds')} [{self.id}]"


def due_after(schedule: Any, last_run_at: datetime) -> datetime:
    """Return when a schedule falls due next after it has run; UTC.

    It depends on nothing else, so that every beat that knows the last run comes to the same. For a
    schedule that cannot say, the last run itself stands for it.
    """
    start: datetime = maybe_make_aware(last_run_at).astimezone(UTC)
    own_now = schedule.nowfun
    schedule.nowfun = lambda: start
    try:
        due: datetime = start + schedule.remaining_estimate(start)
    except Exception:  # it is the user's class, and beat itself asks it for less
        return start
    finally:
        schedule.nowfun = own_now
    # The sun is searched for, and found some microseconds off from another start.
    return due.replace(microsecond=0) if isinstance(schedule, solar) else due


def latest_due(schedule: Any, last_run_at: datetime, now: datetime) -> datetime:
    """Return the last time up to now at which a schedule fell due; the next one, if none has passed.

    Of several that were missed only this one is sent, as always with Celery.
    """
    last: datetime = maybe_make_aware(last_run_at).astimezone(UTC)
    until: datetime = maybe_make_aware(now).astimezone(UTC)
    due = due_after(schedule, last)
    if due > until:
        return due
    if counts_from_last_run(schedule):
        # In UTC: between two times of one time zone Python counts what the clock on the wall shows.
        every: timedelta = schedule.run_every
        return last + (until - last) // every * every
    if not isinstance(schedule, crontab):
        return due
    # An outage may have lasted for months of minutes: look back, each time twice as far.
    back = timedelta(minutes=1)
    while until - back > due and due_after(schedule, until - back) > until:
        back *= 2
    if (nearer := due_after(schedule, until - back)) <= until:
        due = max(due, nearer)
    while (following := due_after(schedule, due)) <= until:
        due = following
    return due


def counts_from_last_run(schedule: Any) -> bool:
    """Whether a schedule is an interval: the next due time is always that much after the last run."""
    return (
        type(schedule) is interval and not schedule.relative and schedule.run_every > timedelta(0)
    )


def once(
    task: Task, request: Context, key: str, settings: Settings, is_copy: bool
) -> AbstractContextManager[None]:
    """Run a firing that has not been run, in this block, under the lock `key` of its task.

    The lock keeps two copies apart, so that the second finds what the first has left: a hold on the
    lock server that outlives it. So it is for a copy that the broker has made of any task, for the
    sake of its own copies. What is neither just runs.

    Raises:
        Ignore: it has been run; the result stays as it is.
    """
    if is_copy or is_firing(request):
        return _once(task, request, key, settings)
    return nullcontext()


@contextmanager
def _once(task: Task, request: Context, key: str, settings: Settings) -> Iterator[None]:
    name = f"{task.name}[{request.id}]"
    done = finish(f"celery-done:{encode(task.name)}", settings.key_prefix)
    run = finish(encode(f"{request.id}:{request.retries}"))
    label = f"{run} {process_label()}"
    options = settings.connection_options()
    mark = DistributedSemaphore(done, DONE_LIMIT, 0, MOMENT, label=label, **options)
    if _is_among(mark, run):
        logger.info("task %s has been run, its copy is dropped", name)
        task_deduplicated.send(
            sender=task, request=request, key=key, task_id=request.id, verdict="copy"
        )
        raise Ignore
    try:
        yield
    except Reject:
        raise
    except Exception:
        _leave(mark, name)
        raise
    _leave(mark, name)


def is_firing(request: Context) -> bool:
    """Whether a message is a firing. What a firing sends is none, though it may copy its headers."""
    about = (request.headers or {}).get(HEADER)
    return isinstance(about, dict) and about.get("id") == request.id


def _is_among(marks: DistributedSemaphore, run: str) -> bool:
    try:
        return any(holder["label"].split(" ")[0] == run for holder in marks.inspect()["holders"])
    except errors.RemoteError as exc:
        logger.warning("whether a task has been run already cannot be learned: %s", exc)
        return False


def _leave(mark: DistributedSemaphore, name: str) -> None:
    try:
        if try_once(mark):
            mark.detach(DONE_TTL)
        else:
            logger.warning("a copy of task %s would run again: %d are remembered", name, DONE_LIMIT)
    except errors.RemoteError as exc:
        logger.warning("a copy of task %s would run again: %s", name, exc)
