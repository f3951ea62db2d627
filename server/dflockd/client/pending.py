"""Places in the queues of many locks, kept by one thread.

`DistributedLock.acquire` takes a thread for as long as it waits. Here one thread for each server looks
after all that wait there, so that hundreds can wait in a process that has other things to do. Each
place has a connection of its own, as ever: the end of the process gives up all of them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from dflockd import errors
from dflockd.address import Address
from dflockd.client import operations
from dflockd.client.blocking import DistributedLock
from dflockd.client.connection import Connection, reason, run
from dflockd.client.greenlets import make_selector, select_green
from dflockd.client.lock import KeepPlace
from dflockd.client.operations import GRACE, Answer, Exchange, Grant, Operation
from dflockd.client.process import current
from dflockd.client.routing import PASSING
from dflockd.wire import UnexpectedReplyError

__all__ = ["Place", "Places"]

RESTART_PATIENCE = 5.0
"""Seconds for which a server that cannot be reached is asked again for a place."""

RESTART_PAUSE = 0.2
"""Seconds between two attempts at one server, or for a key whose server is not ready."""

TURN = 0.005
"""Seconds of such a pause for each key that somebody is to be queued for, so that hundreds of them are
not asked about without end."""

SLOW = 0.5
"""Seconds of an attempt that has failed after which its server is left alone for a while."""

LOOK_AROUND = 1.0
"""Seconds between looks at whether a server owes somebody an answer for too long."""

SILENT_PAUSE = 3.0
"""Seconds to the next attempt at a server that said nothing: each costs the thread about as long."""

FIRST_LOOK = 1.0
"""Seconds of silence after which one looks, in a cluster, whether the server is alive."""

logger = logging.getLogger("dflockd.client")


class Places:
    """Waits for many locks at once. Its methods return at once, in any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._keepers: dict[str, _Keeper] = {}
        self._mutex = threading.Lock()

    def join(
        self,
        lock: DistributedLock,
        timeout_s: float | None,
        *,
        place: str | None = None,
        keep: KeepPlace | None = None,
        unless: Callable[[], bool] | None = None,
        queued: Callable[[], object],
        ended: Callable[[errors.RemoteError | None], object],
    ) -> Place:
        """Take a place in the queue of a lock, behind those that were taken here before.

        A server that ends while it is waited at may just be restarted: a place is taken there again,
        in the order of before, for `RESTART_PATIENCE`. In a cluster a place goes where its key goes.

        Args:
            lock: nobody else's from now on.
            timeout_s: seconds to wait, rounded up to whole ones; ``None`` has no end.
            place: a place that was kept, to be taken up; see `DistributedLock.enqueue`.
            keep: keep the place if it is not served in time; ``lock.place`` is then its name.
            unless: asked before, on the thread that waits: ``True`` ends it before it begins.
            queued: called on that thread once there is something to wait for. It must not take
                long: the lease of a grant that comes meanwhile could end, and others wait as well.
            ended: called on that thread at the end, with what went wrong, if anything did. It must
                not block. ``lock.held`` says whether the lock was granted; it is renewed then.
        """
        where = str(lock._route.address if lock._shards is None else lock._shards.seeds)
        with self._mutex:
            keeper = self._keepers.get(where)
            if keeper is None:
                keeper = self._keepers[where] = _Keeper(where)
            joining = Place(keeper, next(self._numbers), lock, timeout_s, unless, queued, ended)
            joining.progress = lock._progress(place, keep)
            keeper.tell(partial(keeper.join, joining))
        return joining

    def close(self) -> None:
        """End the threads, after what they were told before. Nobody is told of anything any more."""
        with self._mutex:
            for keeper in self._keepers.values():
                keeper.tell(keeper.close)
            self._keepers = {}


