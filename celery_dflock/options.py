"""The ``lock_*`` options of a task, checked when the task is bound to its app."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery import Task
from celery.exceptions import ImproperlyConfigured

from celery_dflock.exceptions import LockKeyError
from celery_dflock.keys import (
    KeyFunction,
    KeyTemplate,
    bound_arguments,
    default_key,
    encode,
    spread,
)

CONFLICT = ("requeue", "skip", "fail")
LOST = ("raise", "warn")

MAX_SECONDS = 9_223_372_036
"""The longest time that can be said to a lock server; for no end at all there is ``None``."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How a requeued task keeps its distance; times in seconds.

    The pause before the next attempt is random, up to `base` doubled with each attempt and at most
    `cap`: "full jitter". (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter)
    A message with a countdown is held unacknowledged by a worker, so `cap` must stay far below the
    broker's visibility timeout.
    """

    base: float = 1.0
    cap: float = 30.0
    max_wait: float = 3600.0
    """After so long since the first conflict the task fails instead; 0 never."""
    max_attempts: int = 0
    """After so many attempts the task fails instead; 0 never."""

    def pause(self, attempt: int, chance: float) -> float:
        """Return the seconds before attempt number `attempt` + 1; `chance` is from 0 to 1."""
        return chance * min(self.cap, self.base * 2.0 ** min(attempt, 32))

    def is_over(self, attempts: int, waited: float) -> bool:
        """Whether it is time to give up."""
        too_many = bool(self.max_attempts) and attempts >= self.max_attempts
        return too_many or bool(self.max_wait and waited >= self.max_wait)


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The options of one task."""

    key: KeyTemplate | KeyFunction | None
    ttl: int
    timeout: float | None
    conflict: str
    requeue: Backoff
    lost: str
    signature: inspect.Signature

    @classmethod
    def of(cls, task: type[Task]) -> LockOptions:
        """Read the options from a task class.

        Raises:
            ImproperlyConfigured: an option is unknown or its value is bad; one line says which.
        """
        _refuse_unknown(task)
        signature = _signature(task)
        timeout = task.lock_timeout
        if timeout is not None and not (_is_number(timeout) and 0 <= timeout <= MAX_SECONDS):
            raise _bad(task, "lock_timeout", "seconds from 0, or None for no end")
        ttl = task.lock_ttl
        if not (isinstance(ttl, int) and _is_number(ttl) and 0 < ttl <= MAX_SECONDS):
            raise _bad(task, "lock_ttl", "whole seconds from 1")
        if task.lock_conflict not in CONFLICT:
            raise _bad(task, "lock_conflict", _one_of(task.lock_conflict, CONFLICT))
        if task.lock_lost not in LOST:
            raise _bad(task, "lock_lost", _one_of(task.lock_lost, LOST))
        return cls(
            key=_key(task, signature),
            ttl=ttl,
            timeout=timeout,
            conflict=task.lock_conflict,
            requeue=_backoff(task),
            lost=task.lock_lost,
            signature=signature,
        )

    def key_of(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the key of one call, without the app's prefix.

        Raises:
            LockKeyError: the arguments make none.
            TypeError: the arguments do not fit the task.
        """
        if callable(self.key):
            key = self.key(task, args, kwargs)
            if not isinstance(key, str) or not key:
                raise LockKeyError(task.name, f"lock_key returned {key!r}, not a text")
            return encode(key)
        arguments = bound_arguments(self.signature, args, kwargs)
        if self.key is None:
            return default_key(task.name, arguments)
        try:
            return self.key.render(spread(self.signature, arguments))
        except (LookupError, AttributeError, ValueError, TypeError) as exc:
            raise LockKeyError(task.name, f"lock_key does not fit the arguments: {exc!r}") from exc


OPTIONS = ("lock_key", "lock_ttl", "lock_timeout", "lock_conflict", "lock_requeue", "lock_lost")


def _signature(task: type[Task]) -> inspect.Signature:
    run = inspect.getattr_static(task, "run")
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _key(task: type[Task], signature: inspect.Signature) -> KeyTemplate | KeyFunction | None:
    # Looked up without binding: a function in a class would become a method.
    key = inspect.getattr_static(task, "lock_key")
    if isinstance(key, staticmethod):
        key = key.__func__
    if key is None:
        return None
    if isinstance(key, str):
        try:
            return KeyTemplate(key, signature)
        except ValueError as exc:
            raise ImproperlyConfigured(f"task {task.name}: lock_key {key!r}: {exc}") from None
    if callable(key):
        function: KeyFunction = key
        return function
    raise _bad(task, "lock_key", "a template over the arguments or (task, args, kwargs) -> key")


def _backoff(task: type[Task]) -> Backoff:
    given = task.lock_requeue
    known = tuple(Backoff.__dataclass_fields__)
    if not isinstance(given, Mapping):
        raise _bad(task, "lock_requeue", f"a dict of {', '.join(known)}")
    for name, value in given.items():
        if name not in known:
            raise _bad(task, "lock_requeue", _one_of(name, known))
        if not _is_number(value) or value < 0:
            raise _bad(task, "lock_requeue", f"a number from 0 for {name}")
    return Backoff(**given)


def _refuse_unknown(task: type[Task]) -> None:
    # Only near misses: a task may have attributes of its own that begin with lock_.
    for name in dir(task):
        if name.startswith("lock_") and name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1, 0.8)
            if near:
                raise ImproperlyConfigured(
                    f"task {task.name}: there is no option {name}: did you mean {near[0]}?"
                )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _one_of(value: object, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(value), known, 1)
    return f"one of {', '.join(known)}" + (f" (did you mean {near[0]}?)" if near else "")


def _bad(task: type[Task], option: str, wanted: str) -> ImproperlyConfigured:
    value = inspect.getattr_static(task, option)
    return ImproperlyConfigured(f"task {task.name}: {option} is {value!r}: give {wanted}")
