"""What can come of asking for the lock of a task, beside the lock: a type for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from celery_dflock.exceptions import LockNotAcquiredError, LockUnavailableError
from dflockd import errors


@dataclass(frozen=True, slots=True)
class Kept:
    """A position in the queue of the lock that is kept for the next attempt.

    Attributes:
        ticket: to take it up with.
        pause: seconds in which the lock server expects that.
    """

    ticket: str
    pause: float


@dataclass(frozen=True, slots=True)
class TimedOut:
    """A conflict: somebody else has the lock, and had it for as long as the task could wait.

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
        ticket: of the task's position, if it has one that nobody has taken up yet.
    """

    error: LockNotAcquiredError
    ticket: str | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No lock server could be asked, or the one that was asked grants nothing of the kind.

    Attributes:
        error: says why.
        server: which.
        refused: what kind of error it answered, if it did; see `refused_with`.
    """

    error: LockUnavailableError
    server: str
    refused: str = ""


def refused_with(error: BaseException | None) -> str:
    """Return the kind of an error of a server that is there and says no; empty if it is away.

    One that says no to this request answers others, so its ``no`` begins no outage.
    """
    if isinstance(error, errors.RefusedError) and not isinstance(error, errors.PASSING):
        return type(error).__name__
    return ""


Refusal: TypeAlias = TimedOut | Overtaken | Redelivered | Superseded | ShuttingDown | Unavailable
"""Why a task does not run now."""
