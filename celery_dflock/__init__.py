"""Distributed locks for Celery tasks.

Everything public can be imported from here. Start with `LockedTask`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_dflock.context import dflock
    from celery_dflock.exceptions import (
        DuplicateTaskError,
        LockError,
        LockKeyError,
        LockLostError,
        LockNotAcquiredError,
        LockUnavailableError,
        SupersededError,
    )
    from celery_dflock.held import TaskLock, current_lock, require_lock
    from celery_dflock.limits import Lock
    from celery_dflock.lock_key import LockKey
    from celery_dflock.options import RequeueOptions, TaskOptions
    from celery_dflock.outcome.skipped import Skipped
    from celery_dflock.task import LockedTask, SingletonTask
else:
    # Loaded when first asked for: pytest imports the package at its start, for the plugin in
    # `celery_dflock.testing`, and must not import Celery with it.
    _MODULES = (
        *("exceptions", "lock_key", "limits", "options", "held", "outcome.skipped"),
        *("context", "task"),
    )

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
        value = next(getattr(module, name) for module in modules if hasattr(module, name))
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "DuplicateTaskError",
    "Lock",
    "LockError",
    "LockKey",
    "LockKeyError",
    "LockLostError",
    "LockNotAcquiredError",
    "LockUnavailableError",
    "LockedTask",
    "RequeueOptions",
    "SingletonTask",
    "Skipped",
    "SupersededError",
    "TaskLock",
    "TaskOptions",
    "current_lock",
    "dflock",
    "require_lock",
]

__version__ = "0.1.0"
