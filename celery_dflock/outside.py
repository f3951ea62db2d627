"""The locks of tasks for code that is none: a view, a shell, a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery, current_app

from celery_dflock import keys
from celery_dflock.config import settings
from celery_dflock.exceptions import LockNotAcquiredError, LockUnavailableError
from dflockd import errors
from dflockd.sync_client import DistributedLock


@contextmanager
def dflock(
    key: str, timeout: float | None = 10, ttl: int = 30, *, app: Celery | None = None
) -> Iterator[DistributedLock]:
    """Hold the lock that a task with this `lock_key` would hold.

    Args:
        key: what a task's ``lock_key`` gives; the app's prefix is put in front.
        timeout: seconds to wait, first come, first served; 0 tries once, ``None`` has no end.
        ttl: lease in seconds; it is renewed as long as the block runs.
        app: whose settings to use; by default the current app.

    Raises:
        LockNotAcquiredError: not granted in time.
        LockUnavailableError: no lock server could be asked.
    """
    app_settings = settings(app or current_app._get_current_object())
    lock = DistributedLock(
        keys.finish(keys.encode(key), app_settings.key_prefix),
        acquire_timeout_s=timeout,
        lease_ttl_s=ttl,
        **app_settings.connection_options(),
    )
    try:
        try:
            granted = lock.acquire()
        except errors.RemoteError as exc:
            raise LockUnavailableError(lock.key, str(exc)) from exc
        if not granted:
            why = f"still held after {timeout} s" if timeout else "it is held"
            raise LockNotAcquiredError(lock.key, why)
        yield lock
    finally:
        lock.release()
