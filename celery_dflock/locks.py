"""The locks of one run: usually one, taken in order and given back together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from itertools import chain, repeat
from typing import Any, Generic, TypeAlias, TypeVar

from celery.utils.nodenames import gethostname

from celery_dflock.config import Settings
from celery_dflock.exceptions import LockLostError, LockUnavailableError
from celery_dflock.worker.shutdown import shutdown
from dflockd import errors
from dflockd.client.lock import LockBase
from dflockd.sync_client import DistributedLock, DistributedSemaphore, Reservation

MOMENT = 30
"""Lease in seconds of what is held to be detached or released at once."""

RESTART_PATIENCE = 5.0
"""Seconds for which a server that has ended is waited for by those who had a place in its queue."""

RESTART_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.5)
"""Seconds between attempts to reach it; the last one repeats."""

HAND_OVER_PATIENCE = 1.0
"""Seconds that who tries a lock once waits for its shard to get from one server to another."""

_RESTARTS = (errors.UnreachableError, errors.DrainingError)

logger = logging.getLogger("celery_dflock")

_WORST_FIRST = ("lost", "free", "asking", "queued", "doubtful", "held")
"""The states of a lock."""

KeepFunction: TypeAlias = Callable[[], Reservation | None]
"""Says how a place is to be kept, once there is something to wait for."""

L = TypeVar("L", bound=LockBase)


class LocksBase(Generic[L]):
    """Locks on several keys as if they were one: everything but waiting.

    Args:
        keys: complete and in order, at least one; see `LockOptions.keys_of`.
        limit: holders of each key at once.
        timeout: seconds to wait for all of them together; ``None`` has no end.
        ttl: lease in seconds.
        settings: of the app: where the servers are.
        label: what people see who ask the server who holds the lock.
        run: what the label begins with: task and id, the same for every copy of the message.
        on_wait: called with the key, and a function that asks who holds it, before each wait.
        on_lost: called once, with the key, when the first of them is lost.
    """

    _lock_class: Callable[..., L]
    _semaphore_class: Callable[..., L]

    def __init__(
        self,
        keys: Sequence[str],
        *,
        limit: int,
        timeout: float | None,
        ttl: int,
        settings: Settings,
        label: str,
        run: str = "",
        on_wait: Callable[[str, Callable[[], str | None]], object] | None = None,
        on_lost: Callable[[str], object] | None = None,
    ) -> None:
        self.keys = list(keys)
        self.run = run
        self.timeout = timeout
        self._on_wait = on_wait
        self._follows = settings.is_cluster
        first_lost = None if on_lost is None else _First(on_lost)
        options = {**settings.connection_options(), "label": label, "on_lost": first_lost}
        self._locks: list[L] = [self._make(key, limit, ttl, options) for key in keys]

    @property
    def held(self) -> bool:
        """Whether all are certainly held."""
        return all(lock.held for lock in self._locks)

    @property
    def state(self) -> str:
        """That of the one which is worst off."""
        states = {lock.state for lock in self._locks}
        return next(state for state in _WORST_FIRST if state in states)

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

    def _make(self, key: str, limit: int, ttl: int, options: Mapping[str, Any]) -> L:
        if limit == 1:
            return self._lock_class(key, None, ttl, **options)
        return self._semaphore_class(key, limit, None, ttl, **options)


class _First:
    """Tells of the first lock that is lost, and only of that.

    It knows nothing of those who have it, so that they are gone with their last user: all that a
    task leaves in a cycle stays until the collector comes.
    """

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[str], object]) -> None:
        self._callback: Callable[[str], object] | None = callback

    def __call__(self, lock: LockBase) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(lock.key)


class HeldLock:
    """Locks that are held, as the code under them sees them.

    Attributes:
        keys: what is locked, prefix included; nearly always one key.
        fences: the fence of each of `keys`.
        waited: seconds that it took until all were granted.
    """

    def __init__(self, locks: LocksBase[Any], waited: float) -> None:
        self._locks = locks
        self.keys = locks.keys
        self.fences = locks.fences
        self.waited = waited

    @property
    def key(self) -> str:
        """What is locked; the first in order where ``lock_key`` gives several."""
        return self.keys[0]

    @property
    def held(self) -> bool:
        """Whether the lock is certainly still held."""
        return self._locks.held

    @property
    def state(self) -> str:
        """``"held"``, ``"doubtful"``, ``"lost"``, or ``"free"`` after the task.

        It is doubtful while its connection has broken and the lock server is sought again: it may
        have given the lock away. Of several keys it is the state of the one which is worst off.
        """
        return self._locks.state

    @property
    def token(self) -> str | None:
        """The token of the grant of `key`; ``None`` once it is lost."""
        return self._locks.tokens[self.key]

    @property
    def fence(self) -> int | None:
        """A number that grows with every grant of `key`, for the resource to compare.

        Send it along with each write; a resource that remembers the largest and refuses smaller
        ones is safe even from a task that does not know yet that its lock is lost.
        """
        return self.fences[self.key]

    def __repr__(self) -> str:
        """Without the token."""
        return f"<{type(self).__name__} {self.key!r} fence={self.fence} {self.state}>"


class Locks(LocksBase[DistributedLock]):
    """Locks for blocking code; see `LocksBase`."""

    _lock_class = DistributedLock
    _semaphore_class = DistributedSemaphore

    def acquire(self, place: str | None = None, keep: KeepFunction | None = None) -> str | None:
        """Take them all, or none.

        Args:
            place: of the only key, to be taken up: where its queue was left before.
            keep: keep the place in the queue of the only key if it is not granted in time; then
                `place` is its name.

        Returns:
            The key that was not granted in time, or ``None`` once all are held.

        Raises:
            AcquireCancelledError: the worker is shutting down.
            LockUnavailableError: a server could not be asked, or refused.
        """
        started, remaining = time.monotonic(), self.timeout
        for lock in self._locks:
            lock.acquire_timeout_s = remaining
            try:
                granted = self._grant(lock, place, keep)
            except errors.RemoteError as exc:
                self.release()
                raise LockUnavailableError(lock.key, str(exc)) from exc
            if not granted:
                self.release()
                return lock.key
            remaining = _left(self.timeout, started)
        return None

    @property
    def place(self) -> str | None:
        """The name of the place that was kept for the only key, if it was."""
        return self._locks[0].ticket

    def _grant(self, lock: DistributedLock, place: str | None, keep: KeepFunction | None) -> bool:
        try:
            shutdown.add(lock)
            if lock.acquire_timeout_s == 0:
                return try_once(lock, place, keep)
            return self._wait(lock, place, keep)
        finally:
            shutdown.discard(lock)

    def _wait(self, lock: DistributedLock, place: str | None, keep: KeepFunction | None) -> bool:
        begun = time.monotonic()
        # One round trip where the lock is free, as above. Where it is not, the place in the queue
        # is there first: nobody overtakes while others are told of the wait.
        if lock.enqueue(place) == "acquired":
            return True
        if self._on_wait is not None:
            self._on_wait(lock.key, cache(lambda: describe_holder(lock, self.run)))
        keeping = keep and keep()
        if self._follows:
            # In a cluster the lock looks for its server by itself, and has begun to before.
            return lock.wait(_left(lock.acquire_timeout_s, begun), keeping)
        started = time.monotonic()
        try:
            return lock.wait(reservation=keeping)
        except _RESTARTS as exc:
            if _left(lock.acquire_timeout_s, started) == 0:
                raise  # it has said nothing for all that time
            logger.info("queueing again for lock %r: %s", lock.key, exc)
            return self._queue_again(lock, started)

    def _queue_again(self, lock: DistributedLock, started: float) -> bool:
        """Wait on at a server that ended while it was waited at: it may just be restarted.

        Whose place was lost with it queue up in the order in which they reach the next one.
        """
        timeout, patience = lock.acquire_timeout_s, time.monotonic() + RESTART_PATIENCE
        for pause in chain(RESTART_PAUSES, repeat(RESTART_PAUSES[-1])):
            time.sleep(pause)
            lock.acquire_timeout_s = _left(timeout, started)
            try:
                return lock.acquire()
            except _RESTARTS:
                if lock.acquire_timeout_s == 0 or time.monotonic() >= patience:
                    raise
        raise AssertionError("there is always another pause")

    def leave(self, place: str) -> None:
        """Give up a place of the only key that was kept, so that nothing is held for it."""
        [lock] = self._locks
        with suppress(errors.RemoteError):  # then it ends by itself
            lock.enqueue(place)
            lock.release()

    def adopt(self, token: str) -> bool:
        """Take over the lock of the only key, by its token; ``False`` if it is held no more.

        Raises:
            LockUnavailableError: its server could not be asked.
        """
        [lock] = self._locks
        try:
            return lock.adopt(token)
        except errors.RemoteError as exc:
            raise LockUnavailableError(lock.key, str(exc)) from exc

    def release(self) -> None:
        """Give back what is held, in the opposite order; nothing happens to what is not."""
        if len(self._locks) == 1:  # nearly always
            self._locks[0].release()
            return
        with ExitStack() as stack:  # it comes to the last even if one is interrupted
            for lock in self._locks:
                stack.callback(lock.release)

    def renew(self, seconds: int | None = None) -> bool:
        """Renew all leases now; ``False`` if one is lost."""
        return all(lock.renew(seconds) for lock in self._locks)

    def check(self) -> None:
        """Return once it is certain that all are held.

        Raises:
            LockLostError: one is not.
        """
        while not self.held:  # one may come into doubt while another's end is waited for
            for lock in self._locks:
                try:
                    lock.check()
                except errors.LockLostError as exc:
                    raise lost_error(lock) from exc

    def holder(self, key: str) -> str | None:
        """Ask who holds a key, named first if it is a copy of this very run.

        ``None`` if nobody does, or if that cannot be learned.
        """
        for lock in self._locks:
            if lock.key == key:
                return describe_holder(lock, self.run)
        return None


def is_kept(lock: LockBase) -> bool:
    """Whether a lock is held, or in doubt: for its owner that is the same until the doubt is over."""
    return lock.state in ("held", "doubtful")


def lost_error(lock: LockBase) -> LockLostError:
    """Return what is to be raised where a lock would have to be held."""
    why = "its lease ended or the server forgot it"
    if lock.state == "doubtful":
        why = "that is in doubt, and on this thread nobody can wait for the end of it"
    return LockLostError(lock.key, why)


def try_once(
    lock: DistributedLock, place: str | None = None, keep: KeepFunction | None = None
) -> bool:
    """Take a lock if it is free, with `acquire_timeout_s` 0.

    Nobody can say so in the milliseconds in which a cluster hands its shard over: these are waited
    for. For the other arguments see `Locks.acquire`.
    """
    until = time.monotonic() + HAND_OVER_PATIENCE
    while True:
        try:
            if keep is None:
                return lock.acquire()
            # As fast where the lock is free. Where it is not, only who has a place can have it kept.
            return lock.enqueue(place) == "acquired" or lock.wait(0, keep())
        except errors.MaxWaitersError:
            if keep is None:
                raise
            return False  # it is not free, and no place of its queue is either
        except errors.RecoveringError as exc:
            if time.monotonic() + exc.retry_s > until:
                raise
            time.sleep(exc.retry_s)


def _left(timeout: float | None, started: float) -> float | None:
    return None if timeout is None else max(0.0, timeout - (time.monotonic() - started))


def describe_holder(lock: DistributedLock, wanted: str = "") -> str | None:
    """Return who holds a lock and for how long, in a few words; ``None`` if it cannot be learned.

    For `wanted` see `describe_holders`.
    """
    try:
        return describe_holders(lock.inspect()["holders"], wanted)
    except errors.RemoteError:
        return None


def describe_holders(holders: Sequence[Mapping[str, Any]], wanted: str = "") -> str | None:
    """Return who holds a lock and for how long, in a few words; ``None`` without holders.

    Of several it names one: whose label begins with `wanted`, else the one who holds it longest.
    """
    if not holders:
        return None
    first = next((h for h in holders if h["label"].startswith(wanted)), holders[0])
    others = f" and {len(holders) - 1} others" if len(holders) > 1 else ""
    return describe(first) + others


def describe(holder: Mapping[str, Any]) -> str:
    """Return who a holder is that a server has named, and for how long, in a few words."""
    return f"{holder['label'] or 'somebody'}, for {holder['held_s']:.0f} s"


def process_label() -> str:
    """Return what tells this process from others: its host and pid."""
    return f"{gethostname()} pid {os.getpid()}"
