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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from dflockd.sync_client import DistributedLock, DistributedSemaphore

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
        options: of this call.
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
    app_settings, task_id = settings(task.app), uuid()
    key = _key(task, options.keys_of(task, tuple(args), dict(kwargs)), app_settings)
    label = label_of(task, task_id, "sent by ")
    lock = lock_on(key, app_settings, MOMENT, label)
    ttl = _lease(task, options, message)
    with _handed_over(lock, ttl, f"{task.name}[{task_id}]") as handed_over:
        try:
            first = _take(lock, handed_over, label, task, options, app_settings)
        except (errors.RemoteError, errors.LockTimeoutError) as exc:
            logger.warning("task %s[%s] is sent without lock_unique: %s", task.name, task_id, exc)
            return publish(task_id=task_id)
        if first is not None and (first.task_id or options.duplicate != "coalesce"):
            return _refuse(task, options, key, first, task_id, message)
        if first is not None:
            why = f"lock {key!r} is held by {first.holder}, which is no task"
            logger.warning("task %s[%s] is sent without lock_unique: %s", task.name, task_id, why)
            return publish(task_id=task_id)
        headers, token = message.get("headers"), lock.token  # none if it is lost by now
        if options.unique != "until_expired" and token is not None:
            ours = {"key": key, "token": token, "until": options.unique}
            headers = header.said_of(task_id, headers, "unique", ours)
        return publish(task_id=task_id, headers=headers)


@contextmanager
def _handed_over(
    lock: DistributedLock, ttl: int, name: str
) -> Iterator[list[tuple[DistributedLock, int]]]:
    """Detach a lock, and what is added to it, once the block has ended; release it if that raised."""
    locks = [(lock, ttl)]
    try:
        yield locks
    except BaseException:
        for each, _ in locks:
            each.release()
        raise
    for each, seconds in locks:
        try:
            each.detach(seconds)  # a worker may have adopted it by now, and keeps it
        except errors.RemoteError as exc:
            logger.warning("task %s was sent, and goes on without lock_unique: %s", name, exc)


def _key(task: Task, parts: Sequence[str], app_settings: Settings) -> str:
    # No two tasks and no two lists make the same text.
    name = keys.encode(task.name).replace(":", "%3A")
    return keys.finish(f"unique:{name}:{keys.join(parts)}", app_settings.key_prefix)


def _lease(task: Task, options: LockOptions, message: Mapping[str, Any]) -> int:
    expires = message.get("expires", task.expires)
    if isinstance(expires, dt.datetime):
        expires = (maybe_make_aware(expires, task.app.timezone) - task.app.now()).total_seconds()
    if options.unique == "until_expired" or not isinstance(expires, int | float):
        return options.unique_ttl
    if expires >= options.unique_ttl:
        return options.unique_ttl
    return min(options.unique_ttl, math.ceil(max(0, expires)) + CLOCK_MARGIN)


def _take(
    lock: DistributedLock,
    handed_over: list[tuple[DistributedLock, int]],
    label: str,
    task: Task,
    options: LockOptions,
    app_settings: Settings,
) -> First | None:
    """Take the lock, or return who was first.

    Raises:
        LockTimeoutError: that is never the same when asked again.
        RemoteError: the server cannot say.
    """
    for _ in range(ATTEMPTS):
        if try_once(lock):
            return None
        first = first_of(lock)
        if first is None:
            continue
        if options.duplicate != "replace":
            return first
        mark = mark_of(first.task_id, app_settings, label)
        if _oust(lock, mark, task, first):
            handed_over.append((mark, options.unique_ttl))
    raise errors.LockTimeoutError(
        f"lock {lock.key!r} on {lock.server} keeps changing hands",
        key=lock.key,
        server=lock.server,
    )


def _oust(
    lock: DistributedLock,
    mark: DistributedSemaphore,
    task: Task,
    first: First,
) -> bool:
    """End the hold of an earlier task, which is marked before; ``False`` if it has ended by itself."""
    try_once(mark)
    try:
        ousted = lock.evict(first.fence)
    except BaseException:
        mark.release()
        raise
    if not ousted:
        mark.release()
        return False
    logger.info("task %s[%s] is replaced by a newer one", task.name, first.task_id)
    task_deduplicated.send(
        sender=task, request=None, key=lock.key, task_id=first.task_id, verdict="replace"
    )
    return True


def _refuse(
    task: Task,
    options: LockOptions,
    key: str,
    first: First,
    task_id: str,
    message: Mapping[str, Any],
) -> AsyncResult:
    logger.info(
        "task %s is not sent (lock_unique, lock_duplicate=%s): lock %r is held by %s",
        task.name,
        options.duplicate,
        key,
        first.holder,
    )
    task_deduplicated.send(
        sender=task, request=None, key=key, task_id=first.task_id, verdict=options.duplicate
    )
    if options.duplicate == "coalesce":
        return task.AsyncResult(first.task_id)
    if options.duplicate == "skip":
        skipped = Skipped(key, task_id, first.holder)
        if not message.get("ignore_result", task.ignore_result):
            _store(task, task_id, skipped)
        return EagerResult(task_id, skipped, states.SUCCESS, name=task.name)
    raise DuplicateTaskError(key, "a task like this one is on its way, held", first.holder)


def _store(task: Task, task_id: str, skipped: Skipped) -> None:
    """Store the result for others that are told the id."""
    # A backend that sends results to who has sent the task has nobody to send this one to.
    if not isinstance(task.backend, RPCBackend):
        task.backend.mark_as_done(task_id, skipped)
