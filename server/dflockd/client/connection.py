"""A connection to a server: a socket that never blocks.

What has to be waited for is yielded; see `dflockd.client.flow`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client.flow import Flow, Hear, Pause, Ready
from dflockd.client.frames import without_frames
from dflockd.client.resolver import look_up, under_way
from dflockd.wire import ReplyReader

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to be made, TLS included; and for its server to say hello where the caller
sets no time."""

SHORTEST_CONNECT = 0.05
"""Seconds that each address of a name has at least."""

UNACKED_TIMEOUT = 10.0
"""Seconds after which data that the other side's kernel has not acknowledged breaks a connection."""

FULL_BACKLOG_PAUSE = 0.02
"""Seconds between attempts at a unix socket that has too many of them."""

FORK_PATIENCE = 0.1
"""Seconds that a fork waits at most for other threads that are just making a socket."""

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY, errno.EINTR)
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)

_Found: TypeAlias = "list[tuple[int, int, int, Any]]"


class Route(NamedTuple):
    """Where a connection goes and how it presents itself: what makes two interchangeable."""

    address: Address
    auth_secret: bytes | None = None
    tls: ssl.SSLContext | None = None

    def at(self, address: Address) -> Route:
        """Return the way to another server, which wants to be shown the same."""
        return Route(address, self.auth_secret, self.tls)

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Route({self.address})"


class _Forked(Protocol):
    def forget_after_fork(self) -> None: ...


class Watcher(Protocol):
    """Something that has registered the descriptor of a connection with a poller."""

    def is_gone(self) -> bool:
        """Whether the poller is no more: nobody learns there of the end of the connection."""


CONNECTIONS: weakref.WeakSet[_Forked] = weakref.WeakSet()
"""Every open connection of this process: a fork must close its copies."""

_making: list[int] = []
"""The threads that are making a socket which `CONNECTIONS` does not know by its number yet.

Forks of other threads wait: the child would have a socket that it does not know of.
"""


published: set[Address] = set()
"""Servers that know the published protocol alone, until a connection to them ends: from then on another
one may be there."""

answered: dict[Address, Any] = {}
"""Of a name that has several addresses, the one where a server was last."""


class Connection:
    """One connection. If you are interrupted between a request and its reply, `close` it.

    The next reply would be taken for the wrong one, and closing is what tells the server to let go.

    The watcher that has registered the descriptor with a poller closes it. If anybody else did, its
    number would be free for the next connection, while the poller takes it for this one. So `close`
    shuts it down where somebody watches it, which tells the server and wakes all who wait; the last
    to `unwatch` closes it.
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
        """What its server knows beyond the published protocol."""
        self.pooled = False
        """Whether it has lain idle, so that the server may have left meanwhile."""
        self.idle_since = 0.0
        self.rested = False
        """Whether nothing has been heard on it since it was idle. Old servers say `error` and hang up
        on who is idle for long: that is no answer to what is asked next."""
        self.guard: object = None
        """Closes it when its owner is forgotten, who stands in a queue on it."""
        self.asked_at = 0.0
        """When the latest `ask` was."""
        self.left = math.inf
        """For how many seconds it is waited for once it is yielded; see `Awaited`."""
        self.poll: Any = None
        """What the driver of threads waits with."""
        self.loop_reader: Any = None
        """What reads from it in the event loop that has used it last."""
        self.reader = ReplyReader()
        self.is_tls = route.tls is not None
        self._watchers: list[object] = []
        """Those that have registered the descriptor, or are closing it. Changed by single
        operations."""
        me = threading.get_ident()
        try:
            _making.append(me)
            self._sock = socket.socket(family, kind, protocol)
            self._sock.setblocking(False)
            if route.tls is not None:
                # Now, while nobody watches it. This hands the descriptor to another object, which can
                # fail in between for a socket that is connected.
                self._sock = route.tls.wrap_socket(
                    self._sock, server_hostname=route.address.host, do_handshake_on_connect=False
                )
            CONNECTIONS.add(self)
        finally:
            _making.remove(me)

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

    def owes(self) -> bool:
        """Return whether an answer is still to come to what was asked on it, or to a part of that."""
        return self.reader.owed > 0

    def has_come(self) -> bool:
        """Return whether something can be read at once, be it the end of the connection.

        For connections that nobody watches. It looks and does not wait, in an event loop as well.
        """
        number = self._sock.fileno()
        if number < 0:
            return True
        make_poll = getattr(select, "poll", None)  # not on Windows, and eventlet takes it away
        if make_poll is None:
            return bool(select.select([number], [], [], 0)[0])
        poll = make_poll()
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))

    def ask(self, request: bytes, now: float) -> None:
        """Send a request, whose reply the caller waits for; if that fails, close it instead."""
        self.asked_at = now
        self.reader.owed += 1
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
        """Send a request, for `receive` to fetch the reply later.

        Raises:
            OSError: the connection broke, or its buffer is full: the server has stopped reading.
        """
        if self.begin(request):
            raise BlockingIOError("send buffer full")

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
            published.discard(self.route.address)
        self._watchers.append(self)
        for each in self._watchers.copy():
            if each is not self and cast(Watcher, each).is_gone():
                self.unwatch(each)
        if len(self._watchers) > 1:
            self._shut_down()
        reader = self.loop_reader
        if reader is not None:
            reader.leave()
        self.unwatch(self)

    def is_gone(self) -> bool:
        """As that of a `Watcher`: a connection that closes itself watches itself until that is done."""
        return False

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            if isinstance(self._sock, ssl.SSLSocket):
                # Not its own, which takes its state away from the thread that shakes hands.
                super(ssl.SSLSocket, self._sock).shutdown(socket.SHUT_RDWR)
            else:
                self._sock.shutdown(socket.SHUT_RDWR)

    def forget_after_fork(self) -> None:
        """Close this process's copy of the descriptor and say nothing: the parent goes on."""
        self.closed = True
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._sock.detach())

    # Flows.

    def reach(self, where: Any, until: float) -> Flow[None]:
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
        if self.is_tls:
            yield from self._shake_hands(until)

    def _shake_hands(self, until: float) -> Flow[None]:
        while True:
            try:
                cast(ssl.SSLSocket, self._sock).do_handshake()
                return
            except ssl.SSLWantReadError:
                writes = False
            except ssl.SSLWantWriteError:
                writes = True
            yield from self._wait(writes=writes, until=until)

    def _wait(self, *, writes: bool, until: float) -> Flow[None]:
        if not (yield Ready(self, writes, until)):
            raise TimeoutError

    def begin(self, request: bytes) -> bytes:
        """Begin to send a request; return what could not be sent yet, for `finish`."""
        self.reader.owed += 1
        return self._send(request)

    def _send(self, data: bytes) -> bytes:
        try:
            sent = self._sock.send(data)
        except _NOT_NOW:
            return data
        except OSError:
            if self.is_tls:
                # Why the server has closed it: with TLS 1.3 that comes when our handshake is done.
                with contextlib.suppress(*_NOT_NOW, ConnectionError, ssl.SSLEOFError):
                    self._sock.recv(1)
            raise
        return b"" if sent == len(data) else data[sent:]

    def finish(self, rest: bytes, until: float) -> Flow[None]:
        """Send the rest of a request."""
        while rest:
            yield from self._wait(writes=True, until=until)
            rest = self._send(rest)

    def receive(self) -> bytes | None:
        """Return the reply if it is there.

        Raises:
            OSError: the connection broke.
            UnexpectedReplyError: nothing was asked, or it is no reply.
        """
        while True:
            try:
                data = self._sock.recv(self.reader.room)
            except _NOT_NOW:
                return None
            if not data:
                raise ConnectionResetError("the server closed the connection")
            line = self.reader.receive(data)
            # More may have come, or a reset: of what TLS has taken from the socket already, and after a
            # reset in uvloop, nobody is told again.
            if line is not None:
                return line


