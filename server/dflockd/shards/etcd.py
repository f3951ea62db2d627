"""The store on etcd 3.4 or newer: over the gRPC stubs of aetcd (``pip install 'dflockd-py[etcd]'``).

aetcd's own `Client` has one endpoint and a watch that does not notice a silent server; here every
call has a bound, and a watch asks the server for a sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from dflockd import clock
from dflockd.errors import InvalidArgumentError
from dflockd.shards import etcd_messages as messages
from dflockd.shards.continuity import Continuity
from dflockd.shards.credentials import EtcdTls, EtcdUser
from dflockd.shards.errors import CompactedError, LeaseGoneError, StoreError, StoreUnreachableError
from dflockd.shards.etcd_endpoint import (
    METADATA,
    Endpoint,
    failure,
    grpc,
    is_signed_out,
    obstacle,
    rpc,
    silent,
)
from dflockd.shards.store import (
    Compare,
    Event,
    Get,
    Loaded,
    Outcome,
    Size,
    StoreLease,
    StoreOperation,
    check_ttl,
    check_txn,
)

DEFAULT_PORT = 2379
TIMEOUT = 2.0
"""Seconds that a call may take, over all endpoints."""

SIGN_IN_PAUSE = 0.5
"""Seconds for which nobody signs in after a refusal. Each attempt costs etcd a tenth of a second of a
core, whatever it says, and every call that has no token makes one."""

_Send: TypeAlias = Callable[[Endpoint, float], Awaitable[Any]]


class EtcdStore:
    """A `Store` on a cluster of etcd. Make it, use it and close it in one event loop.

    A call goes to the endpoint that answered last. While that has no connection, it goes to the
    first one that has; after a call that was not answered in time, to another one if there is one.
    What may be repeated is asked of one after the other, and the first answer counts.

    Args:
        endpoints: ``host:port`` or ``host`` (then port 2379) of the members of one etcd cluster.
        timeout: seconds that a call may take, over all endpoints. A watch that is silent for so
            long is asked for a sign of life, and ends if there is none for as long again.
        tls: how to speak TLS; ``None`` does not. Its files are read for each new connection.
        user: as whom to ask; ``None`` where etcd has no users. The password is read for each sign-in.

    Raises:
        InvalidArgumentError: no endpoints, or no time.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout: float = TIMEOUT,
        tls: EtcdTls | None = None,
        user: EtcdUser | None = None,
    ) -> None:
        if isinstance(endpoints, str) or not endpoints or not all(endpoints):
            raise InvalidArgumentError(
                f"endpoints is {endpoints!r}: give a list, such as ['127.0.0.1:{DEFAULT_PORT}']"
            )
        if not timeout > 0:
            raise InvalidArgumentError(f"timeout is {timeout!r}: give seconds, more than 0")
        # The colons of an address of IPv6 stand in brackets.
        self.endpoints = tuple(
            e if ":" in e.rpartition("]")[2] else f"{e}:{DEFAULT_PORT}" for e in endpoints
        )
        self._timeout = timeout
        self._tls = tls
        self._pem: tuple[bytes | None, ...] | None = None
        """What the connections were made by."""
        self._members: list[Endpoint] = []
        """In the order in which they are tried."""
        self._closing: set[asyncio.Task[None]] = set()
        self._continuity = Continuity()
        self._user = user
        self._metadata: tuple[tuple[str, str], ...] = ()
        """What goes with every call: the token, once there is one."""
        self._turned_away: tuple[rpc.AioRpcError, float] | None = None
        """What was said to the last attempt to sign in, and until when there is no other one."""

    async def get_prefix(self, prefix: str) -> Loaded:
        """See `Store`. While an endpoint is silent for its share of the time, the next is asked too."""
        key, end = messages.key_range(prefix)
        request = rpc.RangeRequest(key=key, range_end=end)
        reply = await self._ask(lambda member: member.kv.Range, request, repeat=True)
        return Loaded(
            {messages.to_text(kv.key): messages.to_record(kv) for kv in reply.kvs},
            reply.header.revision,
        )

    async def txn(
        self,
        compares: Sequence[Compare],
        operations: Sequence[StoreOperation],
        *,
        timeout: float | None = None,
    ) -> Outcome:
        """See `Store`."""
        check_txn(compares, operations)
        request = rpc.TxnRequest(
            compare=[messages.comparison(compare) for compare in compares],
            success=[messages.request(operation) for operation in operations],
            failure=[messages.request(Get(compare.key)) for compare in compares],
        )
        reply = await self._ask(lambda member: member.kv.Txn, request, timeout=timeout)
        found = itertools.chain.from_iterable(r.response_range.kvs for r in reply.responses)
        return Outcome(reply.succeeded, reply.header.revision, messages.to_records(found))

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[list[Event], None]:
        """See `Store`."""
        key, end = messages.key_range(prefix)
        create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=from_revision)
        # A connection of its own: that of the calls is given up when one of them is not answered.
        deadline = clock.now() + self._timeout
        member = Endpoint((await self._connected(deadline)).name, self._pem)
        try:
            async with contextlib.aclosing(self._responses(member, create)) as responses:
                async for response in responses:
                    if response.canceled:
                        raise _watch_ended(member, response)
                    if response.events:
                        events = [messages.to_event(event) for event in response.events]
                        self._continuity.told(events[-1].revision)
                        yield events
        except (rpc.AioRpcError, asyncio.InvalidStateError) as exc:
            raise failure(member, exc) from exc
        finally:
            self._give_up(member)

    async def grant_lease(self, ttl: int) -> StoreLease:
        """See `Store`."""
        check_ttl(ttl)
        request = rpc.LeaseGrantRequest(TTL=ttl)
        reply = await self._ask(lambda member: member.leases.LeaseGrant, request)
        return StoreLease(reply.ID, reply.TTL)

    async def keep_alive(self, lease: int) -> None:
        """See `Store`."""

        async def send(member: Endpoint, timeout: float) -> Any:
            requests = iter([rpc.LeaseKeepAliveRequest(ID=lease)])
            call = member.leases.LeaseKeepAlive(requests, timeout=timeout, metadata=self._metadata)
            try:
                reply = await call.read()
            finally:
                call.cancel()
            if reply is grpc.aio.EOF:
                raise silent(member, "ended the call")
            return reply

        if (await self._call(send, repeat=True)).TTL <= 0:
            raise LeaseGoneError(f"lease {lease} has ended")

    async def revoke_lease(self, lease: int) -> None:
        """See `Store`."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._ask(lambda member: member.leases.LeaseRevoke, request)

    async def size(self) -> Size | None:
        """See `Store`. It is that of the member that answers."""
        request = rpc.StatusRequest()
        reply = await self._ask(lambda member: member.maintenance.Status, request, repeat=True)
        return Size(reply.dbSize, reply.dbSizeInUse)

    def begin_anew(self) -> None:
        """See `Store`."""
        self._continuity.begin_anew()

    def renew(self) -> None:
        """Connect and sign in anew, by what is in the files of its credentials now.

        What is under way ends as it would.

        Raises:
            StoreUnreachableError: a file cannot be read, and all stays as it is.
        """
        self._make_members()
        self._metadata, self._turned_away = (), None

    async def close(self) -> None:
        """See `Store`."""
        for member in self._members:
            self._give_up(member)
        self._members = []
        await asyncio.gather(*self._closing)

    async def _ask(
        self,
        method: Callable[[Endpoint], Callable[..., Awaitable[Any]]],
        request: Any,
        *,
        repeat: bool = False,
        timeout: float | None = None,
    ) -> Any:
        return await self._call(
            lambda member, left: method(member)(request, timeout=left, metadata=self._metadata),
            repeat=repeat,
            timeout=timeout,
        )

    async def _call(
        self, send: _Send, *, repeat: bool = False, timeout: float | None = None
    ) -> Any:
        """Send a request to one endpoint, or if it may be repeated to one after the other."""
        deadline = clock.now() + min(timeout or self._timeout, self._timeout)
        asked = self._continuity.asks()
        if repeat and len(self.endpoints) > 1:
            member, reply = await self._ask_several(send, deadline)
        else:
            member = await self._connected(deadline)
            reply = await self._answer(send, member, deadline)
        # What is said of leases may come from a member that lags behind the others.
        is_latest = isinstance(reply, rpc.RangeResponse | rpc.TxnResponse)
        self._continuity.answered(
            asked,
            reply.header.revision if is_latest else 0,
            name=f"etcd {member.name}",
            cluster=reply.header.cluster_id,
        )
        return reply

    async def _ask_several(self, send: _Send, deadline: float) -> tuple[Endpoint, Any]:
        """Ask one endpoint, and after each share of the time one more; return the first answer.

        Nobody is given up before another one has answered: all may be slow, and would never answer
        within a share.
        """
        left = len(self.endpoints)
        share = (deadline - clock.now()) / left
        asked: list[Endpoint] = []

        async def ask() -> tuple[Endpoint, Any]:
            member = await self._connected(deadline, asked)
            asked.append(member)
            return member, await self._answer(send, member, deadline)

        attempts: set[asyncio.Task[tuple[Endpoint, Any]]] = set()
        unanswered: StoreError | None = None
        try:
            while left or attempts:
                if left:
                    attempts.add(asyncio.ensure_future(ask()))
                    left -= 1
                ended, _ = await asyncio.wait(
                    attempts,
                    timeout=share if left else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                attempts -= ended
                for attempt in ended:
                    try:
                        member, reply = attempt.result()
                    except StoreUnreachableError as exc:
                        unanswered = unanswered or exc
                    else:
                        for silent_one in asked[: asked.index(member)]:
                            self._replace(silent_one)
                        return member, reply
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        assert unanswered is not None
        raise unanswered

    async def _answer(self, send: _Send, member: Endpoint, deadline: float) -> Any:
        """Send to one endpoint, and give up its connection if it does not answer in time."""
        try:
            return await self._send(send, member, deadline)
        except (rpc.AioRpcError, grpc.aio.UsageError, TimeoutError) as exc:
            # A `UsageError`: it was closed. A `TimeoutError`: nobody could sign in.
            error = failure(member, exc)
            if isinstance(error, StoreUnreachableError):
                self._replace(member)
            raise error from exc
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task: its connection was given up when another call was not answered.
            raise silent(member, "the connection was given up") from None

    async def _send(self, send: _Send, member: Endpoint, deadline: float) -> Any:
        """Send to one endpoint; once more where it did not know the token, and so has done nothing."""
        if self._user is None:
            return await send(member, deadline - clock.now())
        await self._sign_in(self._user, member, deadline)
        signed_in = self._metadata
        try:
            return await send(member, deadline - clock.now())
        except rpc.AioRpcError as exc:
            if not is_signed_out(exc):
                raise
        if self._metadata is signed_in:
            self._metadata = ()
        await self._sign_in(self._user, member, deadline)
        return await send(member, deadline - clock.now())

    async def _sign_in(self, user: EtcdUser, member: Endpoint, deadline: float) -> None:
        """Get a token, unless there is one: they end, and with a member that keeps them.

        Raises:
            TimeoutError: neither this call nor the one before it got an answer.
        """
        # Each member for itself: one that is silent keeps nobody from asking another.
        async with asyncio.timeout(deadline - clock.now()), member.signing_in:
            if self._metadata:
                return
            if self._turned_away is not None and clock.now() < self._turned_away[1]:
                raise self._turned_away[0].with_traceback(None)
            try:
                password = user.password()
            except ValueError as exc:
                raise StoreUnreachableError(str(exc)) from None
            request = rpc.AuthenticateRequest(name=user.name, password=password)
            try:
                reply = await member.auth.Authenticate(request)
            except rpc.AioRpcError as exc:
                if not isinstance(failure(member, exc), StoreUnreachableError):
                    self._turned_away = exc, clock.now() + SIGN_IN_PAUSE
                raise
            self._metadata = (("token", reply.token),)

    async def _connected(self, deadline: float, asked: Sequence[Endpoint] = ()) -> Endpoint:
        """Return the first endpoint that has a connection, or else the first to get one.

        With some that were `asked` already, one of the others; then it is not yet preferred to them.
        """
        if self._members and self._members[0].ready and not asked:
            return self._members[0]
        self._make_members()
        why = asyncio.ensure_future(self._why((deadline - clock.now()) / 2))
        try:
            while (left := deadline - clock.now()) > 0:
                if not (others := [member for member in self._members if member not in asked]):
                    break
                attempts = [asyncio.ensure_future(member.connect()) for member in others]
                try:
                    await asyncio.wait(attempts, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for attempt in attempts:
                        attempt.cancel()
                for member in self._members:
                    if member.ready and member not in asked:
                        if not asked:
                            self._members.remove(member)
                            self._members.insert(0, member)
                        return member
        finally:
            why.cancel()
        raise StoreUnreachableError(
            f"no connection to etcd at {', '.join(self.endpoints)} within {self._timeout:g} s"
            + (why.result() if why.done() else "")
        )

    def _make_members(self) -> None:
        """Have connections by what is in the files now: others than those that there are, perhaps."""
        try:
            pem = self._tls and self._tls.read()
        except ValueError as exc:
            raise StoreUnreachableError(f"no connection to etcd: {exc}") from None
        if self._members and pem == self._pem:
            return
        for member in self._members:
            self._give_up(member)
        self._pem = pem
        self._members = [Endpoint(endpoint, pem) for endpoint in self.endpoints]

    async def _why(self, pause: float) -> str:
        """Return what to say of the reason, if there is no connection by then."""
        await asyncio.sleep(pause)
        reasons = await asyncio.gather(*(obstacle(name, self._tls) for name in self.endpoints))
        return next((f": {reason}" for reason in reasons if reason), "")

    def _replace(self, member: Endpoint) -> None:
        """Put an endpoint last, and connect anew: only one that is alive will have a connection."""
        if member in self._members:
            self._members.remove(member)
            self._members.append(Endpoint(member.name, self._pem))
            self._give_up(member)

    def _give_up(self, member: Endpoint) -> None:
        """Close a connection once the calls that are under way on it have ended."""
        task = asyncio.ensure_future(member.channel.close(grace=self._timeout))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _responses(self, member: Endpoint, create: Any) -> AsyncGenerator[Any, None]:
        """Yield what a watch receives; a server that is silent is asked whether it is there."""
        try:
            async with asyncio.timeout(self._timeout):
                await member.connect()
        except TimeoutError:
            raise silent(member, f"no connection within {self._timeout:g} s") from None
        call = member.watches.Watch(metadata=(*METADATA, *self._metadata))
        await call.write(rpc.WatchRequest(create_request=create))
        reading = asyncio.ensure_future(call.read())
        asked = False
        try:
            while True:
                # Not wait_for: to cancel a read would be to cancel the watch.
                if not (await asyncio.wait([reading], timeout=self._timeout))[0]:
                    if asked:
                        raise silent(member, f"no sign of life for {2 * self._timeout:g} s")
                    asked = True
                    progress = rpc.WatchProgressRequest()
                    await call.write(rpc.WatchRequest(progress_request=progress))
                    continue
                if (response := reading.result()) is grpc.aio.EOF:
                    raise silent(member, "ended the watch")
                asked = False
                yield response
                reading = asyncio.ensure_future(call.read())
        finally:
            reading.cancel()
            call.cancel()


def _watch_ended(member: Endpoint, response: Any) -> StoreError:
    if response.compact_revision:
        return CompactedError(
            f"etcd {member.name} has forgotten the changes before revision "
            f"{response.compact_revision}: load again",
            server=member.name,
        )
    return silent(member, f"ended the watch: {response.cancel_reason or 'no reason given'}")
