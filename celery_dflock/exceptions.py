"""Errors with which a task can fail because of its lock.

Each keeps its parts in ``args``, so that it survives pickling and JSON result backends.
"""

from __future__ import annotations

from celery.exceptions import Ignore

from celery_dflock.lock_key import LockKey


class LockError(Exception):
    """Root of the plugin's errors.

    Args:
        key: the key of the lock.
        reason: what happened, in a few words.
    """

    _what = "failed"

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(str(key), reason)
        self.key: str = LockKey(key)
        self.reason = reason

    def __str__(self) -> str:
        """Return one line that names the key."""
        return f"lock {self.key!r} {self._what}: {self.reason}"


class LockNotAcquiredError(LockError):
    """The lock was not granted in time.

    A task fails with it if ``lock_conflict`` is ``"fail"``; `dflock` raises it.

    Args:
        key: the key of the lock.
        reason: what happened, in a few words.
        holder: the label of the holder, or ``None`` if it is not known.
    """

    _what = "was not acquired"

    def __init__(self, key: str, reason: str, holder: str | None = None) -> None:
        super().__init__(key, reason)
        self.args = (*self.args, holder)
        self.holder = holder

    def __str__(self) -> str:
        """Return one line that names the key and the holder."""
        return super().__str__() + (f" by {self.holder}" if self.holder else "")


class DuplicateTaskError(LockNotAcquiredError):
    """The task was not sent: another one like it is on its way and ``lock_duplicate`` is ``"raise"``.

    Args:
        key: the key that both have.
        reason: what happened, in a few words.
        holder: the first task, and the process that sent it or runs it.
    """

    _what = "is taken"


class LockUnavailableError(LockError):
    """No lock server answered, or it refused. A task raises it with ``dflock_unavailable="fail"``."""

    _what = "is unavailable"


class SupersededError(LockError, Ignore):
    """A newer task wants the lock while this one runs, and the newest wins.

    It is raised in the task, where `LockLostError` would be. Clean up and let it pass: the task
    then ends as ``REVOKED``. ``autoretry_for`` does not apply to it.

    Args:
        key: the key of the lock.
        reason: what happened, in a few words.
        by: the newer task.
    """

    _what = "is needed by a newer task"

    def __init__(self, key: str, reason: str, by: str = "") -> None:
        super().__init__(key, reason)
        self.args = (*self.args, by)
        self.by = by


class LockLostError(LockError):
    """The lock was lost while the task ran: another task may hold it by now.

    It is never raised while this is in doubt. If the client reported the loss, its
    `dflockd.errors.LockLostError` is the cause.
    """

    _what = "was lost"


class LockKeyError(LockError, ValueError):
    """The arguments of this call do not make a key."""

    _what = "has no key"
