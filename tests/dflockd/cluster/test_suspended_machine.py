"""Time goes on while a machine is suspended: leases of locks end, and those of etcd."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_dflock
import dflockd
from dflockd import admin
from tests.dflockd.cluster import suspended
from tests.dflockd.cluster.stage import ClusterStage, FewShards
from tests.dflockd.raw_server import eventually
from tests.dflockd.shards.etcd_process import Etcd


class Suspended(FewShards):
    """A server of a cluster for which Python's clock stands still."""

    module = suspended.__name__


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterStage]:
    with (
        Etcd(tmp_path) as etcd,
        ClusterStage(
            tmp_path,
            etcd,
            *("--default-lease-ttl", "1"),
            number=1,
            serving_lease=3,
            max_lease=3,
            kind=Suspended,
        ) as stage,
    ):
        stage.wait_settled()
        yield stage


def test_all_go_by_one_clock() -> None:
    homes = Path(dflockd.__file__).parent, Path(celery_dflock.__file__).parent
    code = [path for home in homes for path in home.rglob("*.py")]
    others = re.compile(r"time\.monotonic|import monotonic|perf_counter")
    assert [path.name for path in code if others.search(path.read_text())] == ["clock.py"]


def test_leases_end(cluster: ClusterStage) -> None:
    (server,) = cluster.servers
    with (
        contextlib.closing(server.connect()) as holder,
        contextlib.closing(server.connect()) as waiter,
    ):
        key = cluster.key_at(server)
        holder.lock(key)
        waiter.lock(key, 10)

    cluster.etcd.pause()
    try:
        eventually(lambda: admin.stats(server.address)["status"] == "cut off")
        with contextlib.closing(server.connect()) as late:
            assert late.ask("l", key, 0).startswith("error_recovering")
    finally:
        cluster.etcd.resume()
