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
from dflockd.connection import Connection, run
from dflockd.green import make_selector, select_green
from dflockd.hold import Hold
from dflockd.operations import Answer, Grant, read_renewal, release, renew, renewal_request
from dflockd.pool import Pool, Route
from dflockd.wire import UnexpectedReplyError

ADOPT_AFTER = 0.1
"""Seconds after which the connection of a held lock is watched.

Most locks are released sooner and so never cost a system call of this thread.
"""

LONGEST_SLEEP = 86400.0
"""Seconds after which the thread looks up though nothing is due: `epoll` cannot count to a month."""

logger = logging.getLogger("dflockd.client")


class Watch:
    """The renewal thread's view of one held lock. Its fields belong to `Renewer`'s mutex."""

    __slots__ = (
        "__weakref__",
        "connection",
        "ended",
        "hold",
        "order",
        "registered",
        "rescued",
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
        self.rescued = False
        """Whether a rescue thread is at work on it, for its connection broke."""
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
        when = min(time.monotonic() + ADOPT_AFTER, hold.renew_at)
        with self._mutex:
            if not self._started:
                self._start()
            self._schedule(watch, when)
            if when < self._wakes_at:
                self._wakes_at = when
                self._wake()
        return watch

    def unwatch(self, watch: Watch) -> Connection | None:
        """Stop looking after a lock and return its connection, or ``None`` if that has broken."""
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
        for pause in hold.pauses():
            time.sleep(pause)
            try:
                connection = Connection.open(*route)
                run(release(hold.target, hold.token), connection)
            except errors.RemoteError:
                continue
            self._pool.give(route, connection)
            return

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
        while self._due and self._due[0][0] > now + ADOPT_AFTER:
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
            self._schedule(watch, hold.deadline if watch.sent else hold.renew_at)
            return None
        try:
            watch.sent = now
            request = renewal_request(hold.target, hold.token, hold.lease)
            watch.connection.send(request)
        except OSError as exc:
            self._rescue(watch, exc)
        self._schedule(watch, hold.deadline)
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

    # A broken connection.

    def _rescue(self, watch: Watch, exc: BaseException) -> None:
        """Have another thread reach the server again: connecting can take its time."""
        target = watch.hold.target
        logger.info("lock %r: connection to %s broke (%s)", target.name, target.server, exc)
        self._unregister(watch)
        watch.connection.close()
        watch.sent = 0.0
        watch.rescued = True
        threading.Thread(
            target=self._try_again, args=(watch,), name="dflockd-rescue", daemon=True
        ).start()

    def _try_again(self, watch: Watch) -> None:
        hold = watch.hold
        # The other idle connections to that server are most likely dead as well.
        self._pool.clear(watch.route)
        for pause in hold.pauses():
            time.sleep(pause)
            if watch.ended or time.monotonic() >= hold.deadline:
                return  # its deadline is in the heap: `_step` says so
            try:
                connection = Connection.open(*watch.route)
                grant = run(renew(hold.target, hold.token, hold.lease), connection)
                connection.label = hold.target.label or b""
            except errors.RemoteError:
                continue
            with self._mutex:
                if watch.ended:
                    connection.close()
                    return
                watch.connection = connection
                watch.rescued = False
                callback = self._renewed(watch, grant)
                if not watch.ended:
                    self._schedule(watch, time.monotonic())
                    self._wakes_at = float("-inf")
                    self._wake()
            _call(callback, hold)
            return

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
