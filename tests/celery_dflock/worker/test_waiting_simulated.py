"""The consumer wait in a simulated world, where all that happens is random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_dflock.worker.consumer_wait import IDLE_HOLDS, LOOK_AROUND
from celery_dflock.worker.slots import Slots
from dflockd.table import Waiter
from dflockd.table.grouped import GroupedQueue
from dflockd.table.line import Line
from dflockd.table.slots import Slots as TableSlots
from dflockd.wire import ALL
from tests.celery_dflock.worker.simulated import Call, SimulatedWaiter, Task, World, world
from tests.celery_dflock.worker.simulated_locks import Pending

calls: st.SearchStrategy[list[Call]] = st.lists(
    st.builds(
        Call,
        st.sampled_from(["consumer", "consumer", "consumer", "slot", "ordinary"]),
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([0.0, 0.01, 0.3, 2.0]),
        st.sampled_from([0.0, 0.01, 0.2, 3.0]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([None, None, 0, 0, 1, 2]),
        st.just(0),
        st.sampled_from([False] * 9 + [True]),
        st.sampled_from([False, False, True]),
        st.sampled_from([1, 1, 1, 2, 3, ALL]),
    ),
    min_size=1,
    max_size=40,
)

PROCESSES = 9
"""The most of all workers, before some are resized."""

resizes = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([0.02, 0.35, 1.0]), st.sampled_from([-2, -1, 1, 3])
    ),
    max_size=4,
)


pauses = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([0.0, 0.02, 0.5]), st.sampled_from([0.01, 0.3, 2.0])
    ),
    max_size=3,
)


def send(world: World, wanted: list[Call]) -> list[Task]:
    tasks = []
    for number, call in enumerate(wanted):
        task = Task(world, number, call)
        world.clock.after(call.at, task.worker.receive, task)
        if call.is_revoked and call.kind == "consumer":
            world.clock.after(call.at + 0.05, setattr, task, "is_revoked", True)
        tasks.append(task)
    return tasks


def consumers(number: int, at: float = 0.0, seconds: float = 0.05, **more: Any) -> list[Call]:
    return [Call("consumer", 0, 0, at, seconds, **more) for _ in range(number)]


def ordinary(number: int, seconds: float, at: float = 0.0, every: float = 0.0) -> list[Call]:
    return [Call("ordinary", 0, 0, at + every * n, seconds) for n in range(number)]


def assert_all_end(there: World, tasks: list[Task], seconds: float, pauses: int = 0) -> None:
    def all_over() -> bool:
        return all(task in there.done or task.is_revoked for task in tasks)

    assert there.clock.run(all_over, seconds), "somebody is left"
    there.clock.run(lambda: False, there.clock.now + 10)
    for each in there.workers:
        assert not each.wait._waiters
        assert not each.waits.positions
    assert not len(there.server.table)
    assert len(set(there.ran)) == len(there.ran), "somebody has run twice"
    # Who was told of its turn just before a pause finds out in its process.
    assert there.requeued <= PROCESSES * pauses, "a process has waited for a lock in vain"
    for task in there.ran if there.requeued == 0 else ():
        same = [each for each in there.ran if each.call.at == task.call.at and is_like(each, task)]
        assert same == sorted(same, key=lambda each: each.number), "not first come, first served"


def is_like(one: Task, other: Task) -> bool:
    """Whether the order of two tasks is that of their arrival."""
    same = one.worker is other.worker and one.wanted.key == other.wanted.key
    if one.others or other.others:
        return False  # without a process for a while they queue anew
    in_line = one.call.kind == other.call.kind == "consumer" and one.wanted.limit == 1
    return same and in_line and one.call.group == other.call.group


@pytest.mark.parametrize("are_celerys", [True, False])
@pytest.mark.parametrize("rates", [[None], [20], [3, None]])
@settings(max_examples=120, deadline=None)
@given(
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    limits=st.lists(st.sampled_from([1, 1, 2, 100]), min_size=1, max_size=3),
    wanted=calls,
    sizes=resizes,
    paused=pauses,
)
@example(slots=[2], limits=[1], wanted=consumers(8), sizes=[], paused=[])
@example(
    slots=[2], limits=[100], wanted=[*ordinary(2, 0.5), *consumers(20, 0.1)], sizes=[], paused=[]
)
@example(
    slots=[2],
    limits=[1],
    wanted=[*ordinary(2, 0.5), *consumers(9, 0.1, group=0), *consumers(1, 0.2, group=1)],
    sizes=[],
    paused=[],
)
def test_all_end_whatever_is_mixed(
    are_celerys: bool,
    rates: list[int | None],
    slots: list[int],
    limits: list[int],
    wanted: list[Call],
    sizes: list[tuple[int, float, int]],
    paused: list[tuple[int, float, float]],
) -> None:
    """Nobody is lost, waits for ever, or waits for a lock in a process; no lock idles for nothing."""
    with world(slots, limits, rates, are_celerys) as there:
        tasks = send(there, wanted)
        for worker, at, more in sizes:
            pool = there.workers[worker % len(slots)].pool
            there.clock.after(at, pool.resize, more)
        for key, at, seconds in paused:
            there.clock.after(at, there.pause, key, seconds)
        work = sum(call.seconds for call in wanted) + sum(seconds for *_, seconds in paused)
        assert_all_end(there, tasks, 20 + 3 * work + 3 * len(tasks), len(paused))


@settings(max_examples=100, deadline=None)
@given(
    slots=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    ages=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    seconds=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_the_newest_runs_and_older_ones_end(
    slots: list[int], ages: list[int], seconds: float
) -> None:
    with world(slots, [1]) as there:
        for _ in range(10):
            there.server.table._partition.issuer.number()
        sent = [
            Call("consumer", number, 0, 0.01 * number, seconds, age=age)
            for number, age in enumerate(ages)
        ]
        tasks = send(there, [*ordinary(2, 0.1), *sent])
        assert_all_end(there, tasks, 60)
        newest = [task for task in tasks if task.call.age == max(ages)]
        assert any(task in there.ran for task in newest)


@pytest.mark.parametrize("are_celerys", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2])
def test_one_worker_keeps_the_order_of_arrival(slots: int, limit: int, are_celerys: bool) -> None:
    with world([slots], [limit], are_celerys=are_celerys) as there:
        tasks = send(there, [Call("consumer", 0, 0, 0.001 * n, 0.05) for n in range(50)])
        assert there.clock.run(lambda: len(there.done) == 50, 10.0)
        assert there.ran == tasks
        assert there.clock.now < 50 * 0.08 / min(slots, limit) + 0.2, "the key was idle"
        assert there.requeued == there.workers[0].waits.passed == 0
        assert len(there.workers[0].wait._waiters) <= 2, "connections are kept for nothing"


@pytest.mark.parametrize("are_celerys", [True, False])
@pytest.mark.parametrize("weight", [2, 3, ALL])
def test_one_that_takes_several_is_not_passed_by_those_that_take_one(
    weight: int, are_celerys: bool
) -> None:
    """They come as fast as they end, so that without its turn it would wait for them all."""
    with world([4], [3], are_celerys=are_celerys) as there:
        light = [Call("consumer", 0, 0, 0.016 * n, 0.05) for n in range(50)]
        light[10] = light[10]._replace(weight=weight)
        tasks = send(there, light)
        assert_all_end(there, tasks, 10.0)
        assert there.ran == tasks


@pytest.mark.parametrize("are_celerys", [True, False])
def test_one_that_takes_several_and_has_no_process_keeps_nobody_waiting(are_celerys: bool) -> None:
    with world([1, 1], [3], are_celerys=are_celerys) as there:
        free = [Call("consumer", 1, 0, 0.3, 0.05)] * 20
        tasks = send(there, [*ordinary(1, 10.0), *consumers(1, 0.1, weight=ALL), *free])
        assert there.clock.run(lambda: set(tasks[2:]) <= there.done, 0.3 + 20 * 0.07 + 0.1)
        assert_all_end(there, tasks, 12.0)


def test_nobody_begins_in_a_pause_and_all_do_after_in_order() -> None:
    with world([2], [1]) as there:
        tasks = send(there, [*ordinary(2, 0.5), *consumers(300, 0.1, 0.01)])
        there.clock.after(0.2, there.pause, 0, 3.0)
        assert_all_end(there, tasks, 40.0, 1)
        assert there.ran == tasks[2:]
        assert min(there.ended[task] for task in there.ran) > 3.2


@pytest.mark.parametrize("are_celerys", [True, False])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_in_a_pool_that_is_always_full_they_take_their_turns(
    slots: int, limit: int, are_celerys: bool
) -> None:
    """With the others there, in their order; none has a process before it has a turn."""
    with world([slots], [limit], are_celerys=are_celerys) as there:
        others = ordinary(200, 0.1, every=0.098 / slots)
        tasks = send(there, [*others, *consumers(20, 0.1)])
        assert there.clock.run(lambda: len(there.done) == 220, 60.0)
        order = sorted(there.ran, key=there.ended.__getitem__)
        assert there.ended[order[-1]] < there.ended[tasks[199]], "they wait for all others"
        assert there.requeued == 0
        assert there.ran == tasks[200:]
        assert there.workers[0].waits.passed <= 25


def test_a_key_is_not_idle_for_those_without_a_process() -> None:
    """Long tasks fill one worker; the other one serves the key meanwhile."""
    with world([1, 1], [1]) as there:
        free = [Call("consumer", 1, 0, 0.2, 0.05)] * 20
        tasks = send(there, [*ordinary(1, 10.0), *consumers(5, 0.1), *free])
        others = set(tasks[6:])
        assert there.clock.run(lambda: others <= there.done, 0.2 + 20 * 0.07 + 0.1)
        assert there.clock.run(lambda: len(there.done) == len(tasks), 11.0)
        assert there.ran[20:] == tasks[1:6]


def test_a_group_with_one_task_does_not_wait_for_all_of_another() -> None:
    with world([2], [1]) as there:
        big, small = consumers(16, 0.1, group=0), consumers(1, 0.2, group=1)
        tasks = send(there, [*ordinary(2, 0.5), *big, *small])
        assert there.clock.run(lambda: len(there.done) == len(tasks), 10.0)
        assert there.ran == [tasks[2], tasks[-1], *tasks[3:-1]]


@pytest.mark.parametrize("held", [0, 1])
def test_what_comes_for_a_wait_that_was_given_up_meanwhile_is_not_used(held: int) -> None:
    """One of its locks comes as the worker gives back the others, and hears of it later."""
    for hundredth in range(250, 350, 5):
        with world([1, 1], [1, 1, 1], inbox=0.2) as there:
            holder = Call("slot", 1, held, 0.0, hundredth / 100)
            wanting = Call("consumer", 0, 0, 0.1, 0.05, needs_all=True)
            assert_all_end(there, send(there, [*ordinary(1, 6.0), holder, wanting]), 30)


@pytest.mark.parametrize("are_celerys", [True, False])
def test_whoever_loses_its_broker_queues_for_a_process_anew(are_celerys: bool) -> None:
    """Whatever it was about to do: Celery's semaphore forgets who queued, and who has a slot."""
    for hundredth in (20, 102, 104, 107):
        with world([1], [1], are_celerys=are_celerys, inbox=0.05) as there:
            worker = there.workers[0]
            tasks = send(there, [*ordinary(1, 1.0), *consumers(3, 0.1, 0.5)])
            there.clock.after(hundredth / 100, worker.lose_broker)
            assert_all_end(there, tasks, 30)
            assert [each.is_cancelled for each in worker.timers] == [True, False]


