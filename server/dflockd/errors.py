"""The errors of this package, as one tree.

::

    DflockdError
    ├── LocalError               the call was wrong; nothing was sent
    │   ├── InvalidKeyError          (ValueError)
    │   ├── InvalidArgumentError     (ValueError)
    │   ├── AlreadyHeldError         (RuntimeError)
    │   └── NotEnqueuedError         (RuntimeError)
    ├── RemoteError              the server or the network failed
    │   ├── UnreachableError         (ConnectionError) no connection, or it broke
    │   ├── BadReplyError            the answer is not that of a lock server
    │   └── RefusedError             the server refused
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
    ├── LockTimeoutError         (TimeoutError) ``with`` did not get the lock in time
    ├── LockLostError            ``check()``: the lock is not held, or no longer held
    └── AcquireCancelledError    another thread called ``cancel()``

Every error is one line that names the key and the server. It has both as attributes and survives
pickling, so that it can cross processes.
"""

from __future__ import annotations

import reprlib
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def shown(value: object) -> str:
    """Return a value that somebody has given as errors show it: in one short line, whatever it is."""
    try:
        text = _repr.repr(value)
    except Exception:  # as of a number with thousands of digits
        text = object.__repr__(value)
    return " ".join(text.split())


class DflockdError(Exception):
    """Root of the errors of this package.

    Attributes:
        key: the key of the lock, or ``None``.
        server: the server as ``host:port``, or ``None``.
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
    """The call was wrong. Nothing was sent and nothing has changed."""


class InvalidKeyError(LocalError, ValueError):
    """The key cannot be sent: it is empty, too long or contains white space."""


class InvalidArgumentError(LocalError, ValueError):
    """An argument is out of range, or a sharding strategy did not return the index of a server."""


class AlreadyHeldError(LocalError, RuntimeError):
    """This lock object already holds the lock or waits for it. Locks are not re-entrant."""


class NotEnqueuedError(LocalError, RuntimeError):
    """``wait()`` was called without a position in the queue: call ``enqueue()`` first."""


class RemoteError(DflockdError):
    """The server or the network failed."""


class UnreachableError(RemoteError, ConnectionError):
    """There is no connection to the server, it broke before the reply, or no reply came in time."""


class BadReplyError(RemoteError):
    """The answer is not that of a lock server."""


class RefusedError(RemoteError):
    """The server refused the request."""


class AuthRefusedError(RefusedError, PermissionError):
    """The server requires an auth token, or a different one."""


class MaxLocksError(RefusedError):
    """The server has reached its limit of keys (``--max-locks``)."""


class MaxWaitersError(RefusedError):
    """The key has reached its limit of waiters (``--max-waiters``)."""


class MaxHoldsError(RefusedError):
    """This connection or the holders of the key have reached ``--max-holds``."""


class MaxRatesError(RefusedError):
    """All rates together have reached the runs that the server remembers (``--max-rate-runs``)."""


class LimitMismatchError(RefusedError):
    """The semaphore is in use with another limit, at a server of the published protocol."""


class OwnerConflictError(RefusedError):
    """The same owner already holds the lock or waits for it, with this attempt or a later one.

    Attributes:
        state: ``"held"`` or ``"waiting"``.
        attempt: the number of that attempt.
    """

    def __init__(
        self, message: str, *, state: str = "", attempt: int = 0, **about: str | None
    ) -> None:
        super().__init__(message, **about)
        self.state = state
        self.attempt = attempt


class SupersededError(RefusedError):
    """A newer owner has asked for the lock, and the newest wins.

    Attributes:
        by: the label of the newer owner; empty if it is not known.
    """

    def __init__(self, message: str, *, by: str = "", **about: str | None) -> None:
        super().__init__(message, **about)
        self.by = by


IN_ORDER = (OwnerConflictError, SupersededError)
"""What is said of who asks: the connection is as good as before."""


class UnsupportedError(RefusedError):
    """The server does not know what is asked for: a published or an older one."""


class LeaseExpiredError(RefusedError):
    """The lease ended before the grant was taken up."""


class DrainingError(RefusedError):
    """The server is shutting down."""


class RecoveringError(RefusedError):
    """The server grants nothing yet: holders from before its restart get time to renew first.

    Also raised while the key is handed over from one server of a cluster to another.

    Attributes:
        retry_s: seconds after which to ask the same server again.
    """

    def __init__(self, message: str, *, retry_s: float = 0.0, **about: str | None) -> None:
        super().__init__(message, **about)
        self.retry_s = retry_s


class MovedError(RefusedError):
    """Another server of the cluster is in charge of the key.

    Attributes:
        shard: the shard of the key.
        epoch: a number that grows each time the shard moves to another server.
        to: that server, as ``host:port``.
        place: the ticket of the position that a waiter had, to resume there; or empty.
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


PASSING = (LeaseExpiredError, DrainingError, RecoveringError, MovedError)
"""What a server says while it starts or ends, or a key moves: the same request is granted later."""


class LockTimeoutError(DflockdError, TimeoutError):
    """``with`` did not get the lock within ``acquire_timeout_s``."""


class LockLostError(DflockdError):
    """The lock is lost or was never granted, or this thread cannot wait until it is certain."""


class AcquireCancelledError(DflockdError):
    """``cancel()`` was called during the wait for the lock."""
