"""Locks that are waited for on behalf of somebody who has other things to do: pending acquires.

`DistributedLock.acquire` takes a thread for as long as it waits. Here the reactor waits for all, so
that hundreds can wait in a process. They are granted nothing, because a process that cannot use a
lock yet must not keep others from it. Once somebody is free to use one, `PendingAcquires.ask` asks
whose turn it is. The answer is a ticket, with which that process takes the position up.

Each has a connection of its own, as usual: the end of the process gives up all of them. One more for
each server asks whose turn it is.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client import operations
from dflockd.client.arguments import Reservation
from dflockd.client.blocking import DistributedLock
from dflockd.client.connection import Connection, Route
from dflockd.client.conversation import connect, talk
from dflockd.client.flow import Flow, Hear, Pause, Signal
from dflockd.client.operations import GRACE, Progress, about_server
from dflockd.client.process import current
from dflockd.client.routing import RETRIED

__all__ = ["PendingAcquire", "PendingAcquires"]

TURN_MS = 2000
"""Milliseconds for which a slot is set aside for a process that learns of its turn: to take it up."""

ASK_AGAIN = 15.0
"""Seconds without a turn after which one is asked for on another connection: what is between here and
the server may have forgotten this one, and then nobody would ever say so."""

RESTART_PATIENCE = 5.0
"""Seconds for which a server that cannot be reached is asked again for a position."""

RESTART_PAUSE = 0.2
"""Seconds between two attempts at one server, or for a key whose server is not ready."""

TURN = 0.005
"""Seconds of such a pause for each key in line, so that hundreds of them are not asked about all
the time."""

SLOW = 0.5
"""Seconds of an attempt that has failed after which its server is left alone for a while."""

SILENT_PAUSE = 3.0
"""Seconds to the next attempt at a server that said nothing."""

LOOK_AROUND = 0.5
"""Seconds between looks at whose time is over of those who cannot be queued."""

WAITS: Final = "it waits"
HANDED: Final = "its ticket was handed over"
PASSED: Final = "its turn could not be used"
FELL_BACK: Final = "its connection has broken"

logger = logging.getLogger("dflockd.client")


class PendingAcquires:
    """Waits for many locks at once. Its methods return at once, in any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._all: set[PendingAcquire] = set()
        # What follows is the reactor's.
        self._lines: dict[str, list[tuple[int, PendingAcquire]]] = {}
        """Which ones have to be queued: in each line a heap, the first to come on top."""
        self._closed_until: dict[str, float] = {}
        """When it is tried again in lines where somebody has failed, so that nobody overtakes."""
        self._avoided_until: dict[Address, float] = {}
        """The same, for all lines of a server that could not be asked: one of them finds out."""
        self._failing: dict[Address, float] = {}
        """Since when nobody could be queued at a server."""
        self._asks = False
        """Whether somebody is free, and has heard of no turn since."""
        self._turns: dict[Route, _Turns] = {}
        """What is asked of each server."""
        self._joining = 0
        """How many positions are being taken."""

    def join(
        self,
        lock: DistributedLock,
        timeout_s: float | None,
        *,
        ticket: str | None = None,
        reservation: Reservation | None = None,
        takes: bool = False,
        queued: Callable[[], object],
        told: Callable[[], object],
        ended: Callable[[errors.RemoteError | None], object],
    ) -> PendingAcquire:
        """Wait for the turn at a lock, behind those that are waited for here already.

        Nothing is granted here, unless it `takes` the lock. A turn brings a ticket for the process
        that uses the lock, which is then the first holder. A server that ends meanwhile may just be
        restarted: for `RESTART_PATIENCE`, positions are taken there again, in the same order. In a
        cluster a position follows its key.

        Args:
            lock: says what is waited for; nobody else's from now on.
            timeout_s: seconds to wait, rounded up to whole ones; ``None`` has no end. It ends nothing
                while it is its turn.
            ticket: the ticket of a position to resume; see `DistributedLock.enqueue`.
            reservation: keep the position if its turn does not come in time; ``lock.ticket`` names it
                then.
            takes: be granted the lock here, without a turn: `told` is called once `lock` holds it, and
                nothing after that.
            queued: called once there is something to wait for.
            told: called when it is its turn, which answers an `ask`: `PendingAcquire.hand_over` or
                `PendingAcquire.pass_on` is next. A slot is set aside for `TURN_MS`. Called again
                after the latter, and if the connection broke before the ticket was handed over.
            ended: called at the end, if that is not by `PendingAcquire.leave`: with ``None`` if its
                turn did not come in time, or with what went wrong. An `OwnerConflictError` says that
                another run of the same owner is there, an `UnsupportedError` that the server is too
                old to tell whose turn it is: wait for its lock where it is used. After
                `PendingAcquire.hand_over` nothing is called any more.

        All of them are called on the reactor's thread, on which every lock of the process depends:
        they must not block, nor ask a server anything. They may be called before this returns.
        """
        number = next(self._numbers)
        progress = lock._progress(ticket, reservation)
        pending = PendingAcquire(self, number, lock, timeout_s, progress, queued, told, ended)
        pending.takes = takes
        self._all.add(pending)
        current().reactor.call(partial(self._line_up, pending))
        return pending

    def ask(self) -> None:
        """Have somebody told of a turn, once: there is somebody free to use a lock.

        Until then more of it changes nothing. If there are several servers, each of them may name one.
        """
        current().reactor.call(self._ask)

    def close(self) -> None:
        """Give all of them up. No callback is called any more."""
        for pending in list(self._all):
            pending.leave()
        current().reactor.call(self._ask_no_more)

    # What follows is done by the reactor.

    def _ask(self) -> None:
        self._asks = True
        for turns in self._turns.values():
            turns.ask()

    def _ask_no_more(self) -> None:
        for turns in self._turns.values():
            turns.close()
        self._turns.clear()

    def _turns_of(self, link: Connection) -> _Turns:
        """Return what is asked of the server of a position."""
        turns = self._turns.get(link.route)
        if turns is None:
            turns = self._turns[link.route] = _Turns(link.route)
            if self._asks:
                turns.ask()
            current().reactor.run(self._find_turns(turns))
        return turns

    def _find_turns(self, turns: _Turns) -> Flow[None]:
        """Ask one server whose turn it is, again and again, on a connection of its own."""
        target = about_server(str(turns.route.address))
        while not turns.is_over:
            if not turns.is_asked:
                turns.signal = Signal()
                yield Hear(turns.signal, math.inf)
                continue
            try:
                if turns.link is None:
                    turns.link = yield from connect(turns.route, clock.now() + RESTART_PATIENCE)
                until = clock.now() + ASK_AGAIN
                ticket = yield from talk(turns.link, operations.next_turn(target), until)
            except Exception as exc:
                logger.debug("asking %s whose turn it is: %s", target.server, exc)
                turns.lose()
                # While it does not ask, others go first: if nothing has failed it does so at once.
                if not turns.is_over and not _is_silence(exc):
                    yield Pause(RESTART_PAUSE)
            else:
                self._tell(turns, ticket.decode())
        turns.lose()

    def _tell(self, turns: _Turns, ticket: str) -> None:
        """Tell somebody of a turn; the answer that names it may still be under way, though."""
        turns.is_asked = False
        pending = turns.positions.get(ticket)
        if pending is not None:
            self._asks = False
            pending.tell()
        else:
            turns.early.add(ticket)
            self._give_back(turns)

    def _give_back(self, turns: _Turns) -> None:
        """Give back the turns of those who have just left: to lose the connection does it."""
        if turns.early and not self._joining:
            turns.early.clear()
            turns.lose()
            turns.ask()

    def _line_up(self, pending: PendingAcquire) -> None:
        if pending.left:
            return
        line = self._lines.get(pending.line)
        if line is None:
            line = self._lines[pending.line] = []
            if len(self._lines) == 1:
                self._failing.clear()
            current().reactor.run(self._serve(pending.line, line))
        heapq.heappush(line, (pending.number, pending))

    def _serve(self, name: str, line: list[tuple[int, PendingAcquire]]) -> Flow[None]:
        """Have those of a line queue up, one after the other, so that nobody overtakes."""
        while line:
            self._end_late_ones(name, line)
            pause = self._opens_at(name, line) - clock.now()
            if pause > 0:
                yield Pause(min(pause, LOOK_AROUND))
                continue
            if line:
                _, pending = heapq.heappop(line)
                yield from self._queue_up(pending)
        del self._lines[name]
        self._closed_until.pop(name, None)

    def _opens_at(self, name: str, line: list[tuple[int, PendingAcquire]]) -> float:
        """Return when the first of a line may queue up."""
        if not line:
            return 0.0
        server = line[0][1].server
        return max(self._closed_until.get(name, 0.0), self._avoided_until.get(server, 0.0))

    def _end_late_ones(self, name: str, line: list[tuple[int, PendingAcquire]]) -> None:
        """End those in line whose time is over.

        One that only waits for those before it has the time of an answer in addition.
        """
        now = clock.now()
        over = now if self._opens_at(name, line) > now else now - GRACE
        late = {entry for entry in line if (entry[1].deadline or math.inf) <= over}
        if late:
            line[:] = [entry for entry in line if entry not in late]
            heapq.heapify(line)
            for _, pending in sorted(late):
                self._end(pending, pending.error or _unasked(pending))

    def _queue_up(self, pending: PendingAcquire) -> Flow[None]:
        if pending.left:
            return
        session, asked, started = pending.lock._session, pending.server, clock.now()
        self._joining += 1
        try:
            if pending.takes:
                ticket = b""
                is_held = yield from session.enqueue(pending, 0, progress=pending.progress)
            else:
                ticket = yield from session.line_up(pending, pending.progress, TURN_MS)
                is_held = False
        except Exception as exc:  # whatever it is, somebody waits for the end
            self._failed(pending, exc, asked, clock.now() - started > SLOW)
        else:
            self._failing.pop(asked, None)
            self._closed_until.pop(pending.line, None)
            if is_held:
                self._hold(pending)
            else:
                self._take_in(pending, ticket)
        finally:
            self._joining -= 1
            for turns in self._turns.values():
                self._give_back(turns)

    def _take_in(self, pending: PendingAcquire, ticket: bytes) -> None:
        """Have a position wait that has just been taken."""
        session = pending.lock._session
        link = session.queued
        if pending.left or link is None:
            session.abandon()
            return
        turns = None
        if not pending.takes:
            # Should the connection break, the position may have gone elsewhere under that ticket.
            pending.progress.place = ticket
            turns = self._turns_of(link)
            pending.wait_at(turns)
        current().reactor.run(self._attend(pending))
        queued, pending.queued = pending.queued, None
        if queued is not None:
            _call(queued)
        if turns is not None and pending.ticket in turns.early:
            turns.early.discard(pending.ticket)
            self._asks = False
            pending.tell()

    def _attend(self, pending: PendingAcquire) -> Flow[None]:
        """Wait for the end of a position."""
        seconds = None
        if pending.deadline is not None:
            seconds = math.ceil(max(0.0, pending.deadline - clock.now()))
        session = pending.lock._session
        try:
            if pending.takes:
                claim = None, session.waiter
                is_taken_up = yield from session.wait(claim, seconds, pending.progress)
            else:
                is_taken_up = yield from session.stay(seconds, pending.progress)
        except Exception as exc:
            pending.wait_no_more()
            self._failed(pending, exc)
            return
        pending.wait_no_more()
        if is_taken_up and pending.takes:
            self._hold(pending)
        elif not is_taken_up:
            self._end(pending)
        elif pending.is_handed:
            self._all.discard(pending)
        else:
            self._end(pending, _taken_elsewhere(pending))

    def _hold(self, pending: PendingAcquire) -> None:
        """Say that its lock is held."""
        self._all.discard(pending)
        if pending.left:
            pending.lock._session.abandon()
        else:
            _call(pending.told)

    def _end(self, pending: PendingAcquire, error: errors.RemoteError | None = None) -> None:
        self._all.discard(pending)
        if not pending.left:
            _call(partial(pending.ended, error))

    # When it fails.

    def _failed(
        self,
        pending: PendingAcquire,
        exc: Exception,
        asked: Address | None = None,
        is_slow: bool = False,
    ) -> None:
        """Have a position be taken again, or give it up.

        Args:
            pending: the pending acquire that has the position.
            exc: what has happened.
            asked: the server to ask for it; ``None`` if it was there and waited.
            is_slow: whether it has taken long to learn of it.
        """
        session, lock = pending.lock._session, pending.lock
        session.abandon()
        if pending.left or not pending.falls_back():
            return
        error = exc if isinstance(exc, errors.RemoteError) else _remote(pending, exc)
        if isinstance(error, errors.LeaseExpiredError):
            # This process was stopped for longer than the lease of its grant.
            self._line_up(pending)
            return
        shards, is_of_key = session.shards, isinstance(error, errors.RecoveringError)
        server, now = asked or pending.server, clock.now()
        if isinstance(error, errors.MovedError) and shards is not None:
            is_of_key = True
            if shards.heed(error, server, now) and asked is None:
                self._line_up(pending)
                return
        pending.error = error
        if not isinstance(error, RETRIED) or (pending.deadline or math.inf) <= now:
            self._end(pending, error)
            return
        # That a shard moves or recovers says nothing about the others of its server.
        since = now if is_of_key else self._failing.setdefault(server, now)
        if now - since >= RESTART_PATIENCE and not _will_pass(pending, error):
            self._give_up(pending, server, error)
            return
        logger.info("queueing again for lock %r: %s", lock.key, error)
        if is_of_key:
            pause = max(RESTART_PAUSE, TURN * len(self._lines))
            self._closed_until[pending.line] = now + pause
        if is_slow or not is_of_key:
            is_silent = is_slow or _is_silence(error)
            self._avoided_until[server] = now + (SILENT_PAUSE if is_silent else RESTART_PAUSE)
        self._line_up(pending)

    def _give_up(self, pending: PendingAcquire, server: Address, error: errors.RemoteError) -> None:
        """End all that stand in line for a server where nobody can be queued."""
        self._failing.pop(server, None)
        self._end(pending, error)
        for line in self._lines.values():
            if line and line[0][1].server == server:
                behind = sorted(line)
                line.clear()
                for _, each in behind:
                    self._end(each, error)


