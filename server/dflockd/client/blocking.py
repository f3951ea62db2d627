"""Locks for blocking code, and the driver that waits on behalf of their flows."""

from __future__ import annotations

import logging
import math
import select
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from dflockd import clock, errors
from dflockd.client import operations
from dflockd.client.arguments import Reservation
from dflockd.client.connection import Connection
from dflockd.client.conversation import Heard
from dflockd.client.flow import Awaited, Flow, Hear, Pause, Ready
from dflockd.client.frames import without_frames
from dflockd.client.greenlets import current_hub
from dflockd.client.lock import LockBase, RateLimitBase, SemaphoreBase
from dflockd.client.session import RELEASE_PATIENCE
from dflockd.client.supersession import listen
from dflockd.sharding import ShardingStrategy, stable_hash_shard
from dflockd.wire import ENQUEUED, UnexpectedReplyError

__all__ = [
    "DistributedLock",
    "DistributedSemaphore",
    "RateLimit",
    "Reservation",
    "ShardingStrategy",
    "drive",
    "stable_hash_shard",
]

LONGEST_POLL = 86400.0
"""Seconds beyond which a wait has no end on this side: `poll` cannot count to a month."""

R = TypeVar("R")

logger = logging.getLogger("dflockd.client")


class DistributedLock(LockBase):
    """A lock with one holder at a time, first come, first served.

    Use ``with``, or call `acquire` and `release`. A thread of this process renews the lease while the
    lock is held. If the process ends, however suddenly, the lock is free at once. Locks are not
    re-entrant. Each object serves one owner at a time; others get an `AlreadyHeldError`. If a signal
    handler raises, neither a lock nor a position is left behind, unless it raises at the very first
    instruction of ``__exit__`` or `release`: then the lock is held for as long as its object lives.

    For the arguments see `dflockd.client.lock.LockBase`.
    """

    def acquire(self, ticket: str | None = None, reservation: Reservation | None = None) -> bool:
        """Wait up to `acquire_timeout_s` for the lock. Return ``False`` if it is not granted in time.

        ``False`` always comes from a server: another holder has the lock.

        Args:
            ticket: the ticket of a position that was kept; see `enqueue`.
            reservation: keep the position if the lock is not granted in time; see `wait`. The time is
                then rounded up to whole seconds.

        Raises:
            AlreadyHeldError: this object already holds the lock or waits for it.
            UnreachableError: there is no server, the connection broke during the wait, or the server
                sent nothing for two seconds more than `acquire_timeout_s`. In a cluster: no server
                can be reached, or the one in charge is silent and was not replaced in time.
            RefusedError: the server refused; the subclass says why. In a cluster the client follows
                a `MovedError`, `RecoveringError` or `DrainingError` until the time is over.
            AcquireCancelledError: another thread called `cancel`.
        """
        session, timeout = self._session, self.acquire_timeout_s
        claim = object()
        try:
            progress = self._kept(ticket, reservation)
            link = session.ask(claim, timeout, progress=progress)
            reply = None
            if link is not None:
                reply = _hear(link, session.patience)
                if type(reply) is bytes and session.is_granted(claim, link, reply):
                    return True
            return drive(session.acquire(claim, timeout, link, reply, progress))
        except BaseException:
            session.let_go(claim)
            raise

    def enqueue(self, ticket: str | None = None) -> str:
        """Take a position in the queue without waiting.

        Args:
            ticket: the ticket of a position that a `wait` with a `Reservation` has left; it is taken
                up again. If it is gone, this takes a new position at the end of the queue.

        Returns:
            ``"acquired"`` if the lock was free, or reserved for this ticket; otherwise ``"queued"``.
            Then call `wait`, before the lease of a grant that comes in the meantime ends.

        Raises:
            InvalidArgumentError: the ticket is malformed.
            RemoteError: as for `acquire`; `acquire_timeout_s` bounds this call as well.
        """
        session, timeout = self._session, self.acquire_timeout_s
        claim = object()
        try:
            progress = self._kept(ticket, None)
            link = session.ask(claim, timeout, operations.to_enqueue, progress)
            reply = None
            if link is not None:
                reply = _hear(link, operations.line_up_patience(timeout))
                if type(reply) is bytes and session.is_granted(claim, link, reply, ENQUEUED):
                    return "acquired"
            flow = session.enqueue(claim, timeout, link, reply, progress)
            return "acquired" if drive(flow) else "queued"
        except BaseException:
            session.let_go(claim)
            raise

    def wait(
        self,
        timeout_s: float | None = None,
        reservation: Reservation | None = None,
    ) -> bool:
        """Wait up to `timeout_s` (default `acquire_timeout_s`) for the grant of an enqueued position.

        Return ``False`` if it does not come in time. The position is then gone, unless reserved.

        Args:
            timeout_s: seconds; rounded up to whole ones with a reservation.
            reservation: keep the position if the wait returns ``False``. The lock then has a
                `ticket` for `enqueue`. If the wait ends in another way, nothing is kept.

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
            return drive(flow)
        except errors.InvalidArgumentError:
            raise
        except BaseException:
            session.give_up(claim)
            raise

    def check(self) -> None:
        """Return if the lock is certainly held.

        After its connection has broken that is in doubt. This waits until the lock is renewed on
        another connection, at most until its lease ends.

        Raises:
            LockLostError: the lock is lost, or was never acquired. Also, without waiting, if it is
                in doubt and `on_lost` of some lock calls this: that thread cannot wait.
        """
        if not self._session.is_certain():
            drive(self._session.check())

    def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Renew the lease now, for `lease_ttl_s` (default: as granted first). Return ``False`` if lost.

        The process renews all the time. Call this before something that stops all its threads for
        longer than the lease.

        Raises:
            InvalidArgumentError: the lease is not a whole number of seconds, 1 or more.
            RemoteError: the server could not be asked, refused, or sent nothing for 10 s or until
                the lease was over. If the lease goes on, so does the lock.
            LocalError: `on_lost` of some lock calls this: its thread would wait for itself.
        """
        return drive(self._renewing(lease_ttl_s))

    def detach(self, lease_ttl_s: int | None = None) -> str | None:
        """Keep the lock held for `lease_ttl_s` (default: as granted) and let go of it here.

        From then on it outlives this object, this process and its connection. It ends with its
        lease, or when a process that has the token takes it over with `adopt` and releases it. If
        somebody has adopted it already, they keep it.

        Returns:
            The token, or ``None`` if this object no longer had the lock: it was lost or adopted.

        Raises:
            InvalidArgumentError: the lease is not a whole number of seconds, 1 or more.
            RemoteError: the server could not be asked, refused, or sent nothing for 10 s or until
                the lease was over. The lock ends with the connection.
        """
        session = self._session
        claim = session.lease, session.waiter
        try:
            return drive(self._detaching(claim, lease_ttl_s))
        except errors.InvalidArgumentError:
            raise
        except BaseException:
            session.take_back(claim)
            raise

    def lend(self) -> str | None:
        """Let another process take the lock over with `adopt`. Return its token for that process.

        This one renews it no more. Until it is adopted it belongs to the connection of this object:
        it is free if this process ends, once its lease ends, or when you call `abandon`. So, unlike
        with `detach`, there is no moment at which nobody's end would free it.

        ``None`` if the lock is not certainly held, or is being renewed at this moment. Then it is as
        before, and you may try again. This asks no server, and does not wait.
        """
        session = self._session
        return session.lend((session.lease, session.waiter))

    def abandon(self) -> None:
        """Give up the lock, or the position, without waiting: close its connection.

        The server frees what belongs to it. A lock that another process has adopted is not this
        object's any more, and stays. You may call this in a signal handler and in any thread.
        """
        self._session.abandon()

    def adopt(self, token: str) -> bool:
        """Take over a lock that is held, by its token. Return ``False`` if it is no longer held.

        From then on this object has it: this process renews it, and it is free when the process ends.

        Args:
            token: the token, from `detach` or from another holder.

        Raises:
            AlreadyHeldError: this object holds the lock or waits for it.
            InvalidArgumentError: the token is malformed.
            RemoteError: the server could not be asked or refused.
        """
        claim = object()
        try:
            return drive(self._adopting(claim, token))
        except BaseException:
            self._session.let_go(claim)
            raise

    def release(self) -> bool:
        """Release the lock, or leave the queue. Return ``False`` if the lock was no longer held.

        Also ``False`` if its connection had just broken and the attempt to renew it on another one
        ended it.

        If the server cannot be reached, this logs a warning and does not raise: an error here would
        hide that of the code under the lock. The process keeps trying for the rest of the lease,
        since a restarted server may remember the lock. The same holds for a server that is silent
        for a second.
        """
        try:
            session = self._session
            claim = session.lease, session.waiter
            link = session.hand_back(claim)
            reply = None
            if link is not None:
                reply = _hear(link, RELEASE_PATIENCE)
                if type(reply) is bytes and session.is_released(link, reply):
                    return True
            return drive(session.release(claim, link, reply))
        except BaseException:
            session.give_up(claim)
            raise

    def give_back(self) -> bool:
        """Release the lock for a run that never began, so that it uses up nothing of its rate.

        See `begin`.
        """
        session = self._session
        claim = session.lease, session.waiter
        try:
            return drive(session.release(claim, give=operations.give_back))
        except BaseException:
            session.give_up(claim)
            raise

    def draw_age(self) -> int:
        """Return a number that is larger than all that the server gave for this key before.

        It is for the ``owner`` of a lock of this key: see `listen`.

        Raises:
            UnsupportedError: the server knows no ages.
            RemoteError: the server could not be asked.
        """
        return drive(self._session.draw_age())

    def listen(self, told: Callable[[str], object]) -> None:
        """Be told once if somebody newer asks for this lock while it is held.

        Returns at once. It is for a lock whose ``owner`` has an age.

        Args:
            told: called with the label of who is newer, on the thread that renews all locks of the
                process: it must not block.
        """
        listen(self._session.lease, told)

    def inspect(self) -> dict[str, Any]:
        """Return the holders and waiters of the key.

        Returns:
            ``holders`` and ``waiters`` in order, each with its ``label`` and its ``held_s`` or
            ``waited_s`` in seconds, beside ``key`` and ``limit``.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return drive(self._inspecting())

    def evict(self, fence: int) -> bool:
        """End the hold with this fence, without its token. Return ``False`` if it has ended already.

        The next waiter gets the lock at once, and the former holder goes on until its next renewal.
        Use this only if you know that the holder is stuck.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return drive(self._evicting(fence))

    def pause(self, for_s: float | None = None, reason: str = "", by: str | None = None) -> None:
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
        return drive(self._pausing(for_s, reason, by))

    def resume(self) -> bool:
        """End the pause of this lock, and serve who waits. Return ``False`` if it is not paused.

        Raises:
            RemoteError: the server could not be asked, or does not know this.
        """
        return drive(self._resuming())

    def __enter__(self) -> Self:
        """Acquire the lock.

        Raises:
            LockTimeoutError: it was not granted within `acquire_timeout_s`.
        """
        # As `acquire` does, without another call.
        session, timeout = self._session, self.acquire_timeout_s
        claim = object()
        try:
            link = session.ask(claim, timeout)
            reply = None
            if link is not None:
                reply = _hear(link, session.patience)
                if type(reply) is bytes and session.is_granted(claim, link, reply):
                    return self
            if not drive(session.acquire(claim, timeout, link, reply)):
                raise self._timed_out()
            return self
        except BaseException:
            # A signal's exception may have come between the grant and here.
            session.let_go(claim)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        # As `release` does. To call that would be an instant more at which a signal's exception leaves
        # the lock held: where a function begins, nothing can catch it yet.
        try:
            session = self._session
            claim = session.lease, session.waiter
            link = session.hand_back(claim)
            reply = None
            if link is not None:
                reply = _hear(link, RELEASE_PATIENCE)
                if type(reply) is bytes and session.is_released(link, reply):
                    return
            drive(session.release(claim, link, reply))
        except BaseException:
            session.give_up(claim)
            raise

    @staticmethod
    def _callback(
        reference: weakref.ref[Any], on_lost: Callable[[Any], object]
    ) -> Callable[[], object]:
        def call() -> None:
            lock = reference()
            if lock is None:
                return
            try:
                on_lost(lock)
            except BaseException:  # also SystemExit: this thread renews all the other locks
                logger.exception("on_lost of lock %r failed", lock.key)

        return call


