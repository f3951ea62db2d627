"""The renewal thread: one for each process, for all locks that its threads hold."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
import weakref

from dflockd import errors
from dflockd.client.connection import Connection, run
from dflockd.client.greenlets import make_selector, select_green
from dflockd.client.lease import Hold
from dflockd.client.operations import (
    Answer,
    Grant,
    kept,
    raised,
    read_renewal,
    release,
    renew,
    renewal_request,
)
from dflockd.client.pool import Pool, Route
from dflockd.client.routing import Ask
from dflockd.wire import UnexpectedReplyError

ADOPT_EVERY = 0.1
"""Seconds between looks at which locks have come; those that have stayed for as long are watched.

Most locks are released sooner and so never cost a system call of this thread. However many come and
go, it looks up for all of them together.
"""

LONGEST_SLEEP = 86400.0
"""Seconds after which the thread looks up though nothing is due: `epoll` cannot count to a month."""

logger = logging.getLogger("dflockd.client")


class _OverError(Exception):
    """Nobody waits for the end of a rescue any more."""


class Watch:
    """The renewal thread's view of one held lock. Its fields belong to `Renewer`'s mutex."""

    __slots__ = (
        "__weakref__",
        "connection",
        "doubted",
        "ended",
        "hold",
        "order",
        "registered",
        "rescued",
        "rescuer",
        "route",
        "sent",
    )

    def __init__(self, hold: Hold, connection: Connection, route: Route) -> None:
        self.hold = hold
        self.connection: Connection = connection
        self.route = route
        self.order = -1
        """The number of its entry in the heap; others with it there are out of date."""
        self.registered = -1
        """The descriptor that the selector knows, or -1."""
        self.sent = 0.0
        """When the renewal left that is not answered yet, or 0."""
        self.doubted = 0.0
        """When the renewal left whose server a thread asks the others about."""
        self.rescued = False
        """Whether a rescue thread is at work on it, for its connection broke."""
        self.rescuer: threading.Thread | None = None
        """The latest of these threads."""
        self.ended = False
        """Released, lost or abandoned: whoever comes across it forgets it."""

    def abandon(self) -> None:
        """Let the lock end with its connection. From any thread, without the mutex."""
        self.ended = True
        self.connection.close()


class Renewer:
    """Renews locks before their leases end and notices at once when their connections break.

    It keeps no lock alive that its owner has forgotten: it refers to watches weakly, and with the
    last reference to a lock object its connection closes.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._mutex = threading.Lock()
        self._due: list[tuple[float, int, weakref.ref[Watch]]] = []
        self._order = itertools.count()
        self._wakes_at = float("-inf")
        self._started = False
        self._selector: selectors.BaseSelector
        self._waker: socket.socket

    # What lock objects call, from any thread.

    def watch(self, hold: Hold, connection: Connection, route: Route) -> Watch:
        """Look after a lock from now on: its connection belongs to this thread."""
        watch = Watch(hold, connection, route)
        next_but_one = (time.monotonic() // ADOPT_EVERY + 2) * ADOPT_EVERY
        when = min(next_but_one, hold.renew_at)
        with self._mutex:
            if not self._started:
                self._start()
            self._schedule(watch, when)
            if when < self._wakes_at:
                self._wakes_at = when
                self._wake()
        return watch

    def unwatch(self, watch: Watch, *, waits: bool = False) -> Connection | None:
        """Stop looking after a lock and return its connection, or ``None`` if that has broken.

        Args:
            watch: of the lock.
            waits: until a server is reached again, or the lease is over. To give that up halfway is
                to end a connection that the hold may have just come to belong to.
        """
        if waits:
            with self._mutex:  # under which a rescuer is made and started: here it has been
                rescuer = watch.rescuer
            if rescuer is not None:
                rescuer.join(watch.hold.left)
        with self._mutex:
            watch.ended = True
            self._unregister(watch)
            if watch.rescued or watch.connection.closed:
                return None
            return watch.connection

    def release_later(self, hold: Hold, route: Route) -> None:
        """Give a lock back once its server can be reached again, unless its lease ends before."""
        threading.Thread(
            target=self._keep_releasing, args=(hold, route), name="dflockd-release", daemon=True
        ).start()

    def _keep_releasing(self, hold: Hold, route: Route) -> None:
        def attempt(step: Ask) -> None:
            there = route._replace(address=step.server)
            connection = Connection.open(*there)
            run(release(hold.target.at(step.server), hold.token), connection)
            self._pool.give(there, connection)

        with contextlib.suppress(errors.RemoteError):  # its lease has ended
            self._pool.follow(hold.path_from(route.address), route, attempt)

    # The thread.

    def _start(self) -> None:
        # A signal's exception may end this anywhere. The next call begins anew then, and a thread that
        # runs already finds that its selector is not the one in use any more.
        selector = self._selector = make_selector()
        woken, self._waker = socket.socketpair()
        woken.setblocking(False)
        self._waker.setblocking(False)
        selector.register(woken, selectors.EVENT_READ, None)
        threading.Thread(
            target=self._run, args=(selector,), name="dflockd-renewal", daemon=True
        ).start()
        self._started = True

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _run(self, selector: selectors.BaseSelector) -> None:
        while selector is self._selector:
            try:
                for key, _ in select_green(selector, self._work_off()):
                    self._readable(key)
            except Exception:
                # Without this thread every lock of the process would be lost.
                logger.exception("renewal: unexpected error")
                time.sleep(0.1)

    def _work_off(self) -> float | None:
        """Do what is due and return for how many seconds nothing else is."""
        while True:
            with self._mutex:
                watch = self._pop_due()
                if watch is None:
                    if not self._due:
                        self._wakes_at = float("inf")
                        return None
                    self._wakes_at = self._due[0][0]
                    return min(max(0.0, self._wakes_at - time.monotonic()), LONGEST_SLEEP)
                callback = self._step(watch)
            _call(callback, watch.hold)

    def _pop_due(self) -> Watch | None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            watch = self._current(heapq.heappop(self._due))
            if watch is not None:
                return watch
        # Locks come and go much faster than their times fall due. What is due soon stays: as long as
        # this thread looks up for it, the locks that follow need not wake it.
        while self._due and self._due[0][0] > now + 2 * ADOPT_EVERY:
            if self._current(self._due[0]) is not None:
                break
            heapq.heappop(self._due)
        return None

    def _step(self, watch: Watch) -> object:
        """Do the next thing for a lock: adopt it, renew it, or give it up."""
        hold = watch.hold
        now = time.monotonic()
        if now >= hold.deadline:
            return self._lost(watch, "its lease ended unrenewed")
        if watch.rescued:
            self._schedule(watch, hold.deadline)
            return None
        if watch.connection.closed:
            # Its owner was interrupted while taking it up or giving it back.
            watch.ended = True
            return None
        if watch.registered < 0:
            self._register(watch)
        if watch.sent or now < hold.renew_at:
            if watch.sent and hold.may_move:
                self._doubt(watch)
            self._schedule(watch, hold.deadline if watch.sent else hold.renew_at)
            return None
        try:
            watch.sent = now
            request = renewal_request(hold.target, hold.token, hold.lease)
            watch.connection.send(request)
        except OSError as exc:
            self._rescue(watch, exc)
        self._schedule(watch, now + hold.silence if hold.may_move else hold.deadline)
        return None

    def _readable(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                key.fileobj.recv(4096)  # type: ignore[union-attr]
            return
        callback: object = None
        with self._mutex:
            watch: Watch | None = key.data()
            if watch is None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(key.fileobj)
                return
            # The event may be older than a release, and the descriptor another's by now.
            if watch.ended or watch.registered != key.fd:
                return
            try:
                line = watch.connection.receive_nowait()
                if line is not None:
                    callback = self._answered(watch, line)
            except (OSError, UnexpectedReplyError, errors.DflockdError) as exc:
                self._rescue(watch, exc)
        _call(callback, watch.hold)

    def _answered(self, watch: Watch, line: bytes) -> object:
        hold = watch.hold
        answer = Answer(line, watch.sent, time.monotonic())
        watch.sent = 0.0
        return self._renewed(watch, read_renewal(hold.target, hold.token, answer))

    def _renewed(self, watch: Watch, grant: Grant | None) -> object:
        """Take in what a renewal has brought."""
        hold = watch.hold
        if grant is None:
            return self._lost(watch, "the server no longer knows it")
        if not hold.held:
            # The answer is good news, but its owner may have seen already that the lease was over.
            return self._lost(watch, "its lease ended unrenewed")
        hold.renewed(grant)
        self._schedule(watch, hold.renew_at)
        return None

    def _lost(self, watch: Watch, why: str) -> object:
        callback = watch.hold.lose()
        watch.ended = True
        self._unregister(watch)
        if not watch.rescued:
            # The server may think otherwise; what it holds for us ends with the connection.
            watch.connection.close()
        target = watch.hold.target
        logger.warning("lock %r on %s is lost: %s", target.name, target.server, why)
        return callback

    # A broken connection, or a refusal.

    def _rescue(self, watch: Watch, exc: BaseException) -> None:
        """Have another thread reach the server in charge again: connecting can take its time."""
        target = watch.hold.target
        logger.info("lock %r: connection to %s broke (%s)", target.name, target.server, exc)
        self._unregister(watch)
        if not isinstance(exc, errors.RecoveringError):
            watch.connection.close()
        # Else it is for this server alone to say when: the hold may stand on this connection.
        watch.sent = 0.0
        watch.rescued = True
        watch.rescuer = threading.Thread(
            target=self._try_again, args=(watch, exc), name="dflockd-rescue", daemon=True
        )
        watch.rescuer.start()

    def _try_again(self, watch: Watch, why: BaseException) -> None:
        hold, route, connection = watch.hold, watch.route, watch.connection
        # Its server may have the lock after all, and would free it with this connection.
        stood_on = connection
        if connection.closed:
            # The other idle connections to that server are most likely dead as well.
            self._pool.clear(route)

        def attempt(step: Ask) -> Grant | None:
            nonlocal route, connection
            if watch.ended or time.monotonic() >= hold.deadline:
                raise _OverError
            if connection.closed or connection.address != step.server:
                if connection is not stood_on:
                    connection.close()
                route = route._replace(address=step.server)
                connection = Connection.open(*route)
            operation = renew(hold.target.at(step.server), hold.token, hold.lease)
            grant = raised(run(kept(operation), connection, look=look))
            connection.label = hold.target.label or b""
            return grant

        def look_around(is_waiting: bool) -> float:
            assert hold.shards is not None
            return self._pool.look(hold.shards, hold.target.key, route, is_waiting)

        look = look_around if hold.may_move else None
        try:
            grant = self._pool.follow(hold.path_from(route.address, why), route, attempt)
        except (_OverError, errors.RemoteError):
            connection.close()
            return  # its deadline is in the heap: `_step` says so
        finally:
            if connection is not stood_on:
                stood_on.close()
        with self._mutex:
            watch.route, watch.connection = route, connection
            # Only now: who abandons it takes no mutex, marks it, and closes what is there.
            if watch.ended:
                connection.close()
                return
            hold.target = hold.target.at(route.address)
            watch.rescued = False
            callback = self._renewed(watch, grant)
            if not watch.ended:
                self._schedule(watch, time.monotonic())
                self._wakes_at = float("-inf")
                self._wake()
        _call(callback, hold)

    # A server that says nothing.

    def _doubt(self, watch: Watch) -> None:
        if watch.doubted == watch.sent:
            return
        watch.doubted = watch.sent
        threading.Thread(
            target=self._ask_others, args=(watch, watch.sent), name="dflockd-doubt", daemon=True
        ).start()

    def _ask_others(self, watch: Watch, sent: float) -> None:
        def check(_: object) -> None:
            if watch.ended or watch.sent != sent:
                raise _OverError  # it has answered

        def pause(seconds: float) -> None:
            time.sleep(seconds)
            check(None)

        server = watch.route.address
        try:
            self._pool.follow(watch.hold.doubts(server), watch.route, check, pause)
        except (_OverError, errors.RemoteError):
            return
        with self._mutex:
            if not watch.ended and watch.sent == sent:
                self._rescue(watch, TimeoutError("no answer, and another server has its shard"))

    # Bookkeeping; the mutex is held.

    def _schedule(self, watch: Watch, when: float) -> None:
        watch.order = next(self._order)
        heapq.heappush(self._due, (when, watch.order, weakref.ref(watch)))

    @staticmethod
    def _current(entry: tuple[float, int, weakref.ref[Watch]]) -> Watch | None:
        """Return whom an entry of the heap is about, unless that has ended or has a later entry."""
        watch = entry[2]()
        return None if watch is None or watch.ended or watch.order != entry[1] else watch

    def _register(self, watch: Watch) -> None:
        watch.registered = watch.connection.fileno()
        known = self._selector.get_map()
        if watch.registered in known:
            # Left by a lock that its owner forgot: its descriptor was closed and has come back.
            self._selector.unregister(watch.registered)
        self._selector.register(watch.registered, selectors.EVENT_READ, weakref.ref(watch))

    def _unregister(self, watch: Watch) -> None:
        if watch.registered >= 0:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(watch.registered)
            watch.registered = -1


def _call(callback: object, hold: Hold) -> None:
    """Tell the owner of a lost lock, outside the mutex."""
    if callable(callback):
        try:
            callback()
        except Exception:
            logger.exception("on_lost of lock %r failed", hold.target.name)
