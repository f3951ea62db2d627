"""Locks for blocking code: threads, scripts, web workers, gevent and eventlet."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from dflockd import errors, operations
from dflockd.connection import Connection, run
from dflockd.hold import Hold
from dflockd.lock import LockBase, SemaphoreBase, check_lease, check_timeout, check_token
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
    _asking: Connection | None = None
    """The connection of the request under way. Whoever is interrupted closes it: see `_let_go`."""
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
        return self._acquire()

    def enqueue(self) -> str:
        """Take a place in the queue without waiting.

        Returns:
            ``"acquired"`` if the lock was free, else ``"queued"``: then call `wait`, before the
            lease of a grant that comes meanwhile ends.
        """
        self._check_free()
        try:
            grant = self._begin(lambda target, _: operations.enqueue(target))
            if grant is not None:
                self._take_up(grant)
                return "acquired"
            self._queued = self._asking
            self._end_request()
            return "queued"
        except BaseException:
            self._let_go()
            raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` (default `acquire_timeout_s`) for the place of `enqueue` to be served.

        ``False`` if it was not in time; the place is gone then.

        Raises:
            InvalidArgumentError: the time is no number of seconds from 0.
            NotEnqueuedError: there is no place.
            LeaseExpiredError: the lock was granted and its lease has ended since.
        """
        check_timeout(timeout_s, self.key, "timeout_s")
        if self.held:
            return True
        if self._queued is None:
            raise self._not_enqueued()
        timeout = self.acquire_timeout_s if timeout_s is None else timeout_s
        try:
            self._asking, self._queued = self._queued, None
            return self._settle(self._run(operations.wait(self._target, timeout), self._asking))
        except BaseException:
            self._let_go()
            raise

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
        try:
            connection = current().renewer.unwatch(watch)
            if connection is None:
                # It broke, and who tried to reach the server again has just been stopped.
                connection = Connection.open(*self._route)
            operation = operations.renew(self._target, hold.token, lease_ttl_s or hold.lease)
            grant = run(operation, connection)
            if grant is not None and hold.held:
                hold.renewed(grant)
                self._watch = current().renewer.watch(hold, connection, self._route)
                return True
            connection.close()
        except BaseException:
            watch.abandon()
            self._let_go()
            self._hold = hold  # lost, not released: its fence stays readable
            self._lose(hold)
            raise
        self._lose(hold)
        return False

    def detach(self, lease_ttl_s: int | None = None) -> str | None:
        """Let the lock stay held for `lease_ttl_s` (default: as granted), and have it no more.

        It outlives this object, this process and its connection. It ends with its lease, or when
        somebody who was given the token has taken it over with `adopt` and releases it. Until here
        it ends with this process, as ever. Who has adopted it already keeps it.

        Returns:
            The token, or ``None`` if it was not this object's any more: lost, or adopted.

        Raises:
            InvalidArgumentError: the lease is no whole number of seconds from 1.
            RemoteError: the server could not be asked or refused; the lock ends with the connection.
        """
        check_lease(lease_ttl_s, self.key)
        watch = self._watch
        if watch is None or not watch.hold.held:
            return None
        hold = watch.hold
        try:
            self._asking = current().renewer.unwatch(watch)
            if self._asking is None:
                self._asking = Connection.open(*self._route)
            lease = lease_ttl_s or hold.lease
            detached = run(operations.detach(self._target, hold.token, lease), self._asking)
            if not detached:
                self._let_go()
                return None
            self._hold = self._watch = None
            self._settle(None)
        except BaseException:
            self._let_go()
            raise
        return hold.token.decode()

    def adopt(self, token: str) -> bool:
        """Take over a lock that is held, by its token; ``False`` if it is held no more.

        From now on it is this object's: renewed by this process, and free when it ends.

        Args:
            token: as `detach` returned it, or as another holder has it.

        Raises:
            AlreadyHeldError: this object holds the lock or has a place in its queue.
            InvalidArgumentError: it is no token.
            RemoteError: the server could not be asked or refused.
        """
        secret = check_token(token, self.key)
        self._check_free()
        try:
            grant = self._begin(lambda target, _: operations.renew(target, secret, target.lease))
            return self._settle(grant)
        except BaseException:
            self._let_go()
            raise

    def release(self) -> bool:
        """Give the lock back, or the place in the queue; ``False`` if it was not held any more.

        Also ``False`` if its connection had just broken and it ended with the attempt to renew it
        over another.

        A failure to reach the server is logged, not raised: an error here would hide that of the
        code under the lock. A thread tries again as long as the lease lasts, for a server that is
        restarted may remember the lock.
        """
        released, connection = False, None
        try:
            self._hold = None
            if self._queued is not None:
                self._queued.close()
            if self._watch is not None and self._watch.hold.pid == os.getpid():
                released, connection = self._give_back(self._watch)
            self._queued = self._watch = None
        except BaseException:
            self._let_go()
            raise
        if connection is not None:
            current().pool.give(self._route, connection)
        return released

    def inspect(self) -> dict[str, Any]:
        """Ask the server who holds the key and who waits for it.

        Returns:
            ``holders`` and ``waiters`` in order, each with its ``label`` and its ``held_s`` or
            ``waited_s`` in seconds, beside ``key`` and ``limit``.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return current().pool.ask(self._route, lambda: operations.inspect(self._target))

    def cancel(self) -> None:
        """Make an `acquire` or `wait` of this lock in another thread raise `AcquireCancelledError`.

        Also one that is just about to begin; never undone. It takes no lock and may be called from a
        signal handler.
        """
        self._is_cancelled = True
        connection = self._asking
        if connection is not None:
            connection.interrupt()

    def __enter__(self) -> Self:
        """Acquire.

        Raises:
            LockTimeoutError: not granted within `acquire_timeout_s`.
        """
        self._check_free()  # apart: what is held already is not this block's to let go
        try:
            if not self._acquire():
                raise self._timed_out()
            return self
        except BaseException:
            # A signal's exception may have come between the grant and here.
            self._let_go()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release."""
        self.release()

    def _check_free(self) -> None:
        # The place of a forked parent is closed here.
        if self.held or (self._queued is not None and not self._queued.closed):
            raise self._already_held()
        if self._watch is not None:
            self.release()  # it was lost

    def _acquire(self) -> bool:
        try:
            return self._settle(self._begin(operations.acquire))
        except BaseException:
            self._let_go()
            raise

    def _begin(self, operation: Callable[[operations.Target, float | None], Operation[R]]) -> R:
        """Run an operation on a connection of the pool, or on a new one if that has died there."""
        timeout, started = self.acquire_timeout_s, time.monotonic()
        self._asking = connection = current().pool.take(self._route)
        try:
            return self._run(operation(self._target_on(connection), timeout), connection)
        except errors.UnreachableError:
            if not connection.pooled:
                raise
        # Nothing was granted that still is: a grant on the dead connection ended with it.
        current().pool.clear(self._route)
        if timeout is not None:
            timeout = max(0, timeout - (time.monotonic() - started))
        self._asking = connection = Connection.open(*self._route)
        return self._run(operation(self._target_on(connection), timeout), connection)

    def _run(self, operation: Operation[R], connection: Connection) -> R:
        try:
            if self._is_cancelled:
                raise self._cancelled()
            return run(operation, connection)
        except errors.UnreachableError:
            if self._is_cancelled:
                raise self._cancelled() from None
            raise

    def _settle(self, grant: Grant | None) -> bool:
        """Do what follows from the end of a wait: hold the lock, or give the connection away."""
        if grant is not None:
            self._take_up(grant)
            return True
        connection = self._asking
        self._end_request()
        if connection is not None:
            current().pool.give(self._route, connection)
        return False

    def _take_up(self, grant: Grant) -> None:
        assert self._asking is not None
        hold = Hold(self._target_anew, grant, self._renew_ratio, self._lost_callback())
        self._watch = current().renewer.watch(hold, self._asking, self._route)
        self._hold = hold
        self._end_request()

    def _end_request(self) -> None:
        self._asking = None
        # `cancel` sets its mark before it looks for a connection. Without the mark now, it finds none,
        # and never cuts a connection that is another lock's by then.
        if self._is_cancelled:
            raise self._cancelled()

    def _let_go(self) -> None:
        """Close whatever this lock stands on: the end of its connection frees it.

        An exception raised by a signal handler comes between any two instructions. So connections
        are attributes before a request goes out on them, not only variables: those would keep them
        open, and the lock held, for as long as somebody keeps the traceback.
        """
        self._hold = None
        for connection in (self._asking, self._queued):
            if connection is not None:
                connection.close()
        if self._watch is not None:
            self._watch.abandon()
        self._asking = self._queued = self._watch = None

    def _give_back(self, watch: Watch) -> tuple[bool, Connection | None]:
        """Release a hold; return whether it was one, and the connection if that can be reused."""
        hold = watch.hold
        connection = current().renewer.unwatch(watch)
        if not hold.held:
            watch.abandon()
            logger.warning("lock %r on %s was lost before its release", self.key, self.server)
            return False, None
        try:
            if connection is not None:
                try:
                    return run(operations.release(self._target, hold.token), connection), connection
                except errors.UnreachableError as exc:
                    if isinstance(exc.__cause__, TimeoutError):
                        raise
            # It broke. The server may wait for a renewal, all the lease long: say that none comes.
            connection = Connection.open(*self._route)
            return run(operations.release(self._target, hold.token), connection), connection
        except errors.RemoteError as exc:
            logger.warning("lock %r could not be released in order: %s", self.key, exc)
            if isinstance(exc, errors.UnreachableError | errors.DrainingError):
                current().renewer.release_later(hold, self._route)
            return False, None


class DistributedSemaphore(SemaphoreBase, DistributedLock):
    """A lock that up to `limit` holders have at a time, first come, first served.

    For the other arguments see `dflockd.lock.LockBase`.
    """