class DistributedSemaphore(SemaphoreBase, DistributedLock):
    """A lock with up to `limit` holders at a time, first come, first served.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


class RateLimit(RateLimitBase, DistributedSemaphore):
    """Limits how many runs may begin in a window of time, first come, first served.

        with RateLimit("vendor-api", "10/m", servers=servers): ...

    The limit is exact over all processes, by the clock of the server: no window of a minute, wherever
    it begins, has more than ten. Runs may last longer than that, and any number of them may overlap.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


def _hear(link: Any, patience: float | None) -> Heard:
    """Wait for the reply to what a connection was asked, for so many seconds (``None``: no end)."""
    try:
        poll = link.poll
        if poll is None or patience is None or link.closed or patience > LONGEST_POLL:
            has_come = _ready(link, False, math.inf if patience is None else patience)
        else:
            has_come = poll.poll(patience * 1000)
    except BaseException as exc:
        if isinstance(exc, OSError) and link.closed:  # by another thread, or greenlet
            return without_frames(exc)
        link.close()
        raise  # also an OSError of a signal handler, or of a greenlet's timeout
    try:
        return link.receive() if has_come else None
    except (OSError, UnexpectedReplyError) as exc:
        return without_frames(exc)
    except BaseException:
        link.close()
        raise


def drive(flow: Flow[R]) -> R:
    """Carry out a flow in this thread: wait for all that it yields."""
    try:
        wait = next(flow)
        while True:
            if type(wait) is not Connection:
                outcome: object = _wait(wait)
            elif wait.poll is None or wait.closed:
                outcome = _ready(wait, False, wait.left)
            else:
                left = wait.left
                outcome = bool(wait.poll.poll(left * 1000 if left < LONGEST_POLL else None))
            wait = flow.send(outcome)
    except StopIteration as stop:
        result: R = stop.value
        return result
    except BaseException:
        flow.close()
        raise


