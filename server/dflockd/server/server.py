"""The server: listeners, sessions, one timer, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl

from dflockd import __version__, clock
from dflockd.address import Address
from dflockd.server.admission import Admission, Guest
from dflockd.server.handling import Handling, HoldJournal, tell_pause
from dflockd.server.listener import Listener, listen
from dflockd.server.log import SparingLog
from dflockd.server.options import ServerOptions
from dflockd.server.session import Session
from dflockd.server.stalls import BEAT, LATE
from dflockd.server.unix import UnixSocket
from dflockd.table import Effect, LockTable
from dflockd.wire import Evict, Pause, Reply, Request, Resume, Space, Status

logger = logging.getLogger("dflockd.server")


class Server(Handling):
    """A lock server. Its state is its own: several can live in one process."""

    def __init__(
        self, table: LockTable, options: ServerOptions, journal: HoldJournal | None = None
    ) -> None:
        super().__init__(table, options, journal)
        mode = "memory" if journal is None else "state directory"
        table.about = {"version": __version__, "mode": mode, **table.about}
        self._listeners: list[Listener] = []
        self._unix_socket: UnixSocket | None = None
        self._beat_due = math.inf

    async def start(self) -> None:
        """Listen.

        Raises:
            SocketPathError: the path of the unix socket cannot be listened on.
            OSError: the address cannot be bound; nothing is listening in either case.
        """
        self.loop = loop = asyncio.get_running_loop()
        self.log = SparingLog(loop, logger)
        self._beat()
        options = self.options
        self.admission = Admission(
            loop,
            "connection",
            limit=options.max_connections,
            pending=options.max_pending,
            timeout=options.auth_timeout,
        )
        try:
            self._listen(await listen(loop, options.host, options.port), options.tls)
            if options.unix_socket is not None:
                self._unix_socket = await UnixSocket.bind(
                    options.unix_socket, options.unix_socket_mode
                )
                self._listen([self._unix_socket.sock], None)
        except OSError:
            self._close_listeners()
            raise

    def _listen(self, sockets: list[socket.socket], tls: ssl.SSLContext | None) -> None:
        is_open = tls is None and self.options.auth_secret is None
        listener = Listener(
            self.loop, sockets, self.admission, self._session, tls=tls, is_open=is_open
        )
        self._listeners.append(listener)

    def _session(self, guest: Guest) -> Session:
        return Session(self, guest)

    @property
    def addresses(self) -> list[str]:
        """What the server listens on, as ``host:port`` or ``unix:path``."""
        return [
            _address(sock.getsockname())
            for listener in self._listeners
            for sock in listener.sockets
        ]

    def carry_out(self, effects: list[Effect], idle: set[int]) -> None:
        """Send what the cluster has brought, and close connections that have nothing here any more.

        Their locks are with another server: so their holders look for it at once.
        """
        self._dispatch(effects)
        for number in idle:
            session = self.sessions.get(number)
            if session is not None:
                session.drain()

    async def stop(self, timeout: float | None = None) -> None:
        """Drain and end: waiters are refused, holders may still renew and release for a while.

        Returns once every connection is closed, at the latest after `timeout` seconds, without one
        after `shutdown_timeout`. With a journal nobody is waited for: what is held is kept.
        """
        self.draining = True
        self._close_listeners()
        self._dispatch(self.table.drain(clock.now(), keep=self.journal is not None))
        self._end_idle()
        holders = sum(1 for session in self.sessions.values() if session.peer.holds)
        if holders:
            logger.info("draining: waiting for %d connections that hold locks", holders)
        try:
            async with asyncio.timeout(
                self.options.shutdown_timeout or None if timeout is None else timeout
            ):
                await self._all_gone()
        except TimeoutError:
            if self.sessions:
                logger.warning(
                    "draining: closed the connections that are left: %d", len(self.sessions)
                )
            for session in list(self.sessions.values()):
                session.abort()
            await self._all_gone()
        if self._timer is not None:
            self._timer.cancel()
        self.slices.stop()
        self._beats.cancel()

    def evict(self, space: Space, key: bytes, fence: int, who: str) -> Reply:
        """End a hold on the word of an operator, and return what its table says to that."""
        reply = self._operate(Evict(space, key, fence))
        if reply is Status.OK:
            # Only then: a key that nobody holds could be anything, even a secret. Each has a line of
            # its own, for an operator has shown the token.
            logger.warning("%s evicts the holder of %r with fence %d", who, key.decode(), fence)
        return reply

    def pause(self, request: Pause, who: str) -> Reply:
        """Pause a key on the word of an operator, and return what the table says to that."""
        reply = self._operate(request)
        if reply is Status.OK:
            tell_pause(logger.warning, who, request)
        return reply

    def resume(self, key: bytes, who: str) -> Reply:
        """End the pause of a key on the word of an operator, and return what the table says to that."""
        reply = self._operate(Resume(key))
        if reply is Status.OK:
            logger.warning("%s resumes %r", who, key.decode())
        return reply

    def _operate(self, request: Request) -> Reply:
        """Have the table handle what somebody asks who is no client."""
        operator = self.table.connect()
        effects = self.table.handle(operator, request, clock.now())
        effects += self.table.disconnect(operator, clock.now(), clean=True)
        self._dispatch([effect for effect in effects if effect[0] != operator.id])
        if self.draining:
            self.end_idle_soon()
        return next(reply for number, reply in effects if number == operator.id)

    @property
    def turned_away(self) -> int:
        """Connections that were refused or dropped: too many, or they did not get in in time."""
        return self.admission.refused + self.admission.dropped

    # Time and end.

    def _beat(self) -> None:
        now = clock.now()
        stood_still = now > self._beat_due + LATE
        self._beat_due = now + BEAT
        # Then for one more beat: connections from meanwhile are only accepted now.
        self.late_at = now if stood_still else self._beat_due + LATE
        self._beats = self.loop.call_later(BEAT, self._beat)
        if self.deadlocks.is_due(now):
            self.slices.look(self.deadlocks.look(self.log))

    def _close_listeners(self) -> None:
        if self._unix_socket is not None:
            self._unix_socket.remove()
            self._unix_socket = None
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _all_gone(self) -> None:
        self._emptied.clear()
        if self.sessions:
            await self._emptied.wait()


def _address(name: object) -> str:
    if isinstance(name, tuple):
        return str(Address(*name[:2]))
    return f"unix:{name!s}"
