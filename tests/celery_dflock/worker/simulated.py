"""A simulated world around the consumer wait: workers, pools, one lock server.

The code is the worker's own, from its inbox to the pool. Time, the broker, the pool, the processes
and the lock server are simulated, with what the server promises and nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_dflock.worker import consumer_wait
from celery_dflock.worker.consumer_wait import ConsumerWait
from tests.celery_dflock.worker.simulated_locks import START, WIRE, Clock, Key, Pending, Position

TURN_PATIENCE = 1.0
"""Seconds for which a process waits for a position that it takes up."""


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