def test_who_is_given_up_just_as_it_gets_a_lock_does_not_wait_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread does that, which has lost the broker, and the message with it."""
    has_next = SimulatedWaiter.has_next
    with world([1], [1, 1]) as there:

        def give_up_first(waiter: SimulatedWaiter) -> None:
            there.workers[0].wait._drop(waiter)
            has_next(waiter)

        monkeypatch.setattr(SimulatedWaiter, "has_next", give_up_first)
        send(there, consumers(1, needs_all=True))
        there.clock.run(lambda: False, 5.0)
        assert not there.ran
        assert not there.workers[0].wait._waiters
        assert not len(there.server.table), "it holds one of them, or waits"


def test_a_turn_that_is_heard_of_twice_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection broke in between."""
    with world([2], [1, 1]) as there:
        tell = Pending.tell

        def tell_twice(pending: Pending) -> None:
            tell(pending)
            pending._told()

        monkeypatch.setattr(Pending, "tell", tell_twice)
        assert_all_end(there, send(there, consumers(3, needs_all=True)), 10)


@pytest.mark.parametrize("are_celerys", [True, False])
def test_those_without_a_process_do_not_hold_a_key_one_after_the_other(are_celerys: bool) -> None:
    """The task in the only process waits for it behind them all."""
    with world([1], [1, 1], are_celerys=are_celerys) as there:
        slot = Call("slot", 0, 0, 0.1, 0.05)
        tasks = send(there, [*ordinary(1, 1.0), slot, *consumers(30, 0.3, needs_all=True)])
        assert there.clock.run(lambda: tasks[1] in there.done, 1.0 + IDLE_HOLDS + 2 * LOOK_AROUND)
        assert_all_end(there, tasks, 60)


