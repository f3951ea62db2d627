"""A simulated cluster without one of its rules: in schedules that chance has found, all goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from tests.dflockd.cluster.rules import BROKEN
from tests.dflockd.cluster.schedules import can_be_broken
from tests.dflockd.cluster.simulation import Rules, ViolationError, World
from tests.dflockd.cluster.stories import HANGS, STORIES

pytestmark = pytest.mark.usefixtures("quiet")

# Rules whose absence chance finds soon, in what is special about the schedules (see `Rules`), and
# where to begin; the soak begins in other places too.
FOUND: dict[str, dict[str, tuple[int, ...]]] = {
    "": {
        "serving lease counted from the answer": (124,),
        "no freeze before the release": (13,),
        "no grace": (24,),
        "snapshot dropped": (2,),
        "clean for ever": (24,),
        "claim whatever the record": (25,),
        "confirmed whatever the record": (23,),
        "epoch not increased": (0,),
        "lease counted from the answer": (49,),
        "positions not kept": (13,),
    },
    "replaces": {
        "epochs of before used again": (4, 7, 8),
        "retried without a pause": (15, 17, 19),
    },
    "chains": {
        "those before the former server forgotten": (233, 588),
        "snapshot deleted in the claim": (2,),
        "deleted whatever was handed over": (21, 26, 70),
    },
    "stops": {
        "takers that are the leaver itself": (1,),
        "takers that leave": (1,),
        "leaving to somebody or not at all": (0,),
    },
    "groups": {"groups forgotten on a move": (0, 47, 75)},
    "ages": {
        "newest forgotten on a move": (9, 15, 16),
        "superseded without waiting for the release": (0, 1, 4),
    },
    "rates": {
        "rates forgotten on a move": (8, 31, 42),
        "one more may begin": (0, 1, 2),
    },
    "ages groups rates": {
        "groups forgotten on a move": (30,),
        "newest forgotten on a move": (6, 10),
        "rates forgotten on a move": (3, 12),
        "one more may begin": (0, 2),
        "superseded without waiting for the release": (0, 4),
    },
    "hangs": {
        "silence taken for an answer": (0,),
        "cut off though nobody has answered": (0,),
        "ten seconds for any answer": (0,),
        "connections given up that owe an answer": (5, 19, 29),
        "answers that are owed forgotten": (8, 30),
    },
}


def cases() -> list[ParameterSet]:
    """Each rule with the first place to begin, and in the soak with the others."""
    return [
        pytest.param(
            *(special, name, seed),
            id=f"{name} {special}".strip() + " again" * (number > 0),
            marks=[pytest.mark.soak] if number else [],
        )
        for special, found in FOUND.items()
        for name, seeds in found.items()
        for number, seed in enumerate(seeds)
    ]


def first_violation(rules: Rules, seeds: range) -> int | None:
    for seed in seeds:
        try:
            World(seed, rules).run()
        except ViolationError:
            return seed
    return None


def test_no_rule_is_left_out() -> None:
    by_stories = {name for names in (*STORIES.values(), *HANGS.values()) for name in names}
    by_chance = {name for found in FOUND.values() for name in found}
    assert by_chance | by_stories == BROKEN.keys()


@pytest.mark.parametrize(("special", "name", "first"), cases())
def test_schedules_show_that_a_rule_is_missing(special: str, name: str, first: int) -> None:
    if not can_be_broken(name):
        pytest.skip("the table is compiled")
    kind = dict.fromkeys(special.split(), True)
    found = first_violation(replace(BROKEN[name], **kind), range(first, first + 150))
    assert found is not None
    World(found, Rules(**kind)).run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FOUND[""])
def test_other_schedules_show_it_as_well(name: str) -> None:
    if not can_be_broken(name):
        pytest.skip("the table is compiled")
    assert first_violation(BROKEN[name], range(2_000_000, 2_001_000)) is not None
