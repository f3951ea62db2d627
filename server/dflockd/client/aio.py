"""Locks for asyncio, and the driver that waits on behalf of their flows.

A connection stays registered with the event loop that uses it, which reads from it only while somebody
waits there. So a lock can be taken in one loop and released in another, and is renewed by the reactor,
whatever its loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from dflockd import clock, errors
from dflockd.client import operations, process
from dflockd.client.arguments import Reservation
from dflockd.client.connection import Connection
from dflockd.client.flow import Awaited, Flow, Hear, Pause, Ready
from dflockd.client.frames import without_frames
from dflockd.client.lock import LockBase, RateLimitBase, SemaphoreBase
from dflockd.client.session import RELEASE_PATIENCE
from dflockd.client.supersession import listen
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
                reply = await _reply(link, session.patience)
                if type(reply) is bytes and session.is_granted(claim, link, reply):
                    return True
            return await drive(session.acquire(claim, timeout, link, reply, progress))
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
            return "acquired" if await drive(flow) else "queued"
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
            return await drive(flow)
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
        await drive(self._session.check())

    async def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Renew the lease now, for `lease_ttl_s` (default: as granted first). Return ``False`` if lost.

        Raises:
            InvalidArgumentError: the lease is not a whole number of seconds, 1 or more.
            RemoteError: the server could not be asked. If the lease goes on, so does the lock.
        """
        return await drive(self._renewing(lease_ttl_s))

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
            return await drive(self._detaching(claim, lease_ttl_s))
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
            return await drive(self._adopting(claim, token))
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
                reply = await _reply(link, RELEASE_PATIENCE)
                if type(reply) is bytes and session.is_released(link, reply):
                    return True
            return await drive(session.release(claim, link, reply))
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
            return await drive(session.release(claim, give=operations.give_back))
        except BaseException:
            session.give_up(claim)
            raise

    async def draw_age(self) -> int:
        """Return a number that is larger than all that the server gave for this key before.

        Raises:
            UnsupportedError: the server knows no ages.
            RemoteError: the server could not be asked.
        """
        return await drive(self._session.draw_age())

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
        return await drive(self._inspecting())

    async def evict(self, fence: int) -> bool:
        """End the hold with this fence, without its token. Return ``False`` if it has ended already.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return await drive(self._evicting(fence))

    async def pause(
        self, for_s: float | None = None, reason: str = "", by: str | None = None
    ) -> None:
        """Have nothing of this lock granted until `resume`, or for so many seconds.

        Its holder goes on, and waiters keep their positions. A second pause replaces the first.

        Args:
            for_s: after so many seconds the pause ends by itself.
            reason: the text that is shown to everybody who looks or waits.
            by: the name of the person or program that pauses it; by default the user and the host
                of this process.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return await drive(self._pausing(for_s, reason, by))

    async def resume(self) -> bool:
        """End the pause of this lock, and serve who waits. Return ``False`` if it is not paused.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return await drive(self._resuming())

    async def __aenter__(self) -> Self:
        """Acquire the lock.

        Raises:
            LockTimeoutError: it was not granted within `acquire_timeout_s`.
        """
        # As `acquire` does: a coroutine within another is a tenth of what the client does for a lock.
        session, timeout = self._session, self.acquire_timeout_s
        claim = object()
        try:
            link = session.ask(claim, timeout)
            reply = None
            if link is not None:
                reply = await _reply(link, session.patience)
                if type(reply) is bytes and session.is_granted(claim, link, reply):
                    return self
            if not await drive(session.acquire(claim, timeout, link, reply)):
                raise self._timed_out()
            return self
        except BaseException:
            session.let_go(claim)
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        session = self._session
        claim = session.lease, session.waiter
        try:
            link = session.hand_back(claim)
            reply = None
            if link is not None:
                reply = await _reply(link, RELEASE_PATIENCE)
                if type(reply) is bytes and session.is_released(link, reply):
                    return
            await drive(session.release(claim, link, reply))
        except BaseException:
            # Cancelled: the end of the connection releases the lock as well.
            session.give_up(claim)
            raise

    @staticmethod
    def _callback(
        reference: weakref.ref[Any], on_lost: Callable[[Any], object]
    ) -> Callable[[], object]:
        loop = asyncio.get_running_loop()

        def call() -> None:
            # Now: until a busy loop gets to it, the owner may have forgotten the lock that it lost.
            lock = reference()
            if lock is None:
                return
            try:
                loop.call_soon_threadsafe(_tell, lock, on_lost, loop)
            except RuntimeError:  # it is closed
                _tell(lock, on_lost, None)

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
    lock: Any, on_lost: Callable[[Any], object], loop: asyncio.AbstractEventLoop | None
) -> None:
    """Tell the owner of a lost lock, on its event loop, or here if that is closed."""
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


async def drive(flow: Flow[R]) -> R:
    """Carry out a flow on the running event loop: wait for all that it yields."""
    loop = asyncio.get_running_loop()
    try:
        wait = next(flow)
        while True:
            if type(wait) is Connection:
                outcome: object = await _awaited(wait, clock.now(), wait.left)
            else:
                outcome = await _wait(loop, wait)
            wait = flow.send(outcome)
    except StopIteration as stop:
        result: R = stop.value
        return result
    except BaseException:
        flow.close()
        raise


# Replies. A connection stays registered with the event loop that uses it: to register it for each reply
# would take as long as all else.

LONGEST_LOOK = 5.0
"""Seconds between looks, while replies are waited for, at whose time is over."""


class _Replies:
    """The readers that wait for replies in one event loop. One timer does for all of them."""

    def __init__(self) -> None:
        self.readers: weakref.WeakSet[_Reader] = weakref.WeakSet()
        """Those that are registered: what is in a closed loop is nobody's."""
        self.looks_at = math.inf
        """When somebody looks next at whose time is over."""

    def heed(self, loop: asyncio.AbstractEventLoop, until: float, now: float) -> None:
        """See to it that somebody looks when a time is over, or before."""
        self.looks_at = until = min(until, now + LONGEST_LOOK)
        loop.call_later(until - now, self._look, loop, until)

    def _look(self, loop: asyncio.AbstractEventLoop, planned: float) -> None:
        if planned != self.looks_at:
            return  # somebody has come whose time is over sooner, and that was a look of its own
        now, earliest = clock.now(), math.inf
        for reader in self.readers:
            waiting = reader.waiting
            if waiting is None:
                continue
            if reader.until > now:
                earliest = min(earliest, reader.until)
            else:
                reader.waiting = None
                if not waiting.done():
                    waiting.set_result(None)
        self.looks_at = math.inf
        if earliest < math.inf:
            self.heed(loop, earliest, now)


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Replies] = weakref.WeakKeyDictionary()


