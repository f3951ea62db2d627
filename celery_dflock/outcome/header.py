"""What the message headers of a task say, written and read in one place.

The header ``dflock`` is a dict: a call's own options, the counters of a requeued task, and what keeps
others like it from being sent. Workers of 0.1 read and write it too; they take a name in it that they
do not know for an option, and refuse it. So what is counted since is in a header of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery.app.task import Context

HEADER = "dflock"
"""The message header of a call's own options, and of the counters of a requeued task: a dict."""

RUN = "dflock_run"
"""The message header of the counters that 0.1 does not know: a dict."""

UNIQUE = "unique"
"""The place in the header for the lock that keeps others like this task from being sent."""

FIRING = "dflock_firing"
"""The message header of a firing: a dict of its ``id``, ``entry`` and ``due`` and the ``fence``."""

RESERVED = frozenset(("attempt", "since", "place", "retries", "copy", "free", UNIQUE))
"""The names in the header ``dflock`` that are no options."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a message brings along from the caller and from earlier attempts to run it.

    Attributes:
        options: those that the call names itself.
        unique: what `celery_dflock.unique` has sent along; see `unique_of`.
        attempt: how often the task was requeued because of a conflict.
        since: when the first of these was; a time of day.
        ticket: of the position in the queue of the lock that was kept for this attempt.
        redelivery: how often this message has found another run of it under way.
        is_free: whether the lock was free the last time.
        outage: how often in a row no lock server could be asked.
        waited: seconds in the consumer, of a wait that has gone through the broker since.
        paused: since when the time does not count, because the latest attempt was no conflict.
    """

    options: Mapping[str, Any]
    unique: Any = None
    attempt: int = 0
    since: float | None = None
    ticket: str | None = None
    redelivery: int = 0
    is_free: bool = False
    outage: int = 0
    waited: float = 0.0
    paused: float | None = None

    @classmethod
    def read(cls, request: Context) -> Header:
        """Return that of a message.

        A retry inherits the headers of the run that sent it. That run had its lock, so counting
        starts anew.
        """
        headers = request.headers
        if not headers or (HEADER not in headers and RUN not in headers):
            return NOTHING
        ours, more = headers.get(HEADER) or {}, headers.get(RUN) or {}
        options = {name: value for name, value in ours.items() if name not in RESERVED}
        header = cls(options, ours.get(UNIQUE))
        if ours.get("retries") != request.retries:
            return header
        return replace(
            header,
            attempt=int(ours.get("attempt", 0)),
            since=ours.get("since"),
            ticket=ours.get("place"),
            redelivery=int(ours.get("copy", 0)),
            is_free="free" in ours,
            outage=int(more.get("outage", 0)),
            waited=float(more.get("waited", 0.0)),
            paused=more.get("paused"),
        )

    def write(self, request: Context) -> dict[str, Any]:
        """Return all headers of the message of a task that is sent again, with these among them."""
        ours = {
            "attempt": self.attempt,
            "since": self.since,
            "place": self.ticket,
            "copy": self.redelivery,
            "free": self.is_free,
            UNIQUE: self.unique,
        }
        more = {"outage": self.outage, "waited": self.waited, "paused": self.paused}
        headers = dict(request.headers or {})
        headers[HEADER] = {**self.options, **_said(ours), "retries": request.retries}
        headers.pop(RUN, None)
        if said := _said(more):
            headers[RUN] = said
        return headers

    def since_at(self, began: float) -> float | None:
        """Return `since` for an attempt that has begun then: time that does not count is left out."""
        if self.since is None or self.paused is None:
            return self.since
        return self.since + max(0.0, began - self.paused)


NOTHING = Header({})
"""That of a message which says nothing, as nearly all do."""


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def options_of_call(request: Context) -> Mapping[str, Any]:
    """Return the options that this call names itself."""
    return Header.read(request).options


def unique_of(request: Context) -> dict[str, str] | None:
    """Return what `celery_dflock.unique` has sent along: ``key``, ``token``, ``until`` and ``id``.

    Only if it is this task's, for headers are handed on to other tasks. A sender of 0.1 that had just
    lost the lock sent no token.
    """
    headers = request.headers
    ours = headers and (headers.get(HEADER) or {}).get(UNIQUE)
    if not isinstance(ours, dict) or ours.get("id") != request.id or not ours.get("token"):
        return None
    return ours


def is_firing(request: Context) -> bool:
    """Whether a message is a firing. What a firing sends is none, though it may copy its headers."""
    about = (request.headers or {}).get(FIRING)
    return isinstance(about, dict) and about.get("id") == request.id
