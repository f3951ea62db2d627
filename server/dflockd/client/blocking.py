"""Locks for blocking code, and the driver that waits on behalf of their flows."""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from dflockd import errors
from dflockd.client import clock, operations
from dflockd.client.arguments import KeepPlace, Reservation
from dflockd.client.connection import Connection, Resolve, Wait, Waits, carry_out
from dflockd.client.lock import LockBase, RateLimitBase, SemaphoreBase
from dflockd.client.newest import listen
from dflockd.client.session import RELEASE_PATIENCE, Reply
from dflockd.client.steps import Flow, Hear, Pause, Ready
from dflockd.sharding import ShardingStrategy, stable_hash_shard
from dflockd.wire import ENQUEUED, UnexpectedReplyError

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

LONGEST_POLL = 86400.0
"""Seconds beyond which a wait has no end on this side: `poll` cannot count to a month."""

R = TypeVar("R")

logger = logging.getLogger("dflockd.client")


class DistributedLock(LockBase):
    """A lock that one holder has at a time, first come, first served.

    Use it with ``with``, or `acquire` and `release` it. While it is held a thread of this process
    renews its lease, and the end of the process, however sudden, frees it at once. It is not
    re-entrant. One object is for one owner at a time; others get an `AlreadyHeldError`. An exception
    that a signal handler raises leaves neither a lock nor a position behind, but for one that comes
    at the very first instruction of ``__exit__``: then the lock is held as long as its object lives.

    For the arguments see `dflockd.client.lock.LockBase`.
    """

    def acquire(self) -> bool:
        """Wait up to `acquire_timeout_s` for the lock; ``False`` if it was not granted in time.

        ``False`` comes from a server: somebody else holds the lock.

        Raises:
            AlreadyHeldError: this object holds the lock or waits for it, whoever called it.
            UnreachableError: no server there, or the connection broke while waiting, or it has said
                nothing for two seconds more than `acquire_timeout_s`; in a cluster, no server of it
                can be reached, or the one in charge says nothing and is not replaced in time.
            RefusedError: the server said no; the subclass says why. In a cluster a `MovedError`,
                `RecoveringError` or `DrainingError` is followed until the time is over.
            AcquireCancelledError: another thread called `cancel`.
        """
        claim = object()
        try:
            return self._acquire(claim)
        except BaseException:
            self._session.let_go(claim)
            raise

    def _acquire(self, claim: object) -> bool:
        session = self._session
        link = session.ask(claim, self.acquire_timeout_s)
        reply = None
        if link is not None:
            reply = _hear(link, session.asked.patience)
            if type(reply) is bytes and session.is_granted(claim, link, reply):
                return True
        return _run(session.acquire(claim, self.acquire_timeout_s, link, reply))

    def enqueue(self, ticket: str | None = None, *, place: str | None = None) -> str:
        """Take a position in the queue without waiting.

        Args:
            ticket: what a `wait` with a `Reservation` has left: the position is taken up again. If it
                is there no more this is a new one, at the end of the queue.
            place: the name of `ticket` before 0.2.

        Returns:
            ``"acquired"`` if the lock was free, or held for this ticket, else ``"queued"``: then call
            `wait`, before the lease of a grant that comes meanwhile ends.

        Raises:
            InvalidArgumentError: the ticket can be none.
            RemoteError: as with `acquire`; `acquire_timeout_s` bounds this as well.
        """
        claim, ticket = object(), place if ticket is None else ticket
        try:
            if ticket is None:
                is_granted = self._enqueue(claim)
            else:
                is_granted = _run(self._enqueueing(claim, ticket))
            return "acquired" if is_granted else "queued"
        except BaseException:
            self._session.let_go(claim)
            raise

    def _enqueue(self, claim: object) -> bool:
        session, timeout = self._session, self.acquire_timeout_s
        link = session.ask(claim, timeout, operations.to_enqueue)
        reply = None
        if link is not None:
            session.ticket = None
            reply = _hear(link, operations.line_up_patience(timeout))
            if type(reply) is bytes and session.is_granted(claim, link, reply, ENQUEUED):
                return True
        return _run(session.enqueue(claim, timeout, None, link, reply))

    def wait(
        self,
        timeout_s: float | None = None,
        reservation: Reservation | None = None,
        *,
        keep: Reservation | None = None,
    ) -> bool:
        """Wait up to `timeout_s` (default `acquire_timeout_s`) for the turn of the position.

        ``False`` if it was not in time; the position is gone then, unless it is reserved.

        Args:
            timeout_s: seconds; rounded up to whole ones with a reservation.
            reservation: keep the position, under the `ticket` that this lock has then, for an
                `enqueue` to take it up. If this wait ends in another way than ``False``, it is not
                kept.
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
            return _run(flow)
        except errors.InvalidArgumentError:
            raise
        except BaseException:
            session.give_up(claim)
            raise

    def check(self) -> None:
        """Return if the lock is certainly held.

        While its connection has broken that is in doubt: this waits until it is renewed, at most until
        its lease ends.

        Raises:
            LockLostError: it is lost, or was never acquired. Also, without waiting, if it is in doubt
                and this is called by `on_lost` of a lock, on the thread that could end the doubt.
        """
        _run(self._session.check())

    def renew(self, lease_ttl_s: int | None = None) -> bool:
        """Start the lease anew now, with `lease_ttl_s` (default: as granted); ``False`` if it is lost.

        The process does so all the time; this is for a stretch without it, such as a call that stops
        all threads of the process for longer than the lease.

        Raises:
            InvalidArgumentError: the lease is no whole number of seconds from 1.
            RemoteError: the server could not be asked or refused, or said nothing for 10 s or until
                the lease was over; the lock ends with the connection.
        """
        return _run(self._renewing(lease_ttl_s))

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
        session = self._session
        claim = session.lease, session.waiter
        try:
            return _run(self._detaching(claim, lease_ttl_s))
        except errors.InvalidArgumentError:
            raise
        except BaseException:
            session.take_back(claim)
            raise

    def adopt(self, token: str) -> bool:
        """Take over a lock that is held, by its token; ``False`` if it is held no more.

        From now on it is this object's: renewed by this process, and free when it ends.

        Args:
            token: as `detach` returned it, or as another holder has it.

        Raises:
            AlreadyHeldError: this object holds the lock or waits for it.
            InvalidArgumentError: it is no token.
            RemoteError: the server could not be asked or refused.
        """
        claim = object()
        try:
            return _run(self._adopting(claim, token))
        except BaseException:
            self._session.let_go(claim)
            raise

    def release(self) -> bool:
        """Give the lock back, or the position in the queue; ``False`` if it was not held any more.

        Also ``False`` if its connection had just broken and it ended with the attempt to renew it
        over another.

        A failure to reach the server is logged, not raised: an error here would hide that of the
        code under the lock. The process tries again as long as the lease lasts, for a server that is
        restarted may remember the lock; that goes for one that says nothing for a second, too.
        """
        session = self._session
        claim = session.lease, session.waiter
        try:
            link = session.hand_back(claim)
            reply = None
            if link is not None:
                reply = _hear(link, RELEASE_PATIENCE)
                if type(reply) is bytes and session.is_released(link, reply):
                    return True
            return _run(session.release(claim, link, reply))
        except BaseException:
            session.give_up(claim)
            raise

    def give_back(self) -> bool:
        """Give the lock back as `release` does, for a run that has not begun and never will.

        So it takes no place of its rate. See `begin`.
        """
        session = self._session
        claim = session.lease, session.waiter
        try:
            return _run(session.release(claim, give=operations.give_back))
        except BaseException:
            session.give_up(claim)
            raise

    def draw_age(self) -> int:
        """Return a number that is larger than all that the server gave for this key before.

        It is for the ``owner`` of a lock of this key: see `listen`.

        Raises:
            UnsupportedError: the server is too old.
            RemoteError: the server could not be asked.
        """
        return _run(self._session.draw_age())

    def listen(self, told: Callable[[str], object]) -> None:
        """Be told once if somebody newer asks for this lock while it is held.

        Returns at once. It is for a lock whose ``owner`` has an age.

        Args:
            told: called with the label of who is newer, on the thread that renews all locks of the
                process: it must not block.
        """
        listen(self._session.lease, told)

    def require_ages(self) -> None:
        """Return if the server of the key knows ages; it is asked, unless it is known to.

        For who was given an age by another process, before it asks for the lock.

        Raises:
            UnsupportedError: the server is too old: it would grant the lock to who is older, too.
            RemoteError: the server could not be asked.
        """
        _run(self._session.require_ages())

    def inspect(self) -> dict[str, Any]:
        """Ask the server who holds the key and who waits for it.

        Returns:
            ``holders`` and ``waiters`` in order, each with its ``label`` and its ``held_s`` or
            ``waited_s`` in seconds, beside ``key`` and ``limit``.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return _run(self._inspecting())

    def evict(self, fence: int) -> bool:
        """End the hold with this fence without its token; ``False`` if it has ended already.

        Somebody else gets the lock at once, and the former holder goes on until its next renewal:
        for those who know that it is stuck.

        Raises:
            RemoteError: the server could not be asked, or is too old to know.
        """
        return _run(self._evicting(fence))

    def cancel(self) -> None:
        """Make an `acquire` or `wait` of this lock in another thread raise `AcquireCancelledError`.

        Also one that is just about to begin; never undone. It takes no lock and may be called from a
        signal handler.
        """
        self._session.cancel()

    def __enter__(self) -> Self:
        """Acquire.

        Raises:
            LockTimeoutError: not granted within `acquire_timeout_s`.
        """
        claim = object()
        try:
            if not self._acquire(claim):
                raise self._timed_out()
            return self
        except BaseException:
            # A signal's exception may have come between the grant and here.
            self._session.let_go(claim)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release."""
        self.release()

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
    """A lock that up to `limit` holders have at a time, first come, first served.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