def dial(
    route: Route, until: float, made: Callable[[Connection], object] | None = None
) -> Flow[Connection]:
    """Make a connection.

    Args:
        route: where to.
        until: when to give up.
        made: gets it, before it is connected: who ends it then ends the attempt. One for each address
            that a name has.

    Raises:
        UnreachableError: nobody answered there in time.
    """
    try:
        return (yield from _reach(route, min(until, clock.now() + CONNECT_TIMEOUT), made))
    except (OSError, ValueError) as exc:  # the latter for what cannot be a host name
        server = str(route.address)
        raise errors.UnreachableError(
            f"lock server {server} cannot be reached: {reason(exc)}", server=server
        ) from without_frames(exc)


def _reach(
    route: Route, until: float, made: Callable[[Connection], object] | None
) -> Flow[Connection]:
    """Connect to one of the addresses that a name has, all of them within the time."""
    path = route.address.unix_path
    if path is not None:
        found: _Found = [(int(socket.AF_UNIX), int(socket.SOCK_STREAM), 0, path)]
    else:
        found = _known_by_number(*route.address)
        if not found:
            looking = look_up(*route.address)
            yield Hear(looking, until)
            if looking.outcome is None:
                raise TimeoutError
            if isinstance(looking.outcome, Exception):
                raise looking.outcome
            found = _usable(looking.outcome)
            # It may take seconds to see that another one is dead: not with each connection.
            found.sort(key=lambda each: each[3] != answered.get(route.address))
    error: OSError | None = None
    for number, (family, kind, protocol, where) in enumerate(found):
        now = clock.now()
        share = max(SHORTEST_CONNECT, (until - now) / (len(found) - number))
        link = None
        try:
            link = Connection(route, family, kind, protocol)
            if made is not None:
                made(link)
            yield from link.reach(where, now + share)
            if len(found) > 1:
                answered[route.address] = where
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


_alert = re.compile(r"[A-Z0-9]+_ALERT_(\w+)").fullmatch


def reason(exc: BaseException) -> str:
    """Say in a few words what an operating system error means."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, ssl.SSLError) and exc.reason and (said := _alert(exc.reason)):
        return f"the server ended TLS and says: {said[1].replace('_', ' ').lower()}"
    if isinstance(exc, OSError) and exc.errno == errno.ENOTCONN:  # before TLS began
        return "the server closed the connection"
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__


# Forks.


def wait_before_fork() -> None:
    """Wait until no other thread is making a socket: that takes no longer than a system call."""
    until = clock.now() + FORK_PATIENCE
    me = threading.get_ident()
    while any(each != me for each in _making) and clock.now() < until:
        time.sleep(0)


def forget_connections_after_fork() -> None:
    """Close the child's copies of all connections.

    While a copy is open the server cannot see the parent's end, and its locks would outlive it.
    """
    for connection in list(CONNECTIONS):
        connection.forget_after_fork()
    CONNECTIONS.clear()
    published.clear()
    under_way.clear()
    _making.clear()
