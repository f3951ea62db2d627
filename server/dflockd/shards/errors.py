"""What can go wrong between a cluster of lock servers and its store.

::

    DflockdError
    ├── LocalError
    │   ├── InvalidArgumentError     no nodes, a shard out of range, a node that cannot be written
    │   └── NoClusterError           (LookupError) this process has no cluster yet
    └── RemoteError
        ├── NoShardMappingError      (LookupError) no node has been given to the shard yet
        ├── BadShardValueError       (ValueError) what the store has for a shard cannot be read
        ├── ShardConflictError       another process changed the shards in between
        └── StoreError               the store said no
            ├── StoreDeniedError         not allowed: user, password or permission
            ├── StoreFullError           it has no room for the write
            ├── StoreUnreachableError    (ConnectionError) or it said nothing in time
            ├── StoreReplacedError       it was wiped, or restored from a backup
            ├── CompactedError           it has forgotten the changes that were asked for
            └── LeaseGoneError           the lease has ended, and its keys with it
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

from dflockd.errors import LocalError, RemoteError


class NoClusterError(LocalError, LookupError):
    """This process has no cluster yet: nobody has called `dflockd.shards.cluster.init`."""


class NoShardMappingError(RemoteError, LookupError):
    """No node has been given to the shard yet: the leader has not made the mapping."""


class BadShardValueError(RemoteError, ValueError):
    """What the store has for a shard cannot be read."""


class ShardConflictError(RemoteError):
    """Shards were changed in the store after they had been loaded; they are as the others left them.

    Attributes:
        shards: their numbers, ascending. All others have been written.
    """

    def __init__(self, message: str, *, shards: Sequence[int] = (), **names: str | None) -> None:
        super().__init__(message, **names)
        self.shards = tuple(shards)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the shards."""
        return _restore, (str(self), self.shards)


def _restore(message: str, shards: tuple[int, ...]) -> ShardConflictError:
    return ShardConflictError(message, shards=shards)


class StoreError(RemoteError):
    """The store refused the request; nothing has changed."""


class StoreDeniedError(StoreError):
    """The request is not allowed: wrong user or password, or the user lacks a permission."""


class StoreFullError(StoreError):
    """The store is full: the database of etcd has reached its quota."""


class StoreUnreachableError(StoreError, ConnectionError):
    """The store did not answer in time, or the connection broke.

    A transaction may have been carried out all the same, or may yet be.
    """


class StoreReplacedError(StoreError):
    """The store is not the one that it was: it was wiped, or restored from a backup.

    A client that has noticed asks it nothing any more.
    """


class CompactedError(StoreError):
    """The store does not know any more what happened since that revision: load again."""


class LeaseGoneError(StoreError):
    """The lease has ended, and its keys with it."""


def network_problem(exc: OSError) -> str:
    """Say in a few words why a connection could not be used."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError):
        reason = exc.reason or str(exc)
        if "CERTIFICATE_REQUIRED" in reason:
            return "it asks for a certificate"
        if "ALERT" in reason:
            return f"it does not accept what this side shows ({reason})"
        return f"TLS fails: {reason}"
    if isinstance(exc, ConnectionRefusedError):
        return "the connection is refused"
    if isinstance(exc, ConnectionResetError):
        return "the connection is reset"
    return exc.strerror or str(exc)
