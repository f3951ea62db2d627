"""A blocking connection to a server, and the driver that runs operations on it."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import ssl
import time
import weakref
from typing import Protocol, TypeVar

from dflockd import errors
from dflockd.address import Address
from dflockd.operations import Answer, Operation, authenticate
from dflockd.wire import ReplyReader, UnexpectedReplyError

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to be made, TLS and auth included."""

UNACKED_TIMEOUT = 10.0
"""Seconds after which data that the other side's kernel has not acknowledged breaks a connection."""

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
        cls, address: Address, auth_secret: bytes | None, context: ssl.SSLContext | None
    ) -> Connection:
        """Connect and authenticate.

        Raises:
            UnreachableError: nobody answered there within `CONNECT_TIMEOUT`.
            AuthRefusedError: the server wants another secret.
        """
        server = str(address)
        try:
            sock = _connect(address, context)
        except (OSError, ValueError) as exc:  # the latter for what cannot be a host name
            raise errors.UnreachableError(
                f"lock server {server} cannot be reached: {reason(exc)}", server=server
            ) from exc
        connection = cls(address, sock)
        try:
            sock.setblocking(False)
            if auth_secret is not None:
                run(authenticate(auth_secret, server), connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    def exchange(self, request: bytes, patience: float | None, ahead: int = 0) -> Answer:
        """Send a request, with `ahead` others before it, and wait for its reply.

        Raises:
            TimeoutError: no reply within `patience` seconds. The connection is of no more use.
            OSError: the connection broke.
            UnexpectedReplyError: the reply is none.
        """
        if self.owed:
            self._receive(patience)
            self.owed = False
        self._reader.ahead = ahead
        sent = time.monotonic()
        self._send(request, patience)
        return Answer(self._receive(patience), sent, time.monotonic())

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

    def _send(self, data: bytes, patience: float | None) -> None:
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
                if not selector.select(patience):
                    raise TimeoutError

    def _receive(self, patience: float | None) -> bytes:
        limit = None if patience is None else time.monotonic() + patience
        while True:
            # Over TLS there may be data that the socket no longer has.
            if not isinstance(self._sock, ssl.SSLSocket) or not self._sock.pending():
                self._wait_readable(None if limit is None else limit - time.monotonic())
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

    def _wait_readable(self, seconds: float | None) -> None:
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
        if not ready:
            raise TimeoutError


def run(operation: Operation[R], connection: Connection) -> R:
    """Run an operation to its end, blocking.

    Raises:
        UnreachableError: the connection broke, or no reply came in time.
        BadReplyError: the reply is none.
        RefusedError: the server said no.

    After any exception, whatever it is, the connection is closed.
    """
    try:
        exchange = next(operation)
        while True:
            try:
                answer = connection.exchange(exchange.request, exchange.patience, exchange.ahead)
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


def _connect(address: Address, context: ssl.SSLContext | None) -> socket.socket:
    if address.unix_path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_TIMEOUT)
        try:
            sock.connect(address.unix_path)
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT)
    try:
        if sock.family != getattr(socket, "AF_UNIX", None):
            tune(sock)
        if context is not None:
            return context.wrap_socket(sock, server_hostname=address.host)
    except BaseException:
        sock.close()
        raise
    return sock


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
