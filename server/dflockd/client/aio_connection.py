"""An asyncio connection, the driver that runs operations on it, and a pool for each event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar, cast

from dflockd import errors
from dflockd.address import Address
from dflockd.client.connection import (
    CONNECT_TIMEOUT,
    CONNECTIONS,
    LEAST_PATIENCE,
    SILENCE,
    reason,
    tune,
)
from dflockd.client.operations import (
    PING_PATIENCE,
    Answer,
    Operation,
    authenticate,
    ping,
    shards,
)
from dflockd.client.pool import MAX_IDLE, Route
from dflockd.client.routing import Ask, Load, Outcome, Path, Ping, ShardMap, glance
from dflockd.wire import ReplyReader, UnexpectedReplyError

R = TypeVar("R")


class Owner(Protocol):
    """Who wants to know when a connection breaks between requests."""

    def connection_broke(self) -> None:
        """React; called once, on the event loop."""


class AsyncConnection(asyncio.Protocol):
    """One connection, used by one task at a time.

    A task that is cancelled between a request and its reply must `close` it, for the same reasons
    as with a blocking `Connection`.
    """

    address: Address

    def __init__(self) -> None:
        self.closed = False
        self.pooled = False
        self.label = b""
        self.owner: Owner | None = None
        self._reader = ReplyReader()
        self._reply: asyncio.Future[bytes] | None = None

    @classmethod
    async def open(cls, route: Route, until: float | None = None) -> AsyncConnection:
        """Connect and authenticate.

        Args:
            route: to the server.
            until: monotonic time at which to give up; see `Connection.open`.

        Raises:
            UnreachableError: nobody answered there in time.
            AuthRefusedError: the server wants another secret.
        """
        server = str(route.address)
        connection = None
        left = CONNECT_TIMEOUT if until is None else until - time.monotonic()
        try:
            async with asyncio.timeout(min(max(LEAST_PATIENCE, left), CONNECT_TIMEOUT)):
                connection = await _connect(route)
                connection.address = route.address
                if route.auth_secret is not None:
                    await run(authenticate(route.auth_secret, server), connection, server)
        except BaseException as exc:
            if connection is not None:
                connection.close()
            # A ValueError is for what cannot be a host name.
            if isinstance(exc, OSError | ValueError) and not isinstance(exc, errors.DflockdError):
                raise errors.UnreachableError(
                    f"lock server {server} cannot be reached: {reason(exc)}", server=server
                ) from exc
            raise
        return connection

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket up."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            tune(sock)
        CONNECTIONS.add(self)

    def data_received(self, data: bytes) -> None:
        """Resume the task that waits for this reply."""
        try:
            line = self._reader.receive(data)
        except UnexpectedReplyError as exc:
            self._fail(exc)
            return
        if line is None:
            return
        reply = self._reply
        if reply is None:
            self._fail(UnexpectedReplyError("a line that nobody asked for"))
        elif not reply.done():
            reply.set_result(line)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the task that waits for a reply, or tell the owner."""
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    # What clients call.

    async def exchange(
        self,
        request: bytes,
        patience: float | None,
        ahead: int = 0,
        until: float | None = None,
        look: Callable[[], Awaitable[float]] | None = None,
    ) -> Answer:
        """Send a request and wait for its reply; see `Connection.exchange`."""
        if self.closed:
            raise ConnectionResetError("the server closed the connection")
        loop = asyncio.get_running_loop()
        reply = self._reply = loop.create_future()
        timer = None
        try:
            self._reader.ahead = ahead
            sent = time.monotonic()
            self._transport.write(request)
            limit = until if patience is None else sent + patience
            if until is not None and limit is not None:
                limit = min(limit, max(until, sent + LEAST_PATIENCE))
            if limit is not None:
                timer = loop.call_later(max(0.0, limit - sent), _late, reply)
            line = await (reply if look is None else _looking(reply, look))
        finally:
            if timer is not None:
                timer.cancel()
            self._reply = None
        return Answer(line, sent, time.monotonic())

    def close(self) -> None:
        """Close it. A server lets go of what was held on it."""
        self.closed = True
        self.owner = None
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._transport.close()

    def abort(self) -> None:
        """Close it without the farewell of TLS, which takes more turns of the loop than are left."""
        self.closed = True
        self.owner = None
        self._transport.abort()

    def forget_after_fork(self) -> None:
        """Close this process's copy of the descriptor and say nothing: the parent goes on.

        The transport cannot be told, and will close that number some day, whatever it stands for by
        then. So the number stays taken.
        """
        self.closed = True
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = self._transport.get_extra_info("socket").fileno()
            if number >= 0:
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)

    def _fail(self, exc: Exception) -> None:
        owner, was_closed = self.owner, self.closed
        self.close()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc)
        elif owner is not None and not was_closed:
            owner.connection_broke()


def _late(reply: asyncio.Future[bytes]) -> None:
    # Not by cancellation: what a loop that was busy for long finds there has come in time.
    if not reply.done():
        reply.set_exception(TimeoutError())


async def _looking(reply: asyncio.Future[bytes], look: Callable[[], Awaitable[float]]) -> bytes:
    """Wait for a reply, and look now and then whether it can still come."""
    pause = SILENCE
    while not (await asyncio.wait({reply}, timeout=pause))[0]:
        try:
            pause = await look()
        except errors.MovedError:
            if not reply.done():
                raise
    return reply.result()


