"""What the message headers of a task say, written and read in one place.

The header ``dflock`` is a dict: the options of a call, the counters of a requeued task, and the
mark of `lock_unique`. What counts for one task id alone has a header of its own.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured

HEADER = "dflock"
"""The message header of a call's own options, and of the counters of a requeued task: a dict."""

RUN = "dflock_run"
"""The message header of what counts for one task id alone: a dict."""

UNIQUE = "unique"
"""The name in the header for the lock of `lock_unique`."""

UNIQUE_FIELDS = ("key", "token", "until")

AGE, AGE_OF = "age", "of"
"""The names there for the age by which the newest wins, and for the id of the task that has it."""

COUNTED = "id"
"""The name there for the id of the task whose attempts are counted, in this header and the other."""

FIRING = "dflock_firing"
"""The message header of a firing: a dict of its ``id``, ``entry`` and ``due`` and the ``fence``."""

RESERVED = frozenset(("attempt", "since", "place", "retries", "copy", "free", UNIQUE))
"""The names in the header ``dflock`` that are no options."""

LARGEST = 1 << 53
"""Larger than any count or time of day; what is not a number is not below it."""

LARGEST_AGE = (1 << 64) - 1

is_ticket = re.compile("[0-9A-Za-z]{1,256}").fullmatch


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
        overtaken: how often its turn had passed before it had a slot.
        age: the number by which the newest wins; 0 for none.
        was_redelivered: whether the broker had delivered an earlier attempt before, which has met no
            other run.
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
    overtaken: int = 0
    age: int = 0
    was_redelivered: bool = False

    @classmethod
    def read(cls, request: Context) -> Header:
        """Return that of a message.

        A retry inherits the headers of the run that sent it. That run had its lock, so counting
        starts anew. So it does for a task that was sent with the headers of another.

        Raises:
            ImproperlyConfigured: a header says what none of ours does; one line says which.
        """
        headers = request.headers
        if headers is None or is_silent(headers):
            return NOTHING
        ours, more = _fields(headers, HEADER), _fields(headers, RUN)
        options = {name: value for name, value in ours.items() if name not in RESERVED}
        header = cls(options, ours.get(UNIQUE), age=age_of(headers, request.id))
        is_its_own = more.get(COUNTED, request.id) == request.id
        if ours.get("retries") != request.retries or not is_its_own:
            return header
        return replace(
            header,
            attempt=int(_number(HEADER, ours, "attempt") or 0),
            since=_number(HEADER, ours, "since"),
            ticket=_ticket(ours),
            redelivery=int(_number(HEADER, ours, "copy") or 0),
            is_free="free" in ours,
            outage=int(_number(RUN, more, "outage") or 0),
            waited=_number(RUN, more, "waited") or 0.0,
            paused=_number(RUN, more, "paused"),
            overtaken=int(_number(RUN, more, "overtaken") or 0),
            was_redelivered="again" in more,
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
        more = {
            "outage": self.outage,
            "waited": self.waited,
            "paused": self.paused,
            "overtaken": self.overtaken,
            "again": self._has_met_nobody(request),
            COUNTED: request.id,
            AGE: self.age,
            AGE_OF: request.id if self.age else None,
        }
        headers = dict(request.headers or {})
        headers[HEADER] = {**self.options, **_said(ours), "retries": request.retries}
        headers.pop(RUN, None)
        if said := _said(more):
            headers[RUN] = said
        return headers

    def is_redelivered(self, request: Context) -> bool:
        """Whether the broker says that it delivered this before, or an earlier attempt found a run.

        Of what is sent again the broker says no more than of any message.
        """
        info = request.delivery_info
        return bool(self.redelivery or self.was_redelivered or (info and info.get("redelivered")))

    def _has_met_nobody(self, request: Context) -> bool:
        return not self.redelivery and self.is_redelivered(request)

    def since_at(self, began: float) -> float | None:
        """Return `since` for an attempt that has begun then: time that does not count is left out."""
        if self.since is None or self.paused is None:
            return self.since
        return self.since + max(0.0, began - self.paused)


def age_of(headers: Mapping[str, Any] | None, task_id: str) -> int:
    """Return the number by which the newest wins that a message carries; 0 without one.

    Only if it is this task's: a task that copies its headers passes it to others.
    """
    fields = (headers or {}).get(RUN)
    if not isinstance(fields, Mapping) or fields.get(AGE_OF) != task_id:
        return 0
    age = fields.get(AGE)
    return age if isinstance(age, int) and 0 < age <= LARGEST_AGE else 0


def with_age(headers: Mapping[str, Any] | None, age: int, task_id: str) -> dict[str, Any]:
    """Return the headers of a message with that number."""
    before = (headers or {}).get(RUN)
    more = before if isinstance(before, Mapping) else {}
    return {**(headers or {}), RUN: {**more, AGE: age, AGE_OF: task_id}}


NOTHING = Header({})
"""That of a message which says nothing."""


def is_silent(headers: Mapping[str, Any] | None) -> bool:
    """Whether the headers of a message say nothing, as nearly all do."""
    return not headers or (HEADER not in headers and RUN not in headers)


def _fields(headers: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    fields = headers.get(name) or {}
    if isinstance(fields, Mapping):
        return fields
    example = "options of the task, such as {'lock_timeout': 60}"
    wanted = example if name == HEADER else "what the plugin has written there"
    raise ImproperlyConfigured(
        f"the message header {name} is {_shown(fields)}: give a dict of {wanted}"
    )


def _number(header: str, fields: Mapping[str, Any], name: str) -> float | None:
    value: float | None = fields.get(name)
    if value is None or (isinstance(value, int | float) and 0 <= value <= LARGEST):
        return value
    raise _bad(header, name, value, "a number, 0 or more")


def _ticket(fields: Mapping[str, Any]) -> str | None:
    value: str | None = fields.get("place")
    if not value or (isinstance(value, str) and is_ticket(value)):
        return value or None
    raise _bad(HEADER, "place", value, "a ticket of a lock server")


def _bad(header: str, name: str, value: object, wanted: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"the message header {header} has {name} {_shown(value)}, not {wanted}: "
        f"send only options of the task there, and leave {name} to the plugin"
    )


def _shown(value: object) -> str:
    return reprlib.repr(value)


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def options_of_call(request: Context) -> Mapping[str, Any]:
    """Return the options that this call names itself."""
    return Header.read(request).options


def unique_of(request: Context) -> dict[str, str] | None:
    """Return what `celery_dflock.unique` has sent along: ``key``, ``token``, ``until`` and ``id``.

    Only if it is this task's, because tasks can pass their headers to others.
    """
    ours = (request.headers or {}).get(HEADER)
    ours = ours.get(UNIQUE) if isinstance(ours, dict) else None
    if not isinstance(ours, dict) or ours.get("id") != request.id:
        return None
    is_whole = all(ours.get(name) and isinstance(ours[name], str) for name in UNIQUE_FIELDS)
    return ours if is_whole else None


def is_firing(request: Context) -> bool:
    """Whether a message is a firing. What a firing sends is none, though it may copy its headers."""
    headers = request.headers
    if not headers or FIRING not in headers:
        return False
    about = headers[FIRING]
    return isinstance(about, dict) and about.get("id") == request.id
