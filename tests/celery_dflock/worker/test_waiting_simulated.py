"""The consumer wait in a simulated world, where all that happens is random."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_dflock.worker.turns import Turns
from tests.celery_dflock.worker.simulated import Task, World, world

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
