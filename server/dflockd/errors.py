"""What can go wrong, as one tree.

::

    DflockdError
    ├── LocalError               the caller's doing; nothing was sent
    │   ├── InvalidKeyError          (ValueError)
    │   ├── InvalidArgumentError     (ValueError)
    │   ├── AlreadyHeldError         (RuntimeError)
    │   └── NotEnqueuedError         (RuntimeError)
    ├── RemoteError              the server's, or the network's
    │   ├── UnreachableError         (ConnectionError) no connection, or it broke
    │   ├── BadReplyError            no lock server is talking
    │   └── RefusedError             it said no
    │       ├── AuthRefusedError     (PermissionError)
    │       ├── MaxLocksError
    │       ├── MaxWaitersError
    │       ├── MaxHoldsError
    │       ├── MaxRatesError
    │       ├── LimitMismatchError
    │       ├── OwnerConflictError
    │       ├── SupersededError
    │       ├── UnsupportedError
    │       ├── LeaseExpiredError
    │       ├── DrainingError
    │       ├── RecoveringError
    │       └── MovedError
    ├── LockTimeoutError         (TimeoutError) ``with`` was not granted the lock in time
    ├── LockLostError            ``check()``: the lock is not held, or not any more
    └── AcquireCancelledError    another thread called ``cancel()``

Every error is one line that names the key and the server, has them as attributes, and survives
pickling, so that it can cross processes.
"""

from __future__ import annotations

from typing import Any


class DflockdError(Exception):
    """Root of the errors of this package.

    Attributes:
        key: the lock concerned, where there is one.
        server: the server concerned as ``host:port``, where there is one.
    """

    def __init__(self, message: str, *, key: str | None = None, server: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.server = server

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the attributes."""
        return _restore, (type(self), str(self), self.key, self.server), self.__dict__


def _restore(
    cls: type[DflockdError], message: str, key: str | None, server: str | None
) -> DflockdError:
    return cls(message, key=key, server=server)


class LocalError(DflockdError):
    """The call was wrong; nothing was sent and nothing has changed."""


class InvalidKeyError(LocalError, ValueError):
    """The key cannot be sent: empty, too long, or with white space in it."""


class InvalidArgumentError(LocalError, ValueError):
    """An argument is out of its range, or a sharding strategy returned no server's index."""


class AlreadyHeldError(LocalError, RuntimeError):
    """This lock object holds the lock, or waits for it, already. Locks are not re-entrant."""


class NotEnqueuedError(LocalError, RuntimeError):
    """``wait()`` without a place in the queue: call ``enqueue()`` first."""


class RemoteError(DflockdError):
    """The server or the network failed."""


class UnreachableError(RemoteError, ConnectionError):
    """No connection to the server, or it broke before the reply, or none came in time."""


class BadReplyError(RemoteError):
    """What came back is no reply of a lock server."""


class RefusedError(RemoteError):
    """The server answered that it will not."""


class AuthRefusedError(RefusedError, PermissionError):
    """The server wants an auth token, or another one."""


class MaxLocksError(RefusedError):
    """The server has as many keys as it may."""


class MaxWaitersError(RefusedError):
    """The key has as many waiters as it may."""


class MaxHoldsError(RefusedError):
    """This connection holds or waits for as much as it may, or the key has as many holders."""


class MaxRatesError(RefusedError):
    """The rates that the server knows allow as many runs as it may have to remember."""


class LimitMismatchError(RefusedError):
    """The semaphore is in use with another limit."""


class OwnerConflictError(RefusedError):
    """The owner of the connection holds the lock or waits for it already, with that attempt or a later.

    Attributes:
        state: ``"held"`` or ``"waiting"``.
        attempt: the attempt that is there.
    """

    def __init__(
        self, message: str, *, state: str = "", attempt: int = 0, **about: str | None
    ) -> None:
        super().__init__(message, **about)
        self.state = state
        self.attempt = attempt


class SupersededError(RefusedError):
    """A newer owner has asked for the lock: the newest wins.

    Attributes:
        by: who that is, as people see it; empty if that is not known.
    """

    def __init__(self, message: str, *, by: str = "", **about: str | None) -> None:
        super().__init__(message, **about)
        self.by = by


class UnsupportedError(RefusedError):
    """The server is too old for what was asked of it."""


IN_ORDER = (OwnerConflictError, SupersededError)
"""What is said of who asks: the connection is as good as before."""


class GroupsUnsupportedError(RefusedError):
    """The server is too old to let groups take turns."""


class LeaseExpiredError(RefusedError):
    """The lease ended before the grant could be taken up."""


class DrainingError(RefusedError):
    """The server is shutting down."""


class RecoveringError(RefusedError):
    """Not now: the server gives holders that it may not know time to renew before it grants again.

    Or the key is being handed from one server of a cluster to another.

    Attributes:
        retry_s: seconds after which it is worth asking the same server again.
    """

    def __init__(self, message: str, *, retry_s: float = 0.0, **about: str | None) -> None:
        super().__init__(message, **about)
        self.retry_s = retry_s


class MovedError(RefusedError):
    """Another server of the cluster is in charge of the key.

    Attributes:
        shard: the key's.
        epoch: it grows each time that the shard gets another server.
        to: that server, as ``host:port``.
        place: names the place in the queue that a waiter had, to be taken up there; or empty.
    """

    def __init__(
        self,
        message: str,
        *,
        shard: int = 0,
        epoch: int = 0,
        to: str = "",
        place: str = "",
        **about: str | None,
    ) -> None:
        super().__init__(message, **about)
        self.shard = shard
        self.epoch = epoch
        self.to = to
        self.place = place


class LockTimeoutError(DflockdError, TimeoutError):
    """The lock was not granted within the time given to ``with``."""


class LockLostError(DflockdError):
    """The lock is not held: it was lost, or never granted, or this caller cannot wait for certainty."""


class AcquireCancelledError(DflockdError):
    """``cancel()`` was called while the lock was waited for."""
