"""What a run of a task needs to know before it asks for its lock, worked out once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from celery import Task
from celery.app.task import Context

from celery_dflock import gate, keys
from celery_dflock.config import Read, Settings
from celery_dflock.identity import AgedOwner, Owner, runs_of
from celery_dflock.limits import Limits, Wanted
from celery_dflock.lock_key import LockKey
from celery_dflock.locks import Locks
from celery_dflock.options import LockOptions, Unchosen
from celery_dflock.outcome import delivery
from celery_dflock.outcome.header import Header
from celery_dflock.outcome.types import HandOff, ItsTurn, TimedOut
from dflockd.client.arguments import OwnerLike
from dflockd.sync_client import DistributedLock

RETRY_TIMEOUT = 1.0
"""Seconds that a retry waits at least: it can arrive before the run that sent it has ended."""

MAKERS = 128
"""So many limits that calls have made a task remembers, with what makes their locks."""

ASKS_ONLY = Limits(1, None, None)
"""The limits of a lock that is only asked about: they are part of no question."""

ORIGINS = 128
"""So many ways to a queue a task remembers. Most have one; with delays and topics there are more."""


class Bound:
    """A task as its options and the settings of its app are: what is the same for all its runs.

    Args:
        task: the class of the task.
        options: its own, or those of one call.
        read: the settings of its app.

    Attributes:
        task: as given, and so are `options` and `read`.
        name: the name of the task.
        settings: the settings of the app.
        is_locked: whether its runs take locks at all.
        is_cluster: whether their servers are a cluster.
        is_outermost: whether their lock surrounds other bases of the task; see `gate.install`.
        make_lock: what makes the lock of a key; see `LocksBase.maker`. If limits are made of the
            arguments, its locks are there to ask questions, and those to acquire come from `maker`.
    """

    def __init__(self, task: type[Task], options: LockOptions, read: Read) -> None:
        self.task = task
        self.options = options
        self.settings = read.settings
        self.is_locked = self.settings.enabled and not gate.is_of_celery(task)
        self.is_cluster = self.settings.is_cluster
        self.maker = lru_cache(MAKERS)(partial(_maker, options.ttl, self.settings))
        self.make_lock = self.maker(options.limits or ASKS_ONLY)
        self.read = read
        self.is_outermost = gate.is_outermost(task)
        # Celery gives a class without a name one at its instance, which is made of this.
        self.name = task.name or task.app.gen_task_name(task.__name__, task.__module__)
        self._owner = runs_of(self.name, self.settings.key_prefix)
        # What is where does not change: the queues of an app keep their names.
        self._is_for_all = lru_cache(ORIGINS)(partial(delivery.is_for_all, task.app))
        self._only_key = options.only_key() if options.limits is not None else None

    def keys_of(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LockKey]:
        """Return what a call locks, complete and in order; for what is raised see `LockOptions`."""
        prefix = self.settings.key_prefix
        if self._only_key is not None:
            try:
                return [keys.finish(self._only_key(args, kwargs), prefix)]
            except Exception:
                pass  # the general way says what is wrong
        options = self.options
        if options.limits is None:
            return [each.key for each in options.wanted(task, args, kwargs, prefix)]
        # Of one limit for all of them: the order of `in_order`, too. As they are finished, for what a
        # function returns may be that already.
        return sorted({keys.finish(key, prefix) for key in options.keys_of(task, args, kwargs)})

    def locks_of(
        self,
        task: Task,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: str,
        owner: OwnerLike | None,
    ) -> list[DistributedLock]:
        """Return the locks of a call in order, not acquired.

        Args:
            task: the task.
            args: the positional arguments of the call.
            kwargs: its keyword arguments.
            label: the label of the client that asks.
            owner: the same, for the server.
        """
        options = self.options
        if options.limits is None:
            wanted = options.wanted(task, args, kwargs, self.settings.key_prefix)
            return self.made(wanted, label=label, owner=owner)
        source = options.group
        group = None if source is None else options.make_group(source, task, args, kwargs)
        locks = []
        for key in self.keys_of(task, args, kwargs):
            locks.append(self.make_lock(key, label=label, owner=owner, group=group))
        return locks

    def made(self, wanted: Iterable[Wanted], **who: Any) -> list[DistributedLock]:
        """Return locks that are wanted, not acquired; `who` asks for them, as for a `Maker`."""
        return [self.maker(each.limits)(each.key, group=each.group, **who) for each in wanted]

    def owner_of(self, request: Context) -> Owner:
        """Return who asks for the lock of a run."""
        info = request.delivery_info or {}
        # What each worker gets for itself is not one message delivered to several.
        is_for_all = self._is_for_all(info.get("exchange") or "", info.get("routing_key") or "")
        audience = request.hostname or "" if is_for_all else ""
        # What a task puts in its own place (`Task.replace`) has its id, and may be the same task.
        nesting = request.replaced_task_nesting or 0
        return self._owner(request.id, request.retries or 0, audience, nesting)

    def asks_as(self, request: Context, age: int) -> Owner | AgedOwner:
        """Return the same, with an age by which the newest wins; 0 is none."""
        owner = self.owner_of(request)
        return (*owner, age) if age else owner


class Plan:
    """One run of one task.

    Args:
        task: the task.
        request: its message; not `task.request`, which is another one on other threads.
        body: what runs under the lock.
        args: its positional arguments.
        kwargs: its keyword arguments.
        bound: what is the same for other runs, if the call names no options of its own.

    Attributes:
        body: the same, with its arguments.
        bound: what is the same for other runs with these options.
        options: the options of this call.
        keys: all keys to lock, in order; nearly always one.
        wanted: the same with their limits, and there only if these are made of the arguments.
        header: what the message says of earlier attempts.
        is_redelivered: whether the broker says that it delivered this before, or an earlier attempt
            found out.
        hand_off: what the consumer has found out, if the task has waited there for the first key.
        began: when; a time of day.
        age: the number by which the newest wins; 0 if it takes no part in that, or has none yet.
        group: to which group it belongs, if not `wanted` says that; see `TaskOptions.lock_group`.

    Raises:
        ImproperlyConfigured: an option that the call names is bad.
        LockKeyError: the arguments make no key.
        TypeError: the arguments do not fit the task.
    """

    wanted: Sequence[Wanted]
    group: str | None

    __slots__ = (
        *("age", "began", "body", "bound", "group", "hand_off", "header", "is_redelivered", "keys"),
        *("options", "request", "task", "wanted"),
    )

    def __init__(
        self,
        task: Task,
        request: Context,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: Bound,
    ) -> None:
        self.began = time.time()
        self.task = task
        self.request = request
        self.body: Callable[[], Any] = partial(body, *args, **kwargs)
        header = self.header = Header.read(request)
        if header.options:
            bound = task._bound(header.options)
        options = self.options = bound.options
        self.bound = bound
        if options.limits is None:
            self.wanted = options.wanted(task, args, kwargs, bound.settings.key_prefix)
            self.keys = [each.key for each in self.wanted]
            self.group = None
        else:
            self.keys = bound.keys_of(task, args, kwargs)
            source = options.group
            self.group = None if source is None else options.make_group(source, task, args, kwargs)
        self.is_redelivered = header.is_redelivered(request)
        handed = HandOff.take(request)
        self.hand_off = handed if handed is None or handed.fits(self.keys) else None
        self.age = header.age if options.supersedes else 0

    @property
    def settings(self) -> Settings:
        """Of the app."""
        return self.bound.settings

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
        if handed is not None:
            if isinstance(handed.came, TimedOut):
                return 0.0  # it tries once more
            if isinstance(handed.came, ItsTurn) and not isinstance(timeout, Unchosen):
                return max(0.0, timeout - handed.waited)
        if self.request.retries and not self.is_sent_again:
            return max(timeout, RETRY_TIMEOUT)
        return timeout

    @property
    def is_sent_again(self) -> bool:
        """Whether an attempt came before, of which this one is no retry."""
        header = self.header
        return bool(header.attempt or header.redelivery or header.outage or header.paused)


def _maker(ttl: int, settings: Settings, limits: Limits) -> Callable[..., DistributedLock]:
    """Return what makes the locks of a task that have these limits; see `Maker`."""
    limit, rate, group_limit, weight = limits
    make = Locks.maker(limit, ttl, settings, rate, group_limit=group_limit)
    # Said here, it costs nothing where there is none: that is nearly everywhere.
    return make if weight == 1 else partial(make, weight=weight)


def keeps_position(options: LockOptions, keys: int) -> bool:
    """Whether a position is kept for a task with so many keys while it is requeued.

    A function decides only after the wait, and may choose something else.
    """
    return options.conflict == "requeue" and options.requeue.hold is not None and keys == 1