class Place:
    """One place in a queue, and the lock once it is granted."""

    __slots__ = (
        "_keeper",
        "connection",
        "deadline",
        "ended",
        "error",
        "left",
        "line",
        "lock",
        "number",
        "operation",
        "overdue",
        "progress",
        "queued",
        "sent",
        "unless",
    )

    def __init__(
        self,
        keeper: _Keeper,
        number: int,
        lock: DistributedLock,
        timeout_s: float | None,
        unless: Callable[[], bool] | None,
        queued: Callable[[], object],
        ended: Callable[[errors.RemoteError | None], object],
    ) -> None:
        self._keeper = keeper
        self.lock = lock
        self.number = number
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.line = "" if lock._shards is None else lock.key
        """Who fails together, in order: all of one server, or those of one key of a cluster."""
        self.error: errors.RemoteError | None = None
        """Why it could not be queued."""
        self.left = False
        self.unless = unless
        self.queued: Callable[[], object] | None = queued
        self.ended = ended
        self.progress = lock._progress()
        self.connection: Connection | None = None
        """While it waits."""
        self.operation: Operation[Grant | None]
        self.sent = 0.0
        self.overdue = math.inf
        """Monotonic time by which the server should have answered."""

    @property
    def server(self) -> Address:
        """Who is to be asked."""
        shards = self.lock._shards
        if shards is None:
            return self.lock._route.address
        return shards.whom_to_ask(self.lock._target.key)

    def leave(self) -> None:
        """Give up the place, or give back what it was granted. Returns at once, in any thread.

        `ended` is not called any more, unless it is being called.
        """
        self.left = True
        self._keeper.tell(partial(self._keeper.leave, self))

    def detach(self, lease_ttl_s: int) -> None:
        """Let the lock go on without this process; see `DistributedLock.detach`. Returns at once."""
        self._keeper.tell(partial(self._keeper.detach, self, lease_ttl_s))


