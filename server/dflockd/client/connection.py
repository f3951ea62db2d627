"""A blocking connection to a server, and the driver that runs operations on it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import socket
import ssl
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from dflockd import errors
from dflockd.address import Address
from dflockd.client.operations import Answer, Operation, authenticate
from dflockd.wire import ReplyReader, UnexpectedReplyError

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to be made, TLS and auth included."""

SHORTEST_CONNECT = 0.05
"""Seconds that a step of it has at least."""

UNACKED_TIMEOUT = 10.0
"""Seconds after which data that the other side's kernel has not acknowledged breaks a connection."""

SILENCE = 1.0
"""Seconds without an answer after which somebody looks whether it can still come."""

LEAST_PATIENCE = 0.5
"""Seconds for any answer, also when the time is over: it may be that this process was stopped."""

LONGEST_POLL = 86400.0
"""Seconds beyond which a wait has no end on this side: `poll` cannot count to a month."""

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

R = TypeVar("R")


class _Forked(Protocol):
    def forget_after_fork(self) -> None: ...


CONNECTIONS: weakref.WeakSet[_Forked] = weakref.WeakSet()
"""Every open connection of this process, blocking or not: a fork must close its copies."""


class Connection:
    """One connection, used by one thread at a time.

    Whoever is interrupted between a request and its reply must `close` it: the next reply would be
    taken for the wrong one, and closing is what tells the server to let go.
    """

    __slots__ = (
        "__weakref__",
        "_poll",
        "_reader",
        "_sock",
        "address",
        "closed",
        "label",
        "owed",
        "pooled",
    )

    def __init__(self, address: Address, sock: socket.socket) -> None:
        self.address = address
        self.closed = False
        self.label = b""
        """What the server shows for it."""
        self.pooled = False
        """Whether it has lain idle, so that the server may have left meanwhile."""
        self.owed = False
        """Whether a reply is still to come to a request that `send` sent."""
        self._sock = sock
        self._reader = ReplyReader()
        self._poll: select.poll | None = None
        CONNECTIONS.add(self)

    @classmethod
    def open(
        cls,
        address: Address,
        auth_secret: bytes | None,
        context: ssl.SSLContext | None,
        until: float | None = None,
    ) -> Connection:
        """Connect and authenticate.

        Args:
            address: the server.
            auth_secret: what it wants to be shown.
            context: for TLS.
            until: monotonic time at which to give up, if that is before the `CONNECT_TIMEOUT`, but
                for `LEAST_PATIENCE`.

        Raises:
            UnreachableError: nobody answered there in time.
            AuthRefusedError: the server wants another secret.
        """
        server, now = str(address), time.monotonic()
        until = now + CONNECT_TIMEOUT if until is None else min(until, now + CONNECT_TIMEOUT)
        try:
            sock = _connect(address, context, max(LEAST_PATIENCE, until - now))
        except (OSError, ValueError) as exc:  # the latter for what cannot be a host name
            raise errors.UnreachableError(
                f"lock server {server} cannot be reached: {reason(exc)}", server=server
            ) from exc
        connection = cls(address, sock)
        try:
            sock.setblocking(False)
            if auth_secret is not None:
                run(authenticate(auth_secret, server), connection, until)
        except BaseException:
            connection.close()
            raise
        return connection

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    def exchange(
        self,
        request: bytes,
        patience: float | None,
        ahead: int = 0,
        until: float | None = None,
        look: Callable[[], float] | None = None,
    ) -> Answer:
        """Send a request, with `ahead` others before it, and wait for its reply.

        Args:
            request: the bytes.
            patience: seconds to wait for the reply; ``None`` for no end.
            ahead: see above.
            until: monotonic time at which the wait ends at the latest, but for `LEAST_PATIENCE`.
            look: called once nothing has come for `SILENCE` seconds. It returns after how many more
                it is to be called again, or raises what ends the wait.

        Raises:
            TimeoutError: no reply in time. The connection is of no more use.
            OSError: the connection broke.
            UnexpectedReplyError: the reply is none.
        """
        sent = time.monotonic()
        limit = until if patience is None else sent + patience
        if until is not None and limit is not None and limit > until:
            least = sent + LEAST_PATIENCE
            limit = until if until > least else min(limit, least)
        if self.owed:
            self._receive(limit, look)
            self.owed = False
            sent = time.monotonic()
        self._reader.ahead = ahead
        self._send(request, limit)
        return Answer(self._receive(limit, look), sent, time.monotonic())

    def send(self, request: bytes, ahead: int = 0) -> None:
        """Send a request, with `ahead` others before it, for `receive_nowait` to fetch the reply later.

        Raises:
            OSError: the connection broke, or its buffer is full: the server has stopped reading.
        """
        self._reader.ahead = ahead
        if self._sock.send(request) != len(request):
            raise BlockingIOError("send buffer full")
        self.owed = True

    def receive_nowait(self) -> bytes | None:
        """Return the reply if it is there.

        Raises:
            OSError: the connection broke.
            UnexpectedReplyError: nothing was asked, or the reply is none.
        """
        try:
            data = self._sock.recv(65536)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        line = self._take(data)
        if line is not None:
            if not self.owed:
                raise UnexpectedReplyError("a line that nobody asked for")
            self.owed = False
        return line

    def interrupt(self) -> None:
        """Make a thread that waits for a reply on this connection fail at once. From any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. A server lets go of what was held on it."""
        self.closed = True
        self._sock.close()

    def forget_after_fork(self) -> None:
        """Close this process's copy of the descriptor and say nothing: the parent goes on."""
        self.closed = True
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())

    def _send(self, data: bytes, limit: float | None) -> None:
        while True:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
            with selectors.DefaultSelector() as selector:
                selector.register(self._sock, selectors.EVENT_WRITE)
                left = None if limit is None else max(0.0, limit - time.monotonic())
                if not selector.select(left):
                    raise TimeoutError

    def _receive(self, limit: float | None, look: Callable[[], float] | None) -> bytes:
        look_at = math.inf if look is None else time.monotonic() + SILENCE
        while True:
            # Over TLS there may be data that the socket no longer has.
            if not isinstance(self._sock, ssl.SSLSocket) or not self._sock.pending():
                soonest = (
                    limit if look is None else min(look_at, math.inf if limit is None else limit)
                )
                left = None if soonest is None else soonest - time.monotonic()
                if not self._wait_readable(left):
                    if look is None or (limit is not None and limit <= look_at):
                        raise TimeoutError
                    look_at = time.monotonic() + look()
                    continue
            try:
                data = self._sock.recv(65536)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            line = self._take(data)
            if line is not None:
                return line

    def _take(self, data: bytes) -> bytes | None:
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return self._reader.receive(data)

    def _wait_readable(self, seconds: float | None) -> bool:
        # Looked up at the time of the call: gevent and eventlet replace what is in `select`.
        make_poll = getattr(select, "poll", None)
        if seconds is not None and seconds > LONGEST_POLL:
            seconds = None
        ready: object
        if make_poll is None:
            ready = select.select([self._sock], [], [], seconds)[0]
        else:
            if self._poll is None:
                self._poll = make_poll()
                self._poll.register(self._sock, select.POLLIN)
            ready = self._poll.poll(None if seconds is None else max(0, seconds) * 1000)
        return bool(ready)


