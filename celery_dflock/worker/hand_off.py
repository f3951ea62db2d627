"""What the consumer of a worker hands to the process that runs a task: what came of its waiting."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from celery.app.task import Context

HANDED = "dflock_handed"
"""The name in a request for what this worker's consumer passes to the process that runs it."""

Verdict: TypeAlias = Literal["turn", "timeout", "unavailable", "redelivered", "superseded", "slot"]
"""What came of the wait.

``turn``: the key is free for this task; nothing is granted yet, the process takes the position up by
its ticket. ``timeout``: not in time. ``unavailable``: no server could be asked. ``redelivered``:
another delivery of the same message has the lock or waits for it. ``superseded``: a newer task has
asked for it, and the newest wins. ``slot``: the server knows no
waiting without a grant, so the task is to wait in its slot.
"""


@dataclass(frozen=True, slots=True)
class HandOff:
    """What came of a task's waiting in the consumer; see `celery_dflock.worker.consumer_wait`.

    Attributes:
        key: what was waited for, complete; of several keys the first in order.
        waited: seconds.
        verdict: what came of it.
        ticket: of the position, to be taken up when the turn has come; or that was kept for the
            next attempt, at ``timeout``.
        pause: for how long it was kept, in seconds.
        error: what the server said, at ``unavailable`` and ``redelivered``; who is newer, at
            ``superseded``.
        refused: the kind of that error, at ``unavailable``; see `Unavailable.refused`.
    """

    key: str
    waited: float
    verdict: Verdict
    ticket: str | None = None
    pause: float | None = None
    error: str = ""
    refused: str = ""

    def put(self, request_dict: MutableMapping[str, Any]) -> None:
        """Lay it into a request that goes to the pool, as plain types: it is sent to a process."""
        request_dict[HANDED] = asdict(self)

    @classmethod
    def take(cls, request: Context) -> HandOff | None:
        """Take it out of the request of a task: nobody else is to come across it."""
        headers, own = request.headers, vars(request)
        if headers and HANDED in headers:
            del headers[HANDED]
        return cls(**own.pop(HANDED)) if HANDED in own else None


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
