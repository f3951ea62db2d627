"""Tasks that wait for their locks in the consumer of a worker and occupy no process of its pool.

The message stays unacknowledged, as one with an ETA does, and the prefetch count is raised by one, so
that the worker keeps receiving others. The client has a pending acquire for the task.

Nothing is granted here. When the turn of a task comes, the worker is told and gives the task to the
pool with the ticket of its position. The process that runs the task shows the ticket and is the first
to hold the lock. So each holder of a lock has a process to use it, and no holder waits for a process.

All other outcomes are decided in that process too, where the task has its context: it is told that
the turn did not come in time, that no server answered, or that another delivery of the message is
already there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.common import ignore_errors

from celery_dflock import gate
from celery_dflock.config import settings
from celery_dflock.look import Look, tell_waiting
from celery_dflock.outcome.types import HANDED, prepare
from celery_dflock.task import LockedTask
from celery_dflock.worker import unacknowledged
from celery_dflock.worker.errands import Errands
from celery_dflock.worker.events import look_whether_wanted
from celery_dflock.worker.inbox import Inbox
from celery_dflock.worker.prefetch import Prefetch
from celery_dflock.worker.shutdown import shutdown
from celery_dflock.worker.turns import Turns
from celery_dflock.worker.waiter import Waiter
from dflockd import errors
from dflockd.client.pending import PendingAcquires

LOOK_AROUND = 1.0
"""Seconds between looks at who was revoked, has expired or is late."""

TOLD_MS = 1000
"""Milliseconds for which a slot of the key is set aside for a task on its way to a process."""

NEXT_SLOT = 0.05
"""Seconds for which a key may be idle for a task that has the next slot, while none is free yet.

The slot of its predecessor may be about to become free: a task releases its lock before its process
is free.
"""

TAKEN_UP = 0.1
"""Seconds from a process's accepting a task to its having taken up the position, and some to spare."""

logger = logging.getLogger("celery_dflock")


class ConsumerWait:
    """The tasks that wait in one consumer.

    `take`, `start` and `stop` are called where Celery handles requests. What the client and the pool
    have to say comes from any thread, and is done by the inbox.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._pending = PendingAcquires()
        self._turns: Turns[Waiter] = Turns()
        self._mutex = threading.Lock()
        """Guards the turns and the outcomes of waiters where there is no event loop."""
        self._waiters: dict[Waiter, None] = {}
        """In the order of their arrival: those who wait, and those on their way through the pool."""
        self._runs: dict[Hashable, Waiter] = {}
        """The same, by who they are and what they wait for."""
        self._errands = Errands("dflock-waiting")
        """What may ask servers and take long: receivers that are told who waits, for one."""
        self._inbox = Inbox(consumer)
        self._prefetch = Prefetch(consumer)
        self._timer: Any = None
        self._has_started = False

    @property
    def requests(self) -> list[Any]:
        """Those that wait here, or for a process."""
        return [waiter.request for waiter in tuple(self._waiters) if not waiter.is_accepted]

    @property
    def prefetch_count(self) -> int:
        """What the broker was told."""
        return self._prefetch.count

    # From the consumer.

    def take(self, request: Any) -> None:
        """Send a request to the pool, after it has waited for its turn if it is to do so here."""
        prepare(request)
        look_whether_wanted(self._consumer)
        if shutdown.begun:
            return  # it may just have come from here; it goes back when the connection ends
        try:
            waiter = Waiter.of(request)
        except Exception:
            waiter = None  # the process that runs the task will meet the same, and say so
        if waiter is None or not self._prefetch.has_room:
            self._consumer.on_task_request(request)
        elif self._waits_already(waiter):
            request.request_dict[HANDED] = waiter.redelivery("another delivery waits for it")
            self._consumer.on_task_request(request)
        elif self._timer is not None:  # else it is too late: it goes the way of those that wait
            try:
                self._wait(waiter)
            except Exception:
                logger.exception("%r waits in its slot: it could not wait in the consumer", request)
                self._consumer.on_task_request(request)

    def start(self) -> None:
        """Begin with a connection to the broker."""
        self._inbox.start()
        self._prefetch.attach()
        if not self._has_started:
            self._has_started = True
            self._warn()
        look = partial(self._inbox.post, self._look_around)
        self._timer = self._consumer.timer.call_repeatedly(LOOK_AROUND, look)

    def watch(self, hub: Any) -> None:
        """The event loop of the worker begins."""
        self._inbox.watch(hub)

    def stop(self) -> None:
        """Give up all positions: the worker ends, or has lost its broker, and these messages with it.

        A broker that is there gets them back at once and in their order, before the tasks that run
        here have ended; one that comes back delivers again what nobody has acknowledged. A task
        that has a process keeps its position: that process may be about to take it up.
        """
        if self._timer is not None:
            self._consumer.timer.cancel(self._timer)
            self._timer = None
        consumer = self._consumer
        gone = [waiter for waiter in tuple(self._waiters) if not waiter.is_accepted]
        waiting = [waiter.request for waiter in gone if not waiter.is_in_pool]
        for waiter in gone:
            try:
                self._drop(waiter)
            except Exception:  # the others must not keep positions with messages that are gone
                logger.exception("%r could not be given up", waiter.request)
        has_broker = consumer.connection is not None and consumer.blueprint.state != bootsteps.RUN
        if has_broker and waiting:
            # Else this worker would receive them again.
            ignore_errors(consumer, consumer.task_consumer.cancel)
        for request in waiting:
            if state.requests.get(request.id) is request:
                state.requests.pop(request.id)
            if has_broker:
                unacknowledged.give_back(consumer, request)
        if waiting:
            logger.info("%d tasks that waited in the consumer go back to the broker", len(waiting))

    def leave(self) -> None:
        """Give up all positions, and nothing else: for a signal handler, before `stop`."""
        for waiter in tuple(self._waiters):
            if not waiter.is_accepted:
                waiter.pending.leave()

    def close(self) -> None:
        """Leave nothing behind: the worker has ended, and perhaps not the process."""
        self._pending.close()
        self._waiters.clear()
        self._runs.clear()
        self._errands.close()
        self._inbox.close()

    def _warn(self) -> None:
        """Say what this broker cannot do for tasks that wait here."""
        app = self._consumer.app
        usual = settings(app).wait
        tasks = [task for task in app.tasks.values() if isinstance(task, LockedTask)]
        timeouts = {
            task.name: task._lock_options.queue_timeout
            for task in tasks
            if (task._lock_options.wait or usual) == "consumer"
            and not gate.is_of_celery(type(task))
        }
        if timeouts:
            self._prefetch.warn()
            unacknowledged.warn(app, timeouts)

    # What happens to a waiter.

    def _waits_already(self, waiter: Waiter) -> bool:
        """Whether another delivery of its message does.

        A task in the pool may have sent this one before that is known here: the server compares.
        """
        there = self._runs.get(waiter.run)
        return there is not None and not there.is_in_pool

    def _wait(self, waiter: Waiter) -> None:
        request, post = waiter.request, self._inbox.post
        with self._mutex:  # it may be told before its pending acquire is known
            waiter.pending = self._pending.join(
                waiter.lock,
                waiter.timeout,
                ticket=waiter.ticket,
                reservation=waiter.reservation,
                told_ms=TOLD_MS,
                queued=partial(self._errands.run, partial(self._announce, waiter)),
                told=partial(self._hear_turn, waiter),
                ended=lambda error: post(partial(self._ended, waiter, error)),
            )
            self._waiters[waiter] = None
            self._runs[waiter.run] = waiter
        # A reserved task counts as work: for the autoscaler, and where prefetching is disabled.
        state.reserved_requests.discard(request)
        self._prefetch.raise_for(request)

    def _announce(self, waiter: Waiter) -> None:
        """Say that it waits; on a thread for that."""
        task, request, lock = waiter.request.task, waiter.context, waiter.lock
        logger.info(
            "task %s[%s] waits for lock %r in the consumer", task.name, request.id, lock.key
        )
        tell_waiting(task, request, lock.key, lock.group, cache(partial(Look.at, lock)))

    def _hear_turn(self, waiter: Waiter) -> None:
        """Its turn has come; on the client's thread."""
        with self._mutex:
            pending = waiter.pending
        if isinstance(self._consumer.pool, solo.TaskPool) and state.active_requests:
            # Nobody says who goes to the pool until the task that runs here has ended.
            pending.pass_on()
        self._inbox.post(partial(self._told, waiter))

    def _told(self, waiter: Waiter) -> None:
        """Its turn has come: have it go to the pool, or let others go first."""
        with self._mutex:
            if waiter.is_over or waiter.handed is not None:
                return
            ticket = None
            if self._turns.told(waiter):
                ticket = waiter.pending.hand_over()
            else:
                waiter.pending.pass_on()
        if ticket is not None:
            waiter.handed = waiter.hand_off(ticket)
            # How many slots do nothing: a hint, on which no lock depends.
            spare = self._consumer.pool.num_processes - len(state.reserved_requests)
            if spare < 0:
                waiter.pending.pass_on()
            elif spare == 0:
                self._after(NEXT_SLOT, self._pass_on, waiter)
            self._send(waiter)

    def _ended(self, waiter: Waiter, error: errors.RemoteError | None) -> None:
        """Its wait is over without a turn."""
        if not waiter.is_over and waiter.handed is None:
            self._settle(waiter)
            waiter.handed = waiter.verdict(error)
            self._send(waiter)

    def _pass_on(self, waiter: Waiter) -> None:
        """Let others go first while no process has taken it up."""
        if not waiter.is_accepted and not waiter.is_over:
            waiter.pending.pass_on()

    def _accepted(self, waiter: Waiter) -> None:
        """A process has taken the task up, and takes up its position now."""
        if self._turns.has_followers(waiter):
            self._after(TAKEN_UP, self._settle, waiter)
        else:
            self._settle(waiter)

    def _settle(self, waiter: Waiter) -> None:
        """Call those back for whom there is room on the way to the pool."""
        with self._mutex:
            for each in self._turns.settle(waiter):
                each.pending.come_back()

    def _drop(self, waiter: Waiter) -> None:
        """It is over, however it ended."""
        with self._mutex:
            if waiter.is_over:
                return
            waiter.is_over = True
            self._waiters.pop(waiter, None)
            if self._runs.get(waiter.run) is waiter:
                del self._runs[waiter.run]
            waiter.pending.leave()
        self._prefetch.lower_for(waiter.request)
        self._settle(waiter)

    def _look_around(self) -> None:
        """Find those who will never run, those who are over, and those who are late."""
        for waiter in tuple(self._waiters):
            try:
                self._look_at(waiter)
            except Exception:  # of the result backend, for one: the next look may find it well
                logger.exception("%r could not continue after its wait", waiter.request)

    def _look_at(self, waiter: Waiter) -> None:
        if waiter.is_in_pool:
            if waiter.request not in state.reserved_requests:
                self._drop(waiter)
        elif waiter.handed is not None:
            self._send(waiter)  # it failed the first time
        elif waiter.request.revoked():
            self._drop(waiter)
        elif waiter.is_late and self._turns.is_due(waiter):
            waiter.pending.come_back()
        elif waiter.has_unique_to_prolong:
            self._errands.run(waiter.prolong_unique)

    # The pool.

    def _send(self, waiter: Waiter) -> None:
        """Give a task to the pool, with what its process is to know."""
        request, handed = waiter.request, waiter.handed
        if waiter.is_over or waiter.is_in_pool or handed is None:
            return
        if request.revoked():
            self._drop(waiter)
            return
        request.request_dict[HANDED] = handed
        self._listen(waiter)
        self._prefetch.lower_for(request)
        state.task_reserved(request)
        waiter.is_in_pool = True
        try:
            self._consumer.on_task_request(request)
        except Exception:
            waiter.is_in_pool = False
            raise

    def _listen(self, waiter: Waiter) -> None:
        """Watch what happens to a request, through its own methods: the app chooses its class."""
        request, post = waiter.request, self._inbox.post
        on_accepted, on_success, on_failure = (
            request.on_accepted,
            request.on_success,
            request.on_failure,
        )

        def accepted(*args: Any, **kwargs: Any) -> Any:
            waiter.is_accepted = True
            post(partial(self._accepted, waiter))
            return on_accepted(*args, **kwargs)

        def over(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            post(partial(self._drop, waiter))
            return method(*args, **kwargs)

        request.on_accepted = accepted
        request.on_success = partial(over, on_success)
        request.on_failure = partial(over, on_failure)

    def _after(self, seconds: float, function: Callable[[Waiter], object], waiter: Waiter) -> None:
        job = partial(function, waiter)
        self._consumer.timer.call_after(seconds, partial(self._inbox.post, job))


class Step(bootsteps.StartStopStep):
    """Ends `ConsumerWait` with its consumer, before the messages are given back."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Consumer, **options: Any) -> None:
        super().__init__(consumer, **options)
        consumer.dflock_wait = ConsumerWait(consumer)

    def register_with_event_loop(self, consumer: Consumer, hub: Any) -> None:
        """The loop begins, for the first time or anew."""
        consumer.dflock_wait.watch(hub)

    def start(self, consumer: Consumer) -> None:
        """The worker is connected to its broker."""
        consumer.dflock_wait.start()

    def stop(self, consumer: Consumer) -> None:
        """The connection has broken, or the worker ends."""
        consumer.dflock_wait.stop()

    terminate = stop

    def shutdown(self, consumer: Consumer) -> None:
        """The worker has ended."""
        consumer.dflock_wait.close()

    def info(self, consumer: Consumer) -> dict[str, Any]:
        """Correct what ``celery inspect stats`` says: those who wait are received beyond it."""
        return {"prefetch_count": consumer.dflock_wait.prefetch_count}
