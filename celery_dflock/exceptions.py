"""What a task can fail with because of its lock.

Each keeps what it says in ``args``, so that it survives pickling and JSON result backends alike.
"""

from __future__ import annotations

from celery.exceptions import Ignore


class LockError(Exception):
    """Root of the plugin's errors.

    Args:
        key: the lock concerned.
        reason: what happened, in a few words.
    """

    _what = "failed"

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        """Return one line that names the key."""
        return f"lock {self.key!r} {self._what}: {self.reason}"


class LockNotAcquiredError(LockError):
    """The lock was not granted in time, and the task or the caller wants that to be a failure.

    Args:
        key: the lock concerned.
        reason: what happened, in a few words.
        holder: who held it then, as the holder describes itself, if that could be learned.
    """

    _what = "was not acquired"

    def __init__(self, key: str, reason: str, holder: str | None = None) -> None:
        super().__init__(key, reason)
        self.args = (key, reason, holder)
        self.holder = holder

    def __str__(self) -> str:
        """Return one line that names the key and the holder."""
        return super().__str__() + (f" by {self.holder}" if self.holder else "")


class DuplicateTaskError(LockNotAcquiredError):
    """The task was not sent: one like it is on its way, and ``lock_duplicate`` is ``raise``.

    Args:
        key: what makes the two alike.
        reason: what happened, in a few words.
        holder: the task that was first, and who sent or runs it.
    """

    _what = "is taken"


class LockUnavailableError(LockError):
    """No lock server could be asked, and ``dflock_unavailable`` says ``fail``."""

    _what = "cannot be asked for"


class SupersededError(LockError, Ignore):
    """A newer task has asked for the lock while this one ran, and the newest wins.

    Raised in the task, at the points at which a lost lock is. Let it pass, after whatever has to be
    tidied up: the task ends as ``REVOKED`` then. Celery does not retry it (``autoretry_for``).

    Args:
        key: the lock concerned.
        reason: what happened, in a few words.
        by: the newer task.
    """

    _what = "is wanted by a newer task"

    def __init__(self, key: str, reason: str, by: str = "") -> None:
        super().__init__(key, reason)
        self.args = (key, reason, by)
        self.by = by


class LockLostError(LockError):
    """The lock was lost while the task ran: somebody else may hold it by now.

    It is never raised while that is in doubt. Where `dflockd.errors.LockLostError`, that of the
    clients, has told of the loss, it is the cause of this one.
    """

    _what = "was lost"


class LockKeyError(LockError, ValueError):
    """The arguments of this call do not make a key."""

    _what = "has no key"
