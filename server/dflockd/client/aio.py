"""Locks for asyncio, and the driver that waits on behalf of their flows.

A connection is a socket that no event loop knows but while somebody waits for it. So a lock can be
taken in one loop and released in another, and is renewed by the reactor, whatever its loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from dflockd.client.arguments import KeepPlace, Reservation
from dflockd.client.connection import Connection, Resolve, Wait, Waits, carry_out
from dflockd.client.lock import LockBase, RateLimitBase, SemaphoreBase
from dflockd.client.newest import listen
from dflockd.client.session import RELEASE_PATIENCE, Reply
from dflockd.client.steps import Flow, Hear, Pause, Ready
from dflockd.sharding import ShardingStrategy, stable_hash_shard
from dflockd.wire import UnexpectedReplyError

__all__ = [
    "DistributedLock",
    "DistributedSemaphore",
    "KeepPlace",
    "RateLimit",
    "Reservation",
    "ShardingStrategy",
    "drive",
    "stable_hash_shard",
]

R = TypeVar("R")

logger = logging.getLogger("dflockd.client")


class DistributedLock(LockBase):
    """A lock that one holder has at a time, first come, first served.

    Use it with ``async with``, or `acquire` and `release` it. While it is held a thread of this
    process renews its lease, so that a busy event loop does not lose it. A cancelled `acquire` leaves
    nothing behind: neither a position in the queue nor a lock. It is not re-entrant. One object is
    for one owner at a time; others get an `AlreadyHeldError`. It may be released in another event
    loop than that in which it was acquired.

    The methods are those of `dflockd.sync_client.DistributedLock`, which says more about each. For
    the arguments see `dflockd.client.lock.LockBase`.
    """

    _may_have_async_callback = True

    async def acquire(self) -> bool:
        """Wait up to `acquire_timeout_s` for the lock; ``False`` if somebody else holds it so long.

        Raises:
            AlreadyHeldError: this object holds the lock or waits for it, whoever called it.
            UnreachableError: no server there, or it does not answer.
            RefusedError: the server said no; the subclass says why.
        """
        session, timeout = self._session, self.acquire_timeout_s
        claim = object()
        try:
            link = session.ask(claim, timeout)
            reply = None
            if link is not None:
                reply = await _hear(link, session.asked.patience)
                if type(reply) is bytes and session.is_granted(claim, link, reply):
                    return True
            return await _run(session.acquire(claim, timeout, link, reply))
        except BaseException:
            session.let_go(claim)
            raise

    async def enqueue(self, ticket: str | None = None, *, place: str | None = None) -> str:
        """Take a position in the queue without waiting: ``"acquired"`` or ``"queued"``.

        Args:
            ticket: what a `wait` with a `Reservation` has left.
            place: the name of `ticket` before 0.2.

        Raises:
            InvalidArgumentError: the ticket can be none.
            RemoteError: as with `acquire`; `acquire_timeout_s` bounds this as well.
        """
        claim = object()
        try:
            flow = self._enqueueing(claim, place if ticket is None else ticket)
            return "acquired" if await _run(flow) else "queued"
        except BaseException:
            self._session.let_go(claim)
            raise

    async def wait(
        self,
        timeout_s: float | None = None,
        reservation: Reservation | None = None,
        *,
        keep: Reservation | None = None,
    ) -> bool:
        """Wait up to `timeout_s` (default `acquire_timeout_s`) for the position of `enqueue`.

        Args:
            timeout_s: seconds; rounded up to whole ones with a reservation.
            reservation: keep the position, under the `ticket` that this lock has then, if it is not
                served in time.
            keep: the name of `reservation` before 0.2.

        Raises:
            InvalidArgumentError: a time is no number of seconds from 0.
            NotEnqueuedError: there is no position.
            LeaseExpiredError: the lock was granted and its lease has ended since.
            RemoteError: as with `acquire`.
        """
        session = self._session
        claim = None, session.waiter
        try:
            flow = self._waiting(claim, timeout_s, keep if reservation is None else reservation)
            if self._own_lease() is not None:  # `enqueue` has been granted it
                return True
            return await _run(flow)
        except errors.InvalidArgumentError:
            raise
        except BaseException:
            session.give_up(claim)
            raise

    async def check(self) -> None:
        """Return if the lock is certainly held; in doubt, wait for its end.

        Raises:
            LockLostError: it is lost, or was never acquired.
        """
        await _run(self._session.check())

    async def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Start the lease anew now, with `lease_ttl_s` (default: as granted); ``False`` if it is lost.

        Raises:
            InvalidArgumentError: the lease is no whole number of seconds from 1.
            RemoteError: the server could not be asked; the lock ends with the connection.
        """
        return await _run(self._renewing(lease_ttl_s))

    async def detach(self, lease_ttl_s: int | None = None) -> str | None:
        """Let the lock stay held for `lease_ttl_s` (default: as granted), and have it no more.

        Returns:
            The token, for `adopt`, or ``None`` if it was not this object's any more.

        Raises:
            InvalidArgumentError: the lease is no whole number of seconds from 1.
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
        """Take over a lock that is held, by its token; ``False`` if it is held no more.

        Raises:
            AlreadyHeldError: this object holds the lock or waits for it.
            InvalidArgumentError: it is no token.
            RemoteError: the server could not be asked or refused.
        """
        claim = object()
        try:
            return await _run(self._adopting(claim, token))
        except BaseException:
            self._session.let_go(claim)
            raise

    async def release(self) -> bool:
        """Give the lock back, or the position; ``False`` if it was not held any more.

        A failure to reach the server is logged, not raised, and tried again in the background.
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
        """Give the lock back as `release` does, for a run that has not begun and never will.

        So it takes no place of its rate. See `begin`.
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
            UnsupportedError: the server is too old.
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

    async def require_ages(self) -> None:
        """Return if the server of the key knows ages; it is asked, unless it is known to.

        For who was given an age by another process, before it asks for the lock.

        Raises:
            UnsupportedError: the server is too old: it would grant the lock to who is older, too.
            RemoteError: the server could not be asked.
        """
        await _run(self._session.require_ages())

    async def inspect(self) -> dict[str, Any]:
        """Ask the server who holds the key and who waits for it.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return await _run(self._inspecting())

    async def evict(self, fence: int) -> bool:
        """End the hold with this fence without its token; ``False`` if it has ended already.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return await _run(self._evicting(fence))

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
    """A lock that up to `limit` holders have at a time, first come, first served.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


class RateLimit(RateLimitBase, DistributedSemaphore):
    """Something of which so many runs may begin in a while, first come, first served.

        async with RateLimit("vendor-api", "10/m", servers=servers): ...

    Over all processes, exactly, by the clock of the server: in no window of a minute, wherever it
    begins, more than ten. Runs may be longer than that, and any number of them go on at once.

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
        return exc
    except BaseException:
        link.close()
        raise


async def _run(flow: Flow[R]) -> R:
    return await drive(carry_out(flow))


async def drive(waits: Waits[R]) -> R:
    """Wait, on the running event loop, for whatever is to be waited for."""
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
    if link.closed:
        return True  # whoever reads from it learns that
    number = link.fileno()
    ready: asyncio.Future[bool] = loop.create_future()
    watch, unwatch = (
        (loop.add_writer, loop.remove_writer) if writes else (loop.add_reader, loop.remove_reader)
    )
    try:
        watch(number, _set, ready, True)
    except NotImplementedError:
        return await _ready_elsewhere(loop, Ready(link, writes, clock.now() + left))
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
