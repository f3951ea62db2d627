"""What the table makes of requests and of time, carried out: replies sent, changes recorded."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Final, NoReturn, Protocol

from dflockd import clock
from dflockd.server.admission import Admission
from dflockd.server.deadlocks import Deadlocks
from dflockd.server.log import SparingLog
from dflockd.server.options import ServerOptions
from dflockd.server.slices import Slices, in_steps
from dflockd.table import Change, Effect, Hold, LockTable, Peer
from dflockd.table.finding import Search
from dflockd.table.report import Listing
from dflockd.table.requests import Answer
from dflockd.wire import (
    Evict,
    Find,
    FrameTooLongError,
    Inspect,
    Pause,
    Reply,
    Report,
    Request,
    RequestReader,
    Resume,
    Stats,
    Status,
    encode_reply,
)
from dflockd.wire.replies import enqueued_line, granted_line, renewed_line
from dflockd.wire.requests import ACQUIRE, ENQUEUE, RELEASE, RENEW

LAST_WORD = 1.0
"""Seconds that the log has for the last line of a server that cannot go on."""

FEW = 16
"""Replies that are not worth asking whether there is time for them."""

IDLE_LOOK = 0.02
"""Seconds between two looks at all sessions, while draining."""

_OF_OPERATORS: Final = frozenset((Evict, Pause, Resume))
"""What the log tells if it is done."""

_DONE: Final = Status.OK
_OK: Final = encode_reply(_DONE)
_ERROR: Final = encode_reply(Status.ERROR)

logger = logging.getLogger("dflockd.server")


class HoldJournal(Protocol):
    """What keeps the holds of a table beyond the end of this process."""

    def record(self, changes: Sequence[Change], fence: int) -> None:
        """Write down what has changed. Any error ends the server: see `Handling.cannot_write`."""


class Recipient(Protocol):
    """The server's end of a connection, as far as others have something for it."""

    peer: Peer
    owed: bool
    """Whether something is decided for its peer that it has not been sent."""

    def deliver(self, reply: Reply) -> None:
        """Send the reply to the request that waits."""

    def owe(self) -> None:
        """Note that a reply is decided, which `deliver` brings later."""

    def look_on(self) -> None:
        """Note that a reply is being made, which `deliver` brings later."""

    def look_at_clock(self, began: float) -> None:
        """Let others go first from now on, if what was handled since then took long."""

    def drain(self) -> None:
        """End the connection if nothing stands on it any more."""

    def abort(self) -> None:
        """End the connection now."""