class _Turns:
    """What is asked of one server: whose turn it is."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.positions: dict[str, PendingAcquire] = {}
        """All that wait there, by ticket."""
        self.early: set[str] = set()
        """Tickets of turns that came before the answers that name them."""
        self.link: Connection | None = None
        self.is_asked = False
        self.is_over = False
        self.signal = Signal()
        """Of one of these two, for a flow that has nothing to do."""

    def ask(self) -> None:
        """Ask once, unless that is done already."""
        self.is_asked = True
        self.signal.fire()

    def lose(self) -> None:
        """Give up the connection, and with it a turn that nobody has heard of."""
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Ask no more."""
        self.is_over = True
        self.signal.fire()
        if self.link is not None:
            self.link.interrupt()


class PendingAcquire:
    """One position in a queue."""

    __slots__ = (
        "_all",
        "_end_of_turn",
        "_turns",
        "deadline",
        "ended",
        "error",
        "left",
        "line",
        "lock",
        "number",
        "progress",
        "queued",
        "takes",
        "ticket",
        "told",
    )

    def __init__(
        self,
        all_of_them: PendingAcquires,
        number: int,
        lock: DistributedLock,
        timeout_s: float | None,
        progress: Progress,
        queued: Callable[[], object],
        told: Callable[[], object],
        ended: Callable[[errors.RemoteError | None], object],
    ) -> None:
        self._all = all_of_them
        self.lock = lock
        self.number = number
        self.deadline = None if timeout_s is None else clock.now() + timeout_s
        shards = lock._session.shards
        self.line = lock.server if shards is None else f"{shards.seeds} {lock.key}"
        """Those that fail together, in order: all of one server, or those of one key of a
        cluster."""
        self.error: errors.RemoteError | None = None
        """Why it could not be queued."""
        self.left = False
        self.takes = False
        """Whether it is granted its lock, and no turn."""
        self.progress = progress
        self.queued: Callable[[], object] | None = queued
        self.told = told
        self.ended = ended
        self.ticket = ""
        """Of its position, while it has one."""
        self._turns: _Turns | None = None
        """Where it waits."""
        self._end_of_turn: dict[str, str] = {"by": WAITS}
        """What has ended its turn, by a single operation: its user and the reactor may be of two
        minds."""

    @property
    def server(self) -> Address:
        """The server to ask."""
        return self.lock._session.asked_first

    # What those who were told have to say; each returns at once, in any thread.

    def hand_over(self) -> str | None:
        """Return the ticket for the process that uses the lock; see `DistributedLock.enqueue`.

        From now on nothing is called any more. The position is there until it is taken up; call
        `leave` once nobody will do so.

        ``None`` if it is not its turn any more, for its connection has broken: it waits again, and
        `told` or `ended` is called in time.
        """
        return self.ticket if self._ends_turn(HANDED) else None

    def pass_on(self) -> None:
        """Let others go first: there is nobody to use the lock. It waits as before its turn."""
        if self._ends_turn(PASSED):
            current().reactor.call(self._pass_on)

    def leave(self) -> None:
        """Give up the position, unless it was handed over and taken up. Nothing is called any more."""
        self.left = True
        self._all._all.discard(self)
        current().reactor.call(self._part)

    @property
    def is_handed(self) -> bool:
        """Whether somebody has its ticket."""
        return self._end_of_turn.get("by") is HANDED

    def _ends_turn(self, how: str) -> bool:
        return self._end_of_turn.setdefault("by", how) is how

    # On the reactor's thread.

    def wait_at(self, turns: _Turns) -> None:
        """Have a position."""
        self.ticket, self._turns = self.progress.place.decode(), turns
        turns.positions[self.ticket] = self

    def wait_no_more(self) -> None:
        """Have none."""
        if self._turns is not None:
            self._turns.positions.pop(self.ticket, None)
            self._turns = None

    def tell(self) -> None:
        """Say that it is its turn."""
        if self.left or self.is_handed:
            self._all._ask()  # somebody has the ticket already: the next one may have its turn
            return
        self._end_of_turn = {}
        _call(self.told)

    def falls_back(self) -> bool:
        """Whether it has to wait again after its connection broke; not if somebody has its ticket."""
        self._ends_turn(FELL_BACK)
        return not self.is_handed

    def _pass_on(self) -> None:
        if self._turns is not None:
            current().reactor.run(self._passing(self._turns))

    def _passing(self, turns: _Turns) -> Flow[None]:
        ticket, session = self.ticket.encode(), self.lock._session
        while self._turns is turns:
            try:
                yield from session.pass_on(turns.route, ticket)
            except Exception as exc:
                logger.debug("passing on a turn for lock %r: %s", self.lock.key, exc)
                yield Pause(RESTART_PAUSE)
            else:
                return

    def _part(self) -> None:
        session = self.lock._session
        for link in (session.asking, session.queued):
            if link is not None:
                link.interrupt()  # what waits on it learns of it, and closes it


