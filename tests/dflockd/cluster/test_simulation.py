"""A simulated cluster under every kind of fault: it keeps its word, and breaks it without its rules.

A failure tells the end of the story and how to replay it. `make soak` runs thousands of schedules.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from tests.dflockd.cluster.rules import BROKEN
from tests.dflockd.cluster.schedules import TOGETHER, can_be_broken, run, run_by
from tests.dflockd.cluster.simulation import Rules, ViolationError, World
from tests.dflockd.cluster.stories import (
    HANGS,
    STORIES,
    lost_with_the_answer,
    restored,
    restored_soon,
    waits_where_nobody_comes,
)

pytestmark = pytest.mark.usefixtures("quiet")

SCHEDULES = range(30, 38)
"""Few, in which all of that happens; the soak has thousands."""

SOAK = 10_000

# What has to happen for a schedule to say anything, in about so many of them.
INTERESTING = {
    "grants": 10.0,
    "renewals": 5.0,
    "crashes": 0.5,
    "pauses": 1.0,
    "stalls": 0.3,
    "moves": 2.0,
    "drains": 0.1,
    "clean ends": 0.1,
    "freezes": 1.0,
    "thaws": 0.5,
    "snapshots": 0.3,
    "places resumed": 0.2,
    "claims without grace": 2.0,
    "claims with grace": 1.0,
    "claim unknown": 0.2,
    "reclaims": 0.01,
    "taken for dead": 1.0,
    "confirm done": 0.2,
    "confirm refused": 0.1,
    "early ends of leases": 0.1,
    "entries deleted": 0.1,
    "keep-alives lost": 0.1,
    "cuts from the store": 0.5,
    "store stopped": 0.1,
    "watches interrupted": 0.1,
    "watches silent": 0.1,
    "release unknown": 0.1,
    "late transactions": 1.0,
    "answers lost": 1.0,
    "connections lost": 0.3,
}


def soak(run_one: Callable[[int], Counter[str]], first: int, schedules: int = SOAK) -> Counter[str]:
    """Run many schedules, in two processes, and return what happened in all of them."""
    with multiprocessing.get_context("spawn").Pool(2, logging.disable, (logging.CRITICAL,)) as pool:
        seeds = range(first, first + schedules)
        return sum(pool.imap_unordered(run_one, seeds, chunksize=50), Counter())


def judge(counts: Counter[str], schedules: int) -> None:
    figures = ", ".join(f"{name} {counts[name]:,}" for name in INTERESTING)
    print(f"\n{schedules:,} schedules, {counts['milliseconds'] / 3.6e6:,.1f} hours: {figures}")
    dull = [name for name, share in INTERESTING.items() if counts[name] < share * schedules]
    assert not dull


def test_a_few_schedules() -> None:
    judge(sum(map(run, SCHEDULES), Counter()), len(SCHEDULES))


# In what schedules something is special, those of a short run, and what happens in one of them at
# least, on average.
SPECIAL: dict[str, tuple[Rules, range, dict[str, float]]] = {
    "places are kept": (
        Rules(keeps_places=True),
        range(2, 5),
        {"places kept": 1, "places resumed": 1},
    ),
    "clients are told of their turns": (
        Rules(wants_turns=True),
        range(1, 4),
        {"told of their turns": 10, "told": 6, "places resumed": 3, "grants": 10},
    ),
    "the newest wins": (
        Rules(ages=True),
        range(1, 4),
        {"superseded": 25, "snapshots": 0.3, "grants": 13},
    ),
    "the newest wins and clients are told of their turns": (
        Rules(ages=True, wants_turns=True),
        range(9, 12),
        {"superseded": 25, "snapshots": 0.3, "grants": 13},
    ),
    "only so many runs may begin in a while": (
        Rules(rates=True),
        range(3),
        {"snapshots": 0.3, "begun": 15},
    ),
    "only so many runs may begin and clients are told of their turns": (
        Rules(rates=True, wants_turns=True),
        range(2, 5),
        {"snapshots": 0.3, "begun": 15},
    ),
    "groups take turns": (
        Rules(groups=True),
        range(1, 4),
        {"snapshots": 0.25, "places resumed": 0.25, "grants": 15},
    ),
    "the newest of groups begins at some rate": (
        TOGETHER,
        range(4, 7),
        {"snapshots": 0.25, "superseded": 10, "begun": 10},
    ),
    "what is handed over goes in parts": (
        Rules(parts=True),
        range(3),
        {"snapshots": 0.3, "read done": 0.5, "grants": 10},
    ),
    "take-overs come in chains": (
        Rules(chains=True),
        range(1, 4),
        {
            "chains": 1,
            "ends at once": 1,
            "claim unknown": 1,
            "claims with grace": 4,
            "snapshots": 0.25,
            "grants": 10,
        },
    ),
    "the store is replaced": (
        Rules(replaces=True),
        range(20, 23),
        {
            "wipes": 0.16,
            "refused": 3,
            "restores": 0.08,
            "stores seen to be replaced": 1,
            "grants": 10,
        },
    ),
    # Clients wait by the rules of the library, and say that a lock is held if a server did.
    "servers hang": (
        Rules(hangs=True),
        range(7, 11),
        {"hangs": 3, "silence": 20, "not answered": 15, "told that it is held": 5, "grants": 10},
    ),
}


@pytest.mark.parametrize("special", SPECIAL)
def test_schedules_in_which(special: str) -> None:
    rules, schedules, least = SPECIAL[special]
    counts = sum((run_by(rules, seed) for seed in schedules), Counter())
    dull = {n: counts[n] for n, share in least.items() if counts[n] < share * len(schedules)}
    assert not dull


def test_all_servers_are_stopped_and_started_again_without_anybody_waiting_for_holders() -> None:
    schedules = 2
    counts = sum((run_by(Rules(stops=True), seed) for seed in range(schedules)), Counter())
    assert counts["stops of all"] == 3 * schedules
    assert counts["clean ends"] == 9 * schedules
    assert counts["claims with grace"] == 0
    assert counts["snapshots"] > 1.6 * schedules
    assert counts["renewals"] > 8 * schedules
    assert counts["places resumed"] > 0.4 * schedules


@pytest.mark.parametrize("hangs", [False, True])
def test_a_seed_replays_exactly(hangs: bool) -> None:
    one, other = (World(7, Rules(hangs=hangs)).run() for _ in range(2))
    assert one.timeline() == other.timeline()
    assert one.counts == other.counts


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_ends_well_by_the_rules_and_badly_without(story: Callable[[World], None]) -> None:
    World(1, story=story).run()
    for name in filter(can_be_broken, STORIES[story]):
        with pytest.raises(ViolationError):
            World(1, BROKEN[name], story).run()


@pytest.mark.parametrize("story", HANGS, ids=lambda story: story.__name__)
def test_a_server_that_hangs_is_no_server_that_says_no(story: Callable[[World], None]) -> None:
    World(1, Rules(hangs=True), story).run()
    for name in filter(can_be_broken, HANGS[story]):
        with pytest.raises(ViolationError):
            World(1, replace(BROKEN[name], hangs=True), story).run()


def test_who_waits_at_a_server_that_was_replaced_unawares_is_sent_to_the_new_one() -> None:
    world = World(1, story=waits_where_nobody_comes).run()
    assert world.granted["c2"] < 30  # it is cut off until 35


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("story", [restored, restored_soon], ids=lambda story: story.__name__)
def test_all_servers_notice_that_the_store_was_restored_and_begin_anew(
    story: Callable[[World], None], seed: int
) -> None:
    world = World(seed, story=story).run()
    assert world.counts["stores seen to be replaced"] == 3
    assert {process.name for process in world.running()}.isdisjoint({"s1.1", "s2.2", "s3.3"})


def test_a_hand_over_whose_claim_was_not_answered_costs_its_waiters_no_recovery() -> None:
    world = World(1, story=lost_with_the_answer).run()
    assert world.counts["claim unknown"] == 1
    assert world.counts["claims with grace"] == 0
    assert 9 < world.granted["c2"] < 12  # a recovery would take until 19


# In the soak: how many schedules, and what happens in one of them at least, on average.
MANY = {
    "all servers are stopped and started": (Rules(stops=True), SOAK // 4, {"stops of all": 3}),
    "servers hang": (Rules(hangs=True), SOAK, {"hangs": 1}),
    "the store is replaced": (Rules(replaces=True), SOAK, {"wipes": 0.2, "restores": 0.05}),
    "what is handed over goes in parts": (Rules(parts=True), SOAK, {"read done": 0.5}),
    "take-overs come in chains": (Rules(chains=True), SOAK, {"chains": 1}),
}
MANY |= {
    special: (rules, SOAK // 20, least)
    for special, (rules, _, least) in SPECIAL.items()
    if special not in MANY
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("special", MANY)
def test_many_schedules_in_which(special: str) -> None:
    rules, schedules, least = MANY[special]
    counts = soak(partial(run_by, rules), 4_000_000, schedules)
    assert not [name for name, share in least.items() if counts[name] < share * schedules]
    assert not (rules.stops and counts["claims with grace"])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_schedules() -> None:
    judge(soak(run, 1_000_000), SOAK)
