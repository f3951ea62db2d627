"""The reactor: one thread for each process, for all that happens without a caller.

It renews the locks that are held, rescues those whose connection breaks, releases what could not be
released at once, and waits on behalf of the consumer: all of it flows, each a task here.

Work is handed to it without any lock. A signal handler, a finaliser or the end of the interpreter
may come at any instant, even while the same thread is handing something over. It would wait forever
for a lock that is held below it.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import logging
import math
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dflockd import clock
from dflockd.client.connection import CONNECTIONS, Connection
from dflockd.client.flow import Awaited, Flow, Pause, Ready, Signal
from dflockd.client.greenlets import make_selector, select_green
from dflockd.client.lease import UNRENEWED, Lease
from dflockd.client.pool import IDLE_AGE, Pool
from dflockd.client.release import Ends, end_later
from dflockd.client.renewal import keep, read_now, renew_now

LOOK_EVERY = 0.1
"""Seconds between looks at the locks that have come; one that is seen twice is watched from then on.

So within twice as long it is renewed, and learns of the end of its connection. Most are released
sooner, and never cost a system call of this thread nor wake it.
"""

LOOK_ON = 10
"""So many looks go on after the last lock has come: as long as they do, the next one wakes nobody."""

EARLY = 0.25
"""Leases that are due for renewal within so many seconds are watched at once."""

FORGOTTEN = 8
"""Leases that have ended for which it is not woken."""

LONGEST_BEGINNING = 1.0
"""Seconds that the end of the process waits for a thread that was started a moment before."""

LONGEST_SLEEP = 86400.0
"""Seconds after which the thread looks up though nothing is due: `epoll` cannot count to a month."""

logger = logging.getLogger("dflockd.client")


class Task:
    """A flow that the reactor drives, and what it waits for. Its fields are the reactor's."""

    __slots__ = ("ended", "flow", "listening", "order", "reactor", "registered")

    def __init__(self, reactor: Reactor, flow: Flow[Any]) -> None:
        self.reactor = reactor
        self.flow = flow
        self.order = -1
        """The number of its entry in the heap; others with it there are out of date."""
        self.registered: tuple[Connection, int] | None = None
        """The connection and the events that the selector knows."""
        self.listening: tuple[Signal, Callable[[], object]] | None = None
        self.ended = False

    def is_gone(self) -> bool:
        """Whether the reactor watches for it no more; see `dflockd.client.connection.Watcher`."""
        return self.ended

    def resume(self, came: bool) -> None:
        """Let the flow go on; in the reactor's thread. See `dflockd.client.lease.Keeping`."""
        self.reactor._step(self, came)

    def listen_no_more(self) -> None:
        """Wait for no signal any more."""
        if self.listening is not None:
            signal, listener = self.listening
            self.listening = None
            signal.forget(listener)


