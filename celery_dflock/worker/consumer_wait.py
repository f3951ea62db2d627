"""Tasks that wait for their locks in the consumer of a worker, and take up no process of its pool.

The message stays where it is, unacknowledged, as one with an ETA does, and the prefetch count is
raised by one, so that the worker goes on to receive others. The client has a pending acquire for it.
When its turn has come the request goes to the pool, and with it the token of the lock. The lock is
renewed here until a process of the pool has accepted the task, and is that process's then.

Whatever comes of it otherwise is decided there as well, where the task has its context: the process
is told that the lock was not granted in time, or that no server could be asked.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import threading
import time
from collections import deque
from functools import cache, partial
from typing import Any

from celery import bootsteps
from celery.app.task import Context
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.common import ignore_errors

from celery_dflock import bases, keys
from celery_dflock.config import Settings, settings
from celery_dflock.identity import label_of
from celery_dflock.locks import MOMENT, describe_holder
from celery_dflock.options import LockOptions
from celery_dflock.outcome import header
from celery_dflock.signals import lock_waiting
from celery_dflock.task import LockedTask
from celery_dflock.worker import hand_off
from dflockd import errors
from dflockd.client.pending import PendingAcquire, PendingAcquires
from dflockd.sync_client import DistributedLock, DistributedSemaphore

LOOK_AROUND = 1.0
"""Seconds between looks at who was revoked or has expired while he waited."""

logger = logging.getLogger("celery_dflock")


_numbers = itertools.count()


class Entry:
    """One task that waits, or has waited and is on its way to a process of the pool."""

    def __init__(self, request: Any, lock: DistributedLock) -> None:
        self.request = request
        self.lock = lock
        self.number = next(_numbers)
        self.since = time.monotonic()
        self.token: str | None = None
        """Of the grant, which may be lost since."""
        self.is_copy = False
        self.ticket: Any = None
        self.is_over = False
        """Whether nobody is to come back to it."""
        self.raised: Any = None
        """Whose prefetch count was raised for it."""
        self.pending: PendingAcquire

    @property
    def context(self) -> Context:
        """The request as a task knows it."""
        return Context(self.request.request_dict)

    def result(self, error: errors.RemoteError | None) -> hand_off.HandOff:
        """Return what the process that runs the task is told."""
        waited = time.monotonic() - self.since
        return hand_off.HandOff(self.lock.key, waited, "slot")


class Parked:
    """The tasks that wait in one consumer.

    Its methods run where Celery handles requests: in the event loop of the worker, or, in those that
    have none, in the main thread and that of its timer, as the ETA tasks do there.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._pending = PendingAcquires()
        self._waiting: set[Entry] = set()
        self._granted: set[Entry] = set()
        self._raised = 0
        self._announcer = _Announcer()
        self._joining = threading.Lock()
        self._arrived: deque[tuple[Entry, errors.RemoteError | None]] = deque()
        self._pair: tuple[socket.socket, socket.socket] | None = None
        """What wakes the event loop of the worker, if it has one."""
        self._timer: Any = None

    @property
    def requests(self) -> list[Any]:
        """Those that wait here."""
        return [entry.request for entry in tuple(self._waiting)]

    # From the consumer.

    def take(self, request: Any) -> None:
        """Send a request to the pool, after it has waited for its lock if it is to do so here."""
        hand_off.discard(request.request_dict)
        try:
            app_settings = settings(request.task.app)
            lock = self._lock(request, app_settings)
        except Exception:
            lock = None  # the process that runs the task will meet the same, and say so
        if lock is None:
            self._consumer.on_task_request(request)
            return
        if self._timer is None:
            return  # too late: it goes the way of those that `stop` has left
        entry = Entry(request, lock)
        # Who is reserved counts as work: for the autoscaler, and where prefetching is disabled.
        state.reserved_requests.discard(request)
        self._waiting.add(entry)
        self._raise_prefetch(entry, app_settings.max_parked)
        options, context = _options(request), entry.context
        ticket: Any = None
        with self._joining:
            entry.pending = self._pending.join(
                lock,
                options.queue_timeout,
                ticket=None if ticket is None else ticket.place,
                reservation=None if ticket is None else ticket.keep(),
                queued=partial(self._announcer.announce, entry),
                ended=lambda error: self._ended(entry, error),
            )

    def watch(self, hub: Any) -> None:
        """Have the event loop of the worker look at what has come."""
        if self._pair is None:
            self._pair = socket.socketpair()
            for each in self._pair:
                each.setblocking(False)
        hub.add_reader(self._pair[0], self._deliver)

    def start(self) -> None:
        """Begin to look around."""
        self._timer = self._consumer.timer.call_repeatedly(LOOK_AROUND, self._look_around)

    def stop(self) -> None:
        """Give up all places: the worker ends, or has lost its broker, and these messages with it.

        A broker that is there gets them back at once and in their order, before the tasks that run
        here have ended; one that comes back delivers again what nobody has acknowledged.
        """
        if self._timer is not None:
            self._consumer.timer.cancel(self._timer)
            self._timer = None
        consumer, waiting = self._consumer, sorted(self._waiting, key=lambda entry: entry.number)
        for entry in (*waiting, *self._granted):
            self._drop(entry)
        has_broker = consumer.connection is not None and consumer.blueprint.state != bootsteps.RUN
        if has_broker and waiting:
            # Else this worker would receive them again.
            ignore_errors(consumer, consumer.task_consumer.cancel)
        for request in (entry.request for entry in waiting):
            if state.requests.get(request.id) is request:
                state.requests.pop(request.id)
            if has_broker:
                request.message.reject_log_error(logger, consumer.connection_errors, requeue=True)
        if waiting:
            logger.info("%d tasks that waited in the consumer go back to the broker", len(waiting))

    def close(self) -> None:
        """Leave nothing behind: the worker has ended, and perhaps not the process."""
        self._pending.close()
        self._announcer.close()
        for each in self._pair or ():
            each.close()

    # On the thread that all locks of the process depend on: nothing here may wait.

    def _ended(self, entry: Entry, error: errors.RemoteError | None) -> None:
        entry.token = entry.lock.token
        with self._joining:  # it may be over before `take` knows its pending acquire
            self._arrived.append((entry, error))
        if self._pair is None:
            self._consumer.timer.call_after(0, self._deliver)
            return
        with contextlib.suppress(OSError):  # it is awake for long, or has ended
            self._pair[1].send(b"\0")

    # Where requests are handled.

    def _deliver(self) -> None:
        """Send those whose wait is over to the pool."""
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):
                self._pair[0].recv(4096)
        while self._arrived:
            entry, error = self._arrived.popleft()
            try:
                self._arrive(entry, error)
            except Exception:
                logger.exception("%r could not go on after its wait", entry.request)

    def _arrive(self, entry: Entry, error: errors.RemoteError | None) -> None:
        request = entry.request
        if entry.is_over:
            return
        self._waiting.discard(entry)
        self._lower_prefetch(entry)
        if request.revoked():
            self._drop(entry)
            return
        handed = entry.result(error)
        handed.put(request.request_dict)
        state.task_reserved(request)
        self._consumer.on_task_request(request)

    def _hand_over_when_accepted(self, entry: Entry) -> None:
        # The request's own, for its class is the task's or the app's choice.
        on_accepted = entry.request.on_accepted

        def hand_over(pid: int, time_accepted: float) -> None:
            if not entry.is_over:
                entry.is_over = True
                self._granted.discard(entry)
                entry.pending.detach(MOMENT)
            on_accepted(pid, time_accepted)

        entry.request.on_accepted = hand_over

    def _look_around(self) -> None:
        """Find those who will never run: while they wait, and on their way through the pool."""
        for entry in tuple(self._waiting):
            if entry.request.revoked():
                self._drop(entry)
        for entry in tuple(self._granted):
            if entry.request not in state.reserved_requests:
                self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        entry.is_over = True
        self._waiting.discard(entry)
        self._granted.discard(entry)
        self._lower_prefetch(entry)
        entry.pending.leave()

    def _raise_prefetch(self, entry: Entry, most: int) -> None:
        qos = self._consumer.qos
        before = qos.value
        # It has a bound of its own, worker_eta_task_limit, and 0 means no limit at all.
        if before and self._raised < most and qos.increment_eventually() > before:
            self._raised += 1
            entry.raised = qos

    def _lower_prefetch(self, entry: Entry) -> None:
        qos, entry.raised = entry.raised, None
        if qos is not None:
            self._raised -= 1
            qos.decrement_eventually()

    def _lock(self, request: Any, app_settings: Settings) -> DistributedLock | None:
        """Return the lock that a request waits for here; ``None`` if it does not."""
        task, options = request.task, _options(request)
        if (options.wait or app_settings.wait) != "consumer" or options.queue_timeout == 0:
            return None
        return None
        if not app_settings.enabled or bases.is_of_celery(type(task)):
            return None
        names = options.keys_of(task, tuple(request.args), request.kwargs)
        if len(names) > 1:
            return None  # who has one would keep others from it while waiting for the next
        key = keys.finish(names[0], app_settings.key_prefix)
        more: dict[str, Any] = {
            **app_settings.connection_options(),
            "label": label_of(task.name, request.id),
        }
        if options.limit == 1:
            return DistributedLock(key, None, options.ttl, **more)
        return DistributedSemaphore(key, options.limit, None, options.ttl, **more)


