"""What a run of a task needs to know before it asks for its lock, found out once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import Task
from celery.app.task import Context

from celery_dflock import keys
from celery_dflock.config import Settings
from celery_dflock.identity import Owner, label_of, owner_of
from celery_dflock.options import LockOptions, Unchosen
from celery_dflock.outcome import delivery
from celery_dflock.outcome.header import Header
from celery_dflock.worker.hand_off import HandOff

RETRY_TIMEOUT = 1.0
"""Seconds that a retry waits at least: it can arrive before the run that sent it has ended."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of one task.

    Attributes:
        task: the task.
        request: its message; not `task.request`, which is another one on other threads.
        body: what is to run under the lock, with its arguments.
        options: of this call.
        settings: of the app.
        keys: what is to be locked, complete and in order; nearly always one key.
        owner: who asks.
        header: what the message says of earlier attempts.
        is_redelivered: whether the broker says that it delivered this before, or an earlier attempt
            found out.
        hand_off: what the consumer has found out, if the task has waited there for the first key.
        began: when; a time of day.
    """

    task: Task
    request: Context
    body: Callable[[], Any]
    options: LockOptions
    settings: Settings
    keys: list[str]
    owner: Owner
    header: Header
    is_redelivered: bool
    hand_off: HandOff | None
    began: float

    @property
    def name(self) -> str:
        """What logs call it."""
        return f"{self.task.name}[{self.request.id}]"

    @property
    def label(self) -> str:
        """What the lock server shows of it to people."""
        return label_of(self.task.name, self.request.id)

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
        if handed is not None and handed.verdict == "turn" and not isinstance(timeout, Unchosen):
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

    Who decides with a function, once the wait is over, may decide for something else.
    """
    return options.conflict == "requeue" and options.requeue.hold is not None and keys == 1


def owner(task: Task, request: Context, prefix: str) -> Owner:
    """Return who asks for the lock of a task."""
    audience = delivery.audience(task.app, request)
    return owner_of(task.name, request.id, request.retries or 0, prefix, audience)


def plan(
    task: Task,
    request: Context,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
) -> Plan:
    """Find out what a run needs to know.

    Raises:
        ImproperlyConfigured: an option that the call names is bad.
        LockKeyError: the arguments make no key.
        TypeError: the arguments do not fit the task.
    """
    began, header = time.time(), Header.read(request)
    options: LockOptions = task._options_of(header.options)
    prefix = settings.key_prefix
    names = [keys.finish(key, prefix) for key in options.keys_of(task, args, kwargs)]
    handed, info = HandOff.take(request), request.delivery_info
    return Plan(
        task=task,
        request=request,
        body=partial(body, *args, **kwargs),
        options=options,
        settings=settings,
        keys=names,
        owner=owner(task, request, prefix),
        header=header,
        is_redelivered=bool(header.redelivery or (info and info.get("redelivered"))),
        hand_off=handed if handed is not None and handed.key == names[0] else None,
        began=began,
    )
