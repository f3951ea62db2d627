"""A simulated world around the consumer wait: workers, pools, one lock server.

The code is the worker's own, from its inbox to the pool. Time, the broker, the pool, the processes
and the lock server are simulated, with what the server promises and nothing more.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_dflock.worker import consumer_wait
from celery_dflock.worker.consumer_wait import TOLD_MS, ConsumerWait

TURN_PATIENCE = 1.0
"""Seconds for which a process waits for a position that it takes up."""


WIRE = 0.001
"""Seconds that anything takes to get from one to another."""


START = 0.01
"""Seconds from a process's accepting a task to its asking for the lock."""


class Clock:
    """The time, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def after(self, seconds: float, function: Callable[..., object], *args: Any) -> SimpleNamespace:
        entry = SimpleNamespace(is_cancelled=False)
        job = partial(self._unless_cancelled, entry, partial(function, *args))
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), job))
        return entry

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Go on until something is so; `False` if it is not after so many seconds."""
        while self._events and not until():
            at, _, job = heapq.heappop(self._events)
            if at > seconds:
                return False
            self.now = max(self.now, at)
            job()
        return until()

    @staticmethod
    def _unless_cancelled(entry: SimpleNamespace, function: Callable[[], object]) -> None:
        if not entry.is_cancelled:
            function()


@dataclass(eq=False)
class Position:
    """Somebody in the queue of a key."""

    number: int
    tell: Callable[[], None] | None = None
    """Where it waits to be told; `None` for one that is to be granted."""
    grant: Callable[[], None] | None = None
    told_until: float = -1.0
    is_passed: bool = False


@dataclass
class Key:
    """One key of the lock server."""

    clock: Clock
    limit: int = 1
    queue: list[Position] = field(default_factory=list)
    holders: set[object] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def join(self, position: Position) -> None:
        self.queue.append(position)
        self.queue.sort(key=lambda each: each.number)
        self.promote()

    def promote(self) -> None:
        while True:
            expected = [each for each in self.queue if each.told_until > self.clock.now]
            if len(self.holders) + len(expected) >= self.limit:
                return
            waiting = (each for each in self.queue if not each.is_passed and each.told_until < 0)
            first = next(waiting, None)
            if first is None:
                return
            if first.grant is not None:
                self.take(first)
            else:
                self.tell(first)

    def take(self, position: Position) -> None:
        self.queue.remove(position)
        self.holders.add(position)
        assert len(self.holders) <= self.limit, "too many holders"
        assert position.grant is not None
        self.clock.after(WIRE, position.grant)

    def tell(self, position: Position) -> None:
        position.told_until = self.clock.now + TOLD_MS / 1000
        assert position.tell is not None
        self.clock.after(WIRE, position.tell)
        self.clock.after(TOLD_MS / 1000, self.lapse, position)

    def lapse(self, position: Position) -> None:
        if 0 <= position.told_until <= self.clock.now:
            self.pass_on(position)

    def pass_on(self, position: Position) -> None:
        if position.told_until >= 0:
            position.told_until, position.is_passed = -1.0, True
            self.promote()

    def come_back(self, position: Position) -> None:
        if position in self.queue:
            position.told_until, position.is_passed = -1.0, False
            self.promote()

    def resume(self, position: Position) -> None:
        """Who runs it takes the position up, or has a new one."""
        was_expected = position.told_until > self.clock.now
        position.told_until, position.is_passed = -1.0, False
        if position not in self.queue:
            position.number = next(self.numbers)
            self.join(position)
        elif was_expected:
            self.take(position)
        else:
            self.promote()

    def leave(self, position: Position) -> None:
        if position in self.queue:
            self.queue.remove(position)
            self.promote()

    def release(self, position: Position) -> None:
        self.holders.remove(position)
        self.promote()


class Pending:
    """The client's part of one wait."""

    def __init__(self, key: Key, position: Position) -> None:
        self.key, self.position = key, position
        self.is_taken_up = False
        self.messages = 0

    def hand_over(self) -> Position:
        return self.position

    def pass_on(self) -> None:
        self._say(self.key.pass_on)

    def come_back(self) -> None:
        self._say(self.key.come_back)

    def leave(self) -> None:
        self._say(self.key.leave)

    def _say(self, what: Callable[[Position], None]) -> None:
        self.messages += 1
        self.key.clock.after(WIRE, self._arrives, what)

    def _arrives(self, what: Callable[[Position], None]) -> None:
        if not self.is_taken_up:
            what(self.position)


class Pool:
    """Processes, and those who queue for one, as Celery's event loop has it."""

    is_green = False

    def __init__(self, world: World, size: int) -> None:
        self.world = world
        self.num_processes = size
        self.semaphore = SimpleNamespace(value=size)
        self.waiting: deque[Task] = deque()
        self.crowd = 0
        """How many for one key have stood in line at once."""

    def put(self, task: Task) -> None:
        if self.semaphore.value > 0:
            self.semaphore.value -= 1
            self.run(task)
        else:
            self.waiting.append(task)
            same = [each for each in self.waiting if each.kind == "consumer" == task.kind]
            self.crowd = max(self.crowd, sum(each.key is task.key for each in same))

    def free(self) -> None:
        if self.waiting:
            self.run(self.waiting.popleft())
        else:
            self.semaphore.value += 1

    def run(self, task: Task) -> None:
        if task.revoked():
            self.free()
        else:
            self.world.clock.after(WIRE, task.begin)


