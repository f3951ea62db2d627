"""Locks for asyncio code. The same as in `dflockd.sync_client`, with ``await``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from dflockd import errors
from dflockd.client import aio_connection as aio
from dflockd.client import operations
from dflockd.client.aio_connection import AsyncConnection
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
from dflockd.client.pool import Route
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

Look: TypeAlias = Callable[[bool], Awaitable[float]]
"""What looks at a server that says nothing; see `dflockd.client.connection.run`."""

logger = logging.getLogger("dflockd.client")


class DistributedLock(LockBase):
    """A lock that one holder has at a time, first come, first served.

    Use it with ``async with``, or `acquire` and `release` it. While it is held its lease is renewed
    on the event loop. A cancelled `acquire` leaves nothing behind: neither a place in the queue nor a
    lock. It is not re-entrant. One object is for one task at a time.

    For the arguments see `dflockd.client.lock.LockBase`.
    """

    _keeper: _Keeper | None = None
    _place: _Place | None = None

    async def acquire(self) -> bool:
        """Wait up to `acquire_timeout_s` for the lock; ``False`` if it was not granted in time.

        ``False`` comes from a server: somebody else holds the lock.

        Raises:
            AlreadyHeldError: this object holds the lock or has a place in its queue.
            UnreachableError: no server there, or the connection broke while waiting, or it has said
                nothing for two seconds more than `acquire_timeout_s`; in a cluster, no server of it
                can be reached, or the one in charge says nothing and is not replaced in time.
            RefusedError: the server said no; the subclass says why. In a cluster a `MovedError`,
                `RecoveringError` or `DrainingError` is followed until the time is over.
        """
        await self._check_free()
        grant, connection = await self._begin(operations.acquire, self.acquire_timeout_s)
        if grant is None:
            aio.pool().give(self._route, connection)
            return False
        self._take_up(grant, connection)
        return True

    async def enqueue(self, place: str | None = None) -> str:
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
        await self._check_free()
        grant, connection = await self._begin(self._enqueueing(place), self.acquire_timeout_s)
        if grant is None:
            self._place = _Place(connection)
            return "queued"
        self._take_up(grant, connection)
        return "acquired"

    async def wait(self, timeout_s: float | None = None, keep: KeepPlace | None = None) -> bool:
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
        progress = self._progress(keep=keep)
        place, self._place = self._place, None
        if place is None:
            raise self._not_enqueued()
        connection = place.take()
        timeout = self.acquire_timeout_s if timeout_s is None else timeout_s
        if self._shards is None:
            target = self._target._replace(progress=progress)
            waiting, until = operations.wait(target, timeout), give_up_at(timeout)
            grant = await aio.run(waiting, connection, target.server, until)
        else:
            # Both begin with the wait for this place.
            begin = operations.acquire if keep is None else operations.queue
            grant, connection = await self._follow(
                self._shards, begin, timeout, connection, progress
            )
        self.place = progress.kept.decode() or None
        if grant is None:
            aio.pool().give(self._route, connection)
            return False
        self._take_up(grant, connection)
        return True

    async def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Start the lease anew now, with `lease_ttl_s` (default: as granted); ``False`` if it is lost.

        The event loop does so by itself; this is for a stretch in which it cannot run.

        Raises:
            InvalidArgumentError: the lease is no whole number of seconds from 1.
            RemoteError: the server could not be asked or refused, or said nothing for 10 s or until
                the lease was over; the lock ends with the connection.
        """
        check_lease(lease_ttl_s, self.key)
        keeper = self._keeper
        if keeper is None or not keeper.hold.held:
            return False
        hold = keeper.hold
        lease = lease_ttl_s or hold.lease
        try:
            grant, connection = await self._tell(
                lambda target: operations.renew(target, hold.token, lease),
                await keeper.stop(waits=True),
                hold.left,
            )
        except BaseException:
            keeper.abandon()
            self._lose(hold)
            raise
        if grant is None or not hold.held:
            connection.close()
            self._lose(hold)
            return False
        hold.renewed(grant)
        hold.target = self._target_anew
        self._keeper = _Keeper(hold, connection, self._route)
        return True

    async def detach(self, lease_ttl_s: int | None = None) -> str | None:
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
        keeper = self._keeper
        if keeper is None or not keeper.hold.held:
            return None
        self._keeper = self._hold = None
        hold = keeper.hold
        lease = lease_ttl_s or hold.lease
        try:
            detached, connection = await self._tell(
                lambda target: operations.detach(target, hold.token, lease),
                await keeper.stop(waits=True),
                hold.left,
            )
        except BaseException:
            keeper.abandon()
            raise
        if not detached:
            connection.close()
            return None
        aio.pool().give(self._route, connection)
        return hold.token.decode()

    async def adopt(self, token: str) -> bool:
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
        await self._check_free()
        grant, connection = await self._begin(
            lambda target, _: operations.confirm(target, secret, target.lease), ANSWER_PATIENCE
        )
        if grant is None:
            aio.pool().give(self._route, connection)
            return False
        self._take_up(grant, connection)
        return True

    async def release(self) -> bool:
        """Give the lock back, or the place in the queue; ``False`` if it was not held any more.

        A failure to reach the server is logged, not raised: an error here would hide that of the
        code under the lock. The event loop tries again as long as the lease lasts, for a server
        that is restarted may remember the lock; that goes for one that says nothing for a second, too.
        """
        place, self._place = self._place, None
        if place is not None:
            place.take().close()
        keeper, self._keeper = self._keeper, None
        self._hold = None
        if keeper is None or keeper.hold.pid != os.getpid():
            return False
        try:
            return await self._give_back(keeper)
        except errors.RemoteError as exc:
            logger.warning("lock %r could not be released in order: %s", self.key, exc)
            if isinstance(exc, PASSING):
                later = asyncio.ensure_future(_release_later(keeper.hold, self._route))
                _later.add(later)
                later.add_done_callback(_later.discard)
            return False
        except BaseException:
            # Cancelled: the end of the connection releases the lock as well.
            keeper.abandon()
            raise

    async def inspect(self) -> dict[str, Any]:
        """Ask the server who holds the key and who waits for it.

        Returns:
            ``holders`` and ``waiters`` in order, each with its ``label`` and its ``held_s`` or
            ``waited_s`` in seconds, beside ``key`` and ``limit``.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return await self._question(operations.inspect)

    async def evict(self, fence: int) -> bool:
        """End the hold with this fence without its token; ``False`` if it has ended already.

        Somebody else gets the lock at once, and the former holder goes on until its next renewal:
        for those who know that it is stuck.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return await self._question(lambda target: operations.evict(target, fence))

    async def __aenter__(self) -> Self:
        """Acquire.

        Raises:
            LockTimeoutError: not granted within `acquire_timeout_s`.
        """
        if not await self.acquire():
            raise self._timed_out()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release."""
        await self.release()

    async def _check_free(self) -> None:
        # The place of a forked parent is closed here.
        if self.held or (self._place is not None and not self._place.connection.closed):
            raise self._already_held()
        if self._keeper is not None:
            await self.release()  # it was lost

    async def _begin(
        self, operation: Callable[[Target, float | None], Operation[R]], timeout: float | None
    ) -> tuple[R, AsyncConnection]:
        """Run an operation at the server in charge; return the connection to it as well."""
        if self._shards is None:
            return await self._ask(operation, timeout, None, give_up_at(timeout))
        return await self._follow(self._shards, operation, timeout, None)

    async def _follow(
        self,
        shards: ShardMap,
        operation: Callable[[Target, float | None], Operation[R]],
        timeout: float | None,
        connection: AsyncConnection | None,
        progress: Progress | None = None,
    ) -> tuple[R, AsyncConnection]:
        """Run an operation wherever in the cluster its key is.

        A connection that is given has a place in the queue: as long as it has, that is waited for.
        """
        pool, is_queued = aio.pool(), connection is not None
        progress, until = progress or Progress(), give_up_at(timeout)
        path = self._path(shards, timeout, connection)

        def look(is_waiting: bool) -> Awaitable[float]:
            return pool.look(shards, self._target.key, self._route, is_waiting)

        async def attempt(step: Ask) -> R:
            nonlocal connection, is_queued
            if connection is not None and (connection.closed or connection.address != step.server):
                pool.give(self._route._replace(address=connection.address), connection)
                connection, is_queued = None, False
            self._go_to(step.server)
            was_queued = is_queued
            answer, connection = await self._ask(going_on, step.timeout, connection, until, look)
            is_queued = was_queued and isinstance(answer, errors.RecoveringError)
            return operations.raised(answer)

        def going_on(target: Target, timeout: float | None) -> Operation[R | Detour]:
            nonlocal is_queued
            begin: Callable[..., Operation[Any]] = operations.wait if is_queued else operation
            is_queued = False
            return operations.kept(begin(target._replace(progress=progress), timeout))

        try:
            answer = await pool.follow(path, self._route, attempt)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        assert connection is not None
        return answer, connection

    async def _ask(
        self,
        operation: Callable[[Target, float | None], Operation[R]],
        timeout: float | None,
        connection: AsyncConnection | None,
        until: float | None,
        look: Look | None = None,
    ) -> tuple[R, AsyncConnection]:
        """Run an operation on a connection of the pool, or on a new one if that has died there."""
        pool = aio.pool()
        if connection is None:
            connection = await pool.take(self._route, until)
        try:
            return await self._run(operation, connection, timeout, until, look), connection
        except errors.UnreachableError:
            if not connection.pooled or (until is not None and time.monotonic() >= until):
                raise
        # Nothing was granted that still is: a grant on the dead connection ended with it.
        if timeout is not None and until is not None:
            timeout = min(timeout, max(0, until - GRACE - time.monotonic()))
        connection = await AsyncConnection.open(self._route, until)
        return await self._run(operation, connection, timeout, until, look), connection

    async def _run(
        self,
        operation: Callable[[Target, float | None], Operation[R]],
        connection: AsyncConnection,
        timeout: float | None,
        until: float | None,
        look: Look | None,
    ) -> R:
        target = self._target_on(connection)
        return await aio.run(operation(target, timeout), connection, target.server, until, look)

    async def _tell(
        self,
        operation: Callable[[Target], Operation[R]],
        connection: AsyncConnection | None,
        timeout: float,
    ) -> tuple[R, AsyncConnection]:
        """Run an operation about what is held, on its connection or, if that broke, on a new one."""
        until = time.monotonic() + timeout
        if self._shards is None:
            connection = connection or await AsyncConnection.open(self._route, until)
            target = self._target
            return await aio.run(operation(target), connection, target.server, until), connection
        shards, pool = self._shards, aio.pool()
        path = self._path(shards, timeout, connection)
        # Its server may have the lock after all, and would free it with this connection.
        stood_on = connection

        async def attempt(step: Ask) -> tuple[R, AsyncConnection]:
            nonlocal connection
            route = self._go_to(step.server)
            if connection is None or connection.closed or connection.address != step.server:
                if connection is not None and connection is not stood_on:
                    connection.close()
                connection = await AsyncConnection.open(route, until)
            told = operations.kept(operation(self._target))
            telling = aio.run(told, connection, str(step.server), until, look)
            return operations.raised(await telling), connection

        def look(is_waiting: bool) -> Awaitable[float]:
            return pool.look(shards, self._target.key, self._route, is_waiting)

        try:
            return await pool.follow(path, self._route, attempt)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        finally:
            if stood_on is not None and stood_on is not connection:
                stood_on.close()

    async def _question(self, operation: Callable[[Target], Operation[R]]) -> R:
        """Run an operation that leaves nothing behind, whatever else this object is doing."""
        pool, target = aio.pool(), self._target
        if self._shards is None:
            return await pool.ask(self._route, lambda: operation(target), ANSWER_PATIENCE)

        async def attempt(step: Ask) -> R:
            route = self._route._replace(address=step.server)
            return await pool.ask(route, lambda: operation(target.at(step.server)), GRACE)

        path = self._path(self._shards, ANSWER_PATIENCE)
        return await pool.follow(path, self._route, attempt)

    async def _give_back(self, keeper: _Keeper) -> bool:
        hold = keeper.hold
        connection = await keeper.stop()
        if not hold.held:
            if connection is not None:
                connection.close()
            keeper.abandon()
            logger.warning("lock %r on %s was lost before its release", self.key, self.server)
            return False
        released, until = None, time.monotonic() + RELEASE_PATIENCE
        if self._shards is not None:
            released, connection = await self._tell(
                lambda target: operations.release(target, hold.token),
                connection,
                min(hold.left, RELEASE_PATIENCE),
            )
        elif connection is not None:
            operation = operations.release(self._target, hold.token)
            try:
                released = await aio.run(operation, connection, self._target.server, until)
            except errors.UnreachableError as exc:
                if isinstance(exc.__cause__, TimeoutError):
                    raise
        if connection is None or released is None:
            # It broke. The server may wait for a renewal, all the lease long: say that none comes.
            connection = await AsyncConnection.open(self._route, until)
            operation = operations.release(self._target, hold.token)
            released = await aio.run(operation, connection, self._target.server, until)
        aio.pool().give(self._route, connection)
        return released

    def _take_up(self, grant: Grant, connection: AsyncConnection) -> None:
        self._hold = Hold(
            self._target_anew, grant, self._renew_ratio, self._lost_callback(), self._shards
        )
        self._keeper = _Keeper(self._hold, connection, self._route)


class DistributedSemaphore(SemaphoreBase, DistributedLock):
    """A lock that up to `limit` holders have at a time, first come, first served.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