def _call(function: Callable[[], Any]) -> Any:
    """Call what somebody else has given, on the thread that all locks depend on."""
    try:
        return function()
    except BaseException:
        logger.exception("%r of a pending acquire failed", function)
        return None


def _is_silence(error: Exception) -> bool:
    """Whether nothing was said, be it a refusal."""
    return isinstance(error.__cause__, TimeoutError)


def _will_pass(pending: PendingAcquire, error: errors.RemoteError) -> bool:
    """Whether there is a server that knows better, or will: then only the time ends the wait."""
    if isinstance(error, errors.MovedError | errors.RecoveringError):
        return True
    shards = pending.lock._session.shards
    return shards is not None and error.server != str(shards.seeds)


def _taken_elsewhere(pending: PendingAcquire) -> errors.RemoteError:
    key, server = pending.lock.key, str(pending.server)
    return errors.OwnerConflictError(
        f"lock {key!r} on {server}: somebody else has taken up the position",
        state="waiting",
        attempt=0,
        key=key,
        server=server,
    )


def _remote(pending: PendingAcquire, exc: Exception) -> errors.RemoteError:
    key, server = pending.lock.key, pending.lock.server
    return errors.UnreachableError(
        f"lock {key!r} on {server}: waiting for it failed: {exc}", key=key, server=server
    )


def _unasked(pending: PendingAcquire) -> errors.RemoteError:
    key, server = pending.lock.key, str(pending.server)
    return errors.UnreachableError(
        f"lock {key!r} on {server}: the server says nothing, and nobody else has it",
        key=key,
        server=server,
    )
