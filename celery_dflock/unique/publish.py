"""At most one on its way: what ``lock_unique`` does where a task is sent.

The sender takes a lock of a special kind, sends the task and detaches the lock. The lock then stays
held without a connection, for ``lock_unique_ttl`` at most, and anyone who sends the same task finds it.
Its token travels with the task. With it the worker adopts the lock, which then ends with the run or
with the worker. A sender that dies before its task is sent leaves nothing behind: the lock is still
its own.

This lock decides what is sent. The other one, that of `LockedTask`, decides what runs.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Task, states
from celery.backends.rpc import RPCBackend
from celery.result import AsyncResult, EagerResult
from celery.utils import uuid
from celery.utils.time import maybe_make_aware

from celery_dflock import keys
from celery_dflock.config import Settings, settings
from celery_dflock.exceptions import DuplicateTaskError
from celery_dflock.locks import MOMENT, try_once
from celery_dflock.options import LockOptions
from celery_dflock.outcome import header
from celery_dflock.outcome.skipped import Skipped
from celery_dflock.signals import task_deduplicated
from celery_dflock.unique.lock import First, first_of, label_of, lock_on, mark_of
from dflockd import errors
from dflockd.sync_client import DistributedLock

ATTEMPTS = 50
"""How often a sender asks again who is first, when it finds each time that this has changed.

Each time somebody else has sent a task, so that others who replace each other need as many.
"""

CLOCK_MARGIN = 2
"""Seconds by which the clocks of sender and worker may differ over when a task expires."""

logger = logging.getLogger("celery_dflock")


def send(
    task: Task,
    options: LockOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    message: Mapping[str, Any],
    publish: Callable[..., AsyncResult],
) -> AsyncResult:
    """Send a task unless one with the same key is on its way; then do as ``lock_duplicate`` says.

    Args:
        task: the task.
        options: the options of this call.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        message: options of the message.
        publish: sends it, with ``task_id`` and ``headers``.

    Raises:
        DuplicateTaskError: there is one, and ``lock_duplicate`` is ``"raise"``.
        LockKeyError: the arguments make no key.
    """
    try:
        options.parameters.bind(args, kwargs)
    except TypeError:
        return publish()  # it is Celery's to refuse, here or in the worker
    keys = sorted(set(options.keys_of(task, tuple(args), dict(kwargs))))
    sender = _Sender(task, options, keys, message)
    with sender:
        first, headers = None, message.get("headers")
        try:
            first = sender.take()
        except (errors.RemoteError, errors.LockTimeoutError) as exc:
            sender.warn(exc)
        else:
            if first is not None and first.task_id:
                return sender.refuse(first, message)
            if first is None:
                headers = sender.headers(headers)
            else:
                sender.warn(f"lock {sender.lock.key!r} is held by {first.holder}, which is no task")
        return publish(task_id=sender.task_id, headers=headers)


class _Sender:
    """Sends a task unless another one is first.

    Once the block has ended, what it holds outlives this process for a while; if that raised, nothing.
    """

    def __init__(
        self, task: Task, options: LockOptions, keys: Sequence[str], message: Mapping[str, Any]
    ) -> None:
        self._task = task
        self._options = options
        self._settings = settings(task.app)
        self.task_id = uuid()
        self._label = label_of(task, self.task_id, "sent by ")
        key = _key(task, keys, self._settings)
        self.lock = lock_on(key, self._settings, MOMENT, self._label)
        self._held: list[tuple[DistributedLock, int]] = [
            (self.lock, _lease(task, options, message))
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        for lock, seconds in self._held:
            if exc_type is not None:
                lock.release()
                continue
            try:
                lock.detach(seconds)  # a worker may have adopted it by now, and keeps it
            except errors.RemoteError as exc:
                name = f"{self._task.name}[{self.task_id}]"
                logger.warning("task %s was sent, and goes on without lock_unique: %s", name, exc)

    def warn(self, why: object) -> None:
        name = f"{self._task.name}[{self.task_id}]"
        logger.warning("task %s is sent without lock_unique: %s", name, why)

    def headers(self, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the headers of the message, with what its worker adopts the lock by."""
        token, until = self.lock.token, self._options.unique
        if until == "until_expired" or token is None:  # it is lost by now
            return given
        ours = {"key": self.lock.key, "token": token, "until": until}
        return header.said_of(self.task_id, given, "unique", ours)

    def take(self) -> First | None:
        """Take the lock, or return who was first.

        Raises:
            LockTimeoutError: that is never the same when asked again.
            RemoteError: the server cannot say.
        """
        lock = self.lock
        for _ in range(ATTEMPTS):
            if try_once(lock):
                return None
            first = first_of(lock)
            if first is None:
                continue
            if self._options.duplicate != "replace" or not first.task_id:
                return first
            self._oust(first)
        why = f"lock {lock.key!r} on {lock.server} keeps changing hands"
        raise errors.LockTimeoutError(why, key=lock.key, server=lock.server)

    def _oust(self, first: First) -> None:
        """End the hold of an earlier task, which is marked before, unless it has ended by itself."""
        mark, ousted = mark_of(first.task_id, self._settings, self._label), False
        try_once(mark)
        try:
            ousted = self.lock.evict(first.fence)
        finally:
            if not ousted:
                mark.release()
        if ousted:
            self._held.append((mark, self._options.unique_ttl))
            logger.info("task %s[%s] is replaced by a newer one", self._task.name, first.task_id)
            self._tell(first, "replace")

    def refuse(self, first: First, message: Mapping[str, Any]) -> AsyncResult:
        """Return the result of a task that is not sent.

        Raises:
            DuplicateTaskError: ``lock_duplicate`` says so.
        """
        task, key, verdict = self._task, self.lock.key, self._options.duplicate
        text = "task %s is not sent (lock_unique, lock_duplicate=%s): lock %r is held by %s"
        logger.info(text, task.name, verdict, key, first.holder)
        self._tell(first, verdict)
        if verdict == "coalesce":
            return task.AsyncResult(first.task_id)
        if verdict == "raise":
            raise DuplicateTaskError(key, "a task like this one is on its way, held", first.holder)
        skipped = Skipped(key, self.task_id, first.holder)
        # For others that are told the id. A backend that sends results to who has sent the task has
        # nobody to send this one to.
        is_ignored = message.get("ignore_result", task.ignore_result)
        if not is_ignored and not isinstance(task.backend, RPCBackend):
            task.backend.mark_as_done(self.task_id, skipped)
        return EagerResult(self.task_id, skipped, states.SUCCESS, name=task.name)

    def _tell(self, first: First, verdict: str) -> None:
        about = {"key": self.lock.key, "task_id": first.task_id, "verdict": verdict}
        task_deduplicated.send(sender=self._task, request=None, **about)


def _key(task: Task, parts: Sequence[str], app_settings: Settings) -> str:
    # No two tasks and no two lists make the same text.
    text = f"unique:{keys.encode(task.name, ':')}:{keys.join(parts)}"
    return keys.finish(text, app_settings.key_prefix)


def _lease(task: Task, options: LockOptions, message: Mapping[str, Any]) -> int:
    expires = message.get("expires", task.expires)
    if isinstance(expires, dt.datetime):
        expires = (maybe_make_aware(expires, task.app.timezone) - task.app.now()).total_seconds()
    if options.unique == "until_expired" or not isinstance(expires, int | float):
        return options.unique_ttl
    if expires >= options.unique_ttl:
        return options.unique_ttl
    return min(options.unique_ttl, math.ceil(max(0, expires)) + CLOCK_MARGIN)
