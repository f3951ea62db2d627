"""A look at what a server may still say that says nothing, with times that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from dflockd import errors
from dflockd.address import Address
from dflockd.client.operations import GRACE
from dflockd.client.routing import ASKED_AT_LEAST, LOOK_AGAIN, PING_PATIENCE, SIGN_EVERY, ShardMap
from tests.dflockd.client.routing_support import (
    GONE,
    NOW,
    SHARD,
    A,
    Ask,
    B,
    C,
    Load,
    SignOfLife,
    glance,
    known,
    moved,
    report,
    walk,
)


def glances(shards: ShardMap, *outcomes: Any, is_waiting: bool = True) -> list[Any]:
    """Look at A, and return the steps; what comes of it is the last."""
    steps: list[Any] = []
    remaining = list(outcomes)
    try:
        look = glance(shards, is_waiting=is_waiting)
        while look.step is not None:
            steps.append(look.step)
            outcome = remaining.pop(0)
            if isinstance(outcome, errors.RemoteError):
                look(outcome, after=1)
            else:
                look(report=outcome)
        steps.append(look.result)
    except errors.MovedError as exc:
        steps.append(exc)
    assert not remaining
    return steps


SILENT = errors.UnreachableError("no answer in time")
ALIVE = None


def test_one_that_is_alive_is_waited_for() -> None:
    assert glances(known(), ALIVE) == [SignOfLife(A, PING_PATIENCE), SIGN_EVERY]


def test_one_that_nobody_has_replaced_yet_is_waited_for() -> None:
    ping, load, end = glances(known(), SILENT, report(A))
    assert ping == SignOfLife(A, PING_PATIENCE)
    assert load.server in (B, C)
    assert end == LOOK_AGAIN


def test_one_that_has_been_replaced_is_left() -> None:
    *_, moved = glances(known(), SILENT, report(B, 8, (B, C)))
    assert (moved.to, moved.epoch, moved.shard) == (str(B), 8, SHARD)
    assert "says nothing" in str(moved)


def test_who_waits_for_nothing_but_an_answer_asks_for_no_sign_of_life() -> None:
    load, end = glances(known(), report(A), is_waiting=False)
    assert isinstance(load, Load)
    assert end == LOOK_AGAIN


def test_what_others_of_the_process_have_seen_counts() -> None:
    shards = known()
    assert glances(shards, ALIVE) == [SignOfLife(A, PING_PATIENCE), SIGN_EVERY]
    assert glances(shards) == [SIGN_EVERY]
    shards.signs[A] = NOW - 0.1, None
    assert glances(shards) == [LOOK_AGAIN], "somebody is looking"
    shards.signs[A] = NOW - 100, None
    assert glances(shards, ALIVE) == [SignOfLife(A, PING_PATIENCE), SIGN_EVERY]


def test_the_others_say_nothing_either() -> None:
    """A look takes no longer than for a few of them, however many there are."""
    many = tuple(Address(f"server-{n}", 6388) for n in range(100))
    shards = known()
    shards.update(report(A, 7, (A, *many)), A, NOW - 100)
    steps = glances(shards, SILENT, *[SILENT] * ASKED_AT_LEAST)
    assert len(steps) == ASKED_AT_LEAST + 2
    assert {step.patience for step in steps[1:-1]} == {0}, "the least that any answer is given"
    assert A not in [step.server for step in steps[1:-1]]
    assert steps[-1] == LOOK_AGAIN


@pytest.mark.parametrize(("silence", "asked"), [(GRACE, 1), (GRACE - 0.5, ASKED_AT_LEAST)])
def test_all_are_silent_when_the_time_is_over(silence: float, asked: int) -> None:
    """Each that is asked takes half a second more: no more than one, if nothing was left for that."""
    many = tuple(Address(f"server-{n}", 6388) for n in range(100))
    shards = known()
    shards.update(report(A, 7, (A, *many)), A, NOW - 100)
    to = walk(shards, 0)
    assert to.step == Ask(A, 0)
    load = to(GONE, after=silence)
    for _ in range(asked - 1):
        assert isinstance(load, Load)
        load = to(SILENT, after=0.5)
    with pytest.raises(errors.UnreachableError, match="gone"):
        to(SILENT)


def test_nobody_is_followed_long_after_the_time_is_over() -> None:
    """One server after the other may hang, and send on when it goes on."""
    to = walk(known(), 0)
    assert to.step == Ask(A, 0)
    assert to(moved(B), after=1) == Ask(B, 0)
    with pytest.raises(errors.MovedError):
        to(moved(C, 9), after=GRACE - 1)
