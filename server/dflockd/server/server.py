"""The server: listeners, sessions, one timer, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from dflockd import __version__
from dflockd.server.admission import Admission, Guest
from dflockd.server.handling import Handling, HoldJournal
from dflockd.server.listener import Listener, listen
from dflockd.server.log import SparingLog
from dflockd.server.options import ServerOptions
from dflockd.server.session import TURN, Session
from dflockd.server.stalls import BEAT, LATE
from dflockd.server.unix import UnixSocket
from dflockd.table import Effect, LockTable
from dflockd.wire import Evict, Reply, Space, Status

ENDS = 16
"""Connections whose end is dealt with in one turn: all of a host's can end at one moment."""

_now = time.monotonic

logger = logging.getLogger("dflockd.server")


class Server(Handling):
    """A lock server. Its state is its own: several can live in one process."""

    def __init__(
        self, table: LockTable, options: ServerOptions, journal: HoldJournal | None = None
    ) -> None:
        super().__init__(table, options, journal)
        mode = "memory" if journal is None else "state directory"
        table.about = {"version": __version__, "mode": mode, **table.about}
        self.unauthorized = 0
        """Connections that had not got the shared secret."""
        self._listeners: list[Listener] = []
        self._unix_socket: UnixSocket | None = None
        self._ends: deque[Callable[[], None]] = deque()
        """Steps of ends that others go before."""
        self._ending = 0
        """Those of this turn."""
        self._resting: deque[Session] = deque()
        self._turns = False
        self._had_long = False
        self.crowded = False
        """Whether a long reply was made in this turn of the loop, or sessions rest."""
        self._emptied = asyncio.Event()
        self.late_at = math.inf
        """From when on what comes in may have come long before: this process has stood still."""
        self._beat_due = math.inf

    async def start(self) -> None:
        """Listen.

        Raises:
            SocketPathError: the path of the unix socket cannot be listened on.
            OSError: the address cannot be bound; nothing is listening in either case.
        """
        self.loop = loop = asyncio.get_running_loop()
        self._beat()
        self.log = SparingLog(loop, logger)
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
        self.blocking.start()

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
        self._dispatch(self.table.drain(_now(), keep=self.journal is not None))
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
        self.searches.stop()
        self.blocking.stop()
        self._beats.cancel()

    def evict(self, space: Space, key: bytes, fence: int, who: str) -> Reply:
        """End a hold on the word of an operator, and return what its table says to that."""
        operator = self.table.connect()
        effects = self.table.handle(operator, Evict(space, key, fence), _now())
        effects += self.table.disconnect(operator, _now(), clean=True)
        self._dispatch([effect for effect in effects if effect[0] != operator.id])
        if self.draining:
            self.end_idle_soon()
        reply = next(reply for number, reply in effects if number == operator.id)
        if reply is Status.OK:
            # Only then: a key that nobody holds could be anything, even a secret.
            logger.warning("%s evicts the holder of %r with fence %d", who, key.decode(), fence)
        return reply

    @property
    def turned_away(self) -> int:
        """Connections that were refused or dropped: too many, or they did not get in in time."""
        return self.admission.refused + self.admission.dropped

    # What sessions call.

    def part(self, session: Session, *, clean: bool, silent: bool) -> None:
        """Free what stands on a session that ends: now or, where many end at once, some turns later."""
        self._in_turn(partial(self._part, session, clean, silent))

    def forget(self, session: Session) -> None:
        """Take out a session whose connection is closed, once what stands on it is freed."""
        self._in_turn(partial(self._forget, session))

    @property
    def is_behind(self) -> bool:
        """Whether sessions that have more to do wait for their turn."""
        return bool(self._resting)

    def rest(self, session: Session) -> None:
        """Have a session go on in a later turn, behind those that rest already."""
        self._resting.append(session)
        self.crowded = True
        if not self._turns:
            self._turns = True
            self.loop.call_soon(self._turn)

    def note_long_reply(self) -> None:
        """Let no other session begin with a long reply in this turn of the loop."""
        if not self._had_long:
            self._had_long = self.crowded = True
            self.loop.call_soon(self._forget_long_reply)

    def _forget_long_reply(self) -> None:
        self._had_long = False
        self.crowded = bool(self._resting)

    def _turn(self) -> None:
        """Let those that rest go on, for no longer in all than one alone may take."""
        until = _now() + TURN
        try:
            for _ in range(len(self._resting)):
                self._resting.popleft().go_on()
                if _now() > until:
                    break
        finally:
            self._turns = bool(self._resting)
            self.crowded = self._turns or self._had_long
            if self._turns:
                self.loop.call_soon(self._turn)

    # Ends.

    def _in_turn(self, step: Callable[[], None]) -> None:
        if self._ending < ENDS:
            if not self._ending:
                self.loop.call_soon(self._end_more)
            self._ending += 1
            step()
        else:
            self._ends.append(step)

    def _end_more(self) -> None:
        number = min(ENDS, len(self._ends))
        if number:
            # First: a step that fails keeps nobody from the next.
            self.loop.call_soon(self._end_more)
        else:
            self._ending = 0
        for _ in range(number):
            self._ends.popleft()()

    def _part(self, session: Session, clean: bool, silent: bool) -> None:
        effects = self.table.disconnect(
            session.peer, _now(), clean=clean, silent=silent, told=not session.owed
        )
        self._dispatch(effects)

    def _forget(self, session: Session) -> None:
        del self.sessions[session.peer.id]
        if not self.sessions:
            self._emptied.set()

    # Time and end.

    def _beat(self) -> None:
        now = _now()
        stood_still = now > self._beat_due + LATE
        self._beat_due = now + BEAT
        # Then for one more beat: connections from meanwhile are only accepted now.
        self.late_at = now if stood_still else self._beat_due + LATE
        self._beats = self.loop.call_later(BEAT, self._beat)

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
        host, port = name[0], name[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"unix:{name!s}"
