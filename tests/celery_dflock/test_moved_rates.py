"""Tasks with a rate whose key moves from one lock server of a cluster to another: real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflockd.client.process import close_idle_connections
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.test_rates import check_windows
from tests.dflockd.cluster.stage import ClusterStage, settled

RUNS, WINDOW = 10, 0.5

HEADERS = {"dflock": {"lock_rate": [RUNS, WINDOW], "lock_limit": None, "lock_ttl": 3}}

LONG_ENOUGH = PATIENCE + 30
"""Seconds, for who also waits until the holders of a server that was killed have had their time."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[ClusterStage]:
    with settled(tmp_path, "--default-lease-ttl", "3", number=2, lease=3) as stage:
        yield stage
        close_idle_connections()


@pytest.mark.parametrize(
    "end",
    [
        "move",
        pytest.param("drain", marks=pytest.mark.soak),
        pytest.param("kill", marks=pytest.mark.soak),
    ],
)
def test_no_window_has_more_while_the_key_moves(
    cluster: Cluster, stage: ClusterStage, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the clock of the tasks, all of which run."""
    key = stage.key_at(stage.servers[0])
    number = 60 if end == "move" else 120
    name = f"rated-{end}"
    with cluster.ready(name, servers=stage.address, pool="threads", concurrency=4):
        sent = [cluster.send(jobs.parked, key, headers=HEADERS, queue=name) for _ in range(number)]

        def starts() -> list[dict[str, Any]]:
            return cluster.events(what="start", key=key)

        cluster.wait(lambda: len(starts()) >= RUNS or None, "the first to begin")
        if end == "move":
            for server in (stage.servers[1], stage.servers[0]):
                stage.move([stage.shard_of(key)], server)
        elif end == "drain":
            stage.servers[0].stop()
        else:
            stage.servers[0].kill()
        for each in sent:
            assert each.get(timeout=LONG_ENOUGH) == each.id
    times = sorted(event["at"] for event in starts())
    assert len(times) == number
    check_windows(starts(), RUNS, WINDOW)
    share = (number - RUNS) / RUNS * WINDOW / (times[-1] - times[0])
    with capsys.disabled():
        print(f"\n{end}: {number} runs, share of what is allowed: {share:.2f}")
