"""The lock table against a naive model, over random histories and with a clock that the test turns."""

from __future__ import annotations

from collections import Counter
from types import MemberDescriptorType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dflockd.table.line import Position
from dflockd.table.states import TRANSITIONS
from tests.dflockd.table.histories import TableMachine, come_and_go


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 10_000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_positions_are_kept_as_the_model_does(
    seeds: range, transitions: set[tuple[int, int]] | None
) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(seed)
        seen.update(machine.model.seen)
        machine.teardown()
    seen -= Counter()  # without what has never happened
    assert len(seen) == 32, seen
    assert min(seen.values()) > 2, seen
    # All that is allowed happens.
    assert transitions is None or transitions == ALLOWED


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 10_000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_groups_take_turns_as_in_the_model(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(seed, in_groups=True)
        seen.update(machine.model.seen)
        machine.teardown()
    for what in OF_GROUPS:
        assert seen[what] > 2, seen


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 10_000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_rates_turns_groups_and_ages_are_at_one_key_as_in_the_model(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(seed, in_groups=True, rated=True)
        seen.update(machine.model.seen)
        machine.teardown()
    for what in (*OF_RATES, *OF_GROUPS[:2], "told", "older", "listened", "back", "held"):
        assert seen[what] > 0, seen


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 1700), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("rated", [False, True])
@pytest.mark.timeout(3600)
def test_weights_count_as_in_the_model(seeds: range, in_groups: bool, rated: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(
            seed, in_groups=in_groups, rated=rated, weighed=True, paused=seed % 2 > 0
        )
        seen.update(machine.model.seen)
        machine.teardown()
    for what in (*OF_WEIGHTS, *(OF_RATES[:2] if rated else ()), "told", "back", "held", "older"):
        assert seen[what] > 2, seen
    for what in ("paused", "waits for the end of a pause", "granted at the end of a pause"):
        assert seen[what] > 2, seen
    assert seen["waits for more places"] > 2 or not rated, seen


OF_WEIGHTS = (
    "a weight that is granted",
    "waits for more slots",
    "gone on behind who asks no more",
)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1400), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_keys_are_paused_as_in_the_model(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(seed, in_groups=seed % 3 > 0, rated=seed % 3 > 1, paused=True)
        seen.update(machine.model.seen)
        machine.teardown()
    for what in OF_PAUSES:
        assert seen[what] > 2, seen


OF_PAUSES = (
    "paused",
    "paused anew",
    "paused while it is held",
    "waits for the end of a pause",
    "back to a paused key",
    "a pause that ends by itself",
    "a pause after a crash",
    "granted at the end of a pause",
)

OF_RATES = (
    "a place that is free again",
    "a place that is given back",
    "a try that finds no place",
    "slots, and no place",
    "another rate",
    "past who waits for a place",
    "a rate that is refused",
    "refused before its limit",
    "refused before it is the newest",
)

OF_GROUPS = (
    "turns of several groups",
    "groups that have all they may",
    "served by a new limit",
    "back to a slot of its group",
)


@pytest.fixture
def transitions(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]] | None:
    """Every change of a waiter's state while the test runs; compiled, nobody can look on."""
    slot = vars(Position)["state"]
    if not isinstance(slot, MemberDescriptorType):
        return None
    seen: set[tuple[int, int]] = set()

    def change(waiter: Position, state: int) -> None:
        before = getattr(waiter, "peer", None) and slot.__get__(waiter)
        if before is not None and before != state:
            seen.add((before, state))
        slot.__set__(waiter, state)

    monkeypatch.setattr(Position, "state", property(slot.__get__, change))
    return seen


ALLOWED = {(state, after) for state, more in TRANSITIONS.items() for after in more}


@pytest.mark.timeout(900)
def test_table_does_what_the_model_does(transitions: set[tuple[int, int]] | None) -> None:
    run_state_machine_as_test(
        TableMachine,
        settings=settings(
            max_examples=50,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    assert transitions is None or transitions <= ALLOWED


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_table_does_what_the_model_does_for_long() -> None:
    run_state_machine_as_test(
        TableMachine,
        settings=settings(
            max_examples=10_000,
            stateful_step_count=120,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