class Handling:
    """A table with its sessions, its journal and its timer.

    Attributes:
        sessions: by the numbers of their peers.
        slices: share out the time of the event loop.
        draining: whether nothing is granted any more, and sessions end that hold nothing.
        late_at: from when on what comes in may have come long before, for this process has stood
            still.
        unauthorized: connections that had not got the shared secret.
    """

    def __init__(
        self, table: LockTable, options: ServerOptions, journal: HoldJournal | None
    ) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.log: SparingLog
        self.admission: Admission
        self.table = table
        self.options = options
        self.journal = journal
        self.sessions: dict[int, Recipient] = {}
        self.slices = Slices()
        self.deadlocks = Deadlocks(table)
        self.draining = False
        self.late_at = math.inf
        self.unauthorized = 0
        self._emptied = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes = math.inf
        self._is_behind = False
        """Whether more is due than a step has done."""
        self._looks = False
        self._searches: deque[Generator[None, None, None]] = deque()
        """What connections look for: the first of it is under way."""
        self._others: list[Effect] = []
        """What the request that is handled has brought, for others first of all."""

    def answer(self, peer: Peer, reader: RequestReader, kind: int, now: float) -> bytes:
        """Let the table handle the request that a reader has cut out, and send all others theirs.

        Returns:
            The reply, and what else its sender is told; nothing if the request waits.

        Raises:
            FrameTooLongError: it is none.
        """
        table, others, out = self.table, self._others, b""
        try:
            if kind < RELEASE or now >= table.deadlines.earliest or table.connections.draining:
                self._handle(peer, reader.request(), now)
            elif kind == RELEASE:
                done = table.release(reader.space, reader.key, reader.token, now, others)
                out = _OK if done is _DONE else encode_reply(done)
            elif kind == ACQUIRE:
                answer = table.acquire(peer, reader.space, reader.key, reader.asked, now, others)
                if isinstance(answer, Hold):
                    out = granted_line(answer.token, answer.lease)
                elif answer is not None:
                    out = encode_reply(answer)
            else:
                out = self._answer_others(peer, reader, kind, now)
        except FrameTooLongError:
            raise
        except Exception:
            # One request may fail; the locks of everybody else may not go down with it.
            name = type(reader.request()).__name__
            self.log.exception("connection %d: request failed: %s", peer.id, name)
            out = _ERROR
        if table.changes:
            self._record()
        if others:
            out += self._own(peer.id)
        if self._others:
            others, self._others = self._others, []
            self._dispatch(others)
        elif table.deadlines.earliest < self._wakes or table.backlog:
            self._arm()
        else:
            return out
        # Only what does more than answer its sender can take long: nobody else looks at the clock.
        self.sessions[peer.id].look_at_clock(now)
        return out

    def _own(self, number: int) -> bytes:
        """Take what is for the sender out of what its request has brought: some are answered so."""
        own, others = b"", []
        for effect in self._others:
            if effect[0] == number:
                own += encode_reply(effect[1])
            else:
                others.append(effect)
        self._others = others
        return own

    def _answer_others(self, peer: Peer, reader: RequestReader, kind: int, now: float) -> bytes:
        """Let the table handle what is neither to take a slot nor to free it."""
        table, asked = self.table, reader.asked
        space, key = reader.space, reader.key
        answer: Answer | None
        if kind == RENEW:
            answer = table.renew(peer, space, key, reader.token, reader.lease, now, self._others)
        elif kind == ENQUEUE:
            answer = table.enqueue(peer, space, key, asked, now, self._others)
        else:
            answer = table.wait(peer, space, key, asked, now, self._others)
        if answer is None:
            return b""
        if not isinstance(answer, Hold):
            return encode_reply(answer)
        if kind == RENEW:
            return renewed_line(answer.lease)
        if kind == ENQUEUE:
            return enqueued_line(answer.token, answer.lease)
        return granted_line(answer.token, answer.lease)

    def _handle(self, peer: Peer, request: Request, now: float) -> None:
        """Let the table handle a message; the reply is one of the effects."""
        if isinstance(request, Find | Inspect | Stats) and not self.table.connections.draining:
            if now >= self.table.deadlines.earliest:
                self._others += self.table.advance(now)
            report = self._report(peer.id, request)
            if self.slices.may_look():
                try:
                    next(report)
                except StopIteration as end:
                    self._others.append((peer.id, end.value))
                    return
            self.sessions[peer.id].look_on()
            look = self._look(peer.id, report)
            if type(request) is not Find:
                self.slices.look(look)
                return
            self._searches.append(look)
            if len(self._searches) == 1:
                self.slices.look(self._search())
            return
        effects = self.table.handle(peer, request, now)
        self._others += effects
        if type(request) in _OF_OPERATORS and (peer.id, _DONE) in effects:
            self._tell(peer.id, request)

    def _tell(self, number: int, request: Request) -> None:
        """Tell the log what an operator has done."""
        if isinstance(request, Evict):
            self.log.warning("connection %d evicts the holder of %r", number, request.key.decode())
        elif isinstance(request, Pause):
            tell_pause(self.log.warning, f"connection {number}", request)
        elif isinstance(request, Resume):
            self.log.warning("connection %d resumes %r", number, request.key.decode())

    def _report(self, number: int, request: Find | Inspect | Stats) -> Generator[None, None, Reply]:
        """Return the answer to a connection that wants to look at the table."""
        until = clock.now() + self.slices.at_once
        try:
            steps = self.table.look(request, clock.now())
            if not isinstance(steps, Search | Listing):
                return steps
            while not steps.step(clock.now()):
                if clock.now() >= until:
                    yield
            return Report(steps.text())
        except Exception:
            text = "connection %d: request failed: %s"
            self.log.exception(text, number, type(request).__name__)
            return Status.ERROR

    def _look(
        self, number: int, report: Generator[None, None, Reply]
    ) -> Generator[None, None, None]:
        """Answer a connection what takes long, unless it ends before."""
        while number in self.sessions:
            try:
                next(report)
            except StopIteration as end:
                self._deliver((number, end.value))
                return
            yield

    def _search(self) -> Generator[None, None, None]:
        """Answer those who look for something, one after the other.

        Each has a list of all that it looks through. Python looks through these lists as well, for
        garbage, and that is not done in steps.
        """
        while self._searches:
            yield from self._searches[0]
            self._searches.popleft()

    def _dispatch(self, effects: list[Effect]) -> None:
        """Send what a step of the table has brought."""
        self._record()
        self._arm()
        if len(effects) <= FEW:
            for effect in effects:
                self._deliver(effect)
            return
        # Thousands may be due at once, and each costs a system call.
        for number, _ in effects:
            session = self.sessions.get(number)
            if session is not None:
                session.owe()
        self.slices.do(in_steps(effects, self._deliver))

    def _deliver(self, effect: Effect) -> None:
        number, reply = effect
        session = self.sessions.get(number)
        if session is not None:
            session.deliver(reply)

    def _record(self) -> None:
        changes = self.table.changes
        if not changes:
            return
        assert self.journal is not None
        try:
            self.journal.record(changes, self.table.fence)
        except Exception as exc:
            # Whatever it is: the table has what the journal has not.
            self.cannot_write(exc)
        changes.clear()

    def cannot_write(self, exc: Exception) -> NoReturn:
        """End the process, for its journal cannot be written. May be called in any thread.

        A client that got a grant now would believe in a lock that the next process does not know.
        """
        # The log may be a pipe that nobody reads any more.
        end = threading.Timer(LAST_WORD, os._exit, (1,))
        end.daemon = True
        end.start()
        logger.critical(
            "stopping: cannot write to the state directory: %s",
            str(exc) or repr(exc),
            exc_info=None if isinstance(exc, OSError) else exc,
        )
        logging.shutdown()
        os._exit(1)

    def _arm(self) -> None:
        """Have the timer go off no later than the next deadline.

        It is left alone when the next deadline moves away: it finds nothing due and is set anew.
        """
        if self._is_behind:
            return
        deadline = self.table.next_deadline()
        if deadline is None:
            if not self.draining:
                return
            deadline = math.inf
        if self._timer is None or self._wakes > deadline:
            if self._timer is not None:
                self._timer.cancel()
            now = clock.now()
            self._wakes = min(deadline, now + self.options.sweep_interval)
            self._timer = self.loop.call_later(self._wakes - now, self._due)

    def _due(self) -> None:
        self._timer = None
        self._wakes = math.inf
        if not self._is_behind:
            self._is_behind = True
            self.slices.do(self._catch_up)

    def _catch_up(self, until: float) -> bool:
        """Let what is due take effect, a step of the table at a time."""
        is_behind = False
        try:
            now = clock.now()
            while not is_behind:
                self._dispatch(self.table.advance(now))
                due, now = self.table.next_deadline(), clock.now()
                if due is None or due > now:
                    break
                is_behind = now >= until
        finally:
            # Whatever fails, the next step is to come.
            self._is_behind = is_behind
        if not is_behind:
            self._arm()
            if self.draining:
                # What a session held may have ended without a request of its own.
                self._end_idle()
        return is_behind

    # The end of a connection: all of a host's can end at one moment.

    def part(self, session: Recipient, *, clean: bool, silent: bool) -> None:
        """Free what stands on a session that ends: now or, where many end at once, some turns later."""
        self.slices.do(partial(self._part, session, clean, silent))

    def _part(self, session: Recipient, clean: bool, silent: bool, _until: float) -> bool:
        effects = self.table.disconnect(
            session.peer, clock.now(), clean=clean, silent=silent, told=not session.owed
        )
        self._dispatch(effects)
        return False

    def forget(self, session: Recipient) -> None:
        """Take out a session whose connection is closed, once what stands on it is freed."""
        self.slices.do(partial(self._forget, session.peer.id))

    def _forget(self, number: int, _until: float) -> bool:
        del self.sessions[number]
        if not self.sessions:
            self._emptied.set()
        return False

    # While draining.

    def end_idle_soon(self) -> None:
        """While draining: end the sessions that somebody else's request has left without a hold."""
        if not self._looks:
            self._looks = True
            # All of them are looked at: once for the requests of some turns, not for each.
            self.loop.call_later(IDLE_LOOK, self._end_idle)

    def _end_idle(self) -> None:
        self._looks = False
        self.slices.do(in_steps(list(self.sessions.values()), _drain))


def _drain(session: Recipient) -> None:
    session.drain()


def tell_pause(warn: Callable[..., object], who: str, request: Pause) -> None:
    """Tell the log who has paused a key, for how long and why."""
    key, span, by, reason = request
    how_long = "until it is resumed" if span is None else f"for {span / 1000:g} s"
    said = by.decode(), reason.decode()
    warn("%s pauses %r %s, by %r: %r", who, key.decode(), how_long, *said)
