"""Firings of singleton beat, as beat and the workers know them.

A firing is one due time of one entry of the schedule. Its task id follows from the entry and the due
time, so that every beat that sends it uses the same id.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from celery.schedules import crontab, solar
from celery.schedules import schedule as interval
from celery.utils.time import maybe_make_aware

from celery_dflock.outcome.header import FIRING

NAMESPACE = uuid.UUID("0d6b54c5-3d5d-5f1b-8c0b-64ad1c5f0f43")


class Firing(NamedTuple):
    """One due time of one entry of the schedule.

    Attributes:
        beat: the key of the beats that may send it; it keeps applications apart.
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
        """Return the options to send it with: those of its entry, its id and its header."""
        about = {"id": self.id, "entry": self.entry, "due": self.due.isoformat(), "fence": fence}
        headers = {**(given.get("headers") or {}), FIRING: about}
        return {"task_id": self.id, **given, "headers": headers}

    def __str__(self) -> str:
        """For logs."""
        return f"{self.entry!r} due {self.due.isoformat(' ', 'milliseconds')} [{self.id}]"


def due_after(schedule: Any, last_run_at: datetime) -> datetime:
    """Return when a schedule is due next after a run; UTC.

    It depends on nothing else, so that every beat that knows the last run gets the same time. For a
    schedule that cannot tell, this is the time of the last run itself.
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
    """Return the last time up to now at which a schedule was due; the next one if none has passed.

    If several were missed, only this one is sent, as always with Celery.
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
    """Whether a schedule is an interval: the next due time is a fixed time after the last run."""
    return (
        type(schedule) is interval and not schedule.relative and schedule.run_every > timedelta(0)
    )
