"""What a run of a task needs to know before it asks for its lock, worked out once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import Task
from celery.app.task import Context

from celery_dflock import gate, keys
from celery_dflock.config import Read, Settings
from celery_dflock.identity import Owner, runs_of
from celery_dflock.lock_key import LockKey
from celery_dflock.locks import Locks
from celery_dflock.options import LockOptions, Unchosen
from celery_dflock.outcome import delivery
from celery_dflock.outcome.header import Header
from celery_dflock.outcome.types import HandOff, ItsTurn, TimedOut

RETRY_TIMEOUT = 1.0
"""Seconds that a retry waits at least: it can arrive before the run that sent it has ended."""


class Bound:
    """A task as its options and the settings of its app are: what is the same for all its runs.

    Args:
        task: the class of the task.
        options: its own, or those of one call.
        read: the settings of its app.

    Attributes:
        task: as given, and so are `options` and `read`.
        settings: of the app.
        is_locked: whether its runs take locks at all.
        is_cluster: whether their servers are a cluster.
        make_lock: what makes the lock of a key; see `LocksBase.maker`.
    """

    def __init__(self, task: type[Task], options: LockOptions, read: Read) -> None:
        self.task = task
        self.options = options
        self.settings = read.settings
        self.is_locked = self.settings.enabled and not gate.is_of_celery(task)
        self.is_cluster = self.settings.is_cluster
        self.make_lock = Locks.maker(
            *(options.limit, options.ttl, self.settings, options.rate),
            group_limit=options.group_limit,
        )
        self.read = read
        self._app = task.app
        self._owner = runs_of(task.name, self.settings.key_prefix)
        self._only_key = options.only_key()

    def keys_of(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LockKey]:
        """Return what a call locks, complete and in order; for what is raised see `LockOptions`."""
        prefix = self.settings.key_prefix
        if self._only_key is not None:
            try:
                return [keys.finish(self._only_key(args, kwargs), prefix)]
            except Exception:
                pass  # the general way says what is wrong
        # In order as they are finished: what a function returns may be that already.
        return sorted(
            {keys.finish(key, prefix) for key in self.options.keys_of(task, args, kwargs)}
        )

    def owner_of(self, request: Context) -> Owner:
        """Return who asks for the lock of a run."""
        audience = delivery.audience(self._app, request)
        return self._owner(request.id, request.retries or 0, audience)


@dataclass(slots=True, eq=False)
class Plan:
    """One run of one task.

    Attributes:
        task: the task.
        request: its message; not `task.request`, which is another one on other threads.
        body: what runs under the lock, with its arguments.
        bound: what is the same for other runs with these options.
        options: of this call.
        settings: of the app.
        keys: all keys to lock, in order; nearly always one.
        header: what the message says of earlier attempts.
        is_redelivered: whether the broker says that it delivered this before, or an earlier attempt
            found out.
        hand_off: what the consumer has found out, if the task has waited there for the first key.
        began: when; a time of day.
        group: to which group it belongs; see `LockedTask.lock_group`.
        age: the number by which the newest wins; 0 if it takes no part in that, or has none yet.
    """

    task: Task
    request: Context
    body: Callable[[], Any]
    bound: Bound
    options: LockOptions
    settings: Settings
    keys: list[LockKey]
    header: Header
    is_redelivered: bool
    hand_off: HandOff | None
    began: float
    age: int = 0
    group: str | None = None

    @property
    def name(self) -> str:
        """What logs call it."""
        return f"{self.task.name}[{self.request.id}]"

    @property
    def keeps_position(self) -> bool:
        """Whether its position is kept while it is requeued because of a conflict."""
        return not self.request.is_eager and keeps_position(self.options, len(self.keys))

    @property
    def waited(self) -> float:
        """Seconds in the consumer."""
        return 0.0 if self.hand_off is None else self.hand_off.waited

    @property
    def timeout(self) -> float | None:
        """Seconds to wait in the slot."""
        timeout = self.options.timeout
        if timeout is None:
            return None
        handed = self.hand_off
        if (
            handed is not None
            and isinstance(handed.came, ItsTurn | TimedOut)
            and not isinstance(timeout, Unchosen)
        ):
            return max(0.0, timeout - handed.waited)
        if self.request.retries and not self.is_sent_again:
            return max(timeout, RETRY_TIMEOUT)
        return timeout

    @property
    def is_sent_again(self) -> bool:
        """Whether an attempt came before, of which this one is no retry."""
        header = self.header
        return bool(header.attempt or header.redelivery or header.outage or header.paused)

    @property
    def is_tried_again(self) -> bool:
        """Whether any attempt came before."""
        return bool(self.request.retries) or self.is_sent_again


def keeps_position(options: LockOptions, keys: int) -> bool:
    """Whether a position is kept for a task with so many keys while it is requeued.

    A function decides only after the wait, and may choose something else.
    """
    return options.conflict == "requeue" and options.requeue.hold is not None and keys == 1


def plan(
    task: Task,
    request: Context,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: Bound,
) -> Plan:
    """Find out what a run of a task needs to know, which is bound so if its call does not say else.

    Raises:
        ImproperlyConfigured: an option that the call names is bad.
        LockKeyError: the arguments make no key.
        TypeError: the arguments do not fit the task.
    """
    began, header = time.time(), Header.read(request)
    if header.options:
        bound = task._bound(header.options)
    names = bound.keys_of(task, args, kwargs)
    handed = HandOff.take(request)
    return Plan(
        task,
        request,
        partial(body, *args, **kwargs),
        bound,
        bound.options,
        bound.settings,
        names,
        header,
        header.is_redelivered(request),
        handed if handed is not None and handed.key == names[0] else None,
        began,
        header.age if bound.options.supersedes else 0,
        None if bound.options.group is None else bound.options.group_of(task, args, kwargs),
    )
