"""A task that is skipped because its lock is held ends with a result that says so."""

from __future__ import annotations

import logging
from typing import Any

from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.lock_key import LockKey
from celery_dflock.plan import Plan
from celery_dflock.signals import task_skipped

logger = logging.getLogger("celery_dflock")


class Skipped(dict[str, Any]):
    """The result of a task that was skipped because its lock was held.

    Such a task ends as ``SUCCESS`` with this value, so that nobody waits forever and a chord goes
    on. The value is a dict: every serializer can store it, and readers do not need the plugin.
    `Skipped.of` turns it into a `Skipped` again.
    """

    MARK = "dflock"

    def __init__(
        self,
        key: str,
        task_id: str | None,
        holder: str | None = None,
        superseded_by: str | None = None,
    ) -> None:
        # A plain text: there are readers who do not have the plugin.
        key = str(key)
        super().__init__({self.MARK: "skipped", "key": key, "task_id": task_id, "holder": holder})
        if superseded_by is not None:
            self["superseded_by"] = superseded_by

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments."""
        return type(self), (self.key, self.task_id, self.holder, self.superseded_by)

    @property
    def key(self) -> LockKey:
        """The key that was held."""
        return LockKey(self["key"])

    @property
    def task_id(self) -> str | None:
        """The id of the task that was skipped."""
        task_id: str | None = self["task_id"]
        return task_id

    @property
    def holder(self) -> str | None:
        """The label of the holder, or ``None`` if it is not known."""
        holder: str | None = self["holder"]
        return holder

    @property
    def superseded_by(self) -> str | None:
        """The newer task, with ``lock_conflict="supersede"`` or ``"newest"``; otherwise ``None``."""
        by: str | None = self.get("superseded_by")
        return by

    @classmethod
    def of(cls, result: object) -> Skipped | None:
        """Return `result` as a `Skipped` if it is the result of a skipped task, otherwise ``None``."""
        if (
            isinstance(result, dict)
            and result.get(cls.MARK) == "skipped"
            and isinstance(result.get("key"), str)
        ):
            by = result.get("superseded_by")
            return cls(result["key"], result.get("task_id"), result.get("holder"), by)
        return None


def skip(plan: Plan, error: LockNotAcquiredError, *, superseded_by: str | None = None) -> Skipped:
    """Return the result of a skipped run."""
    request = plan.request
    logger.info("task %s skipped: %s", plan.name, error)
    task_skipped.send(sender=plan.task, request=request, key=error.key, holder=error.holder)
    return Skipped(error.key, request.id, error.holder, superseded_by)