def test_hundreds_say_little() -> None:
    with world([1], [1]) as there:
        send(there, [*ordinary(1, 5.0), *consumers(500, 0.1, 0.001)])
        assert there.clock.run(lambda: len(there.done) == 501, 300.0)
        assert there.requeued == 0
        assert there.workers[0].waits.passed <= 1


# What it is good for: each of these faults is found.


def hands_over_without_a_process(patch: pytest.MonkeyPatch) -> None:
    """As if whoever is told had one: it queues for a process, and others wait behind its turn."""
    patch.setattr(Slots, "value", 1)


def forgets_those_it_passed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TableSlots, "find_turn", lambda *_: None)


def waits_for_who_does_not_ask(patch: pytest.MonkeyPatch) -> None:
    """The first in line blocks those behind it."""

    def only_the_first(line: Line) -> Waiter | None:
        first = line.foremost()
        return first if first is not None and first.can_start else None

    patch.setattr(Line, "next", only_the_first)


def puts_a_turn_that_was_not_used_last(patch: pytest.MonkeyPatch) -> None:
    def go_last(line: Line, waiter: Waiter) -> None:
        waiter.number += 1000
        line.enter(waiter)

    patch.setattr(Line, "go_back", go_last)


def gives_no_turn_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pending, "pass_on", lambda _: None)


