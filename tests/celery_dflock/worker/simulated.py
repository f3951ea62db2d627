"""A simulated world around the consumer wait: workers, pools, one lock server.

The code is the worker's own, from its inbox to the pool, and the lock server's own table. Time, the
broker, the pool, the processes and what lies between are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from celery.worker import state
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from celery_dflock.run import TURN_TIMEOUT
from celery_dflock.worker import consumer_wait
from celery_dflock.worker.consumer_wait import ConsumerWait
from celery_dflock.worker.inbox import Inbox
from dflockd.table import Entry, Waiter
from dflockd.wire import (
    Acquire,
    Granted,
    How,
    Owner,
    Pause,
    Release,
    Renew,
    Renewed,
    Reserve,
    TimedOut,
)
from tests.celery_dflock.worker.simulated_locks import (
    LOCK,
    START,
    WIRE,
    Clock,
    Connection,
    Lock,
    Pending,
    Server,
    Waits,
    Wanted,
)

LONG_IDLE = 0.25
"""Seconds for which no lock may be free while somebody wants it whose worker has a free process."""


class Call(NamedTuple):
    """A task as it is sent."""

    kind: str
    """``consumer`` and ``slot`` say where it waits; ``ordinary`` wants no lock."""
    worker: int
    key: int
    at: float
    seconds: float
    is_revoked: bool = False
    group: int | None = None
    age: int = 0
    dies: bool = False
    """Its process ends before it asks for the lock."""
    needs_all: bool = False
    """Whether it needs all keys."""
    weight: int = 1


class Lent(NamedTuple):
    """What a process is told of which the worker holds some locks already."""

    ticket: str
    tokens: tuple[tuple[str, str], ...]


class Pool:
    """Processes; tasks that have one, and end."""

    is_green = False

    def __init__(self, world: World, size: int, is_celerys: bool) -> None:
        self.world = world
        self.num_processes = size
        self.semaphore = LaxBoundedSemaphore(size) if is_celerys else None
        self.busy = 0
        self.slack = 0
        """Tasks that may be there beyond its size: what ran before it shrank, and what a semaphore of
        Celery lets in when it grows."""

    def begin(self, task: Task) -> None:
        if task.revoked():
            if self.semaphore is not None:
                self.semaphore.release()
            return
        self.busy += 1
        assert self.busy <= self.num_processes + self.slack, "more tasks than processes"
        self.world.clock.after(WIRE, task.begin)

    def end(self) -> None:
        self.busy -= 1
        if self.semaphore is not None:
            self.semaphore.release()

    def resize(self, more: int) -> None:
        more = max(more, 1 - self.num_processes)
        self.num_processes += more
        self.slack += abs(more) * (1 if self.semaphore is None else 3)
        if self.semaphore is not None and more > 0:
            self.semaphore.grow(more)
        elif self.semaphore is not None:
            self.semaphore.shrink(-more)


class Task:
    """A request, and the process that runs it."""

    def __init__(self, world: World, number: int, call: Call) -> None:
        self.world, self.number, self.call = world, number, call
        self.worker = world.workers[call.worker % len(world.workers)]
        self.id = str(number)
        key = call.key % len(world.limits)
        group = None if call.group is None else b"group-%d" % call.group
        owner = Owner(self.id.encode(), 0, call.age) if call.age else None
        limit = 1 if call.age else world.limits[key]
        weight = 1 if call.age else call.weight
        self.wanted = Wanted(b"key-%d" % key, limit, group, world.rates[key], owner, weight)
        self.others: list[Wanted] = []
        """What it needs beside that, and takes after it."""
        if call.needs_all and not call.age:
            every = [
                Wanted(b"key-%d" % n, each, group, world.rates[n], None, weight)
                for n, each in enumerate(world.limits)
            ]
            self.wanted, *self.others = sorted(every, key=lambda each: (each.limit, each.key))
        self.held: list[tuple[Wanted, bytes, Connection]] = []
        self.request_dict: dict[str, Any] = {}
        self.content_type = "application/json"
        self.ticket = ""
        self.is_revoked = self.is_superseded = False
        self.connection: Connection | None = None
        self.connections: list[Connection] = []
        self.on_accepted: Callable[..., Any] = lambda *_: None
        self.on_success: Callable[..., Any] = self._over
        self.on_failure: Callable[..., Any] = self._over
        self.on_timeout: Callable[..., Any] = self._over

    # What the consumer sees of a request.

    def revoked(self) -> bool:
        if self.is_revoked:
            self._over()
        return self.is_revoked

    def _over(self, *_: Any) -> None:
        state.reserved_requests.discard(self)

    # What the process does.

    def begin(self) -> None:
        self.on_accepted(1, 0.0)
        came = self.request_dict.pop("dflock_handed", None)
        if self.call.dies:
            self.world.clock.after(START, self.end)
        elif self.call.kind == "ordinary":
            self.world.clock.after(self.call.seconds, self.end)
        elif isinstance(came, Lent):
            self.world.clock.after(START, self.adopt, *came)
        elif came is not None and not isinstance(came, str):
            self.is_superseded = True
            self.end()
        else:
            self.world.clock.after(START, self.ask, came or "")

    def connect(self) -> Connection:
        self.connections.append(Connection(self.world.server, f"process of {self.id}"))
        return self.connections[-1]

    @property
    def asked(self) -> Wanted:
        """The lock that it takes next."""
        return [self.wanted, *self.others][len(self.held)]

    def adopt(self, ticket: str, lent: tuple[tuple[str, str], ...]) -> None:
        """Take over what the worker holds, and take up the last."""
        if len(self.held) == len(lent):
            self.ask(ticket)
            return
        token = lent[len(self.held)][1].encode()
        connection = self.connect()

        def adopted(reply: Any) -> None:
            assert isinstance(reply, Renewed), reply
            self.held.append((self.asked, token, connection))
            self.adopt(ticket, lent)

        connection.ask(Renew(LOCK, self.asked.key, token, 600), adopted)

    def ask(self, ticket: str) -> None:
        self.connection = self.connect()
        wanted = self.asked
        more = {**wanted.said(), "ticket": ticket.encode()}
        if ticket:
            more["reserve"] = Reserve(500, 0)
        seconds = TURN_TIMEOUT if ticket else 100_000
        request = Acquire(LOCK, wanted.key, wanted.limit, seconds, 60, **more)
        self.connection.ask(request, self.answered)

    def answered(self, reply: Any) -> None:
        assert self.connection is not None
        if isinstance(reply, Granted):
            self.world.check_not_paused(self.asked.key)
            self.held.append((self.asked, reply.token, self.connection))
            if len(self.held) <= len(self.others):
                self.ask("")
                return
            self.world.ran.append(self)
            assert self.world.clock.now >= self.call.at
            self.world.enter(self)
            for wanted, token, connection in self.held:
                if wanted.rate is not None:
                    connection.ask(Renew(LOCK, wanted.key, token, 600, How.BEGUN))
            self.world.clock.after(self.call.seconds, self.release)
        elif isinstance(reply, TimedOut):  # it is sent again, and its position is kept
            self.world.requeued += 1
            self.ticket = reply.ticket.decode()
            self.end(is_done=False)
            self.world.clock.after(0.5, self.worker.receive, self)
        else:
            self.is_superseded = True
            self.end()

    def release(self, *_: Any) -> None:
        """Release all, the last one first."""
        self.world.inside.discard(self)
        wanted, token, connection = self.held.pop()
        then = self.release if self.held else lambda _: self.end()
        connection.ask(Release(LOCK, wanted.key, token), then)

    def end(self, is_done: bool = True) -> None:
        if is_done:
            self.world.done.add(self)
            self.world.ended[self] = self.world.clock.now
        for connection in self.connections:
            connection.close()
        self.connections, self.held = [], []
        on_success, self.on_success, self.on_failure = self.on_success, self._over, self._over
        self.on_accepted = lambda *_: None
        self._over()
        self.worker.pool.end()
        on_success((False, None, 0.0))


class Worker:
    """One worker: the consumer's side is real."""

    def __init__(self, world: World, number: int, slots: int, is_celerys: bool) -> None:
        self.world, self.number = world, number
        self.pool = Pool(world, slots, is_celerys)
        semaphore = self.pool.semaphore
        begin = self.pool.begin
        timer = SimpleNamespace(
            call_after=world.clock.after, call_repeatedly=self._repeat, cancel=self._cancel
        )
        self.consumer = SimpleNamespace(
            pool=self.pool,
            timer=timer,
            on_task_request=begin if semaphore is None else lambda r: semaphore.acquire(begin, r),
            hub=object(),
            connection=None,
            event_dispatcher=None,
            controller=SimpleNamespace(
                semaphore=semaphore,
                pool_cls=SimpleNamespace(uses_semaphore=is_celerys),
                _process_task=begin,
            ),
        )
        self.timers: list[SimpleNamespace] = []
        self.wait = ConsumerWait(self.consumer)
        self.waits = Waits(world.server, f"worker-{number}")
        self.wait._pending = self.waits  # type: ignore[assignment]
        self.wait._releases.run = lambda job: world.clock.after(3 * WIRE, job)  # type: ignore
        self.wait._warn = lambda: None  # type: ignore[method-assign]
        self.wait.start()

    @property
    def is_free(self) -> bool:
        """Whether a process has nothing to do, and nobody is about to get it."""
        return self.wait._slots.value > 0 and self.pool.busy < self.pool.num_processes

    def receive(self, task: Task) -> None:
        if task.call.kind != "consumer":
            state.task_reserved(task)
            self.consumer.on_task_request(task)
        else:
            self.wait.take(task)

    def lose_broker(self) -> None:
        """It comes back, with the messages of those that have no process; as Celery does that."""
        lost = [waiter.request for waiter in self.wait._waiters]
        if self.pool.semaphore is not None:
            self.pool.slack += self.pool.busy  # Celery counts those that run no more
        self.consumer.controller.semaphore.clear()
        self.wait.stop()
        for task in lost:
            self.receive(task)  # too late
        self.wait.start()
        for task in lost:
            self.receive(task)

    def _repeat(self, seconds: float, function: Callable[[], object]) -> SimpleNamespace:
        entry = SimpleNamespace(is_cancelled=False)
        self.timers.append(entry)

        def again() -> None:
            if not entry.is_cancelled:
                function()
                self.world.clock.after(seconds, again)

        self.world.clock.after(seconds, again)
        return entry

    @staticmethod
    def _cancel(entry: SimpleNamespace) -> None:
        entry.is_cancelled = True


