"""One connection: bytes to requests, the table's effects to bytes."""

from __future__ import annotations

import asyncio
import errno
import hmac
import re
from typing import cast

from dflockd import __version__, clock
from dflockd.server.admission import Guest
from dflockd.server.handling import Handling
from dflockd.server.stalls import has_left
from dflockd.wire import (
    FEATURES,
    Auth,
    FrameTooLongError,
    Hello,
    Identify,
    Reply,
    Request,
    RequestReader,
    Status,
    Unwelcome,
    Welcome,
    encode_reply,
)
from dflockd.wire.requests import ACQUIRE, ENQUEUE, ENTRY, OTHER

READ_AHEAD = 4096
"""Bytes that a peer may send behind a request that waits. A client has no reason to send any."""

MOST_COLLECTED = 4096
"""Bytes of replies that are collected to be sent at once. A few bytes can ask for a long one."""

MOST_UNKNOWN = 1024
"""Bytes that are kept of a request of somebody who has not shown the secret, unless it is longer."""

MOST_BESIDE = 256
"""Bytes that a request has beside the secret that it shows."""

AUTH_PAUSE = 0.1
"""Seconds between a wrong secret and the end of the connection."""


_is_command = re.compile(rb"[a-z0-9_-]{0,64}\r?").fullmatch

_CLIENT_HELLO = b"\x16\x03"

_NO_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"This is the port for locks. It does not speak HTTP: see --http-port.\n"
)


