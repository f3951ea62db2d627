"""A simulated cluster without one of its rules: in schedules that chance has found, all goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from tests.dflockd.cluster.rules import BROKEN
from tests.dflockd.cluster.schedules import TOGETHER, can_be_broken, run_chains
from tests.dflockd.cluster.simulation import Rules, ViolationError, World
from tests.dflockd.cluster.stories import HANGS, STORIES

pytestmark = pytest.mark.usefixtures("quiet")

# Rules whose absence chance finds soon, and a schedule to begin with.
FOUND_BY_CHANCE = {
    "serving lease counted from the answer": 124,
    "no freeze before the release": 13,
    "no grace": 24,
    "snapshot dropped": 2,
    "clean for ever": 24,
    "claim whatever the record": 25,
    "confirmed whatever the record": 23,
    "epoch not increased": 0,
    "lease counted from the answer": 49,
    "positions not kept": 13,
}

# The same, in schedules in which the store is wiped, or restored from a backup.
FOUND_WITH_REPLACED_STORES = {
    "epochs of before used again": (4, 7, 8),
    "retried without a pause": (15, 17, 19),
}

# The same, in schedules with chains of take-overs.
FOUND_IN_CHAINS = {
    "those before the former server forgotten": (233, 588),
    "snapshot deleted in the claim": (2,),
    "deleted whatever was handed over": (21, 26, 70),
}

# The same, in schedules in which all servers are stopped and started, and one to begin with.
FOUND_IN_STOPS = {
    "takers that are the leaver itself": 1,
    "takers that leave": 1,
    "leaving to somebody or not at all": 0,
}

# Those of what a task may ask for beside a lock: in what schedules, and in which of them.
FOUND_WITH_OPTIONS = {
    "groups forgotten on a move": ("groups", (0, 47, 75)),
    "newest forgotten on a move": ("ages", (9, 15, 16)),
    "rates forgotten on a move": ("rates", (8, 31, 42)),
    "one more may begin": ("rates", (0, 1, 2)),
    "superseded without waiting for the release": ("ages", (0, 1, 4)),
}

# The same, in schedules with all of that at once.
FOUND_TOGETHER = {
    "groups forgotten on a move": (30,),
    "newest forgotten on a move": (6, 10),
    "rates forgotten on a move": (3, 12),
    "one more may begin": (0, 2),
    "superseded without waiting for the release": (0, 4),
}

# The same, in schedules in which servers hang.
FOUND_IN_HANGS = {
    "silence taken for an answer": (0,),
    "cut off though nobody has answered": (0,),
    "ten seconds for any answer": (0,),
    "connections given up that owe an answer": (5, 19, 29),
    "answers that are owed forgotten": (8, 30),
}


def shown(found: dict[str, tuple[int, ...]]) -> list[ParameterSet]:
    """Rules that are missing, and schedules that show it: the first of them quickly."""
    again = {name: seeds[1:] for name, seeds in found.items() if seeds[1:]}
    return [
        *(pytest.param(name, seeds[:1], id=name) for name, seeds in found.items()),
        *(
            pytest.param(name, seeds, id=f"{name} again", marks=pytest.mark.soak)
            for name, seeds in again.items()
        ),
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
    by_chance = {
        *FOUND_BY_CHANCE,
        *FOUND_IN_CHAINS,
        *FOUND_IN_HANGS,
        *FOUND_IN_STOPS,
        *FOUND_WITH_OPTIONS,
        *FOUND_WITH_REPLACED_STORES,
    }
    assert by_chance | by_stories == BROKEN.keys()


@pytest.mark.parametrize("name", FOUND_BY_CHANCE)
def test_schedules_show_that_a_rule_is_missing(name: str) -> None:
    if not can_be_broken(name):
        pytest.skip("the table is compiled")
    first = FOUND_BY_CHANCE[name]
    assert first_violation(BROKEN[name], range(first, first + 150)) is not None


@pytest.mark.parametrize(("name", "seeds"), shown(FOUND_IN_CHAINS))
def test_chains_of_take_overs_show_that_a_rule_is_missing(
    name: str, seeds: tuple[int, ...]
) -> None:
    for seed in seeds:
        run_chains(seed)
        with pytest.raises(ViolationError):
            World(seed, replace(BROKEN[name], chains=True)).run()


@pytest.mark.parametrize("name", FOUND_IN_STOPS)
def test_stops_show_that_a_rule_is_missing(name: str) -> None:
    first = FOUND_IN_STOPS[name]
    rules = replace(BROKEN[name], stops=True)
    assert first_violation(rules, range(first, first + 50)) is not None


@pytest.mark.parametrize(
    ("name", "seeds"), shown({name: seeds for name, (_, seeds) in FOUND_WITH_OPTIONS.items()})
)
def test_what_a_task_asks_for_shows_that_a_rule_is_missing(
    name: str, seeds: tuple[int, ...]
) -> None:
    if not can_be_broken(name):
        pytest.skip("the table is compiled")
    kind, _ = FOUND_WITH_OPTIONS[name]
    for seed in seeds:
        World(seed, replace(Rules(), **{kind: True})).run()
        with pytest.raises(ViolationError):
            World(seed, replace(BROKEN[name], **{kind: True})).run()


@pytest.mark.parametrize(("name", "seeds"), shown(FOUND_TOGETHER))
def test_all_that_a_task_asks_for_shows_that_a_rule_is_missing(
    name: str, seeds: tuple[int, ...]
) -> None:
    if not can_be_broken(name):
        pytest.skip("the table is compiled")
    for seed in seeds:
        World(seed, TOGETHER).run()
        with pytest.raises(ViolationError):
            World(seed, replace(TOGETHER, table=BROKEN[name].table)).run()


@pytest.mark.parametrize(("name", "seeds"), shown(FOUND_WITH_REPLACED_STORES))
def test_a_store_that_was_replaced_shows_that_a_rule_is_missing(
    name: str, seeds: tuple[int, ...]
) -> None:
    for seed in seeds:
        World(seed, Rules(replaces=True)).run()
        with pytest.raises(ViolationError):
            World(seed, replace(BROKEN[name], replaces=True)).run()


@pytest.mark.parametrize(("name", "seeds"), shown(FOUND_IN_HANGS))
def test_servers_that_hang_show_that_a_rule_is_missing(name: str, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        with pytest.raises(ViolationError):
            World(seed, replace(BROKEN[name], hangs=True)).run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FOUND_BY_CHANCE)
def test_other_schedules_show_it_as_well(name: str) -> None:
    if not can_be_broken(name):
        pytest.skip("the table is compiled")
    assert first_violation(BROKEN[name], range(2_000_000, 2_001_000)) is not None