def run(
    operation: Operation[R],
    connection: Connection,
    until: float | None = None,
    look: Callable[[bool], float] | None = None,
) -> R:
    """Run an operation to its end, blocking.

    Args:
        operation: what to do.
        connection: where.
        until: monotonic time at which no reply is waited for any more.
        look: called now and then while none comes; see `Connection.exchange`. Its argument says
            whether the server may be right to say nothing yet.

    Raises:
        UnreachableError: the connection broke, or no reply came in time.
        BadReplyError: the reply is none.
        RefusedError: the server said no.

    After any exception, whatever it is, the connection is closed.
    """
    try:
        exchange = next(operation)
        while True:
            looks = None if look is None else partial(look, exchange.waits)
            try:
                answer = connection.exchange(
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
        server = str(connection.address)
        raise errors.BadReplyError(f"server {server}: {exc}", server=server) from exc
    except OSError as exc:
        connection.close()
        if isinstance(exc, errors.DflockdError):
            raise
        server = str(connection.address)
        raise errors.UnreachableError(
            f"connection to lock server {server} broke: {reason(exc)}", server=server
        ) from exc
    except BaseException:
        # A signal, a time limit, a greenlet's end: the reply may be under way.
        connection.close()
        raise


def forget_connections_after_fork() -> None:
    """Close the child's copies of all connections.

    While a copy is open the server cannot see the parent's end, and its locks would outlive it.
    """
    for connection in list(CONNECTIONS):
        connection.forget_after_fork()
    CONNECTIONS.clear()


def _connect(address: Address, context: ssl.SSLContext | None, timeout: float) -> socket.socket:
    until = time.monotonic() + timeout
    if address.unix_path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(address.unix_path)
        except BaseException:
            sock.close()
            raise
    else:
        sock = _connect_to_any(address, until)
    try:
        if sock.family != getattr(socket, "AF_UNIX", None):
            tune(sock)
        if context is not None:
            sock.settimeout(max(SHORTEST_CONNECT, until - time.monotonic()))
            return context.wrap_socket(sock, server_hostname=address.host)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_to_any(address: Address, until: float) -> socket.socket:
    """Connect to one of the addresses that a name has, all of them within the time.

    `socket.create_connection` takes as long for each.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    error: OSError | None = None
    for number, (family, kind, protocol, _, where) in enumerate(found):
        share = (until - time.monotonic()) / (len(found) - number)
        sock = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(max(SHORTEST_CONNECT, share))
            sock.connect(where)
            return sock
        except OSError as exc:
            error = exc
            if sock is not None:
                sock.close()
        except BaseException:
            if sock is not None:
                sock.close()
            raise
    raise error or OSError("the name has no address")


def tune(sock: socket.socket) -> None:
    """Send small requests at once, and notice a server that has vanished without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", int(UNACKED_TIMEOUT * 1000))):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def reason(exc: BaseException) -> str:
    """Say in a few words what an operating system error means."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, OSError) and type(exc).__module__ == "builtins" and exc.errno:
        return os.strerror(exc.errno)  # asyncio words some of them in its own way
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