class World:
    """Everything.

    Args:
        slots: of each worker.
        limits: of each key.
        rates: of each key, in runs for each second; ``None`` is none.
        are_celerys: whether tasks wait for their slots in a semaphore of Celery.
        inbox: seconds until a worker does what its other threads have for it.
    """

    def __init__(
        self,
        slots: list[int],
        limits: list[int],
        rates: list[int | None],
        are_celerys: bool,
        inbox: float,
    ) -> None:
        self.inbox = inbox
        self.server = Server(self.clock)
        self.limits, self.rates = limits, (rates * len(limits))[: len(limits)]
        self.ran: list[Task] = []
        self.done: set[Task] = set()
        self.ended: dict[Task, float] = {}
        self.requeued = 0
        self._operator = Connection(self.server, "operator")
        self.inside: set[Task] = set()
        """Those whose bodies run."""
        self._pauses: list[SimpleNamespace] = []
        """Of which `key`, when they have `begun`, and their `end`."""
        self._idle_since: dict[bytes, float] = {}
        self.workers = [Worker(self, *each, are_celerys) for each in enumerate(slots)]
        self.clock.after(0, self._look)

    def _look(self) -> None:
        """See whether a lock is free though somebody wants it, and could use it at once."""
        now, ready = self.clock.now, {w.waits.instance for w in self.workers if w.is_free}
        entries = self.server.table._partition.spaces[LOCK]
        idle = set()
        for key, entry in entries.items():
            waiting = [waiter for waiter in entry.queue() if not (waiter.is_told or waiter.is_away)]
            wanting = [
                waiter
                for waiter in waiting
                if waiter.process is not None and waiter.process.instance.decode() in ready
            ]
            # One that takes more than is free may be ahead of these. Its worker asks, though perhaps
            # an ordinary task has taken its process since: it hears of that with the next turn.
            able = [waiter for waiter in waiting if waiter.can_start]
            if wanting and entry.pause is None and all(fits(entry, each, now) for each in able):
                idle.add(key)
                since = self._idle_since.setdefault(key, now)
                assert now - since < LONG_IDLE, f"{key!r} is free, and {len(wanting)} want it"
        self._idle_since = {key: at for key, at in self._idle_since.items() if key in idle}
        self.clock.after(0.01, self._look)

    def enter(self, task: Task) -> None:
        """Have a body begin, beside others that leave it room."""
        self.inside.add(task)
        for key in [each.key for each, *_ in task.held]:
            there = [each for task in self.inside for each, *_ in task.held if each.key == key]
            assert sum(each.slots for each in there) <= there[0].limit, f"too many have {key!r}"

    def pause(self, number: int, seconds: float) -> None:
        """Let nobody begin at a key for a while."""
        key = b"key-%d" % (number % len(self.limits))

        def is_paused(_: Any) -> None:
            at = self.clock.now - WIRE
            for pause in self._pauses:
                if pause.key == key:  # the latest counts
                    pause.end = min(pause.end, at)
            self._pauses.append(SimpleNamespace(key=key, begun=at, end=at + seconds))

        self._operator.ask(Pause(key, int(seconds * 1000)), is_paused)

    def check_not_paused(self, key: bytes) -> None:
        """Somebody hears now of a grant."""
        granted = self.clock.now - WIRE
        for pause in self._pauses:
            is_paused = pause.key == key and pause.begun < granted < pause.end - WIRE
            assert not is_paused, f"{key!r} is granted while it is paused"


