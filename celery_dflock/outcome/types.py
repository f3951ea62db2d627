"""What can come of asking for the lock of a task, beside the lock: a type for each.

The process that runs the task says it in these, and so does the consumer of the worker if the task has
waited there; then it hands it to that process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from celery.app.task import Context

from celery_dflock.exceptions import LockNotAcquiredError, LockUnavailableError
from dflockd import errors

HANDED = "dflock_handed"
"""The name in a request for what this worker's consumer passes to the process that runs it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A position in the queue of the lock that is kept for the next attempt.

    Attributes:
        ticket: to take it up with.
        pause: seconds in which the lock server expects that.
    """

    ticket: str
    pause: float

    @classmethod
    def of(cls, ticket: str | None, pause: float | None) -> Kept | None:
        """Return that of a ticket and a pause; ``None`` if there is not both."""
        return None if ticket is None or pause is None else cls(ticket, pause)


@dataclass(frozen=True, slots=True)
class TimedOut:
    """A conflict: somebody else has the lock, and the task cannot wait any longer.

    Attributes:
        error: says so.
        kept: the position of the task, if it was kept.
    """

    error: LockNotAcquiredError
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class Overtaken:
    """The task's turn had come while it waited in the consumer, and has passed before it had a slot."""

    error: LockNotAcquiredError
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class Redelivered:
    """The broker has delivered the message twice: another run of it has the lock, or waits for it."""

    error: LockNotAcquiredError


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer task has asked for the lock, and the newest wins; `error` names it as the holder."""

    error: LockNotAcquiredError


@dataclass(frozen=True, slots=True)
class ShuttingDown:
    """The worker is shutting down: this process waits for nothing any more.

    Attributes:
        error: says so.
        ticket: the ticket of the task's position, if it has one that nobody has taken up yet.
    """

    error: LockNotAcquiredError
    ticket: str | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No lock server could be asked, or the one that was asked grants nothing of the kind.

    Attributes:
        error: says why no lock server granted the lock.
        server: the address of the server that was asked.
        refused: what kind of error it answered, if it did; see `refused_with`.
    """

    error: LockUnavailableError
    server: str
    refused: str = ""


Refusal: TypeAlias = TimedOut | Overtaken | Redelivered | Superseded | ShuttingDown | Unavailable
"""Why a task does not run now."""


def refusal_of(error: errors.RemoteError, key: str, server: str) -> Refusal:
    """Return why a task does not run now that a server has said this, or has said nothing."""
    key = error.key or key
    if isinstance(error, errors.OwnerConflictError):
        return Redelivered(LockNotAcquiredError(key, str(error)))
    if isinstance(error, errors.SupersededError):
        by = error.by or "a newer task"
        return Superseded(LockNotAcquiredError(key, f"superseded, the newest wins: {by}", by))
    return Unavailable(LockUnavailableError(key, str(error)), server, refused_with(error))


def refused_with(error: BaseException | None) -> str:
    """Return the kind of an error of a server that is there and says no; empty if it is away.

    One that says no to this request answers others, so its ``no`` begins no outage.
    """
    if isinstance(error, errors.RefusedError) and not isinstance(error, errors.PASSING):
        return type(error).__name__
    return ""


@dataclass(frozen=True, slots=True)
class ItsTurn:
    """The key is free for the task; nothing is granted yet.

    Attributes:
        ticket: the ticket of its position, which the process takes up; ``None`` if that is gone.
    """

    ticket: str | None


@dataclass(frozen=True, slots=True)
class HandOff:
    """What the consumer of a worker hands to the process that runs a task: what came of its waiting.

    Attributes:
        key: what was waited for, complete; of several keys the first in order.
        waited: seconds.
        came: what came of it. ``None``: the server knows no waiting without a grant, so the task is to
            wait in its slot.
        lent: the keys, of several, that the worker has taken, in order, each with the token by which
            the process adopts it. What came is about the next one then.
    """

    key: str
    waited: float
    came: ItsTurn | Refusal | None
    lent: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def fits(self, keys: Sequence[str]) -> bool:
        """Whether it is about these keys of a run: a function may have made others of its arguments."""
        return self.key == keys[0] and [key for key, _ in self.lent] == keys[: len(self.lent)]

    @classmethod
    def take(cls, request: Context) -> HandOff | None:
        """Take it out of the request of a task: nobody else is to come across it."""
        headers = request.headers
        if headers and HANDED in headers:
            del headers[HANDED]
        handed: HandOff | None = vars(request).pop(HANDED, None)
        return handed


def prepare(request: Any) -> None:
    """Make a request ready for the process that runs it, whether or not it waits here.

    A hand-off that a message brings along is removed: only this worker's consumer is believed.
    Celery also forgets the serializer of the arguments, with Redis for example. If the task is sent
    again with another one, arguments that are not JSON change, or cannot be sent at all.
    """
    request_dict = request.request_dict
    request_dict.pop(HANDED, None)
    properties = request_dict.get("properties") or {}
    if "content_type" not in properties:
        request_dict["properties"] = {**properties, "content_type": request.content_type}
