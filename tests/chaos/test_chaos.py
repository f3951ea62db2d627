"""A short chaos run over everything: `make soak`. `make chaos` runs longer ones.

``CHAOS_SECONDS`` (default 60) says how long, ``CHAOS_SEED`` repeats a run's schedule.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.damage import QUIET
from tests.chaos.driver import run
from tests.chaos.options import CLUSTER_LEASE, CLUSTER_SERVING_LEASE, Options
from tests.chaos.outcome import Outcome

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED") or time.time_ns() % 1_000_000)


def judged(tmp_path: Path, **options: Any) -> Outcome:
    """Run real processes under faults, and expect that nothing is found."""
    print(f"CHAOS_SEED={SEED}")
    outcome = run(Options(directory=tmp_path / "run", seed=SEED, seconds=SECONDS, **options))
    print(outcome.report())
    assert not outcome.findings
    assert not outcome.complaints
    assert outcome.count("begin") > SECONDS
    return outcome


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 4 * QUIET)
@pytest.mark.parametrize("servers", [1, 2])
def test_nothing_is_lost_and_nobody_overlaps(servers: int, tmp_path: Path) -> None:
    outcome = judged(tmp_path, servers=servers, state_dir=tmp_path / "state")
    assert outcome.count("fault") > SECONDS / 10


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 5 * QUIET)
@pytest.mark.parametrize("etcd", [1, 3])
def test_a_cluster_loses_nothing_either(etcd: int, tmp_path: Path) -> None:
    outcome = judged(
        tmp_path,
        servers=3,
        workers=1,
        lease=CLUSTER_LEASE,
        serving_lease=CLUSTER_SERVING_LEASE,
        etcd=etcd,
    )
    assert not outcome.unexplained
    assert outcome.count("fault") > SECONDS / 10


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 4 * QUIET)
def test_nothing_is_lost_by_waiting_in_the_consumer(tmp_path: Path) -> None:
    judged(tmp_path, state_dir=tmp_path / "state", wait="consumer")
