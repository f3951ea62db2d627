"""Locks for asyncio, and the driver that waits on behalf of their flows.

A connection is a socket that no event loop knows but while somebody waits for it. So a lock can be
taken in one loop and released in another, and is renewed by the reactor, whatever its loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import logging
import math
import socket
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from dflockd import errors
from dflockd.client import clock, operations, process
from dflockd.client.arguments import Reservation
from dflockd.client.connection import Connection, Resolve, Wait, Waits, carry_out
from dflockd.client.frames import without_frames
from dflockd.client.lock import LockBase, RateLimitBase, SemaphoreBase
from dflockd.client.newest import listen
from dflockd.client.session import RELEASE_PATIENCE, Reply
from dflockd.client.steps import Flow, Hear, Pause, Ready
from dflockd.sharding import ShardingStrategy, stable_hash_shard
from dflockd.wire import UnexpectedReplyError

__all__ = [
    "DistributedLock",
    "DistributedSemaphore",
    "RateLimit",
    "Reservation",
    "ShardingStrategy",
    "drive",
    "stable_hash_shard",
]

R = TypeVar("R")

logger = logging.getLogger("dflockd.client")


class DistributedLock(LockBase):
    """A lock with one holder at a time, first come, first served.

    Use ``async with``, or call `acquire` and `release`. A thread of this process renews the lease
    while the lock is held, so that a busy event loop does not lose it. A cancelled `acquire` leaves
    neither a position nor a lock behind. Locks are not re-entrant. Each object serves one owner at a
    time; others get an `AlreadyHeldError`. You may release a lock in another event loop than the one
    that acquired it.

    The methods are those of `dflockd.sync_client.DistributedLock`, which says more about each. For
    the arguments see `dflockd.client.lock.LockBase`.
    """

    _may_have_async_callback = True

    async def acquire(
        self, ticket: str | None = None, reservation: Reservation | None = None
    ) -> bool:
        """Wait up to `acquire_timeout_s` for the lock. Return ``False`` if it is not granted in time.

        Args:
            ticket: the ticket of a position that was kept; see `enqueue`.
            reservation: keep the position if the lock is not granted in time; see `wait`.

        Raises:
            AlreadyHeldError: this object already holds the lock or waits for it.
            UnreachableError: there is no server, or it does not answer.
            RefusedError: the server refused; the subclass says why.
        """
        session, timeout = self._session, self.acquire_timeout_s
        claim = object()
        try:
            progress = self._kept(ticket, reservation)
            link = session.ask(claim, timeout, progress=progress)
            reply = None
            if link is not None:
                reply = await _hear(link, session.asked.patience)
                if type(reply) is bytes and session.is_granted(claim, link, reply):
                    return True
            return await _run(session.acquire(claim, timeout, link, reply, progress))
        except BaseException:
            session.let_go(claim)
            raise

    async def enqueue(self, ticket: str | None = None) -> str:
        """Take a position in the queue without waiting: ``"acquired"`` or ``"queued"``.

        Args:
            ticket: the ticket of a position that a `wait` with a `Reservation` has left.

        Raises:
            InvalidArgumentError: the ticket is malformed.
            RemoteError: as for `acquire`; `acquire_timeout_s` bounds this call as well.
        """
        claim = object()
        try:
            progress = self._kept(ticket, None)
            flow = self._session.enqueue(claim, self.acquire_timeout_s, progress=progress)
            return "acquired" if await _run(flow) else "queued"
        except BaseException:
            self._session.let_go(claim)
            raise

    async def wait(
        self,
        timeout_s: float | None = None,
        reservation: Reservation | None = None,
    ) -> bool:
        """Wait up to `timeout_s` (default `acquire_timeout_s`) for the grant of an enqueued position.

        Args:
            timeout_s: seconds; rounded up to whole ones with a reservation.
            reservation: keep the position if the wait returns ``False``. The lock then has a
                `ticket` for `enqueue`.

        Raises:
            InvalidArgumentError: a time is not a number of seconds, 0 or more.
            NotEnqueuedError: there is no position.
            LeaseExpiredError: the lock was granted, but its lease has ended since.
            RemoteError: as for `acquire`.
        """
        session = self._session
        claim = None, session.waiter
        try:
            flow = self._waiting(claim, timeout_s, reservation)
            if self._own_lease() is not None:  # `enqueue` has been granted it
                return True
            return await _run(flow)
        except errors.InvalidArgumentError:
            raise
        except BaseException:
            session.give_up(claim)
            raise

    async def check(self) -> None:
        """Return if the lock is certainly held. In doubt, wait until it is certain again.

        Raises:
            LockLostError: it is lost, or was never acquired.
        """
        await _run(self._session.check())

    async def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Renew the lease now, for `lease_ttl_s` (default: as granted). Return ``False`` if it is lost.

        Raises:
            InvalidArgumentError: the lease is not a whole number of seconds, 1 or more.
            RemoteError: the server could not be asked; the lock ends with the connection.
        """
        return await _run(self._renewing(lease_ttl_s))

    async def detach(self, lease_ttl_s: int | None = None) -> str | None:
        """Keep the lock held for `lease_ttl_s` (default: as granted) and let go of it here.

        Returns:
            The token, for `adopt`, or ``None`` if this object no longer had the lock.

        Raises:
            InvalidArgumentError: the lease is not a whole number of seconds, 1 or more.
            RemoteError: the server could not be asked; the lock ends with the connection.
        """
        session = self._session
        claim = session.lease, session.waiter
        try:
            return await _run(self._detaching(claim, lease_ttl_s))
        except errors.InvalidArgumentError:
            raise
        except BaseException:
            session.take_back(claim)
            raise

    async def adopt(self, token: str) -> bool:
        """Take over a lock that is held, by its token. Return ``False`` if it is no longer held.

        Raises:
            AlreadyHeldError: this object holds the lock or waits for it.
            InvalidArgumentError: the token is malformed.
            RemoteError: the server could not be asked or refused.
        """
        claim = object()
        try:
            return await _run(self._adopting(claim, token))
        except BaseException:
            self._session.let_go(claim)
            raise

    async def release(self) -> bool:
        """Release the lock, or leave the queue. Return ``False`` if the lock was no longer held.

        If the server cannot be reached, this logs a warning, does not raise, and tries again in the
        background.
        """
        session = self._session
        claim = session.lease, session.waiter
        try:
            link = session.hand_back(claim)
            reply = None
            if link is not None:
                reply = await _hear(link, RELEASE_PATIENCE)
                if type(reply) is bytes and session.is_released(link, reply):
                    return True
            return await _run(session.release(claim, link, reply))
        except BaseException:
            # Cancelled: the end of the connection releases the lock as well.
            session.give_up(claim)
            raise

    async def give_back(self) -> bool:
        """Release the lock for a run that never began, so that it uses up nothing of its rate.

        See `begin`.
        """
        session = self._session
        claim = session.lease, session.waiter
        try:
            return await _run(session.release(claim, give=operations.give_back))
        except BaseException:
            session.give_up(claim)
            raise

    async def draw_age(self) -> int:
        """Return a number that is larger than all that the server gave for this key before.

        Raises:
            UnsupportedError: the server knows no ages.
            RemoteError: the server could not be asked.
        """
        return await _run(self._session.draw_age())

    def listen(self, told: Callable[[str], object]) -> None:
        """Be told once if somebody newer asks for this lock while it is held; nothing is awaited.

        Args:
            told: a plain function, called on this event loop with the label of who is newer.
        """
        loop = asyncio.get_running_loop()

        def call(by: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(told, by)

        listen(self._session.lease, call)

    async def inspect(self) -> dict[str, Any]:
        """Return the holders and waiters of the key.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return await _run(self._inspecting())

    async def evict(self, fence: int) -> bool:
        """End the hold with this fence, without its token. Return ``False`` if it has ended already.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return await _run(self._evicting(fence))

    async def __aenter__(self) -> Self:
        """Acquire the lock.

        Raises:
            LockTimeoutError: it was not granted within `acquire_timeout_s`.
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
        """Release the lock."""
        await self.release()

    @staticmethod
    def _callback(
        reference: weakref.ref[Any], on_lost: Callable[[Any], object]
    ) -> Callable[[], object]:
        loop = asyncio.get_running_loop()

        def call() -> None:
            try:
                loop.call_soon_threadsafe(_tell, reference, on_lost, loop)
            except RuntimeError:  # it is closed
                _tell(reference, on_lost, None)

        return call


class DistributedSemaphore(SemaphoreBase, DistributedLock):
    """A lock with up to `limit` holders at a time, first come, first served.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


class RateLimit(RateLimitBase, DistributedSemaphore):
    """Limits how many runs may begin in a window of time, first come, first served.

        async with RateLimit("vendor-api", "10/m", servers=servers): ...

    The limit is exact over all processes, by the clock of the server: no window of a minute, wherever
    it begins, has more than ten. Runs may last longer than that, and any number of them may overlap.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


_callbacks: set[asyncio.Future[Any]] = set()
"""Those under way: the event loop itself would forget them."""


def _tell(
    reference: weakref.ref[Any],
    on_lost: Callable[[Any], object],
    loop: asyncio.AbstractEventLoop | None,
) -> None:
    """Tell the owner of a lost lock, on its event loop, or here if that is closed."""
    lock = reference()
    if lock is None:
        return
    try:
        result = on_lost(lock)
    except BaseException as exc:
        logger.exception("on_lost of lock %r failed", lock.key)
        if loop is not None and not isinstance(exc, Exception):
            raise  # it is the loop's own thread: sys.exit() ends the program
        return
    if not inspect.isawaitable(result):
        return
    if loop is None:
        if inspect.iscoroutine(result):
            result.close()
        logger.error("on_lost of lock %r was not awaited: its event loop is closed", lock.key)
        return
    called = asyncio.ensure_future(result)
    _callbacks.add(called)
    called.add_done_callback(partial(_called, lock.key))


def _called(key: str, called: asyncio.Future[Any]) -> None:
    _callbacks.discard(called)
    if not called.cancelled() and called.exception() is not None:
        logger.error("on_lost of lock %r failed", key, exc_info=called.exception())


async def _hear(link: Any, patience: float | None) -> Reply:
    """Wait for the reply to what a connection was asked, for so many seconds (``None``: no end)."""
    try:
        left = math.inf if patience is None else patience
        is_there = await _ready(asyncio.get_running_loop(), link, False, left)
        return link.receive() if is_there else None
    except (OSError, UnexpectedReplyError) as exc:
        return without_frames(exc)
    except BaseException:
        link.close()
        raise


async def _run(flow: Flow[R]) -> R:
    return await drive(carry_out(flow))


async def drive(waits: Waits[R]) -> R:
    """Carry out a flow on the running event loop: wait for all that it yields."""
    loop = asyncio.get_running_loop()
    try:
        wait = next(waits)
        while True:
            if type(wait) is Connection:
                outcome: object = await _ready(loop, wait, False, wait.left)
            else:
                outcome = await _wait(loop, wait)
            wait = waits.send(outcome)
    except StopIteration as stop:
        result: R = stop.value
        return result
    except BaseException:
        waits.close()
        raise


async def _ready(
    loop: asyncio.AbstractEventLoop, link: Connection, writes: bool, left: float
) -> bool:
    number = link.fileno()
    if link.closed or number < 0:
        return True  # the next read from it fails
    ready: asyncio.Future[bool] = loop.create_future()
    watch, unwatch = (
        (loop.add_writer, loop.remove_writer) if writes else (loop.add_reader, loop.remove_reader)
    )
    try:
        watch(number, _set, ready, True)
    except NotImplementedError:
        return await _ready_elsewhere(loop, Ready(link, writes, clock.now() + left))
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        return True  # another thread has closed it just now
    timer = None
    try:
        if left < math.inf:
            timer = loop.call_later(left, _set, ready, False)
        return await ready
    finally:
        unwatch(number)
        if timer is not None:
            timer.cancel()


async def _ready_elsewhere(loop: asyncio.AbstractEventLoop, wait: Ready) -> bool:
    """Have the reactor wait, where the event loop cannot: that of Windows."""
    ready: asyncio.Future[bool] = loop.create_future()

    def flow() -> Flow[None]:
        outcome = yield wait
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set, ready, outcome)

    process.current().reactor.run(flow())
    return await ready


async def _wait(loop: asyncio.AbstractEventLoop, wait: Wait) -> object:
    if isinstance(wait, Ready):
        left = max(0.0, wait.until - clock.now())
        return await _ready(loop, wait.link, wait.writes, left)
    if isinstance(wait, Pause):
        await asyncio.sleep(wait.seconds)
        return None
    if isinstance(wait, Hear):
        return await _await(loop, wait)
    assert isinstance(wait, Resolve)
    try:
        async with asyncio.timeout(max(0.0, wait.until - clock.now())):
            return await loop.getaddrinfo(wait.host, wait.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        return exc


async def _await(loop: asyncio.AbstractEventLoop, wait: Hear) -> bool:
    heard: asyncio.Future[bool] = loop.create_future()

    def listener() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set, heard, True)

    wait.signal.listen(listener)
    timer = None
    try:
        if wait.until < math.inf:
            left = max(0.0, wait.until - clock.now())
            timer = loop.call_later(left, _set, heard, False)
        return await heard
    finally:
        wait.signal.forget(listener)
        if timer is not None:
            timer.cancel()


def _set(future: asyncio.Future[bool], outcome: bool) -> None:
    if not future.done():
        future.set_result(outcome)