class _Reader:
    """Reads the replies that come on a connection, for who waits for them in one event loop.

    What comes while nobody waits there is not its to read: the server has ended an idle connection, or
    the answer is one to the reactor. Then it unregisters the connection, so that it is not woken again.
    """

    __slots__ = ("__weakref__", "_link", "_number", "_replies", "loop", "until", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, link: Connection) -> None:
        self.loop = loop
        self.waiting: asyncio.Future[Any] | None = None
        self.until = math.inf
        """When a reply is waited for no more."""
        self._link = link
        self._number = -1
        replies = _loops.get(loop)
        self._replies = _loops.setdefault(loop, _Replies()) if replies is None else replies

    def register(self) -> bool:
        """Have the event loop look at the connection; ``False`` if that is closed.

        Raises:
            NotImplementedError: it can look at none.
        """
        link = self._link
        if not link.watch(self):
            return False
        self._number = link.fileno()
        try:
            self.loop.add_reader(self._number, self._read)
        except BaseException:
            link.unwatch(self)
            raise
        self._replies.readers.add(self)
        link.loop_reader = self
        return True

    def wait(self, now: float, left: float) -> asyncio.Future[Any]:
        """Return what becomes the reply; or the error of its reading, or ``None`` once it is late."""
        loop, replies = self.loop, self._replies
        waiting = self.waiting = loop.create_future()
        self.until = until = now + left
        if until < replies.looks_at:
            replies.heed(loop, until, now)
        return waiting

    def is_gone(self) -> bool:
        """Whether the loop is closed; see `dflockd.client.connection.Watcher`."""
        return self.loop.is_closed()

    def leave(self) -> None:
        """Unregister it once it is closed. From any thread.

        After a reset uvloop looks at a connection no more, and to register the next one with its number
        would fail until this one is unregistered.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._number >= 0:
            self._read()

    def _read(self) -> None:
        link, waiting = self._link, self.waiting
        if waiting is None or waiting.done() or link.closed:
            self._unregister()
            if waiting is not None and not waiting.done():
                waiting.set_result(ConnectionAbortedError("it was closed"))
            return
        try:
            line = link.receive()
        except (OSError, UnexpectedReplyError) as exc:
            waiting.set_result(without_frames(exc))
        else:
            if line is None:
                return
            waiting.set_result(line)
        self.waiting = None

    def _unregister(self) -> None:
        number, self._number = self._number, -1
        self.loop.remove_reader(number)
        self._replies.readers.discard(self)
        link = self._link
        if link.loop_reader is self:
            link.loop_reader = None
        link.unwatch(self)


def _reply(link: Any, patience: float | None) -> Awaitable[Any]:
    """Wait for the reply to what a connection was asked, for so many seconds (``None``: no end).

    It may be the error of its reading, or ``None`` if it does not come in time.
    """
    reader, left = link.loop_reader, math.inf if patience is None else patience
    if reader is not None and reader.loop is asyncio.get_running_loop():
        return reader.wait(link.asked_at, left)  # type: ignore[no-any-return]
    return _awaited(link, link.asked_at, left)


def _awaited(link: Any, now: float, left: float) -> Awaitable[Any]:
    loop = asyncio.get_running_loop()
    reader = link.loop_reader
    if reader is None or reader.loop is not loop:
        reader = _Reader(loop, link)
        try:
            is_open = reader.register()
        except NotImplementedError:
            return _reply_elsewhere(loop, link, now + left)
        if not is_open:
            closed: asyncio.Future[Any] = loop.create_future()
            closed.set_result(ConnectionAbortedError("it was closed"))
            return closed
    return reader.wait(now, left)  # type: ignore[no-any-return]


async def _reply_elsewhere(
    loop: asyncio.AbstractEventLoop, link: Connection, until: float
) -> bytes | Exception | None:
    """Have the reactor wait for a reply, where the event loop cannot: that of Windows."""
    line = None
    try:
        while line is None and await _ready_elsewhere(loop, Ready(link, False, until)):
            line = link.receive()
    except (OSError, UnexpectedReplyError) as exc:
        return without_frames(exc)
    return line


# What is waited for now and then.


async def _ready(
    loop: asyncio.AbstractEventLoop, link: Connection, writes: bool, left: float
) -> bool:
    ready: asyncio.Future[bool] = loop.create_future()
    register, unregister = (
        (loop.add_writer, loop.remove_writer) if writes else (loop.add_reader, loop.remove_reader)
    )
    watcher = _Watcher(loop)
    if not link.watch(watcher):
        return True  # the next read from it fails
    number = link.fileno()
    try:
        register(number, _set, ready, True)
        timer = loop.call_later(left, _set, ready, False) if left < math.inf else None
        try:
            return await ready
        finally:
            unregister(number)
            if timer is not None:
                timer.cancel()
    except NotImplementedError:
        return await _ready_elsewhere(loop, Ready(link, writes, clock.now() + left))
    finally:
        link.unwatch(watcher)


class _Watcher:
    """Somebody who waits in an event loop for a connection to become readable, or writable."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_gone = loop.is_closed


async def _ready_elsewhere(loop: asyncio.AbstractEventLoop, wait: Ready) -> bool:
    """Have the reactor wait, where the event loop cannot."""
    ready: asyncio.Future[bool] = loop.create_future()

    def flow() -> Flow[None]:
        outcome = yield wait
        _call_in(loop, ready, outcome)

    process.current().reactor.run(flow())
    return await ready


async def _wait(loop: asyncio.AbstractEventLoop, wait: Awaited) -> object:
    if isinstance(wait, Ready):
        return await _ready(loop, wait.link, wait.writes, max(0.0, wait.until - clock.now()))
    if isinstance(wait, Pause):
        await asyncio.sleep(wait.seconds)
        return None
    come: asyncio.Future[Any] = loop.create_future()
    assert isinstance(wait, Hear)
    listener, timer = partial(_call_in, loop, come, True), None
    wait.signal.listen(listener)
    try:
        if wait.until < math.inf:
            timer = loop.call_later(max(0.0, wait.until - clock.now()), _set, come, False)
        return await come
    finally:
        wait.signal.forget(listener)
        if timer is not None:
            timer.cancel()


def _call_in(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: object) -> None:
    """Set the result of a future from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_set, future, outcome)


def _set(future: asyncio.Future[Any], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)
