"""The locks of one run: usually one, taken in order and given back together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from celery.utils.nodenames import gethostname

from celery_dflock.config import Settings
from celery_dflock.exceptions import LockUnavailableError
from celery_dflock.lifecycle import shutdown
from dflockd import errors
from dflockd.sync_client import DistributedLock, DistributedSemaphore


class Locks:
    """Locks on several keys as if they were one.

    Args:
        keys: complete and in order, at least one; see `LockOptions.keys_of`.
        limit: holders of each key at once.
        timeout: seconds to wait for all of them together; ``None`` has no end.
        ttl: lease in seconds.
        settings: of the app: where the servers are.
        label: what people see who ask the server who holds the lock.
        on_lost: called once, with the key, when the first of them is lost.
    """

    def __init__(
        self,
        keys: Sequence[str],
        *,
        limit: int,
        timeout: float | None,
        ttl: int,
        settings: Settings,
        label: str,
        on_lost: Callable[[str], object] | None = None,
    ) -> None:
        self.keys = list(keys)
        self.timeout = timeout
        self._on_lost = on_lost
        self._locks = [self._make(key, limit, ttl, label, settings) for key in keys]

    def acquire(self) -> str | None:
        """Take them all, or none.

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
                with shutdown.waiting(lock):
                    granted = lock.acquire()
            except errors.RemoteError as exc:
                self.release()
                raise LockUnavailableError(lock.key, str(exc)) from exc
            if not granted:
                self.release()
                return lock.key
            if self.timeout is not None:
                remaining = max(0.0, self.timeout - (time.monotonic() - started))
        return None

    def release(self) -> None:
        """Give back what is held, in the opposite order; nothing happens to what is not."""
        with ExitStack() as stack:  # it comes to the last even if one is interrupted
            for lock in self._locks:
                stack.callback(lock.release)

    def renew(self, seconds: int | None = None) -> bool:
        """Renew all leases now; ``False`` if one is lost."""
        return all(lock.renew(seconds) for lock in self._locks)

    @property
    def held(self) -> bool:
        """Whether all are certainly held."""
        return all(lock.held for lock in self._locks)

    @property
    def tokens(self) -> dict[str, str | None]:
        """The token of each key, ``None`` where it is not held."""
        return {lock.key: lock.token for lock in self._locks}

    @property
    def fences(self) -> dict[str, int | None]:
        """The fence of each key."""
        return {lock.key: lock.fence for lock in self._locks}

    def holder(self, key: str) -> str | None:
        """Ask who holds a key; ``None`` if nobody does, or if that cannot be learned."""
        for lock in self._locks:
            if lock.key == key:
                return describe_holder(lock)
        return None

    def _make(
        self, key: str, limit: int, ttl: int, label: str, settings: Settings
    ) -> DistributedLock:
        options = {**settings.connection_options(), "label": label, "on_lost": self._lost}
        if limit == 1:
            return DistributedLock(key, None, ttl, **options)
        return DistributedSemaphore(key, limit, None, ttl, **options)

    def _lost(self, lock: DistributedLock) -> None:
        callback, self._on_lost = self._on_lost, None
        if callback is not None:
            callback(lock.key)


def describe_holder(lock: DistributedLock) -> str | None:
    """Return who holds a lock and for how long, in a few words; ``None`` if it cannot be learned."""
    try:
        holders = lock.inspect()["holders"]
    except errors.RemoteError:
        return None
    if not holders:
        return None
    first = holders[0]
    others = f" and {len(holders) - 1} others" if len(holders) > 1 else ""
    return f"{first['label'] or 'somebody'}, for {first['held_s']:.0f} s{others}"


def process_label() -> str:
    """Return what tells this process from others: its host and pid."""
    return f"{gethostname()} pid {os.getpid()}"
