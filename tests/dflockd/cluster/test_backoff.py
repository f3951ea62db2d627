"""When what has failed is tried again."""

from __future__ import annotations

import math
import random

from dflockd.cluster.backoff import MOST, Backoff, Backoffs
from dflockd.cluster.transactions import RETRY, Kind, Transaction


def pauses(backoff: Backoff, number: int, takes: float = 0.0) -> list[float]:
    """The times from one attempt to the next, each of which fails after so long."""
    now, found = 100.0, []
    for _ in range(number):
        assert backoff.may(now)
        backoff.begin()
        until = backoff.failed(now, now + takes)
        found.append(until - now)
        assert backoff.due(0.0) == until
        now = until
    return found


def test_soon_at_first_and_seldom_in_the_end() -> None:
    found = pauses(Backoff(lambda: 0.5), 10)
    assert found[0] == RETRY or math.isclose(found[0], RETRY)
    assert found == sorted(found)
    assert math.isclose(found[-1], MOST)


def test_less_than_one_a_second_and_not_all_at_once() -> None:
    found = pauses(Backoff(random.Random(1).random), 1000)
    assert sum(found) / len(found) > 2
    assert len({round(pause, 3) for pause in found[10:]}) > 100
    assert max(found) < 1.3 * MOST


def test_what_takes_long_is_not_waited_for_much_longer() -> None:
    assert max(pauses(Backoff(lambda: 0.5), 10, takes=2.0)) < MOST + 0.3


def test_what_works_again_is_as_before() -> None:
    backoff = Backoff(lambda: 0.5)
    pauses(backoff, 5)
    backoff.worked()
    assert backoff.may(0.0)
    assert backoff.due(None) is None
    assert backoff.due(3.0) == 3.0
    assert pauses(backoff, 1)[0] < 2 * RETRY


def test_one_attempt_at_a_time_while_it_fails() -> None:
    backoff = Backoff(lambda: 0.5)
    backoff.begin()
    backoff.begin()
    until = backoff.failed(0.0, 1.0)
    assert not backoff.may(1.0)
    backoff.begin()
    assert not backoff.may(until + 1)
    assert backoff.due(0.0) is None


def test_several_that_fail_together_count_once() -> None:
    one, four = Backoff(lambda: 0.5), Backoff(lambda: 0.5)
    one.failed(0.0, 2.0)
    for _ in range(4):
        four.failed(0.0, 2.0)
    assert one.failed(3.0, 3.0) == four.failed(3.0, 3.0)


def test_the_less_time_is_left_the_sooner() -> None:
    backoff = Backoff(lambda: 0.5)
    pauses(backoff, 10)
    assert backoff.failed(0.0, 0.0, left=4.0) == 1.0
    assert backoff.failed(0.0, 0.0, left=0.1) == RETRY
    assert backoff.failed(0.0, 0.0, left=-1.0) > 2.0


def test_what_is_refused_for_ever_does_not_hold_up_the_rest() -> None:
    backoffs = Backoffs(lambda: 0.5)
    transaction = Transaction(Kind.TIDY, 0.0, (), ())
    backoffs.ended(transaction, worked=False, now=0.0)
    assert not backoffs[Kind.TIDY].may(0.0)
    assert backoffs[Kind.CLAIM].may(0.0)
    assert backoffs.again_at(Kind.CLAIM) is None
    assert backoffs.again_at(Kind.TIDY) == RETRY