class RateLimit(RateLimitBase, DistributedSemaphore):
    """Something of which so many runs may begin in a while, first come, first served.

        with RateLimit("vendor-api", "10/m", servers=servers): ...

    Over all processes, exactly, by the clock of the server: in no window of a minute, wherever it
    begins, more than ten. Runs may be longer than that, and any number of them go on at once.

    For the other arguments see `dflockd.client.lock.LockBase`.
    """


def _hear(link: Any, patience: float | None) -> Reply:
    """Wait for the reply to what a connection was asked, for so many seconds (``None``: no end)."""
    try:
        poll = link.poll
        if poll is None or patience is None or link.closed or patience > LONGEST_POLL:
            has_come = _ready(link, False, math.inf if patience is None else patience)
        else:
            has_come = poll.poll(patience * 1000)
        return link.receive() if has_come else None
    except (OSError, UnexpectedReplyError) as exc:
        return exc
    except BaseException:
        link.close()
        raise


def _run(flow: Flow[R]) -> R:
    return drive(carry_out(flow))


def drive(waits: Waits[R]) -> R:
    """Wait, in this thread, for whatever is to be waited for."""
    try:
        wait = next(waits)
        while True:
            if type(wait) is not Connection:
                outcome: object = _wait(wait)
            elif wait.poll is None or wait.closed:
                outcome = _ready(wait, False, wait.left)
            else:
                left = wait.left
                outcome = wait.poll.poll(left * 1000 if left < LONGEST_POLL else None)
            wait = waits.send(outcome)
    except StopIteration as stop:
        result: R = stop.value
        return result
    except BaseException:
        waits.close()
        raise