_later: set[asyncio.Future[None]] = set()
"""What tries again to release: the event loop itself would forget it."""


async def _release_later(hold: Hold, route: Route) -> None:
    """Give a lock back once its server can be reached again, unless its lease ends before."""

    async def attempt(step: Ask) -> None:
        there = route._replace(address=step.server)
        connection = await AsyncConnection.open(there)
        releasing = operations.release(hold.target.at(step.server), hold.token)
        await aio.run(releasing, connection, str(step.server))
        aio.pool().give(there, connection)

    with contextlib.suppress(errors.RemoteError):  # its lease has ended
        await aio.pool().follow(hold.path_from(route.address), route, attempt)


class _Place:
    """A place in the queue. It ends with its lock object, if that is forgotten."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self._finalizer = weakref.finalize(self, connection.close)
        self._finalizer.atexit = False

    def take(self) -> AsyncConnection:
        """Return the connection, which does not end with this object any more."""
        self._finalizer.detach()
        return self.connection


class _Keeper:
    """Renews one held lock on the event loop, and notices at once when its connection breaks.

    The loop refers to it weakly: a lock that its owner has forgotten is not kept alive.
    """

    def __init__(self, hold: Hold, connection: AsyncConnection, route: Route) -> None:
        self.hold = hold
        self._route = route
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._connection: AsyncConnection | None
        self._finalizer: weakref.finalize[[], _Keeper]
        self._adopt(connection)
        self._schedule()

    async def stop(self, *, waits: bool = False) -> AsyncConnection | None:
        """Stop renewing; return the connection, or ``None`` if it has broken.

        Args:
            waits: until a server is reached again, or the lease is over. To give that up halfway is
                to end a connection that the hold may have just come to belong to.
        """
        self._ended = True
        self._cancel_timer()
        task, self._task = self._task, None
        if task is not None:
            if self._connection is None and not waits:
                task.cancel()
            else:
                # A renewal is under way: its reply comes before that to the next request.
                await asyncio.wait([task])
        connection, self._connection = self._connection, None
        if connection is None or connection.closed:
            return None
        self._finalizer.detach()
        connection.owner = None
        return connection

    def abandon(self) -> None:
        """Let the lock end with its connection."""
        self._ended = True
        self._cancel_timer()
        self._finalizer()

    def connection_broke(self) -> None:
        """Reach the server again while the lease lasts."""
        self._connection = None
        self._cancel_timer()
        if self._task is None:
            self._task = self._loop.create_task(self._rescue())

    def due(self) -> None:
        """Renew; the time has come."""
        self._timer = None
        self._task = self._loop.create_task(self._renew())

    def _adopt(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._finalizer = weakref.finalize(self, connection.close)
        self._finalizer.atexit = False
        connection.owner = _WeakOwner(self)

    def _schedule(self) -> None:
        # A connection can break between the arrival of a reply and the task that reads it.
        broken = self._connection is None or self._connection.closed
        when = 0.0 if broken else max(0.0, self.hold.renew_at - time.monotonic())
        self._timer = self._loop.call_later(when, _due, weakref.ref(self))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _renew(self) -> None:
        hold, connection = self.hold, self._connection
        if connection is None:
            await self._rescue()
            return
        try:
            async with asyncio.timeout(hold.left):
                grant = await self._ask_to_renew(connection)
        except TimeoutError:
            self._lost("its lease ended unrenewed")
        except errors.RemoteError as exc:
            self._connection = None
            # It may be for this server alone to say when: the hold may stand on this connection.
            is_to_stay = isinstance(exc, errors.RecoveringError)
            await self._rescue(connection if is_to_stay else None, exc)
        else:
            self._renewed(grant)

    async def _ask_to_renew(self, connection: AsyncConnection) -> Grant | None:
        target = self.hold.target._replace(label=None)
        renewal = aio.run(operations.kept(self._renewal(target)), connection, target.server)
        if not self.hold.may_move:
            return operations.raised(await renewal)
        doubt = self._loop.create_task(self._doubt(connection))
        try:
            return operations.raised(await renewal)
        finally:
            doubt.cancel()

    async def _doubt(self, connection: AsyncConnection) -> None:
        """End a connection on which no answer comes, once another server has the lock's shard."""

        async def found(_: Ask) -> None:
            logger.info("lock %r: another server has its shard", self.hold.target.name)

        await asyncio.sleep(self.hold.silence)
        with contextlib.suppress(errors.RemoteError):
            path = self.hold.doubts(connection.address)
            await aio.pool().follow(path, self._route, found)
            connection.close()

    async def _rescue(
        self, connection: AsyncConnection | None = None, why: BaseException | None = None
    ) -> None:
        """Reach the server in charge again, on a connection if one is given, and renew."""
        if self._ended:
            return
        hold = self.hold
        logger.info("lock %r: connection to %s broke", hold.target.name, hold.target.server)
        # Its server may have the lock after all, and would free it with this connection.
        stood_on = connection

        async def attempt(step: Ask) -> Grant | None:
            nonlocal connection
            if connection is None or connection.closed or connection.address != step.server:
                if connection is not None and connection is not stood_on:
                    connection.close()
                connection = None
                self._route = self._route._replace(address=step.server)
                hold.target = hold.target.at(step.server)
                connection = await AsyncConnection.open(self._route)
            renewal = operations.kept(self._renewal(hold.target))
            renewing = aio.run(renewal, connection, hold.target.server, look=look)
            return operations.raised(await renewing)

        def look_around(is_waiting: bool) -> Awaitable[float]:
            assert hold.shards is not None
            return aio.pool().look(hold.shards, hold.target.key, self._route, is_waiting)

        look = look_around if hold.may_move else None
        try:
            async with asyncio.timeout(hold.left):
                path = hold.path_from(self._route.address, why)
                grant = await aio.pool().follow(path, self._route, attempt)
        except (errors.RemoteError, TimeoutError):
            if connection is not None:
                connection.close()
            self._lost("its lease ended unrenewed")
            return
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        assert connection is not None
        connection.label = hold.target.label or b""
        if connection is stood_on:
            self._finalizer.detach()
        else:
            self._finalizer()
        self._adopt(connection)
        self._renewed(grant)

    def _renewal(self, target: operations.Target) -> Operation[Grant | None]:
        return operations.renew(target, self.hold.token, self.hold.lease)

    def _renewed(self, grant: Grant | None) -> None:
        if grant is None:
            self._lost("the server no longer knows it")
            return
        if not self.hold.held:
            # The answer is good news, but its owner may have seen already that the lease was over.
            self._lost("its lease ended unrenewed")
            return
        self.hold.renewed(grant)
        self._task = None
        if not self._ended:
            self._schedule()

    def _lost(self, why: str) -> None:
        if self._ended:
            return
        self.abandon()
        target = self.hold.target
        logger.warning("lock %r on %s is lost: %s", target.name, target.server, why)
        callback = self.hold.lose()
        if callback is not None:
            try:
                callback()
            except Exception:
                logger.exception("on_lost of lock %r failed", target.name)


class _WeakOwner:
    """Passes a broken connection on to its keeper, if there still is one."""

    def __init__(self, keeper: _Keeper) -> None:
        self._keeper = weakref.ref(keeper)

    def connection_broke(self) -> None:
        keeper = self._keeper()
        if keeper is not None:
            keeper.connection_broke()


def _due(reference: weakref.ref[_Keeper]) -> None:
    keeper = reference()
    if keeper is not None:
        keeper.due()
