"""A connection to a server, and what carries the steps of flows out on it.

Sockets never block here. What has to be waited for is yielded, as a `Ready`, `Pause`, `Hear` or
`Resolve`: three drivers know how to wait, one for threads, one for asyncio, one for the reactor, and
nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from dflockd import errors
from dflockd.address import Address
from dflockd.client import clock
from dflockd.client.frames import without_frames
from dflockd.client.operations import Exchange, TimedReply, authenticate, greet
from dflockd.client.steps import SILENT, Flow, Hear, Link, Open, Pause, Ready, Route, Silent, Talk
from dflockd.wire import ReplyReader, UnexpectedReplyError

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to be made, TLS included; and for its server to say hello where the caller
sets no time."""

SHORTEST_CONNECT = 0.05
"""Seconds that each address of a name has at least."""

UNACKED_TIMEOUT = 10.0
"""Seconds after which data that the other side's kernel has not acknowledged breaks a connection."""

LEAST_PATIENCE = 0.5
"""Seconds for any answer, even if the time is over: this process may have been stopped."""

FULL_BACKLOG_PAUSE = 0.02
"""Seconds between attempts at a unix socket that has too many of them."""

FORK_PATIENCE = 0.1
"""Seconds that a fork waits at most for other threads that are just making a socket."""

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY, errno.EINTR)
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)

R = TypeVar("R")


class Resolve(NamedTuple):
    """Look up a name; the outcome is what `getaddrinfo` returns, or the error that it raises."""

    host: str
    port: int
    until: float


Awaited: TypeAlias = "Connection | Ready | Pause | Hear | Resolve"
"""What is yielded to drivers. A connection by itself is waited for like a `Ready` that reads, for the
seconds that it has `left`: that is what nearly all waits are. A driver that reads from it itself
answers with the reply that it has read, or with the error that came of that, instead of ``True``."""
Waits: TypeAlias = Generator[Awaited, Any, R]
_Found: TypeAlias = "list[tuple[int, int, int, Any]]"


class _Forked(Protocol):
    def forget_after_fork(self) -> None: ...


class Watcher(Protocol):
    """Who has registered the descriptor of a connection with a poller."""

    def is_gone(self) -> bool:
        """Whether the poller is no more: nobody learns there of the end of the connection."""


CONNECTIONS: weakref.WeakSet[_Forked] = weakref.WeakSet()
"""Every open connection of this process: a fork must close its copies."""

_making: list[int] = []
"""The threads that are making a socket which `CONNECTIONS` does not know by its number yet.

Forks of other threads wait: the child would have a socket that it does not know of.
"""


