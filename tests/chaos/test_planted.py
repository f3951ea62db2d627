"""Faults that are put in on purpose, in real processes: the checker finds each, and draws it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos import timeline
from tests.chaos.driver import run
from tests.chaos.options import Options

SEEDS = range(1, 11)
"""On a machine that is busy elsewhere little may happen in a run: then there is another one."""

PLANTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a server without a journal is killed": (
        {"faults": ["server-kill"], "pace": 2, "work": 3, "lease": 5, "seconds": 3},
        {"overlap", "lost within its lease"},
    ),
    "a holder ignores the end of its lease": (
        {
            "faults": ["client-stop"],
            "pace": 0.5,
            "lease": 1,
            "heedless": True,
            # Somebody waits whenever a holder is stopped: there is no idle lock to be lucky with.
            "work": 0.8,
            "aside": 0.02,
            "keys": 2,
            "seconds": 3,
        },
        {"overlap"},
    ),
    "the last waiter comes first": (
        {"faults": [], "server": "tests.chaos.planted.lifo", "keys": 1, "seconds": 1},
        {"not first come, first served"},
    ),
    "a release without a look at the token": (
        {
            "faults": [],
            "server": "tests.chaos.planted.careless",
            "keys": 1,
            "work": 0.3,
            "seconds": 1,
        },
        {"overlap"},
    ),
    "a rate that nobody keeps": (
        {"faults": [], "server": "tests.chaos.planted.loose", "keys": 1, "seconds": 3},
        {"too many starts"},
    ),
    "a limit of groups that nobody keeps": (
        {
            "faults": [],
            "server": "tests.chaos.planted.loose",
            "keys": 1,
            "work": 0.5,
            "aside": 0.02,
            "clients": 6,
            "seconds": 3,
        },
        {"overlap of a tenant"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    find(*PLANTED[name], tmp_path)


@pytest.mark.soak
def test_a_fault_planted_in_a_cluster_is_found(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"server": "tests.chaos.planted.hasty", "faults": ["server-kill"]}
    times = {"serving_lease": 2, "lease": 8, "work": 6, "seconds": 30}
    find({**changes, **times, "servers": 3}, {"overlap", "lost within its lease"}, tmp_path)


def find(changes: dict[str, Any], wanted: set[str], tmp_path: Path) -> None:
    common = {"seconds": 2, "workers": 0, "keys": 3, "long": 0}
    found: set[str] = set()
    for seed in SEEDS:
        directory = tmp_path / str(seed)
        outcome = run(Options(directory=directory, seed=seed, **{**common, **changes}))
        found |= {finding.kind for finding in outcome.findings}
        if wanted & found:
            break
    assert wanted & found, outcome.report()
    first = outcome.first
    assert first is not None
    text, _ = timeline.pictures(outcome.events, first)
    lanes = [line for line in text.splitlines() if line.startswith("pid ")]
    concerned = {(event.group, event.pid) for event in first.events}
    assert len(lanes) >= len(concerned) >= 1, text
    assert (directory / "violation.svg").stat().st_size > 0
    print(outcome.report())
