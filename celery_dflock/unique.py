"""At most one on its way: what ``lock_unique`` does where a task is sent, and where it runs.

The sender takes a lock of its own kind, sends the task, and detaches the lock: it stays held without
anybody, for ``lock_unique_ttl`` at most, and whoever sends the same meanwhile finds it. Its token
travels with the task. The worker adopts the lock by it, so that it ends with the run, or with the
worker. A sender that dies before its task is sent leaves nothing: the lock is still its own then.

It decides what is sent. Who runs is up to the other lock, that of `LockedTask`.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from queue import Queue
from typing import Any, NamedTuple

from celery import Task, signals, states
from celery.app.task import Context
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult, EagerResult
from celery.utils import uuid
from celery.utils.time import maybe_make_aware

from celery_dflock import keys, policy
from celery_dflock.config import Settings, settings
from celery_dflock.exceptions import DuplicateTaskError
from celery_dflock.locks import MOMENT, describe, is_kept, process_label, try_once
from celery_dflock.options import MAX_LIMIT, LockOptions
from celery_dflock.signals import task_deduplicated
from dflockd import errors
from dflockd.sync_client import DistributedLock, DistributedSemaphore

ATTEMPTS = 50
"""How often a sender asks again who is first, when it finds each time that this has changed.

Each time somebody else has sent a task, so that others who replace each other need as many.
"""

CLOCK_MARGIN = 2
"""Seconds by which the clocks of sender and worker may differ over when a task expires."""

MAX_NAME = 160
"""Bytes of a task's name in a label, which has 256: the id must be in it."""

_LABEL = re.compile(r".*\[([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\] ")
"""What holders of this kind are labelled with, and the id in it."""

logger = logging.getLogger("celery_dflock")


# Where it is sent.


class _First(NamedTuple):
    """The task that was there before."""

    task_id: str
    """Empty if the label does not say."""
    fence: int
    holder: str


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
    label = _label(task, task_id, "sent by ")
    lock = _lock(key, app_settings, MOMENT, label)
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
        headers = dict(message.get("headers") or {})
        token = lock.token  # none if it is lost by now
        if options.unique != "until_expired" and token is not None:
            ours = {"id": task_id, "key": key, "token": token, "until": options.unique}
            headers[policy.HEADER] = {**(headers.get(policy.HEADER) or {}), policy.UNIQUE: ours}
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
    text = "&".join(part.replace("&", "%26") for part in parts)
    return keys.finish(f"unique:{name}:{text}", app_settings.key_prefix)


def _label(task: Task, task_id: str, does: str = "") -> str:
    name = task.name.encode("utf-8", "replace")[:MAX_NAME].decode("utf-8", "ignore")
    return f"{name}[{task_id}] {does}{process_label()}"


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
) -> _First | None:
    """Take the lock, or return who was first.

    Raises:
        LockTimeoutError: that is never the same when asked again.
        RemoteError: the server cannot say.
    """
    for _ in range(ATTEMPTS):
        if try_once(lock):
            return None
        first = _first(lock)
        if first is None:
            continue
        if options.duplicate != "replace":
            return first
        mark = _mark(first.task_id, app_settings, label)
        if _oust(lock, mark, task, first):
            handed_over.append((mark, options.unique_ttl))
    raise errors.LockTimeoutError(
        f"lock {lock.key!r} on {lock.server} goes from one to another all the time",
        key=lock.key,
        server=lock.server,
    )


def _first(lock: DistributedLock) -> _First | None:
    for holder in lock.inspect()["holders"]:
        task_id = _LABEL.match(holder["label"])
        return _First(task_id[1] if task_id else "", holder["fence"], describe(holder))
    return None


def _mark(task_id: str, app_settings: Settings, label: str) -> DistributedSemaphore:
    """What says to the worker that comes to a task that it was replaced, while somebody holds it.

    Several may set out to replace one task. Each has a slot, and gives it back if another was first.
    """
    key = keys.finish(f"replaced:{task_id or 'unknown'}", app_settings.key_prefix)
    options = app_settings.connection_options()
    return DistributedSemaphore(key, MAX_LIMIT, 0, MOMENT, **options, label=label)


