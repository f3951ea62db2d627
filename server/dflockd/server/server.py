"""The server: listeners, sessions, one timer, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Protocol

from dflockd.server.admission import Admission, Guest
from dflockd.server.listener import Listener, listen
from dflockd.server.log import SparingLog
from dflockd.server.session import TURN, Session
from dflockd.server.stalls import BEAT, LATE
from dflockd.server.unix import UnixSocket
from dflockd.table import Effect, Hold, LockTable, Peer
from dflockd.wire import Evict, Reply, Request, Space, Status, encode_reply

LAST_WORD = 1.0
"""Seconds that the log has for the last line of a server that cannot go on."""

SLICE = 200
"""Replies that one step may send in one turn of the event loop, and connections it may end."""

ENDS = 16
"""Connections whose end is dealt with in one turn: all of a host's can end at one moment."""

_OK = encode_reply(Status.OK)

IDLE_LOOK = 0.02
"""Seconds between two looks at all sessions, while draining."""

# Not `loop.time()`: uvloop's stands still during a turn of the loop. A lease counted from the start
# of a long turn would end before the client, who counts from when it asked, takes it to be over.
_now = time.monotonic

logger = logging.getLogger("dflockd.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server meets the network; times in seconds."""

    host: str = "0.0.0.0"
    port: int = 6388
    """0 lets the system choose."""
    unix_socket: str | None = None
    """Path of a socket to listen on as well."""
    unix_socket_mode: int | None = None
    """Its permissions; without it, what the umask leaves."""
    read_timeout: int = 23
    """For the rest of a request, once its first byte is there."""
    write_timeout: int = 5
    """For a peer that does not read its replies; 0 waits for ever."""
    shutdown_timeout: int = 8
    """For holders to release while draining; 0 waits for ever."""
    sweep_interval: int = 1
    """The expiry timer sleeps no longer than this."""
    max_connections: int = 0
    """Connections that are in; 0 is no limit."""
    max_pending: int = 1024
    """Room beside those for connections that have not got through TLS, or not shown the secret."""
    auth_timeout: int = 10
    """For a peer to get through TLS and to show the secret."""
    auth_secret: bytes | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None


class HoldJournal(Protocol):
    """What keeps the holds of a table beyond the end of this process."""

    def record(self, changes: Iterable[Hold], fence: int) -> None:
        """Write down what has changed; `OSError` if that fails."""


class Server:
    """A lock server. Its state is its own: several can live in one process."""

    def __init__(
        self, table: LockTable, options: ServerOptions, journal: HoldJournal | None = None
    ) -> None:
        self.table = table
        self.options = options
        self.journal = journal
        self.sessions: dict[int, Session] = {}
        self.draining = False
        self.unauthorized = 0
        """Connections that had not got the shared secret."""
        self._listeners: list[Listener] = []
        self._timer: asyncio.TimerHandle | None = None
        self._wakes = math.inf
        self._unix_socket: UnixSocket | None = None
        self._looks = False
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
        """Drain and end: waiters are sent away, holders may still renew and release for a while.

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
                logger.warning("draining: %d connections still open, closed", len(self.sessions))
            for session in list(self.sessions.values()):
                session.abort()
            await self._all_gone()
        if self._timer is not None:
            self._timer.cancel()
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
            # Only then: what nobody holds may be anything, a secret in the wrong place too.
            logger.warning("%s evicts the holder of %r with fence %d", who, key, fence)
        return reply

    @property
    def turned_away(self) -> int:
        """Connections that were refused or dropped: too many, or they did not get in in time."""
        return self.admission.refused + self.admission.dropped

    # What sessions call.

    def handle(self, peer: Peer, request: Request) -> bytes:
        """Let the table handle one request; return the reply to its sender, and send all others."""
        number = peer.id
        try:
            effects = self.table.handle(peer, request, _now())
        except Exception:
            # One request may fail; the locks of everybody else may not go down with it.
            logger.exception("connection %d: request failed: %s", number, type(request).__name__)
            return encode_reply(Status.ERROR)
        finally:
            if self.table.changes:
                self._record()
        out, others = b"", []
        for effect in effects:
            if effect[0] == number:
                out += encode_reply(effect[1])
            else:
                others.append(effect)
        if type(request) is Evict and out == _OK:
            logger.warning("connection %d evicts the holder of %r", number, request.key)
        if others:
            self._dispatch(others)
        elif self.table.quiet_until < self._wakes:
            self._arm()
        return out

    def end_idle_soon(self) -> None:
        """While draining: end the sessions that somebody else's request has left without a hold."""
        if not self._looks:
            self._looks = True
            # All of them are looked at: once for the requests of some turns, not for each.
            self.loop.call_later(IDLE_LOOK, self._end_idle)

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

    def _dispatch(self, effects: list[Effect]) -> None:
        """Send what a step of the table has brought."""
        self._record()
        self._arm()
        for peer, _ in effects[SLICE:]:
            self.sessions[peer].owed = True
        self._send(effects)

    def _record(self) -> None:
        changes = self.table.changes
        if not changes:
            return
        assert self.journal is not None
        try:
            self.journal.record(changes, self.table.fence)
        except OSError as exc:
            self.cannot_write(exc)
        changes.clear()

    def cannot_write(self, exc: Exception) -> NoReturn:
        """End the process, for its journal cannot be written. May be called in any thread.

        Whoever was told of a grant now would believe in a lock that the next process knows not of.
        """
        # The log may be a pipe that nobody reads any more.
        end = threading.Timer(LAST_WORD, os._exit, (1,))
        end.daemon = True
        end.start()
        logger.critical("ending: cannot write to the state directory: %s", str(exc) or repr(exc))
        logging.shutdown()
        os._exit(1)

    def _send(self, effects: list[Effect], start: int = 0) -> None:
        # Thousands may be due at once, and each costs a system call: others get a turn in between.
        end = start + SLICE
        for peer, reply in effects[start:end]:
            session = self.sessions.get(peer)
            if session is not None:
                session.deliver(reply)
        if end < len(effects):
            self.loop.call_soon(self._send, effects, end)

    def _arm(self) -> None:
        """Have the timer go off no later than the next deadline.

        It is left alone when the next deadline moves away: it finds nothing due and is set anew.
        """
        deadline = self.table.next_deadline()
        if deadline is None:
            if not self.draining:
                return
            deadline = math.inf
        if self._timer is None or self._wakes > deadline:
            if self._timer is not None:
                self._timer.cancel()
            now = _now()
            self._wakes = min(deadline, now + self.options.sweep_interval)
            self._timer = self.loop.call_later(self._wakes - now, self._due)

    def _beat(self) -> None:
        now = _now()
        stood_still = now > self._beat_due + LATE
        self._beat_due = now + BEAT
        # Then for one more beat: connections from meanwhile are only accepted now.
        self.late_at = now if stood_still else self._beat_due + LATE
        self._beats = self.loop.call_later(BEAT, self._beat)

    def _due(self) -> None:
        self._timer = None
        self._wakes = math.inf
        self._dispatch(self.table.advance(_now()))
        if self.draining:
            # What a session held may have ended without a request of its own.
            self._end_idle()

    def _end_idle(self) -> None:
        self._looks = False
        self._drain(list(self.sessions.values()))

    def _drain(self, sessions: list[Session], start: int = 0) -> None:
        end = start + SLICE
        for session in sessions[start:end]:
            session.drain()
        if end < len(sessions):
            self.loop.call_soon(self._drain, sessions, end)

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