def _ready(link: Connection, writes: bool, left: float) -> bool:
    if link.closed:
        return True  # whoever reads from it learns that
    # What waits is looked up at the time of the call: gevent and eventlet replace it.
    make_poll = getattr(select, "poll", None)
    seconds = None if left > LONGEST_POLL else max(0.0, left)
    if make_poll is None:
        readable, writable = ([], [link]) if writes else ([link], [])
        return any(select.select(readable, writable, [], seconds)[:2])
    poll = make_poll()
    poll.register(link.fileno(), select.POLLOUT if writes else select.POLLIN)
    if not writes:
        link.poll = poll
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _wait(wait: Wait) -> object:
    if isinstance(wait, Ready):
        return _ready(wait.link, wait.writes, wait.until - clock.now())
    if isinstance(wait, Pause):
        time.sleep(wait.seconds)
        return None
    if isinstance(wait, Hear):
        return _await(wait)
    assert isinstance(wait, Resolve)
    try:
        return socket.getaddrinfo(wait.host, wait.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        return exc


def _await(wait: Hear) -> bool:
    gate = threading.Lock()
    gate.acquire()
    wait.signal.listen(gate.release)
    try:
        left = min(max(0.0, wait.until - clock.now()), threading.TIMEOUT_MAX, LONGEST_POLL)
        return gate.acquire(timeout=left)
    finally:
        wait.signal.forget(gate.release)
