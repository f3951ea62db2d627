"""The store on etcd 3.4 or newer: over the gRPC stubs of aetcd (``pip install 'dflockd-py[etcd]'``).

aetcd's own `Client` has one endpoint and a watch that does not notice a silent server; here every
call has a bound, and a watch asks the server for a sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from dflockd.errors import InvalidArgumentError
from dflockd.shards.errors import (
    CompactedError,
    LeaseGoneError,
    StoreError,
    StoreUnreachableError,
)
from dflockd.shards.store import (
    Compare,
    Delete,
    Event,
    Get,
    Lease,
    Loaded,
    Operation,
    Outcome,
    Put,
    Record,
    RevisionIs,
    check_ttl,
    check_txn,
)
from dflockd.shards.tls import EtcdTls

try:
    import grpc
    from aetcd import rpc
except ImportError as exc:
    raise ImportError(
        f"the etcd store needs aetcd: pip install 'dflockd-py[etcd]' ({exc})"
    ) from exc

# Else gRPC ends its thread when the last channel is gone, and blocks until that has ended, which can
# be never: https://github.com/grpc/grpc/issues/22365
grpc.aio.init_grpc_aio()

DEFAULT_PORT = 2379
TIMEOUT = 2.0
"""Seconds that a call may take, over all endpoints."""

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    # A server that is back is found within a second; the default backs off for minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection whose other end has vanished is given up after 15 s. etcd accepts no less than 5.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)
# A member that is cut off from the others answers that it has no leader, and does not keep silent.
_METADATA = (("hasleader", "true"),)
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


class _Member:
    """One endpoint and a connection to it."""

    def __init__(self, endpoint: str, tls: EtcdTls | None) -> None:
        self.endpoint = endpoint
        if tls is None:
            self.channel = rpc.insecure_channel(endpoint, options=_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
            self.channel = rpc.secure_channel(endpoint, credentials, options=_OPTIONS)
        self.kv = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.watches = rpc.WatchStub(self.channel)

    @property
    def ready(self) -> bool:
        return bool(self.channel.get_state() == grpc.ChannelConnectivity.READY)

    async def connect(self) -> None:
        """Wait for a connection, or for another task to close the channel."""
        with contextlib.suppress(grpc.aio.UsageError, AssertionError):
            await self.channel.channel_ready()


_Send: TypeAlias = Callable[[_Member, float], Awaitable[Any]]


class EtcdStore:
    """A `Store` on a cluster of etcd. Make it, use it and close it in one event loop.

    A call goes to the endpoint that answered last. While that has no connection, it goes to the
    first one that has; after a call that was not answered in time, to another one if there is one.

    Args:
        endpoints: ``host:port`` or ``host`` (then port 2379) of the members of one etcd cluster.
        timeout: seconds that a call may take, over all endpoints. A watch that is silent for so
            long is asked for a sign of life, and ends if there is none for as long again.
        tls: how to speak TLS; ``None`` does not.

    Raises:
        InvalidArgumentError: no endpoints, or no time.
    """

    def __init__(
        self, endpoints: Sequence[str], *, timeout: float = TIMEOUT, tls: EtcdTls | None = None
    ) -> None:
        if isinstance(endpoints, str) or not endpoints or not all(endpoints):
            raise InvalidArgumentError(
                f"endpoints is {endpoints!r}: give a list, such as ['127.0.0.1:{DEFAULT_PORT}']"
            )
        if not timeout > 0:
            raise InvalidArgumentError(f"timeout is {timeout!r}: give seconds, more than 0")
        self.endpoints = tuple(e if ":" in e else f"{e}:{DEFAULT_PORT}" for e in endpoints)
        self._timeout = timeout
        self._tls = tls
        self._members: list[_Member] = []
        """In the order in which they are tried."""
        self._closing: set[asyncio.Task[None]] = set()

    async def get_prefix(self, prefix: str) -> Loaded:
        """See `Store`. An endpoint that is silent has its share of the time; then the next is asked."""
        key, end = _range(prefix)
        request = rpc.RangeRequest(key=key, range_end=end)
        reply = await self._call(
            lambda member, timeout: member.kv.Range(request, timeout=timeout), repeat=True
        )
        return Loaded({_text(kv.key): _record(kv) for kv in reply.kvs}, reply.header.revision)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """See `Store`."""
        check_txn(compares, operations)
        request = rpc.TxnRequest(
            compare=[_comparison(compare) for compare in compares],
            success=[_request(operation) for operation in operations],
            failure=[_request(Get(compare.key)) for compare in compares],
        )
        reply = await self._call(lambda member, timeout: member.kv.Txn(request, timeout=timeout))
        found = itertools.chain.from_iterable(r.response_range.kvs for r in reply.responses)
        records = {_text(kv.key): _record(kv) for kv in found}
        return Outcome(reply.succeeded, reply.header.revision, records)

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[list[Event], None]:
        """See `Store`."""
        key, end = _range(prefix)
        create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=from_revision)
        # A connection of its own: that of the calls is given up when one of them is not answered.
        member = _Member((await self._connected(self._timeout)).endpoint, self._tls)
        try:
            async with contextlib.aclosing(self._responses(member, create)) as responses:
                async for response in responses:
                    if response.canceled:
                        raise _watch_ended(member, response)
                    if response.events:
                        yield [_event(event) for event in response.events]
        except (rpc.AioRpcError, asyncio.InvalidStateError) as exc:
            raise _failure(member, exc) from exc
        finally:
            self._give_up(member)

    async def grant_lease(self, ttl: int) -> Lease:
        """See `Store`."""
        check_ttl(ttl)
        request = rpc.LeaseGrantRequest(TTL=ttl)
        reply = await self._call(
            lambda member, timeout: member.leases.LeaseGrant(request, timeout=timeout)
        )
        return Lease(reply.ID, reply.TTL)

    async def keep_alive(self, lease: int) -> None:
        """See `Store`."""

        async def send(member: _Member, timeout: float) -> int:
            requests = iter([rpc.LeaseKeepAliveRequest(ID=lease)])
            call = member.leases.LeaseKeepAlive(requests, timeout=timeout)
            try:
                reply = await call.read()
            finally:
                call.cancel()
            if reply is grpc.aio.EOF:
                raise _silent(member, "ended the call")
            return int(reply.TTL)

        if await self._call(send, repeat=True) <= 0:
            raise LeaseGoneError(f"lease {lease} has ended")

    async def revoke_lease(self, lease: int) -> None:
        """See `Store`."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._call(
            lambda member, timeout: member.leases.LeaseRevoke(request, timeout=timeout)
        )

    async def close(self) -> None:
        """See `Store`."""
        for member in self._members:
            self._give_up(member)
        self._members = []
        await asyncio.gather(*self._closing)

    async def _call(self, send: _Send, *, repeat: bool = False) -> Any:
        """Send a request to one endpoint, or if it may be repeated to one after the other."""
        deadline = time.monotonic() + self._timeout
        silent: StoreError | None = None
        for left in range(len(self.endpoints) if repeat else 1, 0, -1):
            try:
                member = await self._connected(deadline - time.monotonic())
            except StoreUnreachableError as exc:
                raise silent or exc from None
            try:
                return await send(member, (deadline - time.monotonic()) / left)
            except rpc.AioRpcError as exc:
                silent = _failure(member, exc)
                if not isinstance(silent, StoreUnreachableError):
                    raise silent from exc
                self._replace(member)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Not this task: its connection was given up when another call was not answered.
                silent = _silent(member, "the connection was given up")
        assert silent is not None
        raise silent

    async def _connected(self, timeout: float) -> _Member:
        """Return the first endpoint that has a connection, or else the first to get one."""
        if not self._members:
            self._members = [_Member(endpoint, self._tls) for endpoint in self.endpoints]
        if self._members[0].ready:
            return self._members[0]
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            attempts = [asyncio.ensure_future(member.connect()) for member in self._members]
            try:
                await asyncio.wait(attempts, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for attempt in attempts:
                    attempt.cancel()
            for member in self._members:
                if member.ready:
                    self._members.remove(member)
                    self._members.insert(0, member)
                    return member
        raise StoreUnreachableError(
            f"no connection to etcd at {', '.join(self.endpoints)} within {self._timeout:g} s"
        )

    def _replace(self, member: _Member) -> None:
        """Put an endpoint last, and connect anew: only one that is alive will have a connection."""
        if member in self._members:
            self._members.remove(member)
            self._members.append(_Member(member.endpoint, self._tls))
            self._give_up(member)

    def _give_up(self, member: _Member) -> None:
        """Close a connection once the calls that are under way on it have ended."""
        task = asyncio.ensure_future(member.channel.close(grace=self._timeout))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _responses(self, member: _Member, create: Any) -> AsyncGenerator[Any, None]:
        """Yield what a watch receives; a server that is silent is asked whether it is there."""
        try:
            async with asyncio.timeout(self._timeout):
                await member.connect()
        except TimeoutError:
            raise _silent(member, f"no connection within {self._timeout:g} s") from None
        call = member.watches.Watch(metadata=_METADATA)
        await call.write(rpc.WatchRequest(create_request=create))
        reading = asyncio.ensure_future(call.read())
        asked = False
        try:
            while True:
                # Not wait_for: to cancel a read would be to cancel the watch.
                if not (await asyncio.wait([reading], timeout=self._timeout))[0]:
                    if asked:
                        raise _silent(member, f"no sign of life for {2 * self._timeout:g} s")
                    asked = True
                    progress = rpc.WatchProgressRequest()
                    await call.write(rpc.WatchRequest(progress_request=progress))
                    continue
                if (response := reading.result()) is grpc.aio.EOF:
                    raise _silent(member, "ended the watch")
                asked = False
                yield response
                reading = asyncio.ensure_future(call.read())
        finally:
            reading.cancel()
            call.cancel()


def _failure(member: _Member, exc: Exception) -> StoreError:
    if not isinstance(exc, rpc.AioRpcError):
        return _silent(member, str(exc))
    code, details = exc.code(), exc.details()
    if code not in _REFUSALS:
        return _silent(member, details)
    if code == grpc.StatusCode.NOT_FOUND:
        return LeaseGoneError(f"etcd {member.endpoint}: {details}", server=member.endpoint)
    return StoreError(f"etcd {member.endpoint} refused: {details}", server=member.endpoint)


def _silent(member: _Member, details: str) -> StoreUnreachableError:
    return StoreUnreachableError(f"etcd {member.endpoint}: {details}", server=member.endpoint)


def _watch_ended(member: _Member, response: Any) -> StoreError:
    if response.compact_revision:
        return CompactedError(
            f"etcd {member.endpoint} has forgotten the changes before revision "
            f"{response.compact_revision}: load again",
            server=member.endpoint,
        )
    return _silent(member, f"ended the watch: {response.cancel_reason or 'no reason given'}")


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key with a prefix, and the first one after them."""
    key = prefix.encode("utf-8")
    return (key, key[:-1] + bytes([key[-1] + 1])) if key else (b"\0", b"\0")


def _comparison(compare: Compare) -> Any:
    key = compare.key.encode("utf-8")
    if isinstance(compare, RevisionIs):
        return rpc.Compare(
            key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=compare.revision
        )
    return rpc.Compare(
        key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=compare.value
    )


def _request(operation: Operation) -> Any:
    key = operation.key.encode("utf-8")
    if isinstance(operation, Put):
        put = rpc.PutRequest(key=key, value=operation.value, lease=operation.lease)
        return rpc.RequestOp(request_put=put)
    if isinstance(operation, Delete):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def _record(kv: Any) -> Record:
    return Record(kv.value, kv.mod_revision, kv.lease)


def _event(event: Any) -> Event:
    deleted = event.type == rpc.Event.DELETE
    return Event(_text(event.kv.key), event.kv.mod_revision, None if deleted else _record(event.kv))


def _text(key: bytes) -> str:
    # Keys of others may be anything; they are shown, not lost.
    return key.decode("utf-8", "backslashreplace")