def fits(entry: Entry, waiter: Waiter, now: float) -> bool:
    """Whether all is free that a waiter takes, and held for nobody."""
    queue = entry.queue()
    taken = entry.used + sum(each.weight for each in (*queue.told, *queue.expected))
    if taken + min(waiter.weight, entry.limit) > entry.limit:
        return False
    rate = queue.rate
    return rate is None or rate.free(now) - queue.places >= min(waiter.weight, rate.runs)


class SimulatedWaiter(consumer_wait.Waiter):
    """A waiter of a simulated task."""

    def __init__(self, task: Task) -> None:
        self.request, self.timeout = task, None
        self._locks = self._make_locks()
        self.lock = self._locks[0]
        self.handed = None
        self.is_in_pool = self.is_accepted = self.is_over = False
        self.is_cut = self.is_to_be_sent = False
        self._unique = None
        self.reservation = self.ticket = None

    @classmethod
    def of(cls, request: Any) -> SimulatedWaiter:
        return cls(request)

    def _make_locks(self) -> Any:
        task = self.request
        return [Lock(each) for each in (task.wanted, *task.others)] if task.others else [task]

    def hand_off(self, ticket: Any, lent: Any) -> Any:
        return Lent(ticket, lent) if lent else ticket

    def verdict(self, error: Any) -> Any:
        return error


