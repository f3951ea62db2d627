"""Locks for code that is not a task: a view, a shell, a script, a coroutine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from celery import Celery, current_app, current_task
from kombu.utils.compat import detect_environment

from celery_dflock import keys
from celery_dflock.checks import check_app, check_seconds, check_whole, refused
from celery_dflock.config import settings, with_remedy
from celery_dflock.exceptions import LockNotAcquiredError, LockUnavailableError
from celery_dflock.held import HeldLock, TaskLock, check_lease
from celery_dflock.identity import label_of, process_label
from celery_dflock.limits import MAX_LIMIT, UNLIMITED, check_weight
from celery_dflock.locks import Locks, LocksBase, lost_error
from celery_dflock.look import Look, weight_of
from celery_dflock.options import MAX_SECONDS
from dflockd import client, clock, errors
from dflockd.client.lock import Weight
from dflockd.rates import RateLike, parse_rate

B = TypeVar("B", bound=LocksBase[Any])

_CLAIM = "_locks"
"""The attribute for the locks of the block that an object is in use for; absent while it is free."""


class dflock:
    """Hold a lock while a block of code runs: the one that a task with this `lock_key` would hold.

        with dflock("account:7") as lock: ...
        async with dflock("account:7") as lock: ...

    In the second form the event loop keeps running while the lock is waited for, renewed and
    released; await ``lock.extend()`` and ``lock.check()`` there. Use each object for one block at a
    time. With ``dflock_enabled = False`` no server is asked, and ``lock.held`` is ``False``.

    Args:
        key: a `LockKey`, such as ``sync.lock_keys(7)[0]``, or a text: it becomes what a task with a
            function as ``lock_key`` makes of it, with the app's prefix in front.
        timeout: seconds to wait, first come, first served. 0 tries once, ``None`` waits without
            end.
        ttl: the lease, in seconds. It is renewed for as long as the block runs.
        limit: the ``lock_limit`` of the tasks that share the key; ``None`` is no limit, with a
            `rate` or a `group_limit`.
        group: the group, as a task's ``lock_group`` makes it.
        group_limit: the ``lock_group_limit`` of these tasks.
        rate: the ``lock_rate`` of these tasks. The block counts as one run.
        weight: for how many of the limit the block counts, as a run does with ``lock_weight``: a whole
            number, or ``"all"``.
        app: the app whose settings apply. Default: the current app.

    Raises:
        LockNotAcquiredError: the lock was not granted in time.
        LockUnavailableError: no lock server answered.
        ValueError: an argument is bad.
        RuntimeError: this object is in use already, or ``with`` is used in a coroutine.
    """

    def __init__(
        self,
        key: str,
        timeout: float | None = 10,
        ttl: int = 30,
        *,
        limit: int | None = 1,
        group: str | None = None,
        group_limit: int | None = None,
        rate: RateLike | None = None,
        weight: Weight = 1,
        app: Celery | None = None,
    ) -> None:
        check_app(app)
        keys.finished(key)
        if timeout is not None:
            check_seconds("timeout", timeout, MAX_SECONDS)
        check_whole("ttl", ttl, 1, MAX_SECONDS, "number of seconds")
        if limit is not None:
            check_whole("limit", limit, 1, MAX_LIMIT)
        elif rate is None and group_limit is None:
            raise refused("limit", limit, UNLIMITED.format(""))
        if group_limit is not None:
            check_whole("group_limit", group_limit, 1, MAX_LIMIT)
            if group is None:
                raise refused("group_limit", group_limit, "a group too, or remove it")
        if rate is not None:
            parse_rate(rate)
        check_weight(weight, MAX_LIMIT if limit is None else limit, _bad)
        self.key = key
        self.timeout = timeout
        self._ttl = ttl
        self._limit = limit
        self._group = None if group is None else keys.finished(group, name="group")
        self._group_limit = group_limit
        self._rate = rate
        self._weight = weight
        self._app = app

    def __enter__(self) -> TaskLock:
        """Wait for the lock."""
        self._refuse_event_loop()
        locks, is_enabled = self._claim(Locks)
        try:
            missed = locks.acquire() if is_enabled else None
            if missed is not None:
                raise self._not_acquired(missed, locks.look(missed))
            return TaskLock.of(locks)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        locks = self.__dict__.pop(_CLAIM, None)
        if locks is not None:
            locks.release()

    async def __aenter__(self) -> AsyncLock:
        """Wait for the lock. If the wait is cancelled, nothing is left behind."""
        locks, is_enabled = self._claim(AsyncLocks)
        try:
            missed = await locks.acquire() if is_enabled else None
            if missed is not None:
                raise self._not_acquired(missed, await locks.look())
            return AsyncLock(locks)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        locks = self.__dict__.pop(_CLAIM, None)
        if locks is not None:
            await locks.release()

    def __repr__(self) -> str:
        """As it was made."""
        return f"dflock({self.key!r}, {self.timeout}, {self._ttl}, {self._shown})"

    @property
    def _shown(self) -> str:
        rate = "" if self._rate is None else f", rate={self._rate!r}"
        weight = "" if self._weight == 1 else f", weight={self._weight!r}"
        return f"limit={self._limit}{rate}{weight}"

    def _claim(self, kind: type[B]) -> tuple[B, bool]:
        """Make the locks of a block; whether the app wants any comes with them.

        Raises:
            RuntimeError: the object is in use already.
        """
        locks, is_enabled = self._make(kind)
        # One operation: of two threads that come at once, one has the object and the other is refused.
        if self.__dict__.setdefault(_CLAIM, locks) is not locks:
            raise RuntimeError(f"{self!r} is in use: make another one for this block")
        return locks, is_enabled

    def _make(self, kind: type[B]) -> tuple[B, bool]:
        app_settings = settings(self._app or current_app._get_current_object())
        make = kind.maker(
            *(MAX_LIMIT if self._limit is None else self._limit, self._ttl),
            *(app_settings, self._rate),
            group_limit=self._group_limit,
            begins=True,
        )
        lock = make(
            keys.finished(self.key, app_settings.key_prefix),
            label=_label(),
            group=self._group,
            weight=self._weight,
        )
        return kind([lock], self.timeout, app_settings.is_cluster), app_settings.enabled

    def _refuse_event_loop(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        # One greenlet may run a loop beside another that waits; and who waits there gives way.
        if detect_environment() == "default":
            raise RuntimeError(
                f"with {self!r} would stop the event loop that runs in this thread: use async with"
            )

    def _not_acquired(self, key: str, look: Look) -> LockNotAcquiredError:
        waited = f"waited {self.timeout} s" if self.timeout else ""
        return LockNotAcquiredError(key, look.refusal(waited), look.holder)


class AsyncLock(HeldLock):
    """The lock in the block of ``async with dflock(...)``."""

    _locks: AsyncLocks

    async def extend(self, seconds: int | None = None) -> bool:
        """Renew the lease now, for `seconds` (default: `ttl`). Return ``False`` if the lock is lost.

        A thread renews it all the time, even while the event loop is busy. Call this before
        something that stops all threads of the process for longer than the lease. It waits while
        the state is in doubt, as `check` does.
        """
        check_lease(seconds)
        return await self._locks.renew(seconds)

    async def check(self) -> None:
        """Return if the lock is certainly held. In doubt, wait until it is certain again.

        Raises:
            LockLostError: the lock is lost.
        """
        await self._locks.check()


class AsyncLocks(LocksBase[client.DistributedLock]):
    """A lock for asyncio."""

    _lock_class = client.DistributedLock
    _semaphore_class = client.DistributedSemaphore

    @property
    def _lock(self) -> client.DistributedLock:
        return self._locks[0]

    async def acquire(self) -> str | None:
        """Take the lock; see `Locks.acquire`."""
        lock, started = self._lock, clock.now()
        lock.acquire_timeout_s = self.timeout
        try:
            is_granted = await lock.acquire()
        except errors.RemoteError as exc:
            raise LockUnavailableError(lock.key, with_remedy(exc)) from exc
        self.waited = clock.now() - started
        return None if is_granted else lock.key

    async def release(self) -> None:
        """Release it; nothing happens if it is not held."""
        await self._lock.release()

    async def renew(self, seconds: int | None = None) -> bool:
        """Renew the lease now; ``False`` if it is lost."""
        return await self._lock.renew(seconds)

    async def check(self) -> None:
        """Return once it is certain that it is held.

        Raises:
            LockLostError: it is not.
        """
        try:
            await self._lock.check()
        except errors.LockLostError as exc:
            raise lost_error(self._lock) from exc

    async def look(self) -> Look:
        """Ask what the server knows of it."""
        try:
            return Look.of(await self._lock.inspect(), weight_of(self._lock))
        except errors.RemoteError:
            return Look()


def _bad(name: str, value: object, wanted: str) -> ValueError:
    return refused(name, value, wanted.format(""))


def _label() -> str:
    """Return what people see of who asks: the task that this is in, else the program."""
    task = current_task._get_current_object()
    if task is not None and task.request.id:
        return label_of(task.name, task.request.id, "dflock ")
    return f"{Path(sys.argv[0]).name or 'python'} {process_label()}"
