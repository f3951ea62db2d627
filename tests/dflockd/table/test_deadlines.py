"""The heap of deadlines against a plain list."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.table import Deadlines
from dflockd.table.deadlines import FEW_CHAINS, SPAN_STEP, Timed, rounded


def test_nothing_falls_due_of_nothing() -> None:
    deadlines: Deadlines = Deadlines()
    assert deadlines.next() is None
    assert deadlines.pop(1e9) is None
    assert len(deadlines) == 0


def test_due_is_at_the_deadline_and_not_before() -> None:
    deadlines: Deadlines = Deadlines()
    item = Timed()
    deadlines.set(item, 5, 10.0)
    assert deadlines.next() == 15.0
    assert deadlines.pop(14.999) is None
    assert deadlines.pop(15.0) is item
    assert deadlines.next() is None


def test_order_of_what_falls_due_together() -> None:
    deadlines: Deadlines = Deadlines()
    items = [Timed() for _ in range(4)]
    deadlines.set(items[0], 5, 0.0)
    deadlines.set(items[1], 5, 0.0)
    deadlines.set(items[2], 3, 2.0)
    deadlines.set(items[3], 3, 2.0)
    assert [deadlines.pop(5.0) for _ in range(5)] == [items[2], items[3], items[0], items[1], None]


def test_cleared_is_gone() -> None:
    deadlines: Deadlines = Deadlines()
    item = Timed()
    deadlines.set(item, 5, 0.0)
    deadlines.clear(item)
    assert deadlines.next() is None
    with pytest.raises(KeyError):
        deadlines.clear(item)


@pytest.mark.parametrize("cleared", range(4))
def test_what_is_set_beside_something_cleared_stays(cleared: int) -> None:
    deadlines: Deadlines = Deadlines()
    items = [Timed() for _ in range(4)]
    for number, item in enumerate(items):
        deadlines.set(item, 5, number)
    deadlines.clear(items[cleared])
    items.append(Timed())
    deadlines.set(items[4], 5, 4)
    assert len(deadlines) == 4
    left = [item for item in items if item is not items[cleared]]
    assert [deadlines.pop(10) for _ in range(5)] == [*left, None]


def test_many_spans_far_away_do_not_pile_up() -> None:
    # A client may choose another timeout each time; an item that is nearer hides them from `next`.
    deadlines: Deadlines = Deadlines()
    near = Timed()
    deadlines.set(near, 1, 0.0)
    for span in range(1000, 6000):
        item = Timed()
        deadlines.set(item, span, 0.0)
        assert deadlines.next() == 1.0
        deadlines.clear(item)
    assert len(deadlines) == 1
    assert len(deadlines._chains) <= FEW_CHAINS
    assert len(deadlines._heads) == len(deadlines._chains)


@given(st.floats(-1, 1e6) | st.integers(0, 10_000).map(lambda tenths: tenths / 10))
def test_a_rounded_span_is_never_shorter_and_little_longer(seconds: float) -> None:
    # A lease that was restored would end too early otherwise.
    assert max(0.0, seconds) - 1e-6 <= rounded(seconds) < max(0.0, seconds) + SPAN_STEP + 1e-6


def test_what_is_set_with_the_span_of_a_chain_that_was_dropped_falls_due() -> None:
    deadlines: Deadlines = Deadlines()
    for now in (0.0, 10.0, 20.0):
        item = Timed()
        deadlines.set(item, 5, now)
        assert deadlines.pop(now + 5) is item
        assert deadlines.next() is None


actions = st.tuples(
    st.sampled_from(["set", "set", "clear", "reset", "pass", "pop"]),
    st.integers(0, 30),
    st.integers(1, 6) | st.integers(1, 500),
)


@given(st.lists(actions, max_size=400))
def test_like_a_plain_list(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines = Deadlines()
    plain: list[tuple[float, float, int, Timed]] = []  # deadline, span, when it was set, what
    now = 0.0
    for number, (action, choice, span) in enumerate(steps):
        if action == "set":
            item = Timed()
            deadlines.set(item, span, now)
            plain.append((now + span, span, number, item))
        elif action in ("clear", "reset") and plain:
            item = plain.pop(choice % len(plain))[3]
            if action == "clear":
                deadlines.clear(item)
            else:
                deadlines.reset(item, span, now)
                plain.append((now + span, span, number, item))
        elif action == "pass":
            now += choice / 2
        elif action == "pop":
            due = min((row for row in plain if row[0] <= now), default=None, key=lambda r: r[:3])
            assert deadlines.pop(now) is (due[3] if due else None)
            if due:
                plain.remove(due)
        first = min((row[0] for row in plain), default=None)
        if first is not None:
            assert deadlines.earliest <= first
        if choice % 3 == 0:
            assert deadlines.next() == first
            assert deadlines.earliest == (math.inf if first is None else first)
        assert len(deadlines) == len(plain)
        assert all(item.deadline == when and item.span == s for when, s, _, item in plain)
