"""``task.map``, ``task.starmap`` and ``task.chunks``: refused for tasks that take locks.

They send one message, of a task of Celery's own, that calls ``task(item)`` for each item. Those are
direct calls, without a lock; and a lock that one of them does not get could not be waited for by
requeueing, since the items before it have been run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery import Task

from celery_dflock.config import settings

_INSTEAD = {
    "map": "group(task.s(item) for item in items)",
    "starmap": "group(task.s(*item) for item in items)",
    "chunks": "group(task.s(*item) for item in items)",
}

_CALLERS = {"celery.map": "map", "celery.starmap": "starmap"}


class OneByOne(Task):
    """A task whose items are tasks of their own, each under its lock."""

    abstract = True

    def map(self, it: Iterable[Any]) -> Any:
        """Refuse: the items would run without their locks."""
        _refuse(self, "map")
        return super().map(it)

    def starmap(self, it: Iterable[Any]) -> Any:
        """Refuse: the items would run without their locks."""
        _refuse(self, "starmap")
        return super().starmap(it)

    def chunks(self, it: Iterable[Any], n: int) -> Any:
        """Refuse: the items would run without their locks."""
        _refuse(self, "chunks")
        return super().chunks(it, n)


def refuse_item(task: Task) -> None:
    """Refuse a direct call if it is that of an item.

    Raises:
        NotImplementedError: it is; one line says what to send instead.
    """
    caller = task.app.current_task
    if caller is not None and caller.name in _CALLERS:
        _refuse(task, _CALLERS[caller.name])


def _refuse(task: Task, method: str) -> None:
    if settings(task.app).enabled:
        raise NotImplementedError(
            f"task {task.name}: {method}() would run it without its lock:"
            f" send {_INSTEAD[method]} instead"
        )