class Connection:
    """One connection. If you are interrupted between a request and its reply, `close` it.

    The next reply would be taken for the wrong one, and closing is what tells the server to let go.

    Who has registered the descriptor with a poller closes it. If anybody else did, its number would be
    free for the next connection, while the poller takes it for this one. So `close` shuts it down where
    somebody watches it, which tells the server and wakes all who wait; the last to `unwatch` closes it.
    """

    __slots__ = (
        "__weakref__",
        "_sock",
        "_watchers",
        "asked_at",
        "closed",
        "features",
        "guard",
        "idle_since",
        "is_tls",
        "left",
        "loop_reader",
        "owed",
        "poll",
        "pooled",
        "reader",
        "rested",
        "route",
    )

    def __init__(self, route: Route, family: int, kind: int, protocol: int) -> None:
        self.route = route
        self.closed = False
        self.features: frozenset[bytes] = frozenset()
        self.pooled = False
        self.idle_since = 0.0
        self.rested = False
        """Whether nothing has been heard on it since it was idle. Old servers say `error` and hang up
        on who is idle for long: that is no answer to what is asked next."""
        self.guard: object = None
        self.owed = False
        """Whether a reply is still to come to a request that `send_now` sent."""
        self.asked_at = 0.0
        """When the latest `ask` was."""
        self.left = math.inf
        """For how many seconds it is waited for once it is yielded; see `Awaited`."""
        self.poll: Any = None
        """What the driver of threads waits with."""
        self.loop_reader: Any = None
        """What reads from it in the event loop that has used it last."""
        self.reader = ReplyReader()
        self.is_tls = False
        self._watchers: list[object] = []
        """Who has registered the descriptor, and who is closing it. Changed by single operations."""
        me = threading.get_ident()
        try:
            _making.append(me)
            self._sock = socket.socket(family, kind, protocol)
            CONNECTIONS.add(self)
        finally:
            _making.remove(me)
        self._sock.setblocking(False)

    def __del__(self) -> None:
        """Close what its owner has forgotten."""
        with contextlib.suppress(AttributeError, OSError):  # it was never made
            self._sock.close()

    @property
    def address(self) -> Address:
        """The server."""
        return self.route.address

    def fileno(self) -> int:
        """Return the descriptor, for those who wait; -1 if it is closed."""
        return self._sock.fileno()

    def has_data(self) -> bool:
        """Return whether there is something to read that the socket no longer has."""
        return self.is_tls and cast(ssl.SSLSocket, self._sock).pending() > 0

    def ask(self, request: bytes, now: float) -> None:
        """Send a request, whose reply the caller waits for; if that fails, close it instead."""
        self.reader.ahead = 0
        self.asked_at = now
        try:
            if self._sock.send(request) == len(request):
                return
        except OSError:
            pass
        self.close()

    def accept(self, line: bytes) -> None:
        """Take in that something was heard.

        Raises:
            ConnectionResetError: it is no reply, but the server's farewell.
        """
        if self.rested:
            self.rested = False
            if line == b"error":
                raise ConnectionResetError("the server gave up an idle connection")

    def send_now(self, request: bytes) -> None:
        """Send a request, for `receive_now` to fetch the reply later.

        Raises:
            OSError: the connection broke, or its buffer is full: the server has stopped reading.
        """
        self.reader.ahead = 0
        if self._sock.send(request) != len(request):
            raise BlockingIOError("send buffer full")
        self.owed = True

    def receive_now(self) -> bytes | None:
        """Return the reply if it is there.

        Raises:
            OSError: the connection broke.
            UnexpectedReplyError: nothing was asked, or the reply is none.
        """
        line = self.receive()
        while line is None and self.has_data():
            line = self.receive()
        if line is not None:
            if not self.owed:
                raise UnexpectedReplyError("a line that nobody asked for")
            self.owed = False
        return line

    def watch(self, watcher: Watcher) -> bool:
        """Note that somebody is about to register the descriptor; ``False`` if it is closed."""
        self._watchers.append(watcher)
        if self.closed:  # who closes it from now on sees the watcher
            self.unwatch(watcher)
            return False
        return True

    def unwatch(self, watcher: object) -> None:
        """Note that somebody has unregistered it; the last one closes it, if somebody has ended it."""
        with contextlib.suppress(ValueError):  # its poller is gone, and somebody has seen that
            self._watchers.remove(watcher)
        if self.closed and not self._watchers:
            self._sock.close()

    def interrupt(self) -> None:
        """Make a wait for a reply on it fail at once. From any thread."""
        if self.watch(self):  # so that nobody frees the number meanwhile
            self._shut_down()
            self.unwatch(self)

    def close(self) -> None:
        """Close it. A server lets go of what was held on it. From any thread."""
        self.closed = True
        if not self.features:
            _published.discard(self.route.address)
        self._watchers.append(self)
        for each in self._watchers.copy():
            if each is not self and cast(Watcher, each).is_gone():
                self.unwatch(each)
        if len(self._watchers) > 1:
            self._shut_down()
        self.unwatch(self)

    def is_gone(self) -> bool:
        """As that of a `Watcher`: who closes a connection watches it until that is done."""
        return False

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def forget_after_fork(self) -> None:
        """Close this process's copy of the descriptor and say nothing: the parent goes on."""
        self.closed = True
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._sock.detach())

    # What carries out steps.

    def reach(self, where: Any, until: float) -> Waits[None]:
        """Connect to one address and speak TLS if the route says so.

        Raises:
            OSError: it did not answer, or not in time.
        """
        code = self._sock.connect_ex(where)
        while code == errno.EAGAIN and self._sock.family == getattr(socket, "AF_UNIX", None):
            if clock.now() >= until:
                raise TimeoutError
            yield Pause(FULL_BACKLOG_PAUSE)
            code = self._sock.connect_ex(where)
        if code in _UNDER_WAY:
            yield from self._wait(writes=True, until=until)
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code not in (0, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        if self._sock.family in (socket.AF_INET, socket.AF_INET6):
            _tune(self._sock)
        if self.route.tls is not None:
            yield from self._begin_tls(self.route.tls, until)

    def _begin_tls(self, context: ssl.SSLContext, until: float) -> Waits[None]:
        me = threading.get_ident()
        try:
            _making.append(me)
            sock = self._sock = context.wrap_socket(
                self._sock, server_hostname=self.route.address.host, do_handshake_on_connect=False
            )
        finally:
            _making.remove(me)
        self.is_tls = True
        while True:
            try:
                sock.do_handshake()
                return
            except ssl.SSLWantReadError:
                writes = False
            except ssl.SSLWantWriteError:
                writes = True
            yield from self._wait(writes=writes, until=until)

    def _wait(self, *, writes: bool, until: float) -> Waits[None]:
        if not (yield Ready(self, writes, until)):
            raise TimeoutError

    def send(self, data: bytes) -> bytes:
        """Send; return what could not be sent yet."""
        try:
            sent = self._sock.send(data)
        except _NOT_NOW:
            return data
        return b"" if sent == len(data) else data[sent:]

    def finish(self, rest: bytes, until: float) -> Waits[None]:
        """Send the rest of a request."""
        while rest:
            yield from self._wait(writes=True, until=until)
            rest = self.send(rest)

    def receive(self) -> bytes | None:
        """Return a line if it is complete.

        Raises:
            OSError: the connection broke.
            UnexpectedReplyError: it is no reply.
        """
        try:
            data = self._sock.recv(65536)
        except _NOT_NOW:
            return None
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return self.reader.receive(data)


def carry_out(flow: Flow[R]) -> Waits[R]:
    """Do what a flow says and return its result.

    Raises:
        BaseException: what the flow has raised. If this is closed or interrupted, so is the flow.
    """
    try:
        step = next(flow)
        while True:
            outcome: Any
            try:
                if type(step) is Talk:
                    outcome = yield from _talk(step)
                elif type(step) is Open:
                    outcome = yield from _open(*step)
                else:
                    outcome = yield step  # type: ignore[misc]
            except errors.RemoteError as exc:
                step = flow.throw(exc)
            else:
                step = flow.send(outcome)
    except StopIteration as stop:
        result: R = stop.value
        return result
    finally:
        outcome = None  # it may be an error that was raised here, and refers to here
        flow.close()


def _talk(talk: Talk[R]) -> Waits[R | Silent]:
    """Go through an operation, or go on with it.

    Raises:
        UnreachableError: the connection broke, or no reply came in time.
        BadReplyError: the reply is none.
        RefusedError: the server said no.
    """
    link: Connection = talk.link  # type: ignore[assignment]
    operation = talk.operation
    try:
        exchange, sent, line = talk.under_way or (next(operation), 0.0, None)
        talk.under_way = None
        while True:
            if not sent:
                sent = clock.now()
                limit = _limit(talk, exchange, sent)
                # A reply that is still to come before its own is passed over.
                link.reader.ahead = int(link.owed)
                link.owed = False
                if rest := link.send(exchange.request):
                    yield from link.finish(rest, limit)
            else:
                limit = _limit(talk, exchange, sent)
            while line is None:
                left = min(limit, talk.look_at) - clock.now()
                link.left = left if left > 0 else 0.0
                heard = (link.is_tls and link.has_data()) or (yield link)
                if not heard:
                    break
                line = link.receive() if heard is True else heard
            if isinstance(line, Exception):
                raise line
            if line is not None:
                link.accept(line)
                answer = TimedReply(line, sent, clock.now())
            elif talk.look_at < limit:
                talk.under_way = exchange, sent, None
                return SILENT
            elif exchange.timeout_is_reply and not link.closed:
                link.close()
                over = clock.now()
                answer = TimedReply(b"timeout", over, over)
            else:
                raise TimeoutError
            exchange, sent, line = operation.send(answer), 0.0, None
    except StopIteration as stop:
        result: R = stop.value
        return result
    except UnexpectedReplyError as exc:
        link.close()
        server = str(link.route.address)
        text = f"server {server}: {exc}: is a dflockd server listening there?"
        raise errors.BadReplyError(text, server=server) from without_frames(exc)
    except errors.IN_ORDER:
        raise  # an answer in order: the connection is as good as before
    except OSError as exc:
        link.close()
        if isinstance(exc, errors.DflockdError):
            raise
        server = str(link.route.address)
        raise errors.UnreachableError(
            f"connection to lock server {server} broke: {reason(exc)}", server=server
        ) from without_frames(exc)
    except BaseException:
        # A signal, a time limit, a cancellation, a greenlet's end: the reply may be under way.
        link.close()
        raise
    finally:
        line = None  # it may be an error that was raised here, and refers to here


def _limit(talk: Talk[Any], exchange: Exchange, sent: float) -> float:
    """Return when the reply to a request is too late."""
    limit = math.inf if exchange.patience is None else sent + exchange.patience
    until = talk.until
    if until is None or until >= limit:
        return limit
    # Also a reply whose time is over, or nearly so, has a moment.
    return until if talk.is_strict else max(until, min(limit, sent + LEAST_PATIENCE))


_published: set[Address] = set()
"""Servers that know the published protocol alone, until a connection to them ends: from then on another
one may be there."""


def _open(
    route: Route,
    until: float | None,
    is_strict: bool,
    made: Callable[[Link], object] | None,
) -> Waits[Connection]:
    """Connect, and say who is there.

    Raises:
        UnreachableError: nobody answered there in time.
        AuthRefusedError: the server wants another secret.
    """
    address, now = route.address, clock.now()
    until = now + CONNECT_TIMEOUT if until is None else until
    if not is_strict:
        until = max(until, now + LEAST_PATIENCE)
    secret, server = route.auth_secret, str(address)
    if address not in _published:
        link = yield from _connect(route, until)
        if made is not None:
            made(link)
        hello: Talk[Any] = Talk(link, greet(secret, server), until)
        hello.is_strict = is_strict
        features: Any = yield from _talk(hello)
        if features is not None:
            link.features = features
            return link
        # Older ones hang up on what they do not know, newer ones on who does not begin with the secret.
        link.close()
        _published.add(address)
    link = yield from _connect(route, until)
    if made is not None:
        made(link)
    if secret is not None:
        talk = Talk(link, authenticate(secret, server), until)
        talk.is_strict = is_strict
        yield from _talk(talk)
    return link


def _connect(route: Route, until: float) -> Waits[Connection]:
    try:
        return (yield from _reach(route, min(until, clock.now() + CONNECT_TIMEOUT)))
    except (OSError, ValueError) as exc:  # the latter for what cannot be a host name
        server = str(route.address)
        raise errors.UnreachableError(
            f"lock server {server} cannot be reached: {reason(exc)}", server=server
        ) from without_frames(exc)


def _reach(route: Route, until: float) -> Waits[Connection]:
    """Connect to one of the addresses that a name has, all of them within the time."""
    path = route.address.unix_path
    if path is not None:
        found: _Found = [(int(socket.AF_UNIX), int(socket.SOCK_STREAM), 0, path)]
    else:
        found = _known_by_number(*route.address)
        if not found:
            looked_up = yield Resolve(*route.address, until)
            if isinstance(looked_up, Exception):
                raise looked_up
            found = _usable(looked_up)
    error: OSError | None = None
    for number, (family, kind, protocol, where) in enumerate(found):
        now = clock.now()
        share = max(SHORTEST_CONNECT, (until - now) / (len(found) - number))
        link = None
        try:
            link = Connection(route, family, kind, protocol)
            yield from link.reach(where, now + share)
            return link
        except OSError as exc:
            error = without_frames(exc)
            if link is not None:
                link.close()
        except BaseException:
            if link is not None:
                link.close()
            raise
    raise error or OSError("the name has no address")


@lru_cache(maxsize=256)
def _known_by_number(host: str, port: int) -> _Found:
    """Return where a host is that is given by its number; nothing for a name, which takes time."""
    try:
        return _usable(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        )
    except (OSError, UnicodeError):
        return []


def _usable(found: Any) -> _Found:
    return [(family, kind, protocol, where) for family, kind, protocol, _, where in found]


def _tune(sock: socket.socket) -> None:
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
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__


# Forks.


def wait_before_fork() -> None:
    """Wait until no other thread is making a socket: that takes no longer than a system call."""
    until = time.monotonic() + FORK_PATIENCE
    me = threading.get_ident()
    while any(each != me for each in _making) and time.monotonic() < until:
        time.sleep(0)


def forget_connections_after_fork() -> None:
    """Close the child's copies of all connections.

    While a copy is open the server cannot see the parent's end, and its locks would outlive it.
    """
    for connection in list(CONNECTIONS):
        connection.forget_after_fork()
    CONNECTIONS.clear()
    _published.clear()
    _making.clear()
