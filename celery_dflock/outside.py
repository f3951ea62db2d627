"""The locks of tasks for code that is none: a view, a shell, a script."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celery import Celery, current_app

from celery_dflock import keys
from celery_dflock.config import settings
from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.locks import Locks, process_label
from celery_dflock.task import TaskLock


@contextmanager
def dflock(
    key: str,
    timeout: float | None = 10,
    ttl: int = 30,
    *,
    limit: int = 1,
    app: Celery | None = None,
) -> Iterator[TaskLock]:
    """Hold the lock that a task with this `lock_key` would hold.

    With ``dflock_enabled = False`` nobody is asked, and the lock is not `held`.

    Args:
        key: what a task's ``lock_key`` gives; the app's prefix is put in front.
        timeout: seconds to wait, first come, first served; 0 tries once, ``None`` has no end.
        ttl: lease in seconds; it is renewed as long as the block runs.
        limit: as ``lock_limit`` of the tasks that share the key.
        app: whose settings to use; by default the current app.

    Raises:
        LockNotAcquiredError: not granted in time.
        LockUnavailableError: no lock server could be asked.
    """
    app_settings = settings(app or current_app._get_current_object())
    locks = Locks(
        [keys.finish(keys.encode(key), app_settings.key_prefix)],
        limit=limit,
        timeout=timeout,
        ttl=ttl,
        settings=app_settings,
        label=f"{Path(sys.argv[0]).name or 'python'} {process_label()}",
    )
    if not app_settings.enabled:
        yield TaskLock(locks, 0.0, None)
        return
    try:
        started = time.monotonic()
        refused = locks.acquire()
        if refused is not None:
            why = f"after {timeout} s still held" if timeout else "it is held"
            raise LockNotAcquiredError(refused, why, locks.holder(refused))
        yield TaskLock(locks, time.monotonic() - started, None)
    finally:
        locks.release()