class Task:
    """A request, and the process that runs it."""

    def __init__(
        self, world: World, number: int, worker: Worker, kind: str, key: int, seconds: float
    ):
        self.world, self.number, self.worker = world, number, worker
        self.kind, self.key, self.seconds = kind, world.keys[key], seconds
        self.id = str(number)
        self.request_dict: dict[str, Any] = {}
        self.content_type = "application/json"
        self.pending: Pending | None = None
        self.position: Position | None = None
        self.is_revoked = False
        self.on_accepted: Callable[..., Any] = lambda *_: None
        self.on_success: Callable[..., Any] = self._over
        self.on_failure: Callable[..., Any] = self._over

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
        if self.kind == "ordinary":
            self.world.clock.after(self.seconds, self.end)
            return
        self.world.clock.after(START, self.ask)

    def ask(self) -> None:
        position = self.position
        if self.kind == "slot" or position is None:
            self.position = position = Position(next(self.key.numbers), grant=self.run)
            self.key.join(position)
            return
        assert self.pending is not None
        self.pending.is_taken_up = True
        position.grant, position.tell = self.run, None
        self.world.clock.after(TURN_PATIENCE, self.give_up, position)
        self.key.resume(position)

    def give_up(self, position: Position) -> None:
        """Requeue the task; its position is kept, and it comes again to the consumer."""
        if position in self.key.queue and position.grant is not None:
            self.world.requeued += 1
            position.grant, position.is_passed = None, True
            self.end(is_done=False)
            self.world.clock.after(0.5, self.worker.receive, self)

    def run(self) -> None:
        self.world.ran.append(self)
        self.world.clock.after(self.seconds, self.release)

    def release(self) -> None:
        assert self.position is not None
        self.key.release(self.position)
        self.world.clock.after(WIRE, self.end)

    def end(self, is_done: bool = True) -> None:
        if is_done:
            self.world.done.add(self)
        on_success, self.on_success, self.on_failure = self.on_success, self._over, self._over
        self.on_accepted = lambda *_: None
        on_success((False, None, 0.0))
        self.worker.pool.free()


class Waits:
    """`PendingAcquires` of one worker."""

    def __init__(self, world: World) -> None:
        self.world = world

    def join(self, task: Task, _timeout: object, *, told: Callable[[], None], **_: Any) -> Pending:
        position = task.position
        if position is None:
            position = task.position = Position(next(task.key.numbers))
        position.tell = told
        pending = task.pending = Pending(task.key, position)
        if position in task.key.queue:
            self.world.clock.after(WIRE, task.key.come_back, position)
        else:
            self.world.clock.after(WIRE, task.key.join, position)
        self.world.pendings.append(pending)
        return pending

    def close(self) -> None:
        pass


class Worker:
    """One worker: the consumer's side is real."""

    def __init__(self, world: World, slots: int) -> None:
        self.world = world
        self.pool = Pool(world, slots)
        timer = SimpleNamespace(
            call_after=world.clock.after, call_repeatedly=self._repeat, cancel=self._cancel
        )
        self.wait = ConsumerWait(
            SimpleNamespace(
                pool=self.pool,
                timer=timer,
                on_task_request=self.pool.put,
                hub=object(),
                event_dispatcher=None,
            )
        )
        self.wait._pending = Waits(world)  # type: ignore[assignment]
        self.wait._inbox.post = lambda job: world.clock.after(WIRE / 2, job)  # type: ignore
        self.wait._warn = lambda: None  # type: ignore[method-assign]
        self.wait.start()

    def receive(self, task: Task) -> None:
        if task.kind != "consumer":
            state.task_reserved(task)
            self.pool.put(task)
        else:
            self.wait.take(task)

    def _repeat(self, seconds: float, function: Callable[[], object]) -> SimpleNamespace:
        entry = SimpleNamespace(is_cancelled=False)

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
    """Everything."""

    def __init__(self, slots: list[int], limits: list[int]) -> None:
        self.clock = Clock()
        self.keys = [Key(self.clock, limit) for limit in limits]
        self.ran: list[Task] = []
        self.done: set[Task] = set()
        self.pendings: list[Pending] = []
        self.requeued = 0
        self.workers = [Worker(self, number) for number in slots]


class SimulatedWaiter(consumer_wait.Waiter):
    """A waiter of a simulated task."""

    def __init__(self, task: Task) -> None:
        self.request, self.limit, self.timeout, self._late_at = task, task.key.limit, None, None
        self.lock = task  # type: ignore[assignment]
        self.handed = None
        self.is_in_pool = self.is_accepted = self.is_over = False
        self.reservation = self.ticket = None
        self.owner = (task.id, 0)

    @classmethod
    def of(cls, request: Any) -> SimulatedWaiter:
        return cls(request)

    @property
    def line(self) -> Any:
        return id(self.request.key)

    def hand_off(self, ticket: Any) -> Any:
        return SimpleNamespace(put=lambda _: None)


@contextmanager
def world(slots: list[int], limits: list[int]) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer_wait, "Waiter", SimulatedWaiter)
        quiet = SimpleNamespace(
            has_room=True, attach=lambda: None, raise_for=lambda _: None, lower_for=lambda _: None
        )
        patch.setattr(consumer_wait, "Prefetch", lambda _: quiet)
        state.reset_state()
        yield World(slots, limits)
        state.reset_state()
