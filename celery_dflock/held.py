"""The locks that a task or a block holds, as its code sees them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import ref

from celery_dflock.checks import check_whole
from celery_dflock.lock_key import LockKey
from celery_dflock.locks import Locks, LocksBase
from celery_dflock.options import MAX_SECONDS


class HeldLock:
    """One or more locks that are held.

    Attributes:
        keys: the keys, prefix included; nearly always one.
        fences: the fence of each key.
        waited: seconds until all of them were granted.
    """

    def __init__(self, locks: LocksBase[Any]) -> None:
        self._locks = locks
        self.keys = locks.keys
        self.fences = locks.fences
        self.waited = locks.waited

    @property
    def key(self) -> LockKey:
        """The key. If ``lock_key`` names several, the first in sorted order."""
        return self.keys[0]

    @property
    def group(self) -> str | None:
        """To which group this run belongs at it (``lock_group``); ``None`` if to none."""
        return self._locks.group

    @property
    def held(self) -> bool:
        """Whether the lock is certainly held still."""
        return self._locks.held

    @property
    def state(self) -> str:
        """``"held"``, ``"doubtful"``, ``"lost"``, or ``"free"`` once the task has ended.

        The state is doubtful after the connection has broken and until the lock is renewed on
        another one: the server may have given the lock away. With several keys this is the worst
        state among them.
        """
        return self._locks.state

    @property
    def token(self) -> str | None:
        """The token of the grant of `key`, or ``None`` once it is lost."""
        return self._locks.tokens[self.key]

    @property
    def fence(self) -> int | None:
        """A number that grows with every grant of `key`, for the resource that you write to.

        Send it with each write. A resource that remembers the largest fence and refuses smaller
        ones is safe even from a task that does not know yet that it has lost its lock.
        """
        return self.fences[self.key]

    def __repr__(self) -> str:
        """Without the token."""
        return f"<{type(self).__name__} {self.key!r} fence={self.fence} {self.state}>"


class TaskLock(HeldLock):
    """The lock of the running task; see `current_lock`."""

    _locks: Locks

    @classmethod
    def of(cls, locks: Locks) -> TaskLock:
        """Return that of locks that are held; the same one for as long as anybody has it.

        It is there only where somebody wants it.
        """
        shown: TaskLock | None = locks.shown()
        if shown is None:
            shown = cls(locks)
            locks.shown = ref(shown)
        return shown

    @property
    def outer(self) -> TaskLock | None:
        """The lock of the task that called this one in the same thread, if any."""
        outer = self._locks.outer
        return None if outer is None else TaskLock.of(outer)

    def extend(self, seconds: int | None = None) -> bool:
        """Renew the lease now, for `seconds` (default: ``lock_ttl``). Return ``False`` if it is lost.

        A thread renews it all the time. Call this before something that stops all threads of the
        process for longer than the lease. It waits while the state is in doubt, as `check` does.
        """
        check_lease(seconds)
        return self._locks.renew(seconds)

    def check(self) -> None:
        """Return if the lock is certainly held. In doubt, wait until it is certain again.

        It waits no longer than the rest of the lease.

        Raises:
            LockLostError: the lock is lost. Also if the state is in doubt and you call this on the
                renewal thread, where the function ``lock_lost`` and receivers of the signal
                `lock_lost` run: that thread cannot wait.
        """
        self._locks.check()

    def has(self, key: str) -> bool:
        """Whether it is this lock, or one of those that its task was called under."""
        return self._locks.has_under(key)

    def __eq__(self, other: object) -> bool:
        """Two of the same locks are one."""
        return isinstance(other, TaskLock) and other._locks is self._locks

    def __hash__(self) -> int:
        """As `__eq__` wants it."""
        return hash(self._locks)


def check_lease(seconds: object) -> None:
    """Refuse what `extend` cannot ask for."""
    if seconds is not None:
        check_whole("seconds", seconds, 1, MAX_SECONDS)


running: ContextVar[Locks | None] = ContextVar("celery_dflock.running", default=None)
"""The locks of the task that runs in this thread or greenlet."""


def current_lock() -> TaskLock | None:
    """Return the lock of the locked task that this code runs in, or ``None`` outside of one."""
    locks = running.get()
    return None if locks is None else TaskLock.of(locks)


def require_lock() -> TaskLock:
    """Return the lock of the locked task that this code runs in.

    Use it instead of `current_lock` in code that needs a lock: it never returns ``None``.

    Raises:
        RuntimeError: this code does not run in a locked task, or ``dflock_enabled`` is ``False``.
    """
    lock = current_lock()
    if lock is None:
        raise RuntimeError(
            "no lock is held here: call require_lock() in a task with base=LockedTask, sent to a "
            "worker, with dflock_enabled left on"
        )
    return lock
