"""Which connections are in, and which must still show that they may be.

A connection takes a descriptor from the moment it is accepted. So it is counted from there: first as
*pending*, until it has shown what the port asks for (TLS, the secret), then as one that is *in*. Both
have a budget. Peers that never show anything are dropped, the oldest first, before a new connection
is refused. So however many there are, a client that knows the secret gets in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import select
import socket
from collections import OrderedDict

from dflockd.server.log import SparingLog

MOST_PENDING = 32_768
"""Connections that may be pending at once, however many descriptors are free: each costs memory."""

MOST_TLS = 4096
"""Pending connections that TLS was begun with: each costs 50 KiB, without uvloop 300 KiB."""

TLS_GRACE = 1.0
"""Seconds for which those are not dropped for others."""

LOOKS = 16
"""Pending connections that are looked at, at most, to find one that can be dropped."""

logger = logging.getLogger("dflockd.server")


class Guest:
    """One accepted connection, from its first descriptor to its last.

    The server of the port calls `admit` once the peer has shown what the port asks for.
    """

    __slots__ = ("_admission", "_sock", "ended", "inside", "transport")

    def __init__(self, admission: Admission, sock: socket.socket | None) -> None:
        self._admission: Admission | None = admission
        self._sock = sock
        self.transport: asyncio.Transport | None = None
        """Once there is one; over TLS, once the handshake is done."""
        self.inside = False
        """Whether it is in, and counts towards the limit of connections."""
        self.ended = False
        """Whether `end` was called."""

    def admit(self) -> bool:
        """Let it in: it has shown what is asked for. Return whether there is room.

        If there is not, the caller ends the connection. A guest that is in stays in.
        """
        return self.inside or (self._admission is not None and self._admission.admit(self))

    def leave(self) -> None:
        """Forget it: its descriptor is closed."""
        if self._admission is not None:
            self._admission.forget(self)
            # The socket and the transport know their guest: rings are left for no one to collect.
            self._admission = self._sock = self.transport = None

    def end(self) -> None:
        """End the connection now, in the handshake too; `leave` follows when it is closed."""
        self.ended = True
        if self.transport is not None:
            self.transport.abort()
        elif self._sock is not None:
            # The event loop has it, and learns of the end by reading.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def has_unread(self) -> bool:
        """Whether the peer has sent something that nobody has read yet."""
        if self._sock is None or self._sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))


class Admission:
    """The budgets of one port, or of several that share them.

    Args:
        loop: where it runs.
        name: what the log calls the connections.
        limit: how many connections may be in; 0 is no limit.
        pending: descriptors beside those, which only pending connections have. They may also have
            what the others leave free, up to `MOST_PENDING` in all.
        timeout: seconds that a peer has to get in.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        *,
        limit: int,
        pending: int,
        timeout: float,
    ) -> None:
        self._loop = loop
        self._limit = limit or math.inf
        self._room = self._limit + pending
        self._timeout = timeout
        self._pending: OrderedDict[Guest, float] = OrderedDict()
        self._tls: OrderedDict[Guest, float] = OrderedDict()
        self._leaving = 0
        self._timer: asyncio.TimerHandle | None = None
        self.total = 0
        """Descriptors that peers have here."""
        self.inside = 0
        """Connections that are in."""
        self.refused = 0
        """Connections that there was no room for."""
        self.dropped = 0
        """Connections that did not get in, in time or before others needed the room."""
        self._log = SparingLog(loop, logger)
        self._name = name

    @property
    def pending(self) -> int:
        """Connections that are not in yet."""
        return len(self._pending)

    def is_ready(self) -> bool:
        """Say whether to accept one more now. If not, ask again in the next turn of the loop."""
        if self.total < self._room:
            if len(self._pending) >= MOST_PENDING:
                self._drop_oldest()
            return True
        # The descriptor of one that was dropped is free a turn later. With nobody to drop, accept:
        # a peer that is refused at once knows more than one that is left to wait.
        return not (self._leaving or self._drop_oldest())

    def arrive(self, sock: socket.socket | None = None) -> Guest | None:
        """Count a connection that was accepted; ``None`` if there is no room: close it."""
        if self.total >= self._room:
            self._refuse(
                "%d are open, and %d more are not in: that is all", self.inside, self.pending
            )
            return None
        guest = Guest(self, sock)
        self.total += 1
        self._pending[guest] = self._loop.time() + self._timeout
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout, self._expire)
        return guest

    def begin_tls(self, guest: Guest) -> bool:
        """Say whether TLS may be begun with a guest now. If not, ask again after a while."""
        now = self._loop.time()
        for _ in range(LOOKS):
            if len(self._tls) < MOST_TLS:
                self._tls[guest] = now
                # The time before this was the server's.
                self._put_off(guest)
                return True
            oldest, since = next(iter(self._tls.items()))
            if now - since < TLS_GRACE:
                break
            if oldest.has_unread():
                self._tls[oldest] = now
                self._tls.move_to_end(oldest)
            else:
                self._log_crowded(len(self._tls))
                self._drop(oldest)
        return False

    def admit(self, guest: Guest) -> bool:
        """Let a guest in, if there is room and it has not been dropped."""
        if guest not in self._pending:
            return False
        if self.inside >= self._limit:
            self._refuse("%d are open, which is the limit", self.inside)
            return False
        del self._pending[guest]
        self._tls.pop(guest, None)
        guest.inside = True
        self.inside += 1
        return True

    def forget(self, guest: Guest) -> None:
        """Take out a guest whose descriptor is closed."""
        self.total -= 1
        self._tls.pop(guest, None)
        if guest.inside:
            self.inside -= 1
        elif self._pending.pop(guest, None) is None:
            self._leaving -= 1

    def _refuse(self, why: str, *numbers: int) -> None:
        self.refused += 1
        self._log.warning(f"{self._name} refused: {why}", *numbers)

    def _log_crowded(self, number: int) -> None:
        text = f"{self._name} closed, the oldest of %d that are not in: others need the room"
        self._log.warning(text, number)

    def _drop(self, guest: Guest) -> None:
        del self._pending[guest]
        self._tls.pop(guest, None)
        self._leaving += 1
        self.dropped += 1
        guest.end()

    def _drop_oldest(self) -> bool:
        """Drop the oldest connection that has nothing more to say; say whether there was one."""
        for _ in range(min(LOOKS, len(self._pending))):
            guest = next(iter(self._pending))
            if not guest.has_unread():
                text = (
                    f"{self._name} closed, the oldest of %d that are not in: others need the room"
                )
                self._log.warning(text, len(self._pending))
                self._drop(guest)
                return True
            self._put_off(guest)
        return False

    def _put_off(self, guest: Guest) -> None:
        # It has spoken, and the server has not got round to listening: no fault of the peer.
        self._pending[guest] = self._loop.time() + self._timeout
        self._pending.move_to_end(guest)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._pending:
            guest, deadline = next(iter(self._pending.items()))
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._expire)
                return
            if guest.has_unread():
                self._put_off(guest)
            else:
                text = f"{self._name} closed: it did not get in within %g s"
                self._log.warning(text, self._timeout)
                self._drop(guest)
