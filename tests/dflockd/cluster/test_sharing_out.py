"""Three real servers over a real etcd: how they share thousands of shards, and tell of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dflockd.wire import Report, decode_map
from examples.demo.stage import wait_until
from tests.dflockd.cluster.holders import start_cluster
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.shards.etcd_process import Etcd


@pytest.fixture(scope="module")
def stage(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    """Three servers that share all shards."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), etcd, ClusterServer) as stage:
        stage.wait_settled()
        yield stage


@pytest.fixture(scope="module")
def beginning(stage: ClusterStage) -> dict[int, bytes]:
    """What etcd has of the shards before any of them has moved."""
    return stage.mapping.values()


@pytest.fixture
def cluster(stage: ClusterStage, beginning: dict[int, bytes]) -> ClusterStage:
    """The cluster once the beginning has been looked at."""
    return stage


def test_three_servers_share_the_shards_round_robin(
    stage: ClusterStage, beginning: dict[int, bytes]
) -> None:
    owners = {shard: _read(value)[1] for shard, value in beginning.items()}
    # Who was not there within the time that is waited for others has none, on a busy machine.
    present = sorted(set(owners.values()))
    assert set(present) <= {server.address for server in stage.servers}
    for number, owner in enumerate(present):
        mine = [shard for shard in sorted(owners) if owners[shard] == owner]
        assert mine == list(range(number, 8192, len(present)))


def test_what_is_in_etcd_has_the_documented_format(
    stage: ClusterStage, beginning: dict[int, bytes]
) -> None:
    assert sorted(beginning) == list(range(8192))
    addresses = {server.address for server in stage.servers}
    for value in beginning.values():
        target, current, flags = _read(value)
        assert target == current
        assert target in addresses
        assert re.fullmatch(r"[^,]+,[^,]*(,f=[^,]+)*", value.decode())
        assert [flag.partition(":")[0] for flag in flags] == ["e"]


def _read(value: bytes) -> tuple[str, str, list[str]]:
    """Target, current and flags, as the format is described."""
    parts = [part.strip() for part in value.decode().split(",")]
    flags = [part.removeprefix("f=") for part in parts if part.startswith("f=")]
    target, current = [part for part in parts if not part.startswith("f=")]
    return target, current, flags


def wait_known(cluster: ClusterStage) -> dict[str, Any]:
    """Wait until all servers say of the shards what etcd says, and return that."""
    records = cluster.mapping.records()
    wanted = [(records[shard].current, records[shard].epoch) for shard in range(8192)]

    def probe() -> dict[str, Any] | None:
        for server in cluster.servers:
            report = server.report()
            assert report["num_shards"] == 8192
            owners = [report["servers"][number] for number in report["shards"]]
            if list(zip(owners, report["epochs"], strict=True)) != wanted:
                return None
        return report

    return wait_until(probe, PATIENCE, lambda: "they do not agree")


def test_every_server_knows_where_all_shards_are(cluster: ClusterStage) -> None:
    wait_known(cluster)


def test_who_has_the_map_is_not_sent_it_again(cluster: ClusterStage) -> None:
    """Whoever sent it: a map has one version."""
    report = wait_known(cluster)
    version = report["version"]
    for client in map(cluster.connect, cluster.servers):
        assert client.ask("shards", "_", version) == "ok"
        assert client.ask("shards", "_", f"{version} zlib") == "ok"
        for unknown in ("_", "", "x", f"x{version}", "at all", f"{version[:-1]} zlib zlib"):
            assert json.loads(client.ask("shards", "_", unknown).removeprefix("ok ")) == report
        status, _, packed = client.ask("shards", "_", "_ zlib").partition(" ")
        assert status == "ok"
        assert len(packed) < len(json.dumps(report)) / 4
        document, known = decode_map(Report(packed.encode()))
        assert {**document, "version": known.decode()} == report


def test_who_has_the_map_of_before_is_sent_the_new_one(cluster: ClusterStage) -> None:
    here, there, _ = cluster.servers
    shard = cluster.shard_of(cluster.key_at(here))
    version = wait_known(cluster)["version"]
    cluster.move([shard], there)
    assert wait_known(cluster)["version"] != version
    assert cluster.connect(here).ask("shards", "_", version).startswith("ok {")