def never_queues_for_a_process(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "acquire", lambda *_: None)


def counts_everybody_as_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupedQueue, "is_room_for", lambda *_: True)


def begins_in_a_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TableSlots, "pause", lambda *_: None)


@pytest.mark.parametrize(
    "fault",
    [
        hands_over_without_a_process,
        forgets_those_it_passed_over,
        waits_for_who_does_not_ask,
        puts_a_turn_that_was_not_used_last,
        gives_no_turn_again,
        never_queues_for_a_process,
        counts_everybody_as_one,
        begins_in_a_pause,
    ],
)
def test_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = 0
    for limit, rates in ((1, [None]), (1, [20]), (4, [None])):
        for sent in (
            [*ordinary(2, 0.5), *consumers(20, 0.1)],
            [*ordinary(9, 0.3), *consumers(9, 0.1, group=0), *consumers(1, 0.2, group=1)],
            [Call("slot", 1, 0, 0.0, 1.0), *consumers(9, 0.1), *ordinary(1, 2.0, 0.5)],
            [*ordinary(4, 1.0), *[Call("consumer", n % 2, 0, 0.01, 0.05) for n in range(20)]],
            [Call("consumer", n % 2, 0, 0.0, 0.5, weight=3) for n in range(4)],
        ):
            with world([1, 1], [limit], rates, are_celerys=False) as there:
                there.clock.after(0.3, there.pause, 0, 0.4)
                try:
                    assert_all_end(there, send(there, sent), 30, 1)
                except (AssertionError, KeyError):
                    found += 1
    assert found
