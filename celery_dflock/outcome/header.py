"""What the message headers of a task say, written and read in one place.

The header ``dflock`` is for callers: the options of a call. What the plugin has to say of one task id
is in ``dflock_run``, and counts for that id alone: a task can pass its headers on to others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured

from dflockd.errors import shown

HEADER = "dflock"
"""The message header of a call's own options: a dict."""

RUN = "dflock_run"
"""The message header of what the plugin says of a task: a dict with the ``id`` of that."""

FIRING = "dflock_firing"
"""The message header of a firing: a dict of its ``id``, ``entry`` and ``due`` and the ``fence``."""

UNIQUE_FIELDS = ("key", "token", "until")

NUMBERS = ("attempt", "since", "redelivery", "ended", "outage", "waited", "paused")
"""The fields of a `Header` that are numbers, and count for one retry of a task."""

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
        age: the number by which the newest wins; 0 for none.
        attempt: how often the task was requeued because of a conflict.
        since: when the first of these was; a time of day.
        ticket: the ticket of the position in the queue of the lock that was kept for this attempt.
        redelivery: how often this message has found another run of it under way.
        is_free: whether the lock was free the last time.
        ended: how many runs of this message had ended then, as far as the workers remember.
        outage: how often in a row no lock server could be asked.
        waited: seconds in the consumer, of a wait that has gone through the broker since.
        paused: since when the time does not count, because the latest attempt was no conflict.
        was_redelivered: whether the broker had delivered an earlier attempt before, which has met no
            other run.
    """

    options: Mapping[str, Any]
    unique: Mapping[str, str] | None = None
    age: int = 0
    attempt: int = 0
    since: float | None = None
    ticket: str | None = None
    redelivery: int = 0
    is_free: bool = False
    ended: int = 0
    outage: int = 0
    waited: float = 0.0
    paused: float | None = None
    was_redelivered: bool = False

    @classmethod
    def read(cls, request: Context) -> Header:
        """Return that of a message.

        A retry inherits the headers of the run that sent it. That run had its lock, so counting
        starts anew.

        Raises:
            ImproperlyConfigured: a header says what none of ours does; one line says which.
        """
        headers = request.headers
        if headers is None or is_silent(headers):
            return NOTHING
        for name in (HEADER, RUN):
            if not isinstance(headers.get(name) or {}, Mapping):
                raise _no_dict(name, headers[name])
        own = _own(headers, request.id)
        header = cls(headers.get(HEADER) or {}, unique_of(request), _age(own))
        if own.get("retries") != request.retries:
            return header
        numbers = {name: _number(own, name) for name in NUMBERS if own.get(name) is not None}
        return replace(
            header,
            ticket=_ticket(own),
            is_free=bool(own.get("is_free")),
            was_redelivered=bool(own.get("was_redelivered")),
            **numbers,
        )

    def write(self, request: Context) -> dict[str, Any]:
        """Return all headers of the message of a task that is sent again, with these among them."""
        met_nobody = not self.redelivery and self.is_redelivered(request)
        named = (*NUMBERS, "ticket", "is_free", "unique", "age")
        said = {name: value for name in named if (value := getattr(self, name))}
        if met_nobody:
            said["was_redelivered"] = True
        own = {**said, "id": request.id, "retries": request.retries}
        return {**(request.headers or {}), RUN: own}

    def is_redelivered(self, request: Context) -> bool:
        """Whether the broker says that it delivered this before, or an earlier attempt found a run.

        Of what is sent again the broker says no more than of any message.
        """
        info = request.delivery_info
        return bool(self.redelivery or self.was_redelivered or (info and info.get("redelivered")))

    def since_at(self, began: float) -> float | None:
        """Return `since` for an attempt that has begun then: time that does not count is left out."""
        if self.since is None or self.paused is None:
            return self.since
        return self.since + max(0.0, began - self.paused)


NOTHING = Header({})
"""That of a message which says nothing."""


def is_silent(headers: Mapping[str, Any] | None) -> bool:
    """Whether the headers of a message say nothing, as nearly all do."""
    return not headers or (HEADER not in headers and RUN not in headers)


def options_of_call(request: Context) -> Mapping[str, Any]:
    """Return the options that this call names itself."""
    return Header.read(request).options


def age_of(headers: Mapping[str, Any] | None, task_id: str) -> int:
    """Return the number by which the newest wins that a message carries; 0 without one."""
    return _age(_own(headers, task_id))


def unique_of(request: Context) -> dict[str, str] | None:
    """Return what `celery_dflock.unique` has sent along: ``key``, ``token`` and ``until``."""
    ours = _own(request.headers, request.id).get("unique")
    if not isinstance(ours, dict):
        return None
    is_whole = all(ours.get(name) and isinstance(ours[name], str) for name in UNIQUE_FIELDS)
    return ours if is_whole else None


def said_of(
    task_id: str, headers: Mapping[str, Any] | None, name: str, value: object
) -> dict[str, Any]:
    """Return the headers of a message with one thing more that is said of its task."""
    own = _own(headers, task_id)
    return {**(headers or {}), RUN: {**own, "id": task_id, name: value}}


def of_retry(request: Context, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the headers of a retry that names its own: what was said of the task stays said."""
    before = request.headers or {}
    said = {name: before[name] for name in (HEADER, RUN, FIRING) if name in before}
    return {**said, **(given or {}), **{name: said[name] for name in (RUN, FIRING) if name in said}}


def is_firing(request: Context) -> bool:
    """Whether a message is a firing. What a firing sends is none, though it may copy its headers."""
    headers = request.headers
    return bool(headers) and FIRING in headers and bool(_own(headers, request.id, FIRING))


def _own(headers: Mapping[str, Any] | None, task_id: str, name: str = RUN) -> Mapping[str, Any]:
    """Return what a header says of this task; nothing if it speaks of another one."""
    fields = (headers or {}).get(name)
    return fields if isinstance(fields, Mapping) and fields.get("id") == task_id else {}


def _age(own: Mapping[str, Any]) -> int:
    age = own.get("age")
    return age if isinstance(age, int) and 0 < age <= LARGEST_AGE else 0


def _number(own: Mapping[str, Any], name: str) -> Any:
    value = own[name]
    if isinstance(value, int | float) and 0 <= value <= LARGEST:
        return value
    raise _bad(name, value, "a number, 0 or more")


def _ticket(own: Mapping[str, Any]) -> str | None:
    value: str | None = own.get("ticket")
    if not value or (isinstance(value, str) and is_ticket(value)):
        return value or None
    raise _bad("ticket", value, "a ticket of a lock server")


def _no_dict(header: str, value: object) -> ImproperlyConfigured:
    example = "options of the task, such as {'lock_timeout': 60}"
    wanted = example if header == HEADER else "what the plugin has written there"
    said = f"the message header {header} is {shown(value)}"
    return ImproperlyConfigured(f"{said}: give a dict of {wanted}")


def _bad(name: str, value: object, wanted: str) -> ImproperlyConfigured:
    said = f"the message header {RUN} has {name} {shown(value)}, not {wanted}"
    return ImproperlyConfigured(f"{said}: leave it to the plugin")