class Reactor:
    """Drives flows. What is said of threads holds for the greenlets of gevent and eventlet."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._inbox: deque[tuple[float, Lease | Callable[[], object]]] = deque()
        self._young: dict[Lease, None] = {}
        """Those that came lately, in their order. Each change is a single operation."""
        self._comes = False
        """Whether one has come since the look before."""
        self._seen: set[int] = set()
        """The `id` of those that it has seen once; not themselves, for that would keep them."""
        self._looks = 0
        """How many looks are still to come, unless others come."""
        self._look_at_young_at = math.inf
        self._due: list[tuple[float, int, Task | weakref.ref[Lease]]] = []
        """Leases are only referred to: one that is over would be kept, with its connection, for as long
        as it would have lasted."""
        self._order = itertools.count()
        self._wakes_at = -math.inf
        """When the thread looks up by itself; ``-inf`` while it is up."""
        self._thread = 0
        """Its number, once it runs."""
        self._started: deque[None] = deque()
        """An entry for each thread that was started and has not come yet."""
        self._to_run = [None]
        """For the one thread that is to run: several may be started at once."""
        self._is_closed = False
        self._selector: selectors.BaseSelector
        self._pipe: _Pipe | None = None

    # What others call, from any thread.

    def keep(self, lease: Lease) -> None:
        """Look after a lease until it ends."""
        if lease.lease * lease.renew_ratio < EARLY:
            self._tell(-math.inf, lease)
        else:
            self._young[lease] = None
            self._comes = True
            # The thread says that it will not look any more before it has looked for the last time.
            if not self._looks:
                self._wake_or_start()

    def renew(self, lease: Lease) -> None:
        """Renew a lease now: somebody waits for that."""
        reactor = _reactor_of(lease, self)
        reactor.call(partial(renew_now, lease, reactor._look_at))

    def read(self, lease: Lease, seen: Signal) -> None:
        """Watch a lease from now on, and take in what has come on its connection by now.

        Args:
            lease: the lease to watch.
            seen: fired once that is done.
        """
        reactor = _reactor_of(lease, self)
        reactor.call(partial(read_now, lease, reactor._look_at, seen))

    def report(self, lease: Lease) -> None:
        """Come back to a lease when its beginning must be reported, if it lasts until then."""
        _reactor_of(lease, self)._tell(lease.report_at, lease)

    def forget(self, lease: Lease) -> None:
        """Look after a lease no more that its owner has ended.

        Soon enough is when the thread wakes anyway, unless there are many by then. One that is young
        is let go here: the next takes its memory while that is warm.
        """
        self._young.pop(lease, None)
        if lease.task is not None:
            reactor = _reactor_of(lease, self)
            reactor._inbox.append((math.inf, lease))
            if len(reactor._inbox) > FORGOTTEN and reactor._wakes_at > -math.inf:
                reactor._wake()

    def end_later(self, lease: Lease, operation: Ends) -> None:
        """End a hold once its server can be reached again, unless its lease ends before."""
        self.run(end_later(lease, self._pool, operation))

    def run(self, flow: Flow[Any]) -> Task:
        """Drive a flow to its end."""
        task = Task(self, flow)
        self.call(lambda: self._step(task, None))
        return task

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the reactor's thread; it must not wait."""
        self._tell(-math.inf, function)

    def cannot_be_awaited(self) -> bool:
        """Whether the caller would wait for itself, or for a thread that stands still by now."""
        return self._thread == _thread.get_ident() or sys.is_finalizing()

    def settle(self) -> None:
        """Wait until the thread sleeps; for the end of the process.

        A thread that waits for the interpreter's lock while the interpreter goes away can crash Python:
        https://github.com/python/cpython/issues/84058. Up to 3.12 it did for one that had just begun.
        """
        until = clock.now() + LONGEST_BEGINNING
        while self._started or (self._thread and self._wakes_at == -math.inf):
            if clock.now() > until:
                return
            time.sleep(0.001)

    def forget_after_fork(self) -> None:
        """Close the child's copies of what the parent's reactor uses."""
        self._is_closed = True
        if self._pipe is not None:
            # It is the parent's as well: nothing is unregistered.
            with contextlib.suppress(OSError, AttributeError):
                self._selector.close()

    def _tell(self, when: float, what: Lease | Callable[[], object]) -> None:
        self._inbox.append((when, what))
        if not self._thread or when < self._wakes_at:
            self._wake_or_start()

    def _wake_or_start(self) -> None:
        if self._thread:
            self._wake()
        else:
            self._start()

    def _start(self) -> None:
        # The thread says itself that it runs. Until then each who comes starts one, for the one before
        # may have been interrupted; all but the first end at once. Not by `threading`, which has locks.
        self._started.append(None)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as exc:
            self._started.pop()
            # The interpreter is ending: what is held ends with the process.
            logger.warning("locks are not renewed: the renewal thread cannot be started: %s", exc)

    def _wake(self) -> None:
        if self._pipe is not None:
            self._pipe.wake()

    # The thread.

    def _run(self) -> None:
        try:
            self._to_run.pop()
        except IndexError:
            self._started.pop()
            return
        with contextlib.suppress(Exception):
            threading.current_thread().name = "dflockd-reactor"
        while not self._has_begun():
            time.sleep(LOOK_EVERY)
        self._thread = _thread.get_ident()
        self._started.pop()
        self._step(Task(self, self._sweep()), None)
        while not self._is_closed:
            try:
                self._turn()
            except Exception:
                # Without this thread every lock of the process would be lost.
                logger.exception("reactor: unexpected error")
                time.sleep(0.1)

    def _has_begun(self) -> bool:
        """Get what the thread waits with; ``False`` if there are no descriptors at the moment."""
        pipe = None
        try:
            pipe = _Pipe()
            self._selector = make_selector()
            self._selector.register(pipe.woken, selectors.EVENT_READ, None)
        except OSError as exc:
            logger.warning("locks are not renewed yet: %s", exc)
            if pipe is not None:
                pipe.close()
            return False
        self._pipe = pipe
        return True

    def _turn(self) -> None:
        self._wakes_at = -math.inf
        # In functions of their own: a variable here would keep a lease, and its connection, as long as
        # this thread sleeps.
        self._take_in_all()
        self._do_what_is_due()
        now = clock.now()
        self._look_at_young(now)
        self._forget_what_is_over()
        self._wakes_at = self._look_at_young_at
        if self._due:
            self._wakes_at = min(self._wakes_at, self._due[0][0])
        # A thread that comes from now on sees that, and wakes this one; earlier ones are seen here.
        for key, _ in select_green(self._selector, 0.0 if self._inbox else self._sleeps()):
            if key.data is None:
                self._wakes_at = -math.inf
                assert self._pipe is not None
                self._pipe.drain()
            elif key.data.registered is not None:
                self._step(key.data, True)

    def _sleeps(self) -> float:
        """Return how long this thread may sleep, in seconds.

        While looks go on a lock that comes does not wake this thread: so it wakes for the next look
        even if the clock has gone back since that was planned.
        """
        longest = LOOK_EVERY if self._looks else LONGEST_SLEEP
        return min(max(0.0, self._wakes_at - clock.now()), longest)

    def _take_in_all(self) -> None:
        while self._inbox:
            when, what = self._inbox.popleft()
            self._take_in(when, what)

    def _look_at_young(self, now: float) -> None:
        """Watch what is still there since the look before, and see when to look again."""
        young = self._young
        if self._looks:
            # Of a clock that has gone back nothing follows.
            if now < self._look_at_young_at <= now + LOOK_EVERY:
                return
        elif not self._comes:
            return
        for lease in list(young):
            # Another one may have the number of one that is gone: that is watched a little sooner.
            if id(lease) in self._seen and young.pop(lease, self) is None:
                self._look_at(lease)
        comes, self._comes = self._comes, False
        self._seen = set(map(id, list(young)))
        self._looks = LOOK_ON if comes or young else self._looks - 1
        if not self._looks and young:  # who has come since wakes nobody
            self._looks = LOOK_ON
        self._look_at_young_at = now + LOOK_EVERY if self._looks else math.inf

    def _do_what_is_due(self) -> None:
        now = clock.now()
        while self._due and self._due[0][0] <= now:
            _, order, due = heapq.heappop(self._due)
            if isinstance(due, Task):
                if order == due.order:
                    self._step(due, False)
            elif (lease := due()) is not None:
                self._look_at(lease)
                del lease

    def _take_in(self, when: float, what: Lease | Callable[[], object]) -> None:
        if not isinstance(what, Lease):
            what()
        elif what.task is not None:
            what.poke()
        elif not what.is_over:
            heapq.heappush(self._due, (when, next(self._order), weakref.ref(what)))

    def _forget_what_is_over(self) -> None:
        # Locks come and go much faster than their times fall due.
        while self._due:
            _, order, what = self._due[0]
            if isinstance(what, Task):
                if what.order == order:
                    break
            elif (lease := what()) is not None and not lease.is_over:
                break
            heapq.heappop(self._due)

    def _look_at(self, lease: Lease) -> None:
        """Begin to look after a lease, or see whether its end has come."""
        if lease.is_over:
            return
        if not isinstance(lease.task, Task):
            task = lease.task = Task(self, keep(lease, self._pool))
            self._step(task, None)
        elif clock.now() >= lease.deadline:
            # Its owner is told now, however long a server may let its task wait.
            self._stop(lease.task)
            lease.lose(UNRENEWED)
            return
        heapq.heappush(self._due, (lease.deadline, next(self._order), weakref.ref(lease)))

    def _sweep(self) -> Flow[None]:
        while True:
            yield Pause(IDLE_AGE / 2)
            self._pool.sweep(clock.now())

    # Tasks.

    def _step(self, task: Task, outcome: object) -> None:
        """Resume a task with what it has waited for, and see what it waits for next."""
        if task.ended:
            return
        task.order = -1  # what still comes for this wait is late: it must not end the next one
        task.listen_no_more()
        try:
            wait = task.flow.send(outcome)
        except StopIteration:
            self._end(task)
        except Exception:
            self._end(task)
            logger.exception("reactor: a job failed")
        else:
            self._wait(task, wait)

    def _stop(self, task: Task) -> None:
        """End a task whatever it waits for."""
        self._end(task)
        task.listen_no_more()
        task.flow.close()

    def _end(self, task: Task) -> None:
        task.ended = True
        self._unregister(task)

    def _wait(self, task: Task, wait: Awaited) -> None:
        if isinstance(wait, Connection):
            wait = Ready(wait, False, clock.now() + wait.left)
        if isinstance(wait, Ready):
            self._schedule(task, wait.until)
            if not self._register(task, wait):
                self._answer(task)(True)  # a read from a closed one fails
            return
        self._unregister(task)
        if isinstance(wait, Pause):
            self._schedule(task, clock.now() + wait.seconds)
            return
        self._schedule(task, wait.until)
        listener = partial(self._answer(task), True)
        task.listening = wait.signal, listener
        wait.signal.listen(listener)

    def _answer(self, task: Task) -> Callable[[object], None]:
        """Return what resumes a task from any thread, unless its time is over before."""
        order = task.order

        def answer(outcome: object) -> None:
            self.call(lambda: self._step(task, outcome) if task.order == order else None)

        return answer

    def _schedule(self, task: Task, when: float) -> None:
        task.order = next(self._order)
        if when < math.inf:
            heapq.heappush(self._due, (when, task.order, task))

    def _register(self, task: Task, wait: Ready) -> bool:
        """Have the selector look at a connection; ``False`` if that is closed."""
        link: Connection = wait.link
        events = selectors.EVENT_WRITE if wait.writes else selectors.EVENT_READ
        if task.registered == (link, events):
            return True
        self._unregister(task)
        if not link.watch(task):
            return False
        known = self._selector.get_map().get(link.fileno())
        if (
            known is not None
        ):  # it was a lock's that has been released, which does not wake this thread
            self._unregister(known.data)
        task.registered = link, events
        self._selector.register(link.fileno(), events, task)
        return True

    def _unregister(self, task: Task) -> None:
        if task.registered is not None:
            link, _ = task.registered
            task.registered = None
            # Before `unwatch`, which may close it: the next connection gets the same number, and the
            # selector would report that one to this task.
            with contextlib.suppress(KeyError):  # it could not be registered
                self._selector.unregister(link.fileno())
            link.unwatch(task)


def _reactor_of(lease: Lease, here: Reactor) -> Reactor:
    """Return who looks after a lease: its owner may have come here from another hub."""
    return lease.task.reactor if isinstance(lease.task, Task) else here


class _Pipe:
    """Wakes the thread."""

    def __init__(self) -> None:
        self.woken, self._waker = socket.socketpair()
        self.woken.setblocking(False)
        self._waker.setblocking(False)
        CONNECTIONS.add(self)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or closed
            self._waker.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)

    def close(self) -> None:
        for sock in (self.woken, self._waker):
            with contextlib.suppress(OSError):
                sock.close()

    forget_after_fork = close