class Session(asyncio.Protocol):
    """The server's end of one connection.

    It reads whole requests, hands them to the table one at a time, and writes what comes back in
    one piece for each piece that was read. No task, no stream, no future: a blocked request is a
    fact in the table, not a coroutine.
    """

    def __init__(self, server: Handling, guest: Guest) -> None:
        self._server = server
        self._slices = server.slices
        self._guest = guest
        self._loop = server.loop
        self._reader = RequestReader()
        self._trusted = server.options.auth_secret is None
        self.owed = False
        """Whether a reply to it is decided and still to be delivered."""
        self._looks_on = False
        """Whether a reply to it is being made."""
        self._ended = False
        self._stalled = False
        self._resting = False
        """Whether it has let others go first; it goes on in a later turn of the loop."""
        self._took_long = False
        """Whether what was handled last took more than a share: then others go first."""
        self._is_paused = False
        """Whether nothing is read until what is here is answered."""
        self._held_up = False
        """Whether nothing may be handled now, whatever its peer waits for."""
        self._is_open = False
        """Whether what comes may be handled as it comes, unless its peer waits."""
        self._begun = False
        """Whether the first line has been seen to its end, and the connection not ended since."""
        self._frame_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the server, or leave at once if it is full."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = self._server.table.connect()
        self._server.sessions[self.peer.id] = self
        if self._server.draining or (self._trusted and not self._guest.admit()):
            self._end()

    def data_received(self, data: bytes) -> None:
        """Handle every request that `data` completes."""
        server, reader, peer, slices = self._server, self._reader, self.peer, self._slices
        kind = OTHER
        now = clock.now()
        if (
            self._is_open
            and peer.waiting is None
            and now < slices.free_until
            and now <= server.late_at
        ):
            kind = reader.receive_one(data)
        elif self._begun or self._begins(data):
            reader.receive(data)
        else:
            return
        if kind == OTHER:
            self._resume()
            return
        # One request alone: there is nothing to collect, and nobody to let go first.
        out = server.answer(peer, reader, kind, now)
        if out:
            self._transport.write(out)
        if server.draining:
            self._served(has_taken=True)

    def eof_received(self) -> None:
        """Treat a half-closed connection as closed: nobody is left to wait for."""
        self._end(clean=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free everything that stood on this connection, if it is not free yet."""
        # Over TLS this is how a peer that was killed leaves: its kernel says no farewell for it.
        self._depart(clean=exc is None, silent=_is_silence(exc))
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._server.forget(self)

    def pause_writing(self) -> None:
        """Stop serving a peer that does not read its replies, and drop it after a while."""
        self._stalled = True
        self._review()
        self._watch_write()
        if not self._ended:
            self._watch_frame(False)
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on where `pause_writing` stopped."""
        self._stalled = False
        self._review()
        if self._ended:
            return
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._transport.resume_reading()
        self._resume()

    # What the server calls.

    def deliver(self, reply: Reply) -> None:
        """Send the reply to the request that this peer was waiting for, and go on with the next."""
        if self._ended:
            # What stands on it is about to be freed, this too.
            if not self._looks_on:
                self.owe()
            return
        # The transport knows that the peer is gone before it says so: then nothing is sent.
        self.owed = self._transport.is_closing() and not self._looks_on
        self._looks_on = False
        self._review()
        self._transport.write(encode_reply(reply))
        if self._server.draining:
            self.drain()
        if self._reader.ready or self._reader.in_frame or self._is_paused:
            # Not at once: the caller is in the middle of handing out the effects of another step.
            self._loop.call_soon(self._resume)

    def owe(self) -> None:
        """Note that a reply to it is decided, which `deliver` brings later."""
        self.owed = True
        self._review()

    def look_on(self) -> None:
        """Note that a reply to it is being made, which `deliver` brings later."""
        self._looks_on = True
        self._review()

    def look_at_clock(self, began: float) -> None:
        """Let others go first from now on, if what was handled since then took long."""
        if clock.now() - began > self._slices.slice:
            self._took_long = True
            self._review()

    def drain(self) -> None:
        """End the connection if nothing stands on it any more, and nothing is left to be answered."""
        if self.owed or self._looks_on or self._resting or self.peer.waiting is not None:
            return
        if not self.peer.holds or self._server.journal is not None:
            self._end()

    def abort(self) -> None:
        """End the connection now, whatever stands on it."""
        self._depart(clean=False)
        self._transport.abort()

    # The way of a request.

    def _begins(self, data: bytes) -> bool:
        """Say whether a connection begins with the lock protocol; if it does not, end it.

        A browser can be made to send any bytes to any port, but not to begin with them: before them
        there are the lines of its own request. They would be errors, and then the rest would be run.
        """
        if self._ended:
            return False
        line, ends, _ = data.partition(b"\n")
        if _is_command(line):
            self._begun = bool(ends)
            self._review()
            return True
        log, number = self._server.log, self.peer.id
        if b" HTTP/" in line:
            log.warning("connection %d: closed: it speaks HTTP", number)
            self._transport.write(_NO_HTTP)
            self._end()
        elif line.startswith(_CLIENT_HELLO):
            log.warning("connection %d: closed: it speaks TLS (--tls-cert is not set)", number)
            self._end()
        else:
            log.warning("connection %d: closed: its first line is not a command", number)
            self._end(Status.ERROR)
        return False

    def _review(self) -> None:
        """Say anew what may be handled: after each change of what that depends on."""
        is_owed = self.owed or self._looks_on
        self._held_up = is_owed or self._stalled or self._ended or self._resting
        is_known = self._begun and self._trusted
        self._is_open = is_known and not (self._held_up or self._took_long)

    def _resume(self) -> None:
        """Handle what has come, if anything may be handled now and there is time."""
        if not self._held_up and self.peer.waiting is None:
            now = clock.now()
            if self._reader.ready and (self._took_long or self._slices.is_over(now)):
                self._resting = True
                self._review()
                wait = self._slices.go_on if self._took_long else self._slices.wait
                wait(self._go_on)
            else:
                self._serve(now, now + self._slices.share())
                if self._resting:
                    self._slices.go_on(self._go_on)
        self._limit_ahead()

    def _go_on(self, until: float) -> bool:
        """Go on where it let others go first; return whether it does so again."""
        self._resting = False
        self._review()
        if not self._held_up and self.peer.waiting is None:
            self._serve(clock.now(), until)
        self._limit_ahead()
        return self._resting

    def _serve(self, now: float, until: float) -> None:
        """Handle what has come, one request at least, and rest once it is too late for more."""
        peer, server, reader = self.peer, self._server, self._reader
        out, began = b"", now
        has_taken = False
        # What it asked for before this process stood still may be for nobody any more.
        is_gone = now > server.late_at and has_left(self._transport)
        leaves = False
        try:
            while reader.ready:
                if has_taken:
                    now = clock.now()
                    if now >= until:
                        self._resting = True
                        self._review()
                        break
                has_taken = True
                kind = reader.next()
                if kind == ENTRY or not self._trusted:
                    reply, leaves = self._hear_stranger(reader.request())
                    out += reply
                    if leaves or self._ended:
                        break
                elif is_gone and kind in (ACQUIRE, ENQUEUE):
                    leaves = True
                    break
                else:
                    out += server.answer(peer, reader, kind, now)
                if len(out) > MOST_COLLECTED:
                    self._transport.write(out)
                    out = b""
                if peer.waiting is not None or self._held_up:
                    break
            else:
                if reader.in_frame:
                    reader.check_unfinished()
        except FrameTooLongError as exc:
            server.log.warning("connection %d: %s", peer.id, exc)
            self._transport.write(out)
            self._end(Status.ERROR)
            return
        if out:
            self._transport.write(out)
        took_long = clock.now() - began > self._slices.slice
        if took_long is not self._took_long:
            self._took_long = took_long
            self._review()
        if leaves:
            self._end(clean=True)
        elif server.draining or self._frame_timer is not None or reader.in_frame:
            self._served(has_taken=has_taken)

    def _hear_stranger(self, request: Request) -> tuple[bytes, bool]:
        """Handle a request of somebody who may be in or not: the secret, or what comes before it.

        Returns:
            The reply, and whether the connection ends with that.
        """
        if type(request) is Hello:
            return self._greet(request), False
        if type(request) is Identify and self._server.table.identity is not None:
            # A server asks it once, and shows its secret to nobody whom it does not know yet.
            return encode_reply(self._server.table.identify(request)), True
        if self._trusted and type(request) is not Auth:
            return encode_reply(Status.ERROR), False  # a malformed one
        status = self._let_in(request.secret if type(request) is Auth else None)
        if status is None:
            self._end()
            return b"", False
        if status is Status.AUTH:
            self._refuse()
        return encode_reply(status), False

    def _greet(self, request: Hello) -> bytes:
        """Answer who knows more than the published protocol, and may show the secret with that."""
        status = Status.OK
        if request.secret is not None or not self._trusted:
            found = self._let_in(request.secret)
            if found is None:
                self._end()
                return b""
            status = found
        if status is Status.OK and not self._server.table.greet(self.peer, request):
            status = Status.ERROR
        if status is Status.AUTH:
            self._refuse()
        if status is not Status.OK:
            return encode_reply(Unwelcome(status))
        return encode_reply(Welcome(__version__.encode(), FEATURES))

    def _served(self, *, has_taken: bool) -> None:
        """Do what must follow what has come, which may be a request, or several."""
        if self._server.draining:
            self.drain()
            self._server.end_idle_soon()
        if has_taken and self._frame_timer is not None:
            # What has begun now is another request, with all the time of its own.
            self._watch_frame(False)
        if self._reader.in_frame:
            if not self._trusted:
                self._limit_unknown()
            self._watch_frame(not (self._held_up or self.peer.waiting is not None))

    def _limit_ahead(self) -> None:
        """See to it that not much piles up behind what is not answered yet.

        A client that lets others go first, or has asked for something long, is not read meanwhile. A
        client has no reason to send much behind a request that waits: that ends the connection.
        """
        reader = self._reader
        if self._ended or self._stalled:
            return
        if self._resting or self._looks_on:
            if reader.ready > 1 or reader.in_frame:
                self._is_paused = True
                self._transport.pause_reading()
            return
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if (self.owed or self.peer.waiting is not None) and reader.pending > READ_AHEAD:
            text = "connection %d: too much sent behind a waiting request"
            self._server.log.warning(text, self.peer.id)
            self._end(Status.ERROR)

    def _let_in(self, shown: bytes | None) -> Status | None:
        """Return what to say to the secret of somebody; ``None`` if there is no room for them."""
        secret = self._server.options.secret()
        if secret is None:
            return Status.ERROR
        if shown is None or not hmac.compare_digest(shown, secret):
            return Status.AUTH
        if not self._guest.admit():
            return None
        self._trusted = True
        self._review()
        return Status.OK

    def _limit_unknown(self) -> None:
        """Refuse a peer without the secret that sends more than the secret takes.

        There can be thousands of them, and each could have so much kept for it as a line may have.
        """
        most = max(MOST_UNKNOWN, self._server.options.secret_size + MOST_BESIDE)
        if not (self._ended or self._stalled) and self._reader.pending > most:
            self._transport.write(encode_reply(Status.AUTH))
            self._refuse()

    def _refuse(self) -> None:
        # The pause slows down guessing; what else the peer has sent is not looked at.
        self._server.unauthorized += 1
        self._server.log.warning("connection %d: wrong or missing auth token", self.peer.id)
        self._depart(clean=False)
        self._transport.pause_reading()
        self._loop.call_later(AUTH_PAUSE, self._close)

    # The ends of a connection.

    def _end(self, reply: Status | None = None, *, clean: bool = False) -> None:
        if self._ended:
            return
        if reply is not None:
            self._transport.write(encode_reply(reply))
        self._depart(clean=clean)
        self._close()

    def _close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()
            if self._transport.get_write_buffer_size():
                # It closes once all is sent: a peer that does not read could put that off forever.
                self._watch_write()

    def _depart(self, *, clean: bool, silent: bool = False) -> None:
        """Free what stands on this connection now: a grant must not go to one that has ended.

        The transport reports its end only later, in another turn of the loop at best.
        """
        if not self._ended:
            self._ended = True
            self._begun = False
            self._review()
            self._watch_frame(False)
            self._server.part(self, clean=clean, silent=silent)

    def _watch_frame(self, begun: bool) -> None:
        """Run the read timeout while a request has begun and not ended, and at no other time."""
        if begun and self._frame_timer is None:
            timeout = self._server.options.read_timeout
            self._frame_timer = self._loop.call_later(timeout, self._frame_timed_out)
        elif not begun and self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    def _watch_write(self) -> None:
        """Run the write timeout until everything is sent."""
        timeout = self._server.options.write_timeout
        if timeout and self._write_timer is None:
            self._write_timer = self._loop.call_later(timeout, self._write_timed_out)

    def _frame_timed_out(self) -> None:
        self._server.log.warning("connection %d: read timeout inside a request", self.peer.id)
        self._end(Status.ERROR)

    def _write_timed_out(self) -> None:
        self._server.log.warning("connection %d: write timeout, it does not read", self.peer.id)
        self.abort()


def _is_silence(exc: Exception | None) -> bool:
    """Whether a connection ended because the other side, or the way to it, did not answer any more."""
    unreachable = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
    return isinstance(exc, OSError) and (isinstance(exc, TimeoutError) or exc.errno in unreachable)