class _Keeper:
    """The thread that keeps the places at one server, or in one cluster. Its fields are its own."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._jobs: deque[Callable[[], object]] = deque()
        self._lines: dict[str, list[tuple[int, Place]]] = {}
        """Who has to be queued: in each line a heap, who came first."""
        self._closed_until: dict[str, float] = {}
        """When it is tried again in lines where somebody has failed, so that nobody overtakes."""
        self._avoided_until: dict[Address, float] = {}
        """The same, for all lines of a server that could not be asked: one of them finds out."""
        self._failing: dict[Address, float] = {}
        """Since when nobody could be queued at a server."""
        self._waiting: set[Place] = set()
        self._looks: dict[Address, float] = {}
        """When to look again at a server of the cluster; never while somebody does."""
        self._look_around_at = 0.0
        self._selector: selectors.BaseSelector
        self._woken: socket.socket
        self._waker: socket.socket | None = None
        self._is_woken = False
        self._is_closed = False

    def tell(self, job: Callable[[], object]) -> None:
        """Have the thread do something. From any thread; the first time, under a mutex."""
        self._jobs.append(job)
        if self._waker is None:
            self._selector = make_selector()
            self._woken, self._waker = socket.socketpair()
            self._woken.setblocking(False)
            self._waker.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ, None)
            threading.Thread(target=self._run, name="dflockd-places", daemon=True).start()
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # full, or closed
                self._waker.send(b"\0")

    # What it is told.

    def join(self, place: Place) -> None:
        if not self._lines:
            self._failing.clear()
        self._line_up(place)

    def leave(self, place: Place) -> None:
        self._stop_waiting(place)
        place.lock.release()

    def detach(self, place: Place, lease_ttl_s: int) -> None:
        try:
            place.lock.detach(lease_ttl_s)
        except errors.RemoteError as exc:
            logger.warning("lock %r could not be handed on: %s", place.lock.key, exc)

    def close(self) -> None:
        in_line = (place for line in self._lines.values() for _, place in line)
        for place in [*self._waiting, *in_line]:
            place.left = True
            self.leave(place)
        self._is_closed = True

    # The thread.

    def _run(self) -> None:
        while not self._is_closed:
            try:
                for key, _ in select_green(self._selector, self._work_off()):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                        self._is_woken = False  # whoever comes now wakes it anew
                    elif key.data in self._waiting:
                        self._readable(key.data)
            except Exception:
                # Without this thread nobody would be told of a grant any more.
                logger.exception("places at %s: unexpected error", self._where)
                time.sleep(0.1)
        assert self._waker is not None
        for each in (self._selector, self._woken, self._waker):
            each.close()

    def _work_off(self) -> float | None:
        """Do what is to be done, in small steps, and return for how many seconds nothing else is."""
        while self._jobs:
            self._jobs.popleft()()
        if self._is_closed:
            return 0.0
        now = time.monotonic()
        if (self._waiting or self._lines) and now >= self._look_around_at:
            self._look_around_at = now + LOOK_AROUND
            for place in [place for place in self._waiting if place.overdue <= now]:
                self._failed(place, TimeoutError())
            self._look_at_servers(now)
            self._end_late_ones(now)
        times = {line: self._opens_at(line) for line in self._lines}
        is_open = [line for line, when in times.items() if when <= now]
        if is_open:
            self._advance(min(is_open, key=lambda line: self._lines[line][0]))
            return 0.0  # grants that have come meanwhile are looked at between two of them
        if not self._waiting and not self._lines:
            return None
        return max(0.0, min([*times.values(), self._look_around_at]) - now)

    def _opens_at(self, line: str) -> float:
        """Return the monotonic time from which on the first of a line may queue up."""
        server = self._lines[line][0][1].server
        return max(self._closed_until.get(line, 0.0), self._avoided_until.get(server, 0.0))

    def _end_late_ones(self, now: float) -> None:
        """End those in line whose time is over.

        Who only waits for this thread has the time of an answer beyond.
        """
        late = []
        for line, waiting in self._lines.items():
            over = now if self._opens_at(line) > now else now - GRACE
            late += [place for _, place in waiting if (place.deadline or math.inf) <= over]
        for place in late:
            in_line = self._lines[place.line]
            in_line.remove((place.number, place))
            heapq.heapify(in_line)
            if not in_line:
                del self._lines[place.line]
                self._closed_until.pop(place.line, None)
            self._end(place, place.error or self._unasked(place))

    def _advance(self, line: str) -> None:
        """Have the first of a line queue up."""
        _, place = heapq.heappop(self._lines[line])
        if not self._lines[line]:
            del self._lines[line]
        if place.left:
            return
        unless, place.unless = place.unless, None
        if unless is not None and unless():
            place.ended(None)
            return
        asked, started = place.server, time.monotonic()
        try:
            is_queued = self._enqueue(place)
        except Exception as exc:  # whatever it is, somebody waits for the end
            self._failed(place, exc, asked, time.monotonic() - started > SLOW)
            return
        self._failing.pop(asked, None)
        self._closed_until.pop(place.line, None)
        if is_queued:
            self._wait(place)
        else:
            self._end(place)

    def _enqueue(self, place: Place) -> bool:
        """Take the place; ``False`` if the lock was free, and is held now."""
        lock, progress = place.lock, place.progress
        try:
            # Without any time, for others wait for this thread: it asks again later.
            grant = lock._begin(
                lambda target, _: operations.enqueue(target._replace(progress=progress)), 0
            )
            assert lock._asking is not None
            if grant is None:
                place.connection = lock._queued = lock._asking
                lock._end_request()
                return True
            # The server keeps the place until it is asked about it, and refuses another on the same
            # connection, even after somebody else has adopted the lock.
            grant = run(operations.wait(lock._target, 0), lock._asking)
            assert grant is not None
            lock._take_up(grant)
            return False
        except BaseException:
            lock._let_go()
            raise

    def _wait(self, place: Place) -> None:
        assert place.connection is not None
        target = place.lock._target._replace(progress=place.progress)
        seconds = None
        if place.deadline is not None:
            seconds = math.ceil(max(0.0, place.deadline - time.monotonic()))
        place.operation = operations.wait(target, seconds)
        self._waiting.add(place)
        self._selector.register(place.connection, selectors.EVENT_READ, place)
        try:
            self._send(place, next(place.operation))
        except OSError as exc:
            self._failed(place, exc)
            return
        queued, place.queued = place.queued, None
        if queued is not None:
            queued()

    def _send(self, place: Place, exchange: Exchange) -> None:
        assert place.connection is not None
        place.sent = time.monotonic()
        place.overdue = math.inf if exchange.patience is None else place.sent + exchange.patience
        place.connection.send(exchange.request, exchange.ahead)

    def _readable(self, place: Place) -> None:
        connection = place.connection
        assert connection is not None
        try:
            line = connection.receive_nowait()
            if line is not None:
                answer = Answer(line, place.sent, time.monotonic())
                self._send(place, place.operation.send(answer))
        except StopIteration as stop:
            self._stop_waiting(place)
            place.lock._asking, place.lock._queued = connection, None
            place.lock.place = place.progress.kept.decode() or None
            place.lock._settle(stop.value)
            self._end(place)
        except Exception as exc:
            self._failed(place, exc)

    def _look_at_servers(self, now: float) -> None:
        """Look whether the servers are alive that somebody has not heard from for long."""
        silent: dict[Address, Place] = {}
        for place in self._waiting:
            if place.lock._shards is not None and now - place.sent >= FIRST_LOOK:
                assert place.connection is not None
                silent[place.connection.address] = place
        for address, place in silent.items():
            if self._looks.get(address, 0.0) <= now:
                self._looks[address] = math.inf
                # Apart: it can take its time, and this thread has grants to take up.
                look = partial(self._look, place.lock, address)
                threading.Thread(target=look, name="dflockd-doubt", daemon=True).start()

    def _look(self, lock: DistributedLock, address: Address) -> None:
        again, shards = LOOK_AROUND, lock._shards
        assert shards is not None
        route = lock._route._replace(address=address)
        try:
            again = current().pool.look(shards, lock._target.key, route, True)
        except errors.RemoteError as exc:
            logger.info("places at %s: %s", self._where, exc)
        finally:
            self.tell(partial(self._looked, address, time.monotonic() + again))

    def _looked(self, address: Address, again: float) -> None:
        """Have all that wait at a server that says nothing queue where their keys are by now."""
        self._looks[address] = again
        for place in list(self._waiting):
            shards, connection = place.lock._shards, place.connection
            if connection is None or connection.address != address or shards is None:
                continue
            is_alive = shards.signs.get(address, (0.0, None))[1]
            moved = shards.moved(place.lock._target.key, address)
            if moved is not None and not is_alive:
                self._failed(place, moved)

    def _stop_waiting(self, place: Place) -> None:
        self._waiting.discard(place)
        connection, place.connection = place.connection, None
        if connection is not None and not connection.closed:
            self._selector.unregister(connection)

    def _end(self, place: Place, error: errors.RemoteError | None = None) -> None:
        if not place.left:
            place.ended(error)

    def _line_up(self, place: Place) -> None:
        heapq.heappush(self._lines.setdefault(place.line, []), (place.number, place))

    # When it fails.

    def _failed(
        self,
        place: Place,
        exc: Exception,
        asked: Address | None = None,
        is_slow: bool = False,
    ) -> None:
        """Have a place be taken again, or give it up.

        Args:
            place: it.
            exc: what has happened.
            asked: who was to be asked for the place; ``None`` if it was there and waited.
            is_slow: whether it has taken this thread long to learn of it.
        """
        self._stop_waiting(place)
        place.lock._let_go()
        if place.left:
            return
        error = exc if isinstance(exc, errors.RemoteError) else self._remote(place, exc)
        if isinstance(error, errors.LeaseExpiredError):
            self._line_up(place)  # this process was stopped for longer than the lease of its grant
            return
        shards, is_of_key = place.lock._shards, isinstance(error, errors.RecoveringError)
        if isinstance(error, errors.MovedError) and shards is not None:
            is_of_key = True
            if shards.learn(error) and asked is None:
                self._line_up(place)
                return
        now = time.monotonic()
        place.error = error
        if not isinstance(error, PASSING) or (place.deadline or math.inf) <= now:
            self._end(place, error)
            return
        # That a shard moves or recovers says nothing about the others of its server.
        server = asked or place.server
        since = now if is_of_key else self._failing.setdefault(server, now)
        if now - since >= RESTART_PATIENCE and not self._will_pass(place, error):
            self._give_up(place, server, error)
            return
        logger.info("queueing again for lock %r: %s", place.lock.key, error)
        if is_of_key:
            pause = max(RESTART_PAUSE, TURN * len(self._lines))
            self._closed_until[place.line] = now + pause
        if is_slow or not is_of_key:
            is_silent = is_slow or isinstance(error.__cause__, TimeoutError)
            self._avoided_until[server] = now + (SILENT_PAUSE if is_silent else RESTART_PAUSE)
        self._line_up(place)

    @staticmethod
    def _will_pass(place: Place, error: errors.RemoteError) -> bool:
        """Whether there is a server that knows better, or will: then only the time ends the wait."""
        if isinstance(error, errors.MovedError | errors.RecoveringError):
            return True
        shards = place.lock._shards
        return shards is not None and error.server != str(shards.seeds)

    def _remote(self, place: Place, exc: Exception) -> errors.RemoteError:
        about = f"lock {place.lock.key!r} on {place.lock.server}"
        if isinstance(exc, UnexpectedReplyError):
            return errors.BadReplyError(
                f"{about}: {exc}", key=place.lock.key, server=place.lock.server
            )
        return errors.UnreachableError(
            f"{about}: the connection broke: {reason(exc)}",
            key=place.lock.key,
            server=place.lock.server,
        )

    def _unasked(self, place: Place) -> errors.RemoteError:
        server = str(place.server)
        return errors.UnreachableError(
            f"lock {place.lock.key!r} on {server}: the server says nothing, and nobody else has it",
            key=place.lock.key,
            server=server,
        )

    def _give_up(self, place: Place, server: Address, error: errors.RemoteError) -> None:
        """End all that stand in line for a server where nobody can be queued."""
        self._failing.pop(server, None)
        self._end(place, error)
        for line in [
            line for line, waiting in self._lines.items() if waiting[0][1].server == server
        ]:
            self._closed_until.pop(line, None)
            for _, behind in sorted(self._lines.pop(line)):
                self._end(behind, error)
