"""One member of an etcd cluster: the connection to it, and what its errors mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from dflockd.shards.credentials import EtcdTls
from dflockd.shards.errors import (
    LeaseGoneError,
    StoreDeniedError,
    StoreError,
    StoreFullError,
    StoreUnreachableError,
    network_problem,
)

try:
    import grpc
    from aetcd import rpc
except ImportError as exc:
    raise ImportError(
        f"the etcd store needs aetcd: pip install 'dflockd-py[etcd]' ({exc})"
    ) from exc

__all__ = ["METADATA", "Endpoint", "failure", "grpc", "is_signed_out", "obstacle", "rpc", "silent"]

# Else gRPC ends its thread when the last channel is gone, and blocks until that has ended, which can
# be never: https://github.com/grpc/grpc/issues/22365
grpc.aio.init_grpc_aio()

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    # A server that is back is found within a second; the default backs off for minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # So is one whose name has another address now; the default looks it up every 30 s at most.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A connection whose other end has vanished is given up after 15 s. etcd accepts no less than 5.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)
# A member that is cut off from the others answers that it has no leader, and does not keep silent.
METADATA = (("hasleader", "true"),)
# What says that nothing was done. Whatever else goes wrong, nobody knows.
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}

LOOK_TIMEOUT = 0.3
"""Seconds in which a member that can be talked to has said something."""

_DENIALS = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
# The same, under codes that mean other things as well.
_DENIED = ("invalid user ID or password", "user name is empty", "authentication is not enabled")


class Endpoint:
    """One endpoint and a connection to it.

    Args:
        name: where it is.
        pem: what is in the files of an `EtcdTls`; ``None`` without TLS.
    """

    def __init__(self, name: str, pem: Sequence[bytes | None] | None) -> None:
        self.name = name
        self.signing_in = asyncio.Lock()
        if pem is None:
            self.channel = rpc.insecure_channel(name, options=_OPTIONS)
        else:
            ca, cert, key = pem
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
            self.channel = rpc.secure_channel(name, credentials, options=_OPTIONS)
        self.auth = rpc.AuthStub(self.channel)
        self.kv = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.maintenance = rpc.MaintenanceStub(self.channel)
        self.watches = rpc.WatchStub(self.channel)

    @property
    def ready(self) -> bool:
        """Whether there is a connection."""
        return bool(self.channel.get_state() == grpc.ChannelConnectivity.READY)

    async def connect(self) -> None:
        """Wait for a connection, or for another task to close the channel."""
        with contextlib.suppress(grpc.aio.UsageError, AssertionError):
            await self.channel.channel_ready()


async def obstacle(name: str, tls: EtcdTls | None) -> str:
    """Say why there is no connection to an endpoint: gRPC tells that only its log."""
    if tls is not None and (problem := tls.problem()):
        return problem
    host, _, port = name.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(
            host.strip("[]"), int(port), ssl=tls and tls.context()
        )
        try:
            # A certificate is refused after the handshake. An etcd that is content says hello.
            async with asyncio.timeout(LOOK_TIMEOUT):
                await reader.read(1)
        finally:
            writer.transport.abort()
    except TimeoutError:
        return "it does not answer"
    except OSError as exc:
        return network_problem(exc)
    except ValueError:
        return "there is no such name or port"
    return ""


def failure(endpoint: Endpoint, exc: Exception) -> StoreError:
    """Return what an error of a call says."""
    if not isinstance(exc, rpc.AioRpcError):
        return silent(endpoint, str(exc) or "no answer in time")
    code, details = exc.code(), exc.details()
    if code not in _REFUSALS:
        return silent(endpoint, details)
    if code == grpc.StatusCode.NOT_FOUND:
        return LeaseGoneError(f"etcd {endpoint.name}: {details}", server=endpoint.name)
    kind = StoreError
    if code in _DENIALS or any(text in details for text in _DENIED):
        kind = StoreDeniedError
    elif code == grpc.StatusCode.RESOURCE_EXHAUSTED and "space exceeded" in details:
        kind = StoreFullError
        details += " (compact it, defragment it, and disarm its alarm)"
    if _DENIED[0] in details:
        details += ": look at the name of the user, and at what is in the file with the password"
    return kind(f"etcd {endpoint.name} refused: {details}", server=endpoint.name)


def is_signed_out(exc: Exception) -> bool:
    """Whether a call was refused for its token: it has ended, or users were changed since."""
    if not isinstance(exc, rpc.AioRpcError):
        return False
    details = exc.details() or ""
    return exc.code() == grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in details


def silent(endpoint: Endpoint, details: str) -> StoreUnreachableError:
    """Return the error that nobody knows what was done."""
    return StoreUnreachableError(f"etcd {endpoint.name}: {details}", server=endpoint.name)