@contextmanager
def world(
    slots: list[int],
    limits: list[int],
    rates: list[int | None] | None = None,
    are_celerys: bool = True,
    inbox: float = WIRE / 2,
) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer_wait, "Waiter", SimulatedWaiter)
        patch.setattr(consumer_wait, "HANDED", "dflock_handed")
        clock = SimpleNamespace(now=lambda: there.clock.now)
        quiet = SimpleNamespace(
            has_room=True, attach=lambda: None, raise_for=lambda _: None, lower_for=lambda _: None
        )
        patch.setattr(consumer_wait, "Prefetch", lambda _: quiet)
        patch.setattr(Inbox, "post", lambda _, job: there.clock.after(there.inbox, job))
        state.reset_state()
        there = World.__new__(World)
        there.clock = Clock()
        patch.setattr(consumer_wait, "clock", clock)
        there.__init__(slots, limits, rates or [None], are_celerys, inbox)  # type: ignore[misc]
        tell = Pending.tell

        def told(pending: Pending) -> None:
            check_order(there, pending)
            tell(pending)

        patch.setattr(Pending, "tell", told)
        yield there
        state.reset_state()


def check_order(there: World, pending: Pending) -> None:
    """Nobody of the same worker, key and group has come before, and waits still.

    The worker learns of it later than the server has decided, so only those count who were there.
    """
    table = there.server.table
    told = table._partition.reserved.get(pending.ticket.encode())
    if told is None or not told.is_told:
        return
    for waiter in told.entry.queue():
        if waiter.process is told.process and not waiter.is_told and waiter.group == told.group:
            assert waiter.number > told.number, "somebody who came later is told before"