async def run(
    operation: Operation[R],
    connection: AsyncConnection,
    server: str,
    until: float | None = None,
    look: Callable[[bool], Awaitable[float]] | None = None,
) -> R:
    """Run an operation to its end; see the blocking `dflockd.client.connection.run`.

    After any exception, cancellation included, the connection is closed.
    """
    try:
        exchange = next(operation)
        while True:
            looks = None if look is None else partial(look, exchange.waits)
            try:
                answer = await connection.exchange(
                    exchange.request, exchange.patience, exchange.ahead, until, looks
                )
            except TimeoutError:
                if not exchange.timeout_is_reply:
                    raise
                connection.close()
                now = time.monotonic()
                answer = Answer(b"timeout", now, now)
            exchange = operation.send(answer)
    except StopIteration as stop:
        result: R = stop.value
        return result
    except UnexpectedReplyError as exc:
        connection.close()
        raise errors.BadReplyError(f"server {server}: {exc}", server=server) from exc
    except OSError as exc:
        connection.close()
        if isinstance(exc, errors.DflockdError):
            raise
        raise errors.UnreachableError(
            f"connection to lock server {server} broke: {reason(exc)}", server=server
        ) from exc
    except BaseException:
        connection.close()
        raise


class AsyncPool:
    """Idle connections of one event loop, by route."""

    def __init__(self) -> None:
        self._idle: defaultdict[Route, list[AsyncConnection]] = defaultdict(list)
        self._loop_ends = False
        self._guard = self._close_with_loop()
        # `asyncio.run` ends the asynchronous generators that have begun on its loop.
        with contextlib.suppress(StopIteration):
            self._guard.__anext__().__await__().send(None)

    async def take(self, route: Route, until: float | None = None) -> AsyncConnection:
        """Return a connection that is the caller's until given back; raises as `open` does."""
        idle = self._idle[route]
        while idle:
            connection = idle.pop()
            if not connection.closed:
                return connection
        return await AsyncConnection.open(route, until)

    def give(self, route: Route, connection: AsyncConnection) -> None:
        """Take a connection back, between two requests."""
        if connection.closed:
            return
        connection.pooled = True
        idle = self._idle[route]
        if len(idle) < MAX_IDLE and not self._loop_ends:
            idle.append(connection)
        else:
            connection.close()

    async def ask(self, route: Route, operation: Callable[[], Operation[R]], patience: float) -> R:
        """Run an operation that leaves nothing behind; see `dflockd.client.pool.Pool.ask`."""
        until = time.monotonic() + patience
        connection = await self.take(route, until)
        server = str(route.address)
        try:
            result = await run(operation(), connection, server, until)
        except errors.UnreachableError:
            if not connection.pooled or time.monotonic() >= until:
                raise
            connection = await AsyncConnection.open(route, until)
            result = await run(operation(), connection, server, until)
        self.give(route, connection)
        return result

    async def look(self, shards: ShardMap, key: bytes, route: Route, is_waiting: bool) -> float:
        """Look at a server that has not answered yet; see `dflockd.client.pool.Pool.look`."""

        async def found(step: Ask) -> float:
            return step.timeout or 0.0

        path = glance(shards, key, route.address, is_waiting, time.monotonic())
        return await self.follow(path, route, found)

    async def follow(self, path: Path, route: Route, attempt: Callable[[Ask], Awaitable[R]]) -> R:
        """Walk a path until an attempt succeeds; see `dflockd.client.pool.Pool.follow`."""
        step = next(path)
        while True:
            report = None
            try:
                if isinstance(step, Ask):
                    return await attempt(step)
                if isinstance(step, Load):
                    there = route._replace(address=step.server)
                    loading = partial(shards, str(step.server), step.known)
                    report = await self.ask(there, loading, step.patience)
                elif isinstance(step, Ping):
                    there = route._replace(address=step.server)
                    await self.ask(there, partial(ping, str(step.server)), PING_PATIENCE)
                else:
                    await asyncio.sleep(step.seconds)
            except errors.RemoteError as exc:
                step = path.send(Outcome(time.monotonic(), error=exc))
            else:
                step = path.send(Outcome(time.monotonic(), report=report))

    def clear(self) -> None:
        """Close the idle connections."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._loop_ends = True
            for idle in self._idle.values():
                for connection in idle:
                    connection.abort()
            self._idle.clear()


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncPool]
_pools = weakref.WeakKeyDictionary()


def pool() -> AsyncPool:
    """Return the pool of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _pools.get(loop)
    if found is None:
        # A pool refers to its loop by its connections. Where nobody ended the generators, this ends it.
        for other in [other for other in _pools if other.is_closed()]:
            del _pools[other]
        found = _pools[loop] = AsyncPool()
    return found


async def _connect(route: Route) -> AsyncConnection:
    loop = asyncio.get_running_loop()
    address, tls = route.address, route.tls
    name = address.host if tls is not None else None
    if address.unix_path is not None:
        _, connection = await loop.create_unix_connection(
            AsyncConnection, address.unix_path, ssl=tls, server_hostname=name
        )
    else:
        _, connection = await loop.create_connection(
            AsyncConnection, address.host, address.port, ssl=tls, server_hostname=name
        )
    return connection
