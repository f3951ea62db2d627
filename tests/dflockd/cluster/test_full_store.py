"""A real etcd whose database is full: what servers ask of it, what they say, and how it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflockd.shards import Put, StoreFullError
from dflockd.shards.etcd import EtcdStore
from tests.dflockd.cluster.stage import ClusterStage, FewShards
from tests.dflockd.cluster.test_replaced_store import readiness
from tests.dflockd.raw_server import PATIENCE, granted
from tests.dflockd.shards.etcd_process import Etcd

SERVING_LEASE = 3
LEASE = 8
QUOTA = 12 << 20


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path, more=("--quota-backend-bytes", str(QUOTA))) as process:
        yield process


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path) -> Iterator[ClusterStage]:
    args = ("--default-lease-ttl", str(LEASE), "--http-port", "0")
    with ClusterStage(
        tmp_path, etcd, *args, serving_lease=SERVING_LEASE, max_lease=LEASE, kind=FewShards
    ) as cluster:
        cluster.wait_settled()
        yield cluster


def fill(etcd: Etcd) -> None:
    async def put_until_it_is_full() -> None:
        store = EtcdStore([etcd.endpoint], timeout=PATIENCE)
        for size in (1_000_000, 1_000):
            with contextlib.suppress(StoreFullError):
                while True:
                    await store.txn([], [Put("/else", b"x" * size)])
        await store.close()

    asyncio.run(put_until_it_is_full())


class Early(FewShards):
    """A server that is started while etcd is full."""

    def _after_start(self) -> None:
        self.wait_log("retrying until it works")


def test_it_is_asked_seldom_and_said_and_goes_on_by_itself(
    cluster: ClusterStage, etcd: Etcd, tmp_path: Path
) -> None:
    key = cluster.key_at(cluster.servers[0])
    fill(etcd)
    for server in cluster.servers:
        line = server.wait_log("no lock is granted or renewed until it does")
        assert "has refused what keeps this server alive" in line
        assert "database space exceeded" in line
    document = readiness(cluster.servers[0])
    assert document["ready"] is False
    assert "database space exceeded" in json.dumps(document)

    # Shards are claimed, moved and tidied meanwhile, as far as they were to be.
    calls, since = etcd.calls(), time.monotonic()
    time.sleep(4)
    spent = _transactions(etcd.calls() - calls)
    assert spent < len(cluster.servers) * (time.monotonic() - since)
    assert spent > 0

    # One that starts meanwhile waits.
    with Early(tmp_path, *cluster.arguments(), name="early") as early:
        assert "database space exceeded" in early.log_text()
        etcd.make_room()
        early.wait_joined()
    _, line = cluster.follow("l", key, f"0 {LEASE}", timeout=PATIENCE)
    assert granted(line)
    for server in cluster.servers:
        server.wait_log("answers: locks are granted and renewed")
    assert readiness(cluster.servers[0])["ready"] is True


def _transactions(calls: Counter[str]) -> int:
    return sum(calls[name] for name in ("Txn", "Range", "LeaseGrant", "LeaseRevoke"))
