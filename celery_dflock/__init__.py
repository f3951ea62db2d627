"""celery-dflock: one at a time, for Celery tasks.

Everything public is here; see `LockedTask` for how to begin.
"""

from celery_dflock.exceptions import (
    LockError,
    LockKeyError,
    LockLostError,
    LockNotAcquiredError,
    LockUnavailableError,
)
from celery_dflock.outside import dflock
from celery_dflock.policy import Skipped
from celery_dflock.task import LockedTask, SingletonTask, TaskLock, current_lock

__all__ = [
    "LockError",
    "LockKeyError",
    "LockLostError",
    "LockNotAcquiredError",
    "LockUnavailableError",
    "LockedTask",
    "SingletonTask",
    "Skipped",
    "TaskLock",
    "current_lock",
    "dflock",
]

__version__ = "0.1.0"