class Step(bootsteps.StartStopStep):
    """The place of `Parked` in the life of a consumer: it ends before the messages do."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Consumer, **options: Any) -> None:
        super().__init__(consumer, **options)
        consumer.dflock_parked = Parked(consumer)

    def register_with_event_loop(self, consumer: Consumer, hub: Any) -> None:
        """The loop begins, for the first time or anew."""
        consumer.dflock_parked.watch(hub)

    def start(self, consumer: Consumer) -> None:
        """The worker is connected to its broker."""
        consumer.dflock_parked.start()

    def stop(self, consumer: Consumer) -> None:
        """The connection has broken, or the worker ends."""
        consumer.dflock_parked.stop()

    terminate = stop

    def shutdown(self, consumer: Consumer) -> None:
        """The worker has ended."""
        consumer.dflock_parked.close()


def _options(request: Any) -> LockOptions:
    task: LockedTask = request.task
    is_plain = not request.request_dict.get(header.HEADER)
    return task._lock_options if is_plain else task._options(Context(request.request_dict))


class _Announcer:
    """Says who waits, on a thread of its own: receivers of the signal may ask servers and take long."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Entry | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def announce(self, entry: Entry) -> None:
        """Have it said, after those from before. Returns at once."""
        self._waiting.put(entry)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dflock-waiting", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, once it has said all."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            try:
                _say_waiting(entry)
            except Exception:
                logger.exception("%r: that it waits could not be said", entry.request)


def _say_waiting(entry: Entry) -> None:
    task, request, lock = entry.request.task, entry.context, entry.lock
    logger.info("task %s[%s] waits for lock %r in the consumer", task.name, request.id, lock.key)
    holder = cache(lambda: describe_holder(lock))
    lock_waiting.send(sender=task, request=request, key=lock.key, holder=holder)
