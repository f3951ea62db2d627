"""A look at what a server may still say that says nothing: pure, with times that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from dflockd import errors
from dflockd.address import Address
from dflockd.client.operations import GRACE
from dflockd.client.routing import (
    ASKED_AT_LEAST,
    LOOK_AGAIN,
    LOOK_EVERY,
    Ask,
    Load,
    ShardMap,
    SignOfLife,
    StepOutcome,
    glance,
    pursue,
)
from tests.dflockd.client.routing_support import (
    GONE,
    KEY,
    NOW,
    SHARD,
    A,
    B,
    C,
    known,
    moved,
    report,
)


def glances(shards: ShardMap, *outcomes: Any, is_waiting: bool = True) -> list[Any]:
    """Look at A, and return the steps; with an error, that comes last."""
    path, steps = glance(shards, KEY, A, is_waiting, NOW), []
    remaining = list(outcomes)
    try:
        step = next(path)
        while True:
            steps.append(step)
            if isinstance(step, Ask):
                break
            step = path.send(remaining.pop(0))
    except errors.MovedError as exc:
        steps.append(exc)
    assert not remaining
    return steps


SILENT = StepOutcome(NOW + 1, errors.UnreachableError("no answer in time"))


def test_one_that_is_alive_is_waited_for() -> None:
    assert glances(known(), StepOutcome(NOW)) == [SignOfLife(A), Ask(A, LOOK_EVERY)]


def test_one_that_nobody_has_replaced_yet_is_waited_for() -> None:
    ping, load, end = glances(known(), SILENT, StepOutcome(NOW + 1, report=report(A)))
    assert ping == SignOfLife(A)
    assert load.server in (B, C)
    assert end == Ask(A, LOOK_AGAIN)


def test_one_that_has_been_replaced_is_left() -> None:
    *_, moved = glances(known(), SILENT, StepOutcome(NOW + 1, report=report(B, 8, (B, C))))
    assert (moved.to, moved.epoch, moved.shard) == (str(B), 8, SHARD)
    assert "says nothing" in str(moved)


def test_who_waits_for_nothing_but_an_answer_asks_for_no_sign_of_life() -> None:
    load, end = glances(known(), StepOutcome(NOW, report=report(A)), is_waiting=False)
    assert isinstance(load, Load)
    assert end == Ask(A, LOOK_AGAIN)


def test_what_others_of_the_process_have_seen_counts() -> None:
    shards = known()
    assert glances(shards, StepOutcome(NOW)) == [SignOfLife(A), Ask(A, LOOK_EVERY)]
    assert glances(shards) == [Ask(A, LOOK_EVERY)]
    shards.signs[A] = NOW - 0.1, None
    assert glances(shards) == [Ask(A, LOOK_AGAIN)], "somebody is looking"
    shards.signs[A] = NOW - 100, None
    assert glances(shards, StepOutcome(NOW)) == [SignOfLife(A), Ask(A, LOOK_EVERY)]


def test_the_others_say_nothing_either() -> None:
    """A look takes no longer than for a few of them, however many there are."""
    many = tuple(Address(f"server-{n}", 6388) for n in range(100))
    shards = known()
    shards.update(report(A, 7, (A, *many)), A, NOW - 100)
    steps = glances(shards, SILENT, *[SILENT] * ASKED_AT_LEAST)
    assert len(steps) == ASKED_AT_LEAST + 2
    assert {step.patience for step in steps[1:-1]} == {0}, "the least that any answer is given"
    assert A not in [step.server for step in steps[1:-1]]
    assert steps[-1] == Ask(A, LOOK_AGAIN)


def test_all_are_silent_when_the_time_is_over() -> None:
    many = tuple(Address(f"server-{n}", 6388) for n in range(100))
    shards = known()
    shards.update(report(A, 7, (A, *many)), A, NOW - 100)
    path = pursue(shards, KEY, NOW, NOW)
    assert next(path) == Ask(A, 0)
    now = NOW + GRACE
    load = path.send(StepOutcome(now, GONE))
    for _ in range(ASKED_AT_LEAST - 1):
        assert isinstance(load, Load)
        assert load.patience == 0
        now += 0.5
        load = path.send(StepOutcome(now, SILENT.error))
    with pytest.raises(errors.UnreachableError, match="gone"):
        path.send(StepOutcome(now, SILENT.error))


def test_nobody_is_followed_long_after_the_time_is_over() -> None:
    """One server after the other may hang, and send on when it goes on."""
    path = pursue(known(), KEY, NOW, NOW)
    assert next(path) == Ask(A, 0)
    assert path.send(StepOutcome(NOW + 1, moved(B))) == Ask(B, 0)
    with pytest.raises(errors.MovedError):
        path.send(StepOutcome(NOW + GRACE, moved(C, 9)))
