"""What the consumer of a worker hands to the process that runs a task."""

from __future__ import annotations

from typing import TypedDict

from celery.app.task import Context

HANDED = "dflock_handed"
"""The place in a request for what the consumer of this worker hands to the process that runs it."""


class Handed(TypedDict, total=False):
    """What came of a task's waiting in the consumer; see `celery_dflock.worker.consumer_wait`.

    With a token the lock is held. With `error` it could not be asked for. A copy has found its own
    message in its way. With none of these it was not granted in time; then the place that was kept
    for the task and the pause for which that was done, if it was.
    """

    key: str
    token: str
    error: str
    is_copy: bool
    waited: float
    """Seconds."""
    place: str
    pause: float


def take_handed(request: Context) -> Handed | None:
    """Take out of a request what the consumer has put there: nobody else is to come across it."""
    if request.headers:
        request.headers.pop(HANDED, None)
    handed: Handed | None = vars(request).pop(HANDED, None)
    return handed


def has_lost_place(handed: Handed) -> bool:
    """Whether a lock was granted: if it is held by another now, the time to wait is not over."""
    return "token" in handed
