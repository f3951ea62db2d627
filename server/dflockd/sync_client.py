"""Locks for blocking code: threads, scripts, web workers, gevent and eventlet."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from dflockd import errors, operations
from dflockd.connection import Connection, run
from dflockd.hold import Hold
from dflockd.lock import LockBase, SemaphoreBase, check_lease
from dflockd.operations import Grant, Operation
from dflockd.process import current
from dflockd.renewal import Watch
from dflockd.sharding import ShardingStrategy, stable_hash_shard

__all__ = ["DistributedLock", "DistributedSemaphore", "ShardingStrategy", "stable_hash_shard"]

R = TypeVar("R")

logger = logging.getLogger("dflockd.client")


class DistributedLock(LockBase):
    """A lock that one holder has at a time, first come, first served.

    Use it with ``with``, or `acquire` and `release` it. While it is held a thread of this process
    renews its lease, and the end of the process, however sudden, frees it at once. It is not
    re-entrant. One object is for one thread at a time; only `cancel` may be called from others.

    For the arguments see `dflockd.lock.LockBase`.
    """

    _watch: Watch | None = None
    _queued: Connection | None = None
    _waiting_on: Connection | None = None
    _is_cancelled = False

    def acquire(self) -> bool:
        """Wait up to `acquire_timeout_s` for the lock; ``False`` if it was not granted in time.

        Raises:
            AlreadyHeldError: this object holds the lock or has a place in its queue.
            UnreachableError: no server there, or the connection broke while waiting.
            RefusedError: the server said no; the subclass says why.
            AcquireCancelledError: another thread called `cancel`.
        """
        self._check_free()
        grant, connection = self._begin(operations.acquire)
        if grant is None:
            current().pool.give(self._route, connection)
            return False
        self._take_up(grant, connection)
        return True

    def enqueue(self) -> str:
        """Take a place in the queue without waiting.

        Returns:
            ``"acquired"`` if the lock was free, else ``"queued"``: then call `wait`, before the
            lease of a grant that comes meanwhile ends.
        """
        self._check_free()
        grant, connection = self._begin(lambda target, _: operations.enqueue(target))
        if grant is None:
            self._queued = connection
            return "queued"
        self._take_up(grant, connection)
        return "acquired"

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` (default `acquire_timeout_s`) for the place of `enqueue` to be served.

        ``False`` if it was not in time; the place is gone then.

        Raises:
            NotEnqueuedError: there is no place.
            LeaseExpiredError: the lock was granted and its lease has ended since.
        """
        if self.held:
            return True
        connection, self._queued = self._queued, None
        if connection is None:
            raise self._not_enqueued()
        timeout = self.acquire_timeout_s if timeout_s is None else timeout_s
        grant = self._run(operations.wait(self._target, timeout), connection)
        if grant is None:
            current().pool.give(self._route, connection)
            return False
        self._take_up(grant, connection)
        return True

    def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Start the lease anew now, with `lease_ttl_s` (default: as granted); ``False`` if it is lost.

        The renewal thread does so all the time; this is for a stretch without it, such as a call
        that stops all threads of the process for longer than the lease.

        Raises:
            InvalidArgumentError: the lease is no whole number of seconds from 1.
            RemoteError: the server could not be asked or refused; the lock ends with the connection.
        """
        check_lease(lease_ttl_s, self.key)
        watch = self._watch
        if watch is None or not watch.hold.held:
            return False
        hold = watch.hold
        connection = current().renewer.unwatch(watch)
        if connection is None:
            # It broke, and who tried to reach the server again has just been stopped.
            connection = Connection.open(*self._route)
        operation = operations.renew(self._target, hold.token, lease_ttl_s or hold.lease)
        try:
            grant = run(operation, connection)
        except BaseException:
            self._lose(hold)
            raise
        if grant is None or not hold.held:
            connection.close()
            self._lose(hold)
            return False
        hold.renewed(grant)
        self._watch = current().renewer.watch(hold, connection, self._route)
        return True

    def release(self) -> bool:
        """Give the lock back, or the place in the queue; ``False`` if it was not held any more.

        A failure to reach the server is logged, not raised: the lock ends with the connection, at
        the latest with its lease, and an error here would hide that of the code under the lock.
        """
        queued, self._queued = self._queued, None
        if queued is not None:
            queued.close()
        watch, self._watch = self._watch, None
        if watch is None:
            return False
        self._hold = None
        if watch.hold.pid != os.getpid():
            return False
        try:
            return self._give_back(watch)
        except BaseException:
            # A signal's exception: the end of the connection releases the lock as well.
            watch.abandon()
            raise

    def cancel(self) -> None:
        """Make an `acquire` or `wait` of this lock in another thread raise `AcquireCancelledError`.

        Also one that is just about to begin; never undone. It takes no lock and may be called from a
        signal handler.
        """
        self._is_cancelled = True
        connection = self._waiting_on
        if connection is not None:
            connection.interrupt()

    def __enter__(self) -> Self:
        """Acquire.

        Raises:
            LockTimeoutError: not granted within `acquire_timeout_s`.
        """
        try:
            if not self.acquire():
                raise self._timed_out()
        except BaseException:
            # A signal's exception may have come between the grant and here.
            self.release()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release."""
        self.release()

    def _check_free(self) -> None:
        if self._queued is not None or self.held:
            raise self._already_held()
        self.release()  # what was lost, if anything

    def _begin(
        self, operation: Callable[[operations.Target, float | None], Operation[R]]
    ) -> tuple[R, Connection]:
        """Run an operation on a connection of the pool, or on a new one if that has died there."""
        timeout, started = self.acquire_timeout_s, time.monotonic()
        connection = current().pool.take(self._route)
        try:
            return self._run(operation(self._target, timeout), connection), connection
        except errors.UnreachableError:
            if not connection.pooled:
                raise
        # Nothing was granted that still is: a grant on the dead connection ended with it.
        current().pool.clear(self._route)
        if timeout is not None:
            timeout = max(0, timeout - (time.monotonic() - started))
        connection = Connection.open(*self._route)
        return self._run(operation(self._target, timeout), connection), connection

    def _run(self, operation: Operation[R], connection: Connection) -> R:
        self._waiting_on = connection
        try:
            if self._is_cancelled:
                connection.close()
                raise self._cancelled()
            return run(operation, connection)
        except errors.UnreachableError:
            if self._is_cancelled:
                raise self._cancelled() from None
            raise
        finally:
            self._waiting_on = None

    def _give_back(self, watch: Watch) -> bool:
        hold = watch.hold
        connection = current().renewer.unwatch(watch)
        if connection is None or not hold.held:
            watch.abandon()
            logger.warning("lock %r on %s was lost before its release", self.key, self.server)
            return False
        try:
            released = run(operations.release(self._target, hold.token), connection)
        except errors.RemoteError as exc:
            logger.warning("lock %r could not be released in order: %s", self.key, exc)
            return False
        current().pool.give(self._route, connection)
        return released

    def _take_up(self, grant: Grant, connection: Connection) -> None:
        try:
            hold = Hold(self._target, grant, self._renew_ratio, self._lost_callback())
            self._watch = current().renewer.watch(hold, connection, self._route)
            self._hold = hold
        except BaseException:
            connection.close()
            raise


class DistributedSemaphore(SemaphoreBase, DistributedLock):
    """A lock that up to `limit` holders have at a time, first come, first served.

    For the other arguments see `dflockd.lock.LockBase`.
    """
