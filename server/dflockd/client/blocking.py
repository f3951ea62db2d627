"""Locks for blocking code: threads, scripts, web workers, gevent and eventlet."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from dflockd import errors
from dflockd.client import operations
from dflockd.client.connection import Connection, run
from dflockd.client.lease import Hold
from dflockd.client.lock import (
    ANSWER_PATIENCE,
    RELEASE_PATIENCE,
    KeepPlace,
    LockBase,
    SemaphoreBase,
    check_lease,
    check_timeout,
    check_token,
    give_up_at,
)
from dflockd.client.operations import GRACE, Detour, Grant, Operation, Progress, Target
from dflockd.client.process import current
from dflockd.client.reactor import Watch
from dflockd.client.routing import PASSING, Ask, ShardMap
from dflockd.sharding import ShardingStrategy, stable_hash_shard

__all__ = [
    "DistributedLock",
    "DistributedSemaphore",
    "KeepPlace",
    "ShardingStrategy",
    "stable_hash_shard",
]

R = TypeVar("R")

CANCEL_CHECK = 0.05
"""Seconds between looks at whether a pause has been cancelled."""

logger = logging.getLogger("dflockd.client")


class DistributedLock(LockBase):
    """A lock that one holder has at a time, first come, first served.

    Use it with ``with``, or `acquire` and `release` it. While it is held a thread of this process
    renews its lease, and the end of the process, however sudden, frees it at once. It is not
    re-entrant. One object is for one thread at a time; only `cancel` may be called from others.

    For the arguments see `dflockd.client.lock.LockBase`.
    """

    _watch: Watch | None = None
    _queued: Connection | None = None
    _asking: Connection | None = None
    """The connection of the request under way. Whoever is interrupted closes it: see `_let_go`."""
    _telling: Connection | None = None
    """The same, for a request about what is held: `cancel` does not end it."""
    _is_cancelled = False

    def acquire(self) -> bool:
        """Wait up to `acquire_timeout_s` for the lock; ``False`` if it was not granted in time.

        ``False`` comes from a server: somebody else holds the lock.

        Raises:
            AlreadyHeldError: this object holds the lock or has a place in its queue.
            UnreachableError: no server there, or the connection broke while waiting, or it has said
                nothing for two seconds more than `acquire_timeout_s`; in a cluster, no server of it
                can be reached, or the one in charge says nothing and is not replaced in time.
            RefusedError: the server said no; the subclass says why. In a cluster a `MovedError`,
                `RecoveringError` or `DrainingError` is followed until the time is over.
            AcquireCancelledError: another thread called `cancel`.
        """
        self._check_free()
        return self._acquire()

    def enqueue(self, place: str | None = None) -> str:
        """Take a place in the queue without waiting.

        Args:
            place: one that was kept for whoever takes it up: what a `wait` with `KeepPlace` has left
                in `place`. If it is there no more this is a new one, at the end of the queue.

        Returns:
            ``"acquired"`` if the lock was free, or held for this place, else ``"queued"``: then call
            `wait`, before the lease of a grant that comes meanwhile ends.

        Raises:
            InvalidArgumentError: the place can be none.
            RemoteError: as with `acquire`; `acquire_timeout_s` bounds this as well.
        """
        self._check_free()
        operation = self._enqueueing(place)
        try:
            grant = self._begin(operation, self.acquire_timeout_s)
            if grant is not None:
                self._take_up(grant)
                return "acquired"
            self._queued = self._asking
            self._end_request()
            return "queued"
        except BaseException:
            self._let_go()
            raise

    def wait(self, timeout_s: float | None = None, keep: KeepPlace | None = None) -> bool:
        """Wait up to `timeout_s` (default `acquire_timeout_s`) for the place of `enqueue` to be served.

        ``False`` if it was not in time; the place is gone then, unless it is to be kept.

        Args:
            timeout_s: seconds; rounded up to whole ones if the place is to be kept.
            keep: keep the place, under the name that is then in `place`, for an `enqueue` to take it
                up. If this wait ends in another way than ``False``, it is not kept.

        Raises:
            InvalidArgumentError: a time is no number of seconds from 0.
            NotEnqueuedError: there is no place.
            LeaseExpiredError: the lock was granted and its lease has ended since.
            RemoteError: as with `acquire`.
        """
        check_timeout(timeout_s, self.key, "timeout_s")
        if self.held:
            return True
        if self._queued is None:
            raise self._not_enqueued()
        timeout = self.acquire_timeout_s if timeout_s is None else timeout_s
        progress = self._progress(keep=keep)
        try:
            self._asking, self._queued = self._queued, None
            if self._shards is None:
                target = self._target._replace(progress=progress)
                waiting = operations.wait(target, timeout)
                grant = self._run(waiting, self._asking, give_up_at(timeout))
            else:
                # Both begin with the wait for this place.
                begin = operations.acquire if keep is None else operations.queue
                grant = self._follow(self._shards, begin, timeout, self._asking, progress)
            self.place = progress.kept.decode() or None
            return self._settle(grant)
        except BaseException:
            self._let_go()
            raise

    def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Start the lease anew now, with `lease_ttl_s` (default: as granted); ``False`` if it is lost.

        The renewal thread does so all the time; this is for a stretch without it, such as a call
        that stops all threads of the process for longer than the lease.

        Raises:
            InvalidArgumentError: the lease is no whole number of seconds from 1.
            RemoteError: the server could not be asked or refused, or said nothing for 10 s or until
                the lease was over; the lock ends with the connection.
        """
        check_lease(lease_ttl_s, self.key)
        watch = self._watch
        if watch is None or not watch.hold.held:
            return False
        hold = watch.hold
        try:
            connection = current().renewer.unwatch(watch, waits=True)
            lease = lease_ttl_s or hold.lease
            grant, connection = self._tell(
                lambda target: operations.renew(target, hold.token, lease), connection, hold.left
            )
            if grant is not None and hold.held:
                hold.renewed(grant)
                hold.target = self._target_anew
                self._watch = current().renewer.watch(hold, connection, self._route)
                self._telling = None
                return True
            connection.close()
            self._telling = None
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
            RemoteError: the server could not be asked or refused, or said nothing for 10 s or until
                the lease was over; the lock ends with the connection.
        """
        check_lease(lease_ttl_s, self.key)
        watch = self._watch
        if watch is None or not watch.hold.held:
            return None
        hold = watch.hold
        try:
            connection = current().renewer.unwatch(watch, waits=True)
            lease = lease_ttl_s or hold.lease
            detached, self._asking = self._tell(
                lambda target: operations.detach(target, hold.token, lease), connection, hold.left
            )
            self._hold = self._watch = self._telling = None
            self._settle(None)
        except BaseException:
            self._let_go()
            raise
        return hold.token.decode() if detached else None

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
            grant = self._begin(
                lambda target, _: operations.confirm(target, secret, target.lease), ANSWER_PATIENCE
            )
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
        restarted may remember the lock; that goes for one that says nothing for a second, too.
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
        return self._question(operations.inspect)

    def evict(self, fence: int) -> bool:
        """End the hold with this fence without its token; ``False`` if it has ended already.

        Somebody else gets the lock at once, and the former holder goes on until its next renewal:
        for those who know that it is stuck.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return self._question(lambda target: operations.evict(target, fence))

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
            return self._settle(self._begin(operations.acquire, self.acquire_timeout_s))
        except BaseException:
            self._let_go()
            raise

    def _begin(
        self, operation: Callable[[Target, float | None], Operation[R]], timeout: float | None
    ) -> R:
        """Run an operation at the server in charge; `_asking` is then the connection to it."""
        if self._shards is None:
            return self._ask(operation, timeout, None, give_up_at(timeout))
        return self._follow(self._shards, operation, timeout, None)

    def _follow(
        self,
        shards: ShardMap,
        operation: Callable[[Target, float | None], Operation[R]],
        timeout: float | None,
        connection: Connection | None,
        progress: Progress | None = None,
    ) -> R:
        """Run an operation wherever in the cluster its key is.

        A connection that is given has a place in the queue: as long as it has, that is waited for.
        """
        pool, is_queued = current().pool, connection is not None
        progress, until = progress or Progress(), give_up_at(timeout)

        def look(is_waiting: bool) -> float:
            return pool.look(shards, self._target.key, self._route, is_waiting)

        def attempt(step: Ask) -> R:
            nonlocal is_queued
            connection = self._asking
            if connection is not None and (connection.closed or connection.address != step.server):
                self._asking, is_queued = None, False
                pool.give(self._route._replace(address=connection.address), connection)
                connection = None
            self._go_to(step.server)
            was_queued = is_queued
            answer = self._ask(going_on, step.timeout, connection, until, look)
            is_queued = was_queued and isinstance(answer, errors.RecoveringError)
            return operations.raised(answer)

        def going_on(target: Target, timeout: float | None) -> Operation[R | Detour]:
            nonlocal is_queued
            begin: Callable[..., Operation[Any]] = operations.wait if is_queued else operation
            is_queued = False
            return operations.kept(begin(target._replace(progress=progress), timeout))

        self._asking = connection
        return pool.follow(
            self._path(shards, timeout, connection), self._route, attempt, self._pause
        )

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_cancelled and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, CANCEL_CHECK))
        if self._is_cancelled:
            raise self._cancelled()

    def _ask(
        self,
        operation: Callable[[Target, float | None], Operation[R]],
        timeout: float | None,
        connection: Connection | None,
        until: float | None,
        look: Callable[[bool], float] | None = None,
    ) -> R:
        """Run an operation on a connection of the pool, or on a new one if that has died there."""
        pool = current().pool
        if connection is None:
            connection = pool.take(self._route, until)
        self._asking = connection
        try:
            return self._run(
                operation(self._target_on(connection), timeout), connection, until, look
            )
        except errors.UnreachableError:
            if not connection.pooled:
                raise
            # The other idle ones are most likely dead as well.
            pool.clear(self._route)
            if until is not None and time.monotonic() >= until:
                raise
        # Nothing was granted that still is: a grant on the dead connection ended with it.
        if timeout is not None and until is not None:
            timeout = min(timeout, max(0, until - GRACE - time.monotonic()))
        self._asking = connection = Connection.open(*self._route, until)
        return self._run(operation(self._target_on(connection), timeout), connection, until, look)

    def _run(
        self,
        operation: Operation[R],
        connection: Connection,
        until: float | None = None,
        look: Callable[[bool], float] | None = None,
    ) -> R:
        try:
            if self._is_cancelled:
                raise self._cancelled()
            return run(operation, connection, until, look)
        except errors.UnreachableError:
            if self._is_cancelled:
                raise self._cancelled() from None
            raise

    def _tell(
        self,
        operation: Callable[[Target], Operation[R]],
        connection: Connection | None,
        timeout: float,
    ) -> tuple[R, Connection]:
        """Run an operation about what is held, on its connection or, if that broke, on a new one.

        `_telling` is then the connection, as long as the caller stands on it.
        """
        until = time.monotonic() + timeout
        if self._shards is None:
            self._telling = connection or Connection.open(*self._route, until)
            return run(operation(self._target), self._telling, until), self._telling
        shards, pool = self._shards, current().pool
        # Its server may have the lock after all, and would free it with this connection.
        self._telling = stood_on = connection

        def attempt(step: Ask) -> tuple[R, Connection]:
            route, connection = self._go_to(step.server), self._telling
            if connection is None or connection.closed or connection.address != step.server:
                if connection is not None and connection is not stood_on:
                    connection.close()
                self._telling = connection = Connection.open(*route, until)
            told = operations.kept(operation(self._target))
            return operations.raised(run(told, connection, until, look)), connection

        def look(is_waiting: bool) -> float:
            return pool.look(shards, self._target.key, self._route, is_waiting)

        path = self._path(shards, timeout, connection)
        try:
            return pool.follow(path, self._route, attempt)
        finally:
            if stood_on is not None and stood_on is not self._telling:
                stood_on.close()

    def _question(self, operation: Callable[[Target], Operation[R]]) -> R:
        """Run an operation that leaves nothing behind, whatever else this object is doing."""
        pool, target = current().pool, self._target
        if self._shards is None:
            return pool.ask(self._route, lambda: operation(target), ANSWER_PATIENCE)

        def attempt(step: Ask) -> R:
            route = self._route._replace(address=step.server)
            return pool.ask(route, lambda: operation(target.at(step.server)), GRACE)

        return pool.follow(self._path(self._shards, ANSWER_PATIENCE), self._route, attempt)

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
        hold = Hold(
            self._target_anew, grant, self._renew_ratio, self._lost_callback(), self._shards
        )
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
        for connection in (self._asking, self._queued, self._telling):
            if connection is not None:
                connection.close()
        if self._watch is not None:
            self._watch.abandon()
        self._asking = self._queued = self._telling = self._watch = None

    def _give_back(self, watch: Watch) -> tuple[bool, Connection | None]:
        """Release a hold; return whether it was one, and the connection if that can be reused."""
        hold = watch.hold
        connection = current().renewer.unwatch(watch)
        if not hold.held:
            watch.abandon()
            logger.warning("lock %r on %s was lost before its release", self.key, self.server)
            return False, None
        try:
            if self._shards is not None:
                patience = min(hold.left, RELEASE_PATIENCE)
                released, connection = self._tell(
                    lambda target: operations.release(target, hold.token),
                    connection,
                    patience,
                )
                self._telling = None
                return released, connection
            until = time.monotonic() + RELEASE_PATIENCE
            if connection is not None:
                try:
                    releasing = operations.release(self._target, hold.token)
                    return run(releasing, connection, until), connection
                except errors.UnreachableError as exc:
                    if isinstance(exc.__cause__, TimeoutError):
                        raise
            # It broke. The server may wait for a renewal, all the lease long: say that none comes.
            connection = Connection.open(*self._route, until)
            return run(operations.release(self._target, hold.token), connection, until), connection
        except errors.RemoteError as exc:
            logger.warning("lock %r could not be released in order: %s", self.key, exc)
            if self._telling is not None:
                self._telling.close()
                self._telling = None
            if isinstance(exc, PASSING):
                current().renewer.release_later(hold, self._route)
            return False, None


class DistributedSemaphore(SemaphoreBase, DistributedLock):
    """A lock that up to `limit` holders have at a time, first come, first served.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """
