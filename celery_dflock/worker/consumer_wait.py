"""Tasks that wait for their locks in the consumer of a worker and occupy no process of its pool.

The message stays unacknowledged, as one with an ETA does, and the prefetch count is raised by one, so
that the worker keeps receiving others. The client has a pending acquire for the task.

Nothing is granted here, and no order is kept. While a process of the pool is free, the worker asks
whose turn it is. The lock server names one, and the task goes to that process with the ticket of its
position. The process shows the ticket and is the first to hold the lock. So each holder of a lock has
a process to use it, and no holder waits for a process.

All other outcomes are decided in that process too, where the task has its context: it is told that
the turn did not come in time, that no server answered, or that another delivery of the message is
already there.

A task of several keys waits for one after the other here, in their order. All but the last are granted
to the worker, whose connections and thread keep them: if it dies, they are free. With the turn of the
last one the task goes to a process, which adopts the others: if that dies, they are free as well. A
worker whose own thread runs its tasks (solo) cannot see to what is held here meanwhile: there it waits
for the turn of the first one alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from celery import bootsteps
from celery.concurrency.solo import TaskPool as SoloPool
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.common import ignore_errors

from celery_dflock import gate
from celery_dflock.config import settings
from celery_dflock.look import Look, tell_waiting
from celery_dflock.outcome.types import HANDED, HandOff, prepare
from celery_dflock.task import LockedTask
from celery_dflock.worker import unacknowledged
from celery_dflock.worker.errands import Errands, Job
from celery_dflock.worker.events import look_whether_wanted
from celery_dflock.worker.inbox import Inbox
from celery_dflock.worker.prefetch import Prefetch
from celery_dflock.worker.shutdown import shutdown
from celery_dflock.worker.slots import Slots, slots_of
from celery_dflock.worker.waiter import Waiter
from dflockd import clock, errors
from dflockd.client.pending import PendingAcquires
from dflockd.sync_client import DistributedLock

LOOK_AROUND = 1.0
"""Seconds between looks at who was revoked, has expired or is late."""

IDLE_HOLDS = 2.0
"""Seconds without a free process after which tasks of several keys give back what they hold here.

All processes may be taken by tasks that wait in them for these very keys, and other workers may have
free ones.
"""

KEPT = 0.02
"""Seconds for which a process that was waited for does nothing until somebody's turn is known."""

SENDING = 5.0
"""Seconds that a worker which gives up all waits for a task that is just being sent again.

Its message goes back to the broker if that was in vain: else the task would be there twice. A broker
that hangs for longer may have both. The lock keeps them apart, and the second finds that it has run.
"""

IDLE, ASKED, QUEUED, HELD = "idle", "asked", "queued for a process", "has a process"
"""What is done so that the next task has one; `ASKED` while one is free, or was."""

logger = logging.getLogger("celery_dflock")


class ConsumerWait:
    """The tasks that wait in one consumer.

    `take`, `start` and `stop` are called where Celery handles requests. What the client and the pool
    have to say comes from any thread, and is done by the inbox.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._pending = PendingAcquires()
        self._next = IDLE
        self._rounds = 0
        """How often that has changed; what was planned before is out of date."""
        self._since = 0.0
        """When it has changed last, on `dflockd.clock`."""
        self._mutex = threading.Lock()
        """Guards the outcomes of waiters where there is no event loop."""
        self._sending = threading.Lock()
        """Held while a task is sent again: until then nobody knows whose its message is."""
        self._waiters: dict[Waiter, None] = {}
        """In the order of their arrival: those who wait, and those on their way through the pool."""
        self._errands = Errands("dflock-waiting")
        """What may ask servers and take long: receivers that are told who waits, for one."""
        self._sends = Errands("dflock-sending")
        """Sends tasks again and prolongs what they hold as unique: even if a receiver is slow."""
        self._releases = Errands("dflock-releases")
        """Gives back locks of tasks that need several: not behind somebody who is slow."""
        self._may_hold = not isinstance(consumer.pool, SoloPool)
        """Whether this thread is there for what tasks hold here, while others run."""
        self._inbox = Inbox(consumer)
        self._slots, self._use = slots_of(consumer, self._inbox.post)
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
        elif self._timer is not None:  # else it is too late: it goes the way of those that wait
            try:
                self._wait(waiter)
            except Exception:
                logger.exception("%r waits in its slot: it could not wait in the consumer", request)
                self._consumer.on_task_request(request)

    def start(self) -> None:
        """Begin with a connection to the broker."""
        self._inbox.start()
        self._change(IDLE)
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
        waiting = [waiter for waiter in gone if not waiter.is_in_pool]
        has_broker = consumer.connection is not None and consumer.blueprint.state != bootsteps.RUN
        is_clear = self._sending.acquire(timeout=SENDING if has_broker else 0)
        for waiter in gone:
            try:
                self._drop(waiter)
            except Exception:  # the others must not keep positions with messages that are gone
                logger.exception("%r could not be given up", waiter.request)
        if is_clear:
            self._sending.release()  # and none of these is sent any more
        if has_broker and waiting:
            # Else this worker would receive them again.
            ignore_errors(consumer, consumer.task_consumer.cancel)
        for waiter in waiting:
            _forget(waiter.request)
            if has_broker and waiter.is_sent:
                unacknowledged.end(consumer, waiter.request)
            elif has_broker:
                unacknowledged.give_back(consumer, waiter.request)
        if waiting:
            logger.info("%d tasks that waited in the consumer go back to the broker", len(waiting))

    def leave(self) -> None:
        """Give up all positions, and nothing else: for a signal handler, before `stop`."""
        for waiter in tuple(self._waiters):
            if not waiter.is_accepted:
                waiter.pending.leave()
                if waiter.handed is None:
                    self._give_back(waiter.held)

    def close(self) -> None:
        """Leave nothing behind: the worker has ended, and perhaps not the process."""
        self._pending.close()
        self._waiters.clear()
        self._errands.close()
        self._sends.close()
        self._releases.close()
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

    def _wait(self, waiter: Waiter) -> None:
        waiter.holds_nothing = not self._may_hold
        self._join(waiter)
        request = waiter.request
        # A reserved task counts as work: for the autoscaler, and where prefetching is disabled.
        state.reserved_requests.discard(request)
        self._prefetch.raise_for(request)
        self._inbox.post(self._find_next)

    def _join(self, waiter: Waiter) -> None:
        """Have it wait for its lock, the first or the next one."""
        post, lock, is_last = self._inbox.post, waiter.lock, waiter.is_last
        heard = partial(self._hear_turn, waiter, lock)
        if not is_last:
            heard = partial(post, partial(self._granted, waiter, lock))
            self._releases.run(bool)  # its thread is there before a signal handler needs it
        with self._mutex:  # it may be told before its pending acquire is known
            if waiter.is_over:  # another thread has given it up just now
                self._give_back(waiter.let_go())
                return
            waiter.pending = self._pending.join(
                lock,
                waiter.left,
                ticket=waiter.ticket,
                reservation=waiter.reservation,
                takes=not is_last,
                queued=partial(self._errands.run, partial(self._announce, waiter, lock)),
                told=heard,
                ended=lambda error: post(partial(self._ended, waiter, lock, error)),
            )
            self._waiters[waiter] = None

    def _waits_for(self, waiter: Waiter, lock: DistributedLock) -> bool:
        """Whether what has come of waiting for a lock is still of use.

        Another thread has said it, and it may be about a wait that was given up since.
        """
        if waiter.handed is not None or waiter.lock is not lock:
            return False
        with self._mutex:
            return not waiter.pending.left

    def _granted(self, waiter: Waiter, lock: DistributedLock) -> None:
        """One of its locks is held, and not the last one."""
        if not self._waits_for(waiter, lock):
            self._give_back([lock])
            return
        waiter.has_next()
        if self._lacks_process:
            # Else all that wait for it here would have it in turn, each until the next look.
            self._wait_for_turn(waiter)
        else:
            self._join(waiter)
            self._find_next()

    def _give_back(self, locks: Sequence[DistributedLock]) -> None:
        """Release what is held for a run that does not begin; on a thread for that.

        What a process has adopted stays.
        """
        for lock in reversed(locks):
            self._releases.run(lock.give_back)
            self._releases.run(lock.abandon)

    def _without_holds(self, waiter: Waiter, job: Job) -> None:
        """Do something about it once it holds nothing: nobody else may meet its own holds."""
        if not waiter.held:
            job()
            return
        self._give_back(waiter.let_go())
        self._releases.run(partial(self._inbox.post, job))

    def _wait_for_turn(self, waiter: Waiter) -> None:
        """Have it hold nothing, and wait for the turn of its first key."""
        logger.info("%r gives back what it holds: no process is free", waiter.request)
        self._without_holds(waiter, partial(self._begin_again, waiter))

    def _begin_again(self, waiter: Waiter) -> None:
        """Have it queue anew."""
        try:
            waiter.begin_again()
        except Exception:  # the process will meet the same, and say so
            self._hand(waiter, waiter.overtaken())
        else:
            self._join(waiter)

    def _hand(self, waiter: Waiter, handed: HandOff) -> None:
        """Have a process end its wait, whenever it gets one."""
        if not waiter.is_over:
            waiter.handed = handed
            self._send(waiter)

    def _announce(self, waiter: Waiter, lock: DistributedLock) -> None:
        """Say that it waits for a lock; on a thread for that."""
        task, request = waiter.request.task, waiter.context
        logger.info(
            "task %s[%s] waits for lock %r in the consumer", task.name, request.id, lock.key
        )
        tell_waiting(task, request, lock.key, lock.group, cache(partial(Look.at, lock)))

    def _ended(
        self, waiter: Waiter, lock: DistributedLock, error: errors.RemoteError | None
    ) -> None:
        """Its wait is over without a turn."""
        if not self._waits_for(waiter, lock):
            return
        if error is None and (waiter.is_cut or (waiter.is_late and self._slots.value <= 0)):
            send = partial(self._sends.run, partial(self._send_again, waiter))
            self._without_holds(waiter, send)
            return
        self._without_holds(waiter, partial(self._hand, waiter, waiter.verdict(error)))

    def _send_again(self, waiter: Waiter) -> None:
        """Have the broker deliver it anew, which would not wait much longer; on a thread for that.

        That is no turn and no attempt: its position is kept, and it waits on.
        """
        with self._sending:
            if waiter.is_over:
                return
            try:
                waiter.send_again()
            except Exception as exc:  # the broker is away: the next look may find it there
                logger.warning("%r cannot be sent again yet: %r", waiter.request, exc)
                waiter.is_to_be_sent = True
                return
            waiter.is_sent = True
        self._inbox.post(partial(self._acknowledge, waiter))

    def _acknowledge(self, waiter: Waiter) -> None:
        """It was sent again: this message has done what it was for."""
        if not waiter.is_over:
            self._drop(waiter)
            _forget(waiter.request)
            waiter.request.acknowledge()

    def _drop(self, waiter: Waiter) -> None:
        """It is over, however it ended."""
        with self._mutex:
            if waiter.is_over:
                return
            waiter.is_over = True
            self._waiters.pop(waiter, None)
            waiter.pending.leave()
        if waiter.held:
            self._give_back(waiter.let_go())
        self._prefetch.lower_for(waiter.request)

    def _look_around(self) -> None:
        """Find those who will never run, those who are over, and those who are late."""
        self._grow()
        if isinstance(self._slots, Slots):
            self._slots.go_on()  # the pool may have grown
        for waiter in tuple(self._waiters):
            try:
                self._look_at(waiter)
            except Exception:  # of the result backend, for one: the next look may find it well
                logger.exception("%r could not continue after its wait", waiter.request)

    def _grow(self) -> None:
        """Have a process for who is next, where Celery's autoscaler counts only tasks that have one."""
        autoscaler = getattr(self._consumer.controller, "autoscaler", None)
        if autoscaler is None or self._next != QUEUED or self._slots.value > 0:
            return
        if autoscaler.processes < autoscaler.max_concurrency:
            autoscaler.scale_up(1)
            self._consumer.pool.maintain_pool()

    def _look_at(self, waiter: Waiter) -> None:
        if waiter.is_in_pool:
            if waiter.request not in state.reserved_requests:
                self._drop(waiter)
        elif waiter.handed is not None:
            self._send(waiter)  # it failed the first time
        elif waiter.request.revoked():
            self._drop(waiter)
        elif waiter.held and self._lacks_process:
            waiter.pending.leave()
            self._wait_for_turn(waiter)
        elif waiter.is_to_be_sent:
            waiter.is_to_be_sent = False
            self._sends.run(partial(self._send_again, waiter))
        elif waiter.has_unique_to_prolong:
            self._sends.run(waiter.prolong_unique)

    # Which waiter is next.

    def _find_next(self) -> None:
        """See to it that the next task whose turn it is has a process, while somebody waits."""
        if self._next != IDLE or self._timer is None:
            return
        if all(waiter.handed is not None for waiter in tuple(self._waiters)):
            return
        if self._slots.value > 0:
            self._change(ASKED)
            self._pending.ask()
        else:
            rounds = self._change(QUEUED)
            self._slots.acquire(self._inbox.post, partial(self._have_process, rounds))

    def _have_process(self, rounds: int) -> None:
        """A process is free that was waited for: it does nothing until somebody's turn is known."""
        if rounds != self._rounds:
            self._slots.release()
            return
        rounds = self._change(HELD)
        self._pending.ask()
        job = partial(self._inbox.post, partial(self._let_go, rounds))
        self._consumer.timer.call_after(KEPT, job)

    def _let_go(self, rounds: int) -> None:
        """It is nobody's turn: others may have the process."""
        if rounds == self._rounds:
            self._change(ASKED)
            self._slots.release()

    def _hear_turn(self, waiter: Waiter, lock: DistributedLock) -> None:
        """Its turn has come; on the client's thread, for the worker's own may be in a task (solo)."""
        free = self._slots.value
        if self._next != HELD and free <= 0:
            with self._mutex:
                waiter.pending.pass_on()
        elif free > 1:
            # Another process is free, and the server should know that at once: a task can be over
            # before this one is in the pool, and somebody at another worker would go first.
            self._pending.ask()
        self._inbox.post(partial(self._told, waiter, lock))

    def _told(self, waiter: Waiter, lock: DistributedLock) -> None:
        """Its turn has come: have it go to a process, or let others go first."""
        has_process = self._next == HELD
        if not has_process and self._slots.value > 0:
            has_process = True
            self._slots.acquire(bool)  # at once
        is_wanted = self._waits_for(waiter, lock)
        ticket = waiter.pending.hand_over() if has_process and is_wanted else None
        self._change(IDLE)
        try:
            if ticket is not None:
                lent = waiter.lend()
                waiter.handed = (
                    waiter.overtaken() if lent is None else waiter.hand_off(ticket, lent)
                )
                if lent is None:
                    self._give_back(waiter.let_go())
                has_process = not self._send(waiter, self._use)
            elif is_wanted:
                waiter.pending.pass_on()
        finally:
            if has_process:
                self._slots.release()
            self._find_next()

    def _change(self, to: str) -> int:
        self._next = to
        self._rounds += 1
        self._since = clock.now()
        return self._rounds

    @property
    def _lacks_process(self) -> bool:
        """Whether one has been waited for in vain for a while."""
        return self._next == QUEUED and clock.now() - self._since >= IDLE_HOLDS

    # The pool.

    def _send(self, waiter: Waiter, begin: Callable[[Any], object] | None = None) -> bool:
        """Give a task to the pool, with what its process is to know; say whether that was done."""
        request, handed = waiter.request, waiter.handed
        if waiter.is_over or waiter.is_in_pool or handed is None:
            return False
        if request.revoked():
            self._drop(waiter)
            return False
        request.request_dict[HANDED] = handed
        self._listen(waiter)
        self._prefetch.lower_for(request)
        state.task_reserved(request)
        waiter.is_in_pool = True
        try:
            (begin or self._consumer.on_task_request)(request)
        except Exception:
            waiter.is_in_pool = False
            raise
        return True

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
            return on_accepted(*args, **kwargs)

        def over(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            post(partial(self._drop, waiter))
            return method(*args, **kwargs)

        request.on_accepted = accepted
        request.on_success = partial(over, on_success)
        request.on_failure = partial(over, on_failure)


def _forget(request: Any) -> None:
    """Have Celery not know it any more; a newer message of the same task may be here already."""
    if state.requests.get(request.id) is request:
        state.requests.pop(request.id)


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