def _oust(
    lock: DistributedLock,
    mark: DistributedSemaphore,
    task: Task,
    first: _First,
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
    first: _First,
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
        skipped = policy.Skipped(key, task_id, first.holder)
        if not message.get("ignore_result", task.ignore_result):
            _store(task, task_id, skipped)
        return EagerResult(task_id, skipped, states.SUCCESS, name=task.name)
    raise DuplicateTaskError(key, "a task like this one is on its way, held", first.holder)


def _store(task: Task, task_id: str, skipped: policy.Skipped) -> None:
    """Store the result for others that are told the id."""
    # A backend that sends results to who has sent the task has nobody to send this one to.
    if not isinstance(task.backend, RPCBackend):
        task.backend.mark_as_done(task_id, skipped)


# Where it runs.


class Carried:
    """The lock that a task has brought along from its sender, in the worker that runs it.

    Args:
        task: the task; its request is the current one, unless `free` is all that is called.
        request: what has brought the lock along.
        ours: what it says of the lock; see `celery_dflock.policy.unique_of`.
        ttl: lease in seconds.
        app_settings: where the servers are.
    """

    def __init__(
        self,
        task: Task,
        request: Context,
        ours: Mapping[str, str],
        ttl: int,
        app_settings: Settings,
    ) -> None:
        self._task = task
        self._request = request
        self._settings = app_settings
        self._token = ours["token"]
        self._until = ours["until"]
        self._lock = _lock(ours["key"], app_settings, ttl, _label(task, request.id))
        self._has_begun = False

    def take(self) -> None:
        """Make the lock that of this process, before the task waits for the other.

        So that it ends with the process. A copy, as far as it is known to be one, has no claim to it.
        """
        if not policy.is_known_copy(self._request):
            self._adopt()

    def begin(self, options: LockOptions) -> None:
        """Make sure that the lock is that of this process, for the task is about to run; or end it.

        Raises:
            Ignore: the task was replaced by a newer one, and is revoked.
        """
        self._has_begun = True
        replaceable = options.duplicate == "replace"
        held = self._adopt()
        if self._until == "until_executing":
            held = self._lock.release()
        elif held and (replaceable or self._request.retries or policy.attempts(self._request)):
            # The run that has sent this one again may have detached the lock after it was taken
            # here; but before it gave back the other lock, which is held by now.
            held = self._renew()
        if not held and replaceable:
            self._check_replaced()

    def end(self, exc: BaseException | None, options: LockOptions) -> None:
        """Give the lock back, or send it along with what goes on elsewhere."""
        if self._has_begun and self._until == "until_executing":
            return
        if isinstance(exc, policy.CopyRequeued) and not is_kept(self._lock):
            return  # it belongs to the run that holds the other one
        held = is_kept(self._lock) or (not self._has_begun and self._adopt())
        if _goes_on(exc):
            if held:
                self._detach(options.unique_ttl)
        elif not (held and self._lock.release()) and options.duplicate == "replace":
            self._unmark()  # replaced while it ran already: no worker comes to it again

    def free(self) -> None:
        """Give the lock back: the task will never run."""
        if self._adopt():
            self._lock.release()

    @property
    def _name(self) -> str:
        return f"{self._task.name}[{self._request.id}]"

    def _adopt(self) -> bool:
        if is_kept(self._lock):
            return True
        try:
            return self._lock.adopt(self._token)
        except errors.RemoteError as exc:
            self._warn(exc)
            return False

    def _renew(self) -> bool:
        try:
            return self._lock.renew()
        except errors.RemoteError as exc:
            self._warn(exc)
            return False

    def _detach(self, ttl: int) -> None:
        try:
            self._lock.detach(ttl)
        except errors.RemoteError as exc:
            self._warn(exc)

    def _warn(self, exc: errors.RemoteError) -> None:
        logger.warning("task %s goes on without lock_unique: %s", self._name, exc)

    def _check_replaced(self) -> None:
        newer = self._unmark()
        if newer is None:
            return
        task, request = self._task, self._request
        logger.info("task %s does not run: it is replaced by %s", self._name, newer)
        keep = not (task.ignore_result or request.ignore_result)
        task.backend.mark_as_revoked(
            request.id, f"replaced by {newer}", request=request, store_result=keep
        )
        raise Ignore

    def _unmark(self) -> str | None:
        """Return which task has replaced this one, if any, and end the marks that say so."""
        mark = _mark(self._request.id, self._settings, "")
        try:
            newer = left = _first(mark)
            while left is not None:  # several may have set out to replace it, of whom one has
                mark.evict(left.fence)
                left = _first(mark)
        except errors.RemoteError as exc:
            self._warn(exc)
            return None
        return newer.task_id if newer is not None else None


def _goes_on(exc: BaseException | None) -> bool:
    return isinstance(exc, Retry | policy.CopyRequeued) or (
        isinstance(exc, Reject) and bool(exc.requeue)
    )


def carried(
    task: Task, request: Context, options: LockOptions, app_settings: Settings
) -> AbstractContextManager[Carried | None]:
    """Look after what a task has brought along from its sender, if anything, while it runs."""
    ours = policy.unique_of(request)
    if ours is None:
        return nullcontext()
    return _looked_after(Carried(task, request, ours, options.ttl, app_settings), options)


@contextmanager
def _looked_after(brought: Carried, options: LockOptions) -> Iterator[Carried]:
    try:
        brought.take()
        yield brought
    except BaseException as exc:
        brought.end(exc, options)
        raise
    else:
        brought.end(None, options)


def _lock(key: str, app_settings: Settings, ttl: int, label: str) -> DistributedLock:
    return DistributedLock(key, 0, ttl, **app_settings.connection_options(), label=label)


# Where it is revoked, or found to have expired: in the main process of a worker.


def free_revoked(sender: Task, request: Context, **_: Any) -> None:
    """Give back the lock of a task that will not run, on a thread: the worker must not wait."""
    ours = policy.unique_of(request)
    if ours is not None:
        _to_be_freed().put(Carried(sender, request, ours, MOMENT, settings(sender.app)))


@cache
def _to_be_freed() -> Queue[Carried]:
    pending: Queue[Carried] = Queue()

    def free_all() -> None:
        while True:
            try:
                pending.get().free()
            except Exception:
                logger.exception("the lock of a revoked task could not be freed")

    threading.Thread(target=free_all, name="dflock-revoked", daemon=True).start()
    return pending


signals.task_revoked.connect(free_revoked, dispatch_uid="celery_dflock.free_revoked")
