"""The consumer wait in a simulated world: workers, pools, one lock server; all that happens at random.

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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_dflock.worker import consumer_wait
from celery_dflock.worker.consumer_wait import TOLD_MS, ConsumerWait
from celery_dflock.worker.turns import Turns

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


Call = tuple[str, int, int, float, float, bool]
"""Kind, worker, key, when it is sent, for how long it runs, and whether it is revoked soon."""

calls: st.SearchStrategy[list[Call]] = st.lists(
    st.tuples(
        st.sampled_from(["consumer", "consumer", "slot", "ordinary"]),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([0.0, 0.01, 0.3, 2.0]),
        st.sampled_from([0.0, 0.01, 0.2, 3.0]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=40,
)


def send(world: World, wanted: list[Call]) -> list[Task]:
    tasks = []
    for number, (kind, worker, key, at, seconds, is_revoked) in enumerate(wanted):
        its = world.workers[worker % len(world.workers)]
        task = Task(world, number, its, kind, key % len(world.keys), seconds)
        world.clock.after(at, its.receive, task)
        if is_revoked and kind == "consumer":
            world.clock.after(at + 0.05, setattr, task, "is_revoked", True)
        tasks.append(task)
    return tasks


@settings(max_examples=300, deadline=None)
@given(
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    limits=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    wanted=calls,
)
@example(slots=[2], limits=[1], wanted=[("consumer", 0, 0, 0, 0.05, False)] * 8)
@example(
    slots=[2],
    limits=[1],
    wanted=[(kind, 0, 0, 0, 0.05, False) for kind in ("slot", "consumer") * 8],
)
def test_all_end_whatever_is_mixed(slots: list[int], limits: list[int], wanted: list[Call]) -> None:
    """Nobody is lost or waits for ever, and what is said to the server does not grow with the queue."""
    with world(slots, limits) as there:
        tasks = send(there, wanted)
        work = sum(call[4] for call in wanted)

        def all_over() -> bool:
            return all(task in there.done or task.is_revoked for task in tasks)

        assert there.clock.run(all_over, 10 + 3 * work + 3 * len(tasks)), "somebody is left"
        there.clock.run(lambda: False, there.clock.now + 10)
        for each in there.workers:
            assert not each.wait._waiters
            assert not len(each.wait._turns)
        assert not any(key.queue or key.holders for key in there.keys)
        assert len(set(there.ran)) == len(there.ran), "somebody has run twice"
        assert all(pending.messages <= 5 for pending in there.pendings)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2])
def test_one_worker_keeps_the_order_of_arrival(slots: int, limit: int) -> None:
    with world([slots], [limit]) as there:
        tasks = send(there, [("consumer", 0, 0, 0.001 * n, 0.05, False) for n in range(50)])
        assert there.clock.run(lambda: len(there.done) == 50, 10.0)
        if min(slots, limit) == 1:
            assert there.ran == tasks
        assert there.clock.now < 50 * 0.08 / min(slots, limit) + 0.2, "the key was idle"
        assert there.requeued == 0
        assert len(there.workers[0].wait._waiters) <= 2, "connections are kept for nothing"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("limit", [1, 2])
def test_a_pool_that_is_full_has_few_of_each_key_in_its_line(slots: int, limit: int) -> None:
    """They take their turns with the others there, in their order, and none is sent away again."""
    with world([slots], [limit]) as there:
        busy: list[Call] = [("ordinary", 0, 0, 0.09 * n, 0.2, False) for n in range(60)]
        tasks = send(there, busy + [("consumer", 0, 0, 0.1, 0.05, False)] * 20)
        assert there.clock.run(lambda: len(there.done) == 80, 30.0), "somebody starves"
        assert there.workers[0].pool.crowd == limit
        assert there.requeued == 0
        if min(slots, limit) == 1:
            assert there.ran == tasks[60:]


def test_a_key_is_not_idle_for_those_without_a_process() -> None:
    """Long tasks fill one worker; the other one serves the key meanwhile."""
    with world([1, 1], [1]) as there:
        stuck: list[Call] = [("consumer", 0, 0, 0.1, 0.05, False)] * 5
        free: list[Call] = [("consumer", 1, 0, 0.2, 0.05, False)] * 20
        tasks = send(there, [("ordinary", 0, 0, 0.0, 10.0, False), *stuck, *free])
        others = set(tasks[6:])
        assert there.clock.run(lambda: others <= there.done, 0.2 + 20 * 0.07 + 0.1)
        assert there.clock.run(lambda: len(there.done) == len(tasks), 11.0)
        assert there.ran[20:] == tasks[1:6]


def test_thousands_are_told_once_and_called_back_once() -> None:
    with world([1], [1]) as there:
        send(there, [("ordinary", 0, 0, 0.0, 5.0, False)])
        send(there, [("consumer", 0, 0, 0.1, 0.001, False)] * 2000)
        assert there.clock.run(lambda: len(there.done) == 2001, 300.0)
        assert max(pending.messages for pending in there.pendings) <= 3
        assert there.requeued == 0


def test_who_is_never_told_changes_nothing() -> None:
    turns: Turns[Any] = Turns()
    one = SimpleNamespace(line="key", limit=1)
    assert turns.settle(one) == []
    assert not turns.is_due(one)
    assert len(turns) == 0
