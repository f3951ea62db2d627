"""Accepting connections: each is counted before anything is spent on it, TLS included."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial

from dflockd.server.admission import Admission, Guest
from dflockd.server.log import SparingLog
from dflockd.server.tls import TlsContext, peer

BACKLOG = 1024

ACCEPTS = 64
"""Connections that are accepted in one turn of the event loop."""

HANDSHAKES = 16
"""TLS handshakes that are begun in one turn: each takes a third of a millisecond and more."""

CROWDED = 0.05
"""Seconds until a handshake is begun that there was no room for."""

RETRY = 0.1
"""Seconds until connections are accepted again after the system had no room for one."""

FAREWELL = 1.0
"""Seconds that the end of a TLS connection waits for the farewell of the peer."""

# Nobody waits for the handshake but the admission, which has its own idea of how long.
_NO_TIMEOUT = 86_400.0

# What OpenSSL calls it when a peer does not speak TLS at all: health checks do not.
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

logger = logging.getLogger("dflockd.server")


class Listener:
    """Accepts the connections of some sockets, and gives each a protocol once it is ready.

    `asyncio`'s own servers accept as much as they can and make the TLS handshake out of sight. Here
    a connection passes `admission` when it is accepted, so that descriptors never run out.

    Args:
        loop: where it runs.
        sockets: what to accept from; they listen already and become the listener's.
        admission: decides which connections are accepted.
        factory: makes the protocol of a connection. It calls `Guest.admit`, for a port that is open
            to everybody too.
        tls: what to speak TLS with.
        is_open: the port wants no secret, so that an accepted connection is signed in.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: list[socket.socket],
        admission: Admission,
        factory: Callable[[Guest], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None = None,
        is_open: bool = False,
    ) -> None:
        self._loop = loop
        self._sockets = sockets
        self._admission = admission
        self._factory = factory
        self._tls = tls
        self._is_open = is_open
        self._welcomes: set[asyncio.Task[None]] = set()
        self._speaking: deque[tuple[Guest, asyncio.Future[None]]] = deque()
        """Those whose handshake can be begun."""
        self._log = SparingLog(loop, logger)
        for sock in sockets:
            sock.setblocking(False)
            loop.add_reader(sock, self._accept, sock)

    @property
    def sockets(self) -> list[socket.socket]:
        """What it accepts from; empty once it is closed."""
        return self._sockets

    def close(self) -> None:
        """Accept no more. Connections stay, handshakes that are not done do not."""
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets = []
        if self._tls is None:
            # They are done in a moment. uvloop would close one that is cancelled then, and not tell
            # its protocol: a session that nobody ends.
            return
        for task in self._welcomes:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS):
            if not self._admission.is_ready():
                return
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._log.error("cannot accept connections: %s", exc.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY, self._resume, listening)
                return
            sock = _GuestSocket.of(accepted)
            guest = self._admission.arrive(sock)
            if guest is None:
                sock.close()
                continue
            sock.guest = guest
            if self._is_open and not guest.admit():
                sock.close()
                continue
            with contextlib.suppress(OSError):
                # It may be gone already.
                _keep_alive(sock)
            task = self._loop.create_task(self._welcome(sock, guest))
            self._welcomes.add(task)
            task.add_done_callback(partial(self._welcomed, sock))

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _welcomed(self, sock: _GuestSocket, task: asyncio.Task[None]) -> None:
        self._welcomes.discard(task)
        if not sock.is_taken:
            sock.close()

    async def _welcome(self, sock: _GuestSocket, guest: Guest) -> None:
        """Give a connection its protocol, after the handshake if there is one."""
        tls = self._tls
        try:
            if tls is not None:
                peer.set(sock)
                await self._turn(sock, guest)
            if guest.ended:
                return
            sock.is_taken = True
            if isinstance(tls, TlsContext):
                tls = tls.current
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: self._factory(guest),
                sock,
                ssl=tls,
                ssl_handshake_timeout=_NO_TIMEOUT if tls is not None else None,
                ssl_shutdown_timeout=FAREWELL if tls is not None else None,
            )
        except OSError as exc:
            # The event loop closes its descriptor. To close it here too could hit another
            # connection that has got the same number meanwhile.
            guest.end()
            reason = getattr(exc, "reason", None)
            if reason is not None and reason not in _NO_TLS:
                self._log.warning("connection closed: the TLS handshake failed: %s", reason)
            return
        except BaseException:
            guest.end()
            raise
        guest.transport = transport
        if guest.ended:
            transport.abort()

    async def _turn(self, sock: socket.socket, guest: Guest) -> None:
        """Wait until a handshake may be begun: the peer has spoken, and so have few before it.

        Until then the connection costs next to nothing, and others get their turns in between.
        """
        future = self._loop.create_future()
        self._loop.add_reader(sock, self._spoken, sock, guest, future)
        try:
            await future
        except asyncio.CancelledError:
            self._loop.remove_reader(sock)
            raise

    def _spoken(self, sock: socket.socket, guest: Guest, future: asyncio.Future[None]) -> None:
        self._loop.remove_reader(sock)
        if not future.done():
            self._speaking.append((guest, future))
            if len(self._speaking) == 1:
                self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        for _ in range(min(HANDSHAKES, len(self._speaking))):
            guest, future = self._speaking[0]
            if not (future.done() or guest.ended or self._admission.begin_tls(guest)):
                self._loop.call_later(CROWDED, self._begin)
                return
            self._speaking.popleft()
            if not future.done():
                future.set_result(None)
        if self._speaking:
            self._loop.call_soon(self._begin)


class _GuestSocket(socket.socket):
    """A socket that says when its descriptor is gone, whichever event loop has it."""

    __slots__ = ("guest", "is_taken")

    guest: Guest | None
    is_taken: bool
    """Whether the event loop has it, and closes it."""

    @classmethod
    def of(cls, sock: socket.socket) -> _GuestSocket:
        """Return `sock` as one of these; what was passed is empty then."""
        new = cls(sock.family, sock.type, sock.proto, fileno=sock.detach())
        new.guest = None
        new.is_taken = False
        return new

    def close(self) -> None:
        super().close()
        if self.fileno() < 0:
            self._leave()

    def detach(self) -> int:
        fd = super().detach()
        self._leave()
        return fd

    def _leave(self) -> None:
        guest, self.guest = self.guest, None
        if guest is not None:
            guest.leave()


async def listen(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address that `host` has.

    Raises:
        OSError: one of them cannot be bound; nothing is listening then.
        UnicodeError: `host` cannot be a host name.
    """
    found = await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
    )
    # ``::`` is every address, those of IPv4 too.
    both = [where[0] for *_, where in found] == ["::"] and socket.has_dualstack_ipv6()
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            sockets.append(
                socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
            )
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _keep_alive(sock: socket.socket) -> None:
    """Let the kernel find out about peers that vanished: there is no idle timeout to do it."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
