"""The locks of one run: usually one, acquired in order and released together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import chain, repeat
from typing import Any, Generic, TypeAlias, TypeVar

from celery_dflock.config import Settings, with_remedy
from celery_dflock.exceptions import LockLostError, LockUnavailableError
from celery_dflock.lock_key import LockKey
from celery_dflock.look import Look
from celery_dflock.worker.shutdown import shutdown
from dflockd import clock, errors
from dflockd.client.lock import LockBase, Maker
from dflockd.rates import RateLike
from dflockd.sync_client import DistributedLock, DistributedSemaphore, Reservation

MOMENT = 30
"""Lease in seconds of what is held to be detached or released at once."""

RESTART_TIMEOUT = 5.0
"""Seconds for which a server that has ended is waited for by those who had a position in its queue."""

RESTART_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.5)
"""Seconds between attempts to reach it; the last one repeats."""

HAND_OVER_TIMEOUT = 1.0
"""Seconds that who tries a lock once waits for its shard to get from one server to another."""

_RESTARTS = (errors.UnreachableError, errors.DrainingError)

logger = logging.getLogger("celery_dflock")

_WORST_FIRST = ("lost", "free", "asking", "queued", "doubtful", "held")
"""The states of a lock."""

ReserveFunction: TypeAlias = Callable[[], Reservation | None]
"""Returns the reservation for a position, once there is something to wait for."""
AskFunction: TypeAlias = Callable[[DistributedLock, str | None, ReserveFunction | None], bool]
"""Asks for a lock, with the ticket of a position and what may keep it."""

L = TypeVar("L", bound=LockBase)


class LocksBase(Generic[L]):
    """Locks on several keys as if they were one: everything but waiting.

    Args:
        locks: the locks of keys in their order, at least one; see `LockOptions.keys_of` and `maker`.
        timeout: seconds to wait for all of them together; ``None`` has no end.
        is_cluster: whether their servers are a cluster.
        on_wait: called with the lock, and a function that asks what its server knows, before each wait.

    Attributes:
        timeout: as given.
    """

    _lock_class: type[L]
    _semaphore_class: type[L]

    waited = 0.0
    """Seconds that it took until all were granted."""

    def __init__(
        self,
        locks: Sequence[L],
        timeout: float | None,
        is_cluster: bool = False,
        on_wait: Callable[[L, Callable[[], Look]], object] | None = None,
    ) -> None:
        self._locks = locks
        self.timeout = timeout
        self._is_cluster = is_cluster
        self._on_wait = on_wait

    @classmethod
    def maker(
        cls,
        limit: int,
        ttl: int,
        settings: Settings,
        rate: RateLike | None = None,
        *,
        group_limit: int | None = None,
        begins: bool = False,
    ) -> Maker[L]:
        """Return what makes the lock, or the semaphore, of a key: for tasks with that ``lock_limit``.

        Args:
            limit: holders of each key at once.
            ttl: lease in seconds.
            settings: the settings of the app: where the servers are.
            rate: how many runs may begin in a while; ``None`` at any time.
            group_limit: holders of each key that belong to one group; ``None`` is no limit.
            begins: whether a run begins with the grant, or is said to by `begin`.
        """
        lock_class = cls._lock_class if limit == 1 else cls._semaphore_class
        return lock_class.maker(
            *(limit, None, ttl),
            rate=rate,
            begins=begins,
            group_limit=group_limit,
            **settings.connection_options(),
        )

    @property
    def keys(self) -> list[LockKey]:
        """Of the locks, in their order."""
        return [LockKey(lock.key) for lock in self._locks]

    @property
    def group(self) -> str | None:
        """To which group they belong: the first of them that has one; ``None`` if to none."""
        group = next((lock.group for lock in self._locks if lock.group is not None), None)
        return None if group is None else LockKey(group)  # as finished as a key

    @property
    def held(self) -> bool:
        """Whether all are certainly held."""
        if len(self._locks) == 1:  # nearly always
            return self._locks[0].held
        return all(lock.held for lock in self._locks)

    @property
    def state(self) -> str:
        """That of the one which is worst off."""
        states = {lock.state for lock in self._locks}
        return next(state for state in _WORST_FIRST if state in states)

    @property
    def lost(self) -> L | None:
        """The first that is lost, if one is."""
        return next((lock for lock in self._locks if lock.state == "lost"), None)

    def has(self, key: str) -> bool:
        """Whether one of them is held, or may be."""
        return any(lock.key == key and is_kept(lock) for lock in self._locks)

    @property
    def tokens(self) -> dict[str, str | None]:
        """The token of each key, ``None`` where it is neither held nor in doubt."""
        return {lock.key: lock.token for lock in self._locks}

    @property
    def fences(self) -> dict[str, int | None]:
        """The fence of each key."""
        return {lock.key: lock.fence for lock in self._locks}


class Locks(LocksBase[DistributedLock]):
    """Locks for blocking code; see `LocksBase`."""

    _lock_class = DistributedLock
    _semaphore_class = DistributedSemaphore

    _taken_up = 0
    """How many keys were held before the others are waited for."""

    reservation: Reservation | None = None
    """The reservation for the position of the first key, if the wait for it timed out."""

    heeds_shutdown = False
    """Whether a shutdown of the worker ends the wait: that of a message which can go elsewhere."""

    has_begun = True
    """Whether a release leaves the slots of a rate used: not before the task begins, if it has one."""

    outer: Locks | None = None
    """Those of the task that called this one in the same thread, if any."""

    shown: Callable[[], Any] = staticmethod(lambda: None)
    """What the task, and callbacks about it, see while anybody has it; see `TaskLock.of`."""

    def has_under(self, key: str) -> bool:
        """Whether one of them, or of those that their task was called under, is held, or may be."""
        return self.has(key) or (self.outer is not None and self.outer.has_under(key))

    def kept_by_caller(self) -> LockKey | None:
        """The first key of which those that this task was called under leave too few slots, if any.

        They wait for this one in the same thread, and would forever.
        """
        if self.outer is not None:
            for lock in self._locks:
                slots, limit = _share_of(lock)
                used = self.outer._slots_under(lock.key)
                if used and used + slots > limit:
                    return LockKey(lock.key)
        return None

    def _slots_under(self, key: str) -> int:
        own = sum(_share_of(lock)[0] for lock in self._locks if lock.key == key and is_kept(lock))
        return own + (0 if self.outer is None else self.outer._slots_under(key))

    def acquire(
        self, ticket: str | None = None, reserve: ReserveFunction | None = None
    ) -> str | None:
        """Take all, or none; but for those that were adopted or taken up.

        Args:
            ticket: the ticket of a position for the first key, to go on from.
            reserve: keep the position in the queue of the first key if it is not granted in time;
                then `ticket` names it, and `reservation` is what was said.

        Returns:
            The key that was not granted in time, or ``None`` once all are held.

        Raises:
            AcquireCancelledError: the worker is shutting down; see `heeds_shutdown`.
            OwnerConflictError: the same owner holds one of them already, or waits for it.
            SupersededError: somebody newer has asked for the first.
            LockUnavailableError: a server could not be asked, or refused.
        """
        started, waited = clock.now(), 0.0
        timeout = remaining = self.timeout
        for lock in self._locks[self._taken_up :] if self._taken_up else self._locks:
            lock.acquire_timeout_s = remaining
            ask = self._try_once if remaining == 0 else self._wait
            if not self._asked(ask, lock, ticket, reserve):
                self.release()
                return lock.key
            ticket = reserve = None
            waited = clock.now() - started
            if timeout is not None:
                remaining = max(0.0, timeout - waited)
        self.waited += waited
        return None

    def take_up(self, ticket: str | None, timeout: float, reserve: ReserveFunction | None) -> bool:
        """Take the next key up where it was waited for; ``False`` if it is not free after all.

        That is the first one, or the one after those that were adopted. Then nothing is held.

        For `reserve` and what is raised see `acquire`.
        """
        lock = self._locks[self._taken_up]
        lock.acquire_timeout_s = timeout
        ask = self._resume if timeout else self._try_once
        if self._asked(ask, lock, ticket, reserve):
            self._taken_up += 1
            return True
        if self._taken_up:
            self.release()
        return False

    def adopt(self, lent: Sequence[tuple[str, str]]) -> bool:
        """Take over the first keys, by their tokens; ``False``, and nothing is held, if one is lost.

        Raises:
            LockUnavailableError: a server could not be asked, or refused.
        """
        for lock, (_, token) in zip(self._locks, lent, strict=False):
            if not self._asked(partial(_adopt, token), lock, None, None):
                self.release()
                return False
            self._taken_up += 1
        return True

    @property
    def ticket(self) -> str | None:
        """That of the position that was kept for the first key, if it was."""
        return self._locks[0].ticket

    def server(self, key: str) -> str:
        """Where a key is asked for."""
        return next(lock.server for lock in self._locks if lock.key == key)

    def _asked(
        self,
        ask: AskFunction,
        lock: DistributedLock,
        ticket: str | None,
        reserve: ReserveFunction | None,
    ) -> bool:
        """Ask a server for a lock; what goes wrong frees all of them."""
        try:
            if self.heeds_shutdown:
                shutdown.add(lock)
            return ask(lock, ticket, reserve)
        except (*errors.IN_ORDER, errors.AcquireCancelledError):
            self.release()
            raise
        except errors.RemoteError as exc:
            self.release()
            raise LockUnavailableError(lock.key, with_remedy(exc)) from exc
        finally:
            # Not in a function: an exception of a signal handler may come as one begins.
            if self.heeds_shutdown:
                if not shutdown.begun:
                    shutdown.waiting.pop(lock, None)
                shutdown.look_again()

    def _reserve(self, reserve: ReserveFunction | None) -> Reservation | None:
        self.reservation = None if reserve is None else reserve()
        return self.reservation

    def _try_once(
        self, lock: DistributedLock, ticket: str | None, reserve: ReserveFunction | None
    ) -> bool:
        return try_once(lock, ticket, None if reserve is None else partial(self._reserve, reserve))

    def _resume(
        self, lock: DistributedLock, ticket: str | None, reserve: ReserveFunction | None
    ) -> bool:
        return lock.acquire(ticket, self._reserve(reserve))

    def _wait(
        self, lock: DistributedLock, ticket: str | None, reserve: ReserveFunction | None
    ) -> bool:
        begun = clock.now()
        # One round trip where the lock is free, as above. Where it is not, the position is there
        # first: nobody overtakes while the wait is reported.
        if lock.enqueue(ticket) == "acquired":
            return True
        if self._on_wait is not None:
            self._on_wait(lock, cache(partial(Look.at, lock)))
        reservation = self._reserve(reserve)
        if self._is_cluster:
            # In a cluster the lock looks for its server by itself, and has begun to before.
            return lock.wait(_left(lock.acquire_timeout_s, begun), reservation)
        started = clock.now()
        try:
            return lock.wait(reservation=reservation)
        except _RESTARTS as exc:
            if _left(lock.acquire_timeout_s, started) == 0:
                raise  # it has said nothing for all that time
            logger.info("queueing again for lock %r: %s", lock.key, exc)
            return self._queue_again(lock, started)

    def _queue_again(self, lock: DistributedLock, started: float) -> bool:
        """Wait on at a server that ended while it was waited at: it may just be restarted.

        Whose position was lost with it queue up in the order in which they reach the next one.
        """
        timeout, until = lock.acquire_timeout_s, clock.now() + RESTART_TIMEOUT
        for pause in chain(RESTART_PAUSES, repeat(RESTART_PAUSES[-1])):
            time.sleep(pause)
            lock.acquire_timeout_s = _left(timeout, started)
            try:
                return lock.acquire()
            except _RESTARTS:
                if lock.acquire_timeout_s == 0 or clock.now() >= until:
                    raise
        raise AssertionError("there is always another pause")

    def release(self) -> None:
        """Give back what is held, in the opposite order; nothing happens to what is not."""
        if self.has_begun and len(self._locks) == 1:  # nearly always
            self._locks[0].release()
            return
        with ExitStack() as stack:  # the last one too, even if one is interrupted
            for lock in self._locks:
                stack.callback(lock.release if self.has_begun else lock.give_back)

    def listen(self, told: Callable[[str], object]) -> None:
        """Be told once, on the renewal thread, if somebody newer asks for the first key."""
        self._locks[0].listen(told)

    def begin(self) -> None:
        """Note that the task runs: its slots of a rate are used from now on, for one window."""
        self.has_begun = True
        for lock in self._locks:
            lock.begin()

    def renew(self, seconds: int | None = None) -> bool:
        """Renew all leases now; ``False`` if one is lost."""
        return all(lock.renew(seconds) for lock in self._locks)

    def check(self) -> None:
        """Return once it is certain that all are held.

        Raises:
            LockLostError: one is not.
        """
        while True:
            for lock in self._locks:
                try:
                    lock.check()
                except errors.LockLostError as exc:
                    raise lost_error(lock) from exc
            # One may come into doubt while another's end is waited for.
            if len(self._locks) == 1 or self.held:
                return

    def look(self, key: str) -> Look:
        """Ask what the server knows of a key."""
        return Look.at(next(lock for lock in self._locks if lock.key == key))


def _share_of(lock: LockBase) -> tuple[int, int]:
    """Return how many slots a lock takes, and of how many. In groups: all, for each has its own few."""
    if not isinstance(lock, DistributedSemaphore) or lock.group is not None:
        return 1, 1
    return lock.limit if lock.weight == "all" else lock.weight, lock.limit


def is_kept(lock: LockBase) -> bool:
    """Whether a lock is held, or in doubt: for its owner that is the same until the doubt is over."""
    return lock.state in ("held", "doubtful")


def lost_error(lock: LockBase) -> LockLostError:
    """Return the error for code that needs a lock which is not held."""
    why = "its lease ended or the server no longer knows it"
    if lock.state == "doubtful":
        why = "its state is in doubt, and this thread cannot wait until it is known"
    return LockLostError(lock.key, why)


def _adopt(token: str, lock: DistributedLock, *_: object) -> bool:
    return lock.adopt(token)


def try_once(
    lock: DistributedLock, ticket: str | None = None, reserve: ReserveFunction | None = None
) -> bool:
    """Take a lock if it is free, with `acquire_timeout_s` 0.

    Nobody can say so in the milliseconds in which a cluster hands its shard over: these are waited
    for. For the other arguments see `Locks.acquire`.
    """
    until = clock.now() + HAND_OVER_TIMEOUT
    while True:
        reservation = reserve and reserve()
        try:
            return lock.acquire(ticket, reservation)
        except errors.MaxWaitersError:
            if ticket is None and reservation is None:
                raise
            return False  # it is not free, and no position in its queue is either
        except errors.RecoveringError as exc:
            if clock.now() + exc.retry_s > until:
                raise
            time.sleep(exc.retry_s)


def _left(timeout: float | None, started: float) -> float | None:
    return None if timeout is None else max(0.0, timeout - (clock.now() - started))