def _ready(link: Connection, writes: bool, left: float) -> bool:
    number = link.fileno()
    if link.closed or number < 0:
        return True  # the next read from it fails
    # What waits is looked up at the time of the call: gevent and eventlet replace it.
    make_poll = getattr(select, "poll", None)
    seconds = None if left > LONGEST_POLL else max(0.0, left)
    if make_poll is None:
        readable, writable = ([], [number]) if writes else ([number], [])
        return any(select.select(readable, writable, [], seconds)[:2])
    poll = make_poll()
    poll.register(number, select.POLLOUT if writes else select.POLLIN)
    if not writes and current_hub() is None:  # theirs is of one hub alone
        link.poll = poll
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _wait(wait: Awaited) -> object:
    if isinstance(wait, Ready):
        return _ready(wait.link, wait.writes, wait.until - clock.now())
    if isinstance(wait, Pause):
        time.sleep(wait.seconds)
        return None
    assert isinstance(wait, Hear)
    return _await(wait)


def _await(wait: Hear) -> bool:
    gate = threading.Lock()
    gate.acquire()
    wait.signal.listen(gate.release)
    try:
        left = min(max(0.0, wait.until - clock.now()), threading.TIMEOUT_MAX, LONGEST_POLL)
        return gate.acquire(timeout=left)
    finally:
        wait.signal.forget(gate.release)
