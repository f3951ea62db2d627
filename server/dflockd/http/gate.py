"""Connections of the HTTP port: how many there are, how long they last, and what they let in.

A `Gate` lets in whole, well-formed requests, one at a time, and ends what is slow, idle or too much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from dflockd import clock
from dflockd.http.answers import Response, encoded, text
from dflockd.http.head import HeadReader, HttpRequest, RefusedHeadError
from dflockd.server import Admission, Guest, SparingLog

HEAD_TIMEOUT = 10.0
"""Seconds for a whole head: from the connection, or from the first byte of a further request."""

IDLE_TIMEOUT = 75.0
"""Seconds from an answer to the next request."""

REQUEST_TIMEOUT = 60.0
"""Seconds for what is done about a request. No request needs nearly as much."""

WRITE_TIMEOUT = 20.0
"""Seconds for a peer to read an answer."""

LINGER = 1.0
"""Seconds for which a connection stays open behind a refusal, so that the peer can read it."""


STOP_TIMEOUT = 1.0
"""Seconds for requests that are worked on when the server ends."""


class GateHouse:
    """All connections of the HTTP port. Without a request a connection is pending, then it is in.

    Args:
        log: where it reports those that are refused. No line has any part of a request.
        serve: answers a request that has come through a gate.
        most: how many connections there may be.
        secret: the length of the secret that a request can show.
    """

    def __init__(
        self,
        log: SparingLog,
        serve: Callable[[HttpRequest, Gate], Awaitable[Response]],
        *,
        most: int,
        secret: int = 0,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.log = log
        self.serve = serve
        self.secret = secret
        self._limit = limit = max(most * 3 // 4, 1)
        self.admission = Admission(
            self.loop,
            "HTTP connection",
            limit=limit,
            pending=max(most - limit, 1),
            # The gate ends it a little earlier, with an answer; but for TLS that is not done.
            timeout=HEAD_TIMEOUT + LINGER,
        )
        self._gates: dict[Gate, None] = {}
        self._inside: dict[Gate, None] = {}
        self._awaits_room = False
        """Whether one was told to leave: its descriptor is free a turn or two later."""
        self._arrived: deque[tuple[Gate, HttpRequest]] = deque()

    def gate(self, guest: Guest) -> Gate:
        """Return the protocol for a connection that was accepted."""
        return Gate(self, guest)

    def remember(self, gate: Gate) -> None:
        """Take in a connection that is made; over TLS, once the handshake is done."""
        self._gates[gate] = None

    def forget(self, gate: Gate) -> None:
        """Take out a connection that has ended."""
        self._inside.pop(gate, None)
        self._gates.pop(gate, None)

    async def stop(self) -> None:
        """End all connections, after what is worked on has been answered, but soon."""
        works = [gate.work for gate in self._gates if gate.work is not None]
        if works:
            await asyncio.wait(works, timeout=STOP_TIMEOUT)
        for gate in list(self._gates):
            gate.abort()

    def let_in(self, gate: Gate, request: HttpRequest) -> None:
        """Have a request served: one in each turn of the event loop, so that the locks have theirs."""
        self._arrived.append((gate, request))
        if len(self._arrived) == 1:
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        gate, request = self._arrived[0]
        if gate in self._inside or self._has_room():
            self._awaits_room = False
            self._arrived.popleft()
            if gate.admit():
                self._inside[gate] = None
                gate.pass_on(request)
        elif not self._awaits_room and not self._make_room():
            self._arrived.popleft()
            gate.refuse(503, "too many connections")
        # else it is its turn as soon as somebody has left
        if self._arrived:
            self.loop.call_soon(self._turn)

    def _has_room(self) -> bool:
        return self.admission.inside < self._limit

    def _make_room(self) -> bool:
        """End a connection for which nothing is being done; return whether there was one.

        Those that have not shown the secret leave before others, and of these the longest idle. So
        connections alone shut nobody out.
        """
        idle = [gate for gate in self._inside if gate.is_idle]
        if not idle:
            return False
        longest = min(idle, key=lambda gate: (gate.trusted, gate.since))
        self.log.warning("connection closed, the longest idle: others need the room")
        self._awaits_room = True
        longest.abort()
        return True


class Gate(asyncio.Protocol):
    """One connection."""

    def __init__(self, house: GateHouse, guest: Guest) -> None:
        self._house = house
        self._guest = guest
        self._loop = house.loop
        self._reader = HeadReader(house.secret)
        self.work: asyncio.Task[None] | None = None
        """What is done about a request, while something is."""
        self._can_write: asyncio.Future[None] | None = None
        """Set once the peer has read enough; absent while it does."""
        self.trusted = False
        """Whether it has shown the secret, where there is one."""
        self.is_idle = False
        """Whether it can go for want of room: it is in, and no request is being worked on."""
        self.since = 0.0
        """Since when it is idle, if it is."""
        self._busy = False
        self._over = False
        self._awaits_first_byte = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request."""
        self._transport = cast(asyncio.Transport, transport)
        # Not before: of a handshake that comes to nothing no protocol learns the end.
        self._house.remember(self)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else "somebody"
        self._allow(HEAD_TIMEOUT, self._head_timed_out)

    def data_received(self, data: bytes) -> None:
        """Let a request in once its head is whole and none is before it."""
        if self._over:
            return
        self._reader.receive(data)
        if not self._busy:
            self._look()
        if self._busy and self._reader.is_full:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Close: nobody is left to answer."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End what is done for it."""
        self._stop()
        self._house.forget(self)
        if self._write_timer is not None:
            self._write_timer.cancel()
        if self.work is not None:
            self.work.cancel()  # a peer that has gone away wants no answer

    def pause_writing(self) -> None:
        """Give the peer some time to read what is sent."""
        if self._can_write is None:
            self._can_write = self._loop.create_future()
        if self._write_timer is None:
            self._write_timer = self._loop.call_later(WRITE_TIMEOUT, self._write_timed_out)

    def resume_writing(self) -> None:
        """Go on: it has read."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._can_write is not None:
            if not self._can_write.done():  # by the end of what waits for it
                self._can_write.set_result(None)
            self._can_write = None

    # What is done about a request.

    def _look(self) -> None:
        if self._over or self._busy:
            return
        try:
            request = self._reader.next_request()
        except RefusedHeadError as exc:
            self.refuse(exc.status, exc.reason)
            return
        if request is not None:
            self._busy, self.is_idle = True, False
            self._allow(REQUEST_TIMEOUT, self._request_timed_out)
            self._house.let_in(self, request)
        elif self._reader.pending and self._awaits_first_byte:
            self._allow(HEAD_TIMEOUT, self._head_timed_out)

    def admit(self) -> bool:
        """Take the place of one with a request; return whether it is still there for that."""
        return not self._over and self._guest.admit()

    def pass_on(self, request: HttpRequest) -> None:
        """Have a request answered."""
        if not self._transport.is_closing():
            self.work = self._loop.create_task(self._serve(request))

    async def _serve(self, request: HttpRequest) -> None:
        try:
            answer = await self._house.serve(request, self)
            if self._transport.is_closing():
                return
            data, is_last = encoded(answer, request)
            self.relent()
            self._transport.write(data)
            if self._can_write is not None:
                await self._can_write
        finally:
            self.work = None
        self._answered(is_last=is_last)

    def relent(self) -> None:
        """Count as idle from now on: what there was to do is done, but for the answer."""
        self.is_idle = True
        self.since = clock.now()

    def _answered(self, *, is_last: bool) -> None:
        """Be ready for the next request, unless this was the last."""
        if self._over:
            return
        self.relent()
        self._busy = False
        self._allow(IDLE_TIMEOUT, self.abort)
        self._awaits_first_byte = True
        if is_last:
            self._over = True
            self._transport.close()
            return
        if not self._reader.is_full:
            # Else each answer would let in more than the one request that it takes away.
            self._transport.resume_reading()
        if self._reader.pending:
            self._loop.call_soon(self._look)

    # The ends of a connection.

    def abort(self) -> None:
        """End it now."""
        self._stop()
        self._transport.abort()

    def refuse(self, status: int, reason: str) -> None:
        """Answer a request that is not looked at, and end the connection."""
        if self._over:
            return
        self._house.log.warning(f"%s: {reason} ({status})", self.peer)
        self._transport.write(encoded(text(status, reason))[0])
        self._stop()
        # What the peer still sends is read and dropped: a reset would take the answer from it. That
        # is nothing to do for it: else those that are refused would shut everybody out.
        self.relent()
        self._timer = self._loop.call_later(LINGER, self._transport.abort)

    def _stop(self) -> None:
        self._over = True
        self.is_idle = False
        if self._timer is not None:
            self._timer.cancel()

    def _allow(self, seconds: float, then: Callable[[], None]) -> None:
        """Have it end in some way if nothing happens until then."""
        self._awaits_first_byte = False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, then)

    def _head_timed_out(self) -> None:
        if self._reader.pending:
            self.refuse(408, "request did not arrive in time")
        else:
            self.abort()  # it has sent nothing, so there is nobody to answer

    def _request_timed_out(self) -> None:
        self._house.log.warning("%s: request took too long", self.peer)
        self.abort()

    def _write_timed_out(self) -> None:
        self._house.log.warning("%s: answer was not read in time", self.peer)
        self.abort()
