"""What is seen of a cluster from one of its servers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from dflockd import admin
from dflockd.cluster.tenures import Stage
from dflockd.errors import RecoveringError
from dflockd.sync_client import DistributedLock
from dflockd.table import Limits, ShardTable, TokenIssuer
from dflockd.wire import Recovering
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage, FewShards, settled
from tests.dflockd.http.http_here import site_here
from tests.dflockd.raw_server import PATIENCE, eventually
from tests.dflockd.table.sharded_support import two_shards

SERVING_LEASE = 6
"""Seconds: long enough for a busy machine, on which a server would stop to serve now and then."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("seen")
    flags = ("--http-port", "0", "--default-lease-ttl", "3")
    with settled(directory, *flags, lease=3, serving_lease=SERVING_LEASE, number=2) as stage:
        yield stage


def ask(server: ClusterServer, path: str) -> Any:
    url = server.wait_log("live page: ").rpartition("live page: ")[2].strip()
    with urlopen(url + path, timeout=PATIENCE) as answer:
        text = answer.read().decode()
    return text if path == "metrics" else json.loads(text)


def refusal(server: ClusterServer, path: str) -> tuple[int, Any]:
    """Return the status with which a server refuses to tell, and what it says."""
    with pytest.raises(HTTPError) as refused:
        ask(server, path)
    with refused.value as answer:
        return answer.code, json.load(answer)


def test_the_map_is_the_one_of_the_protocol(cluster: ClusterStage) -> None:
    one, two = cluster.servers
    eventually(lambda: ask(one, "api/shards") == one.report())
    # Where a test has had a third one, both of these have to see that it is gone.
    both = sorted([one.address, two.address])
    eventually(lambda: ask(two, "api/shards")["servers"] == both)


def test_what_this_server_has(cluster: ClusterStage) -> None:
    def is_whole() -> bool:
        report = cluster.servers[0].report()
        return len(report["servers"]) == len(cluster.servers) and min(report["shards"]) >= 0

    eventually(is_whole)  # etcd may know of it before this server does
    report = cluster.servers[0].report()
    has = Counter(report["servers"][number] for number in report["shards"])
    for server in cluster.servers:
        wanted = {"address": server.address, "shards": {"serving": has[server.address]}}
        eventually(lambda at=server, it=wanted: ask(at, "api/stats")["cluster"] == it)
        metrics = ask(server, "metrics")
        assert f'dflockd_shards{{stage="serving"}} {has[server.address]:.1f}' in metrics
        assert "dflockd_shards_unserved 0.0" in metrics
        stages = {stage.value for stage in Stage}
        assert {s for s in stages if f'dflockd_shards{{stage="{s}"}}' in metrics} == stages
    assert has.total() == FewShards.shards


def test_how_full_etcd_is(cluster: ClusterStage) -> None:
    [status] = cluster.etcd.control("endpoint", "status")
    for server in cluster.servers:

        def sizes(server: ClusterServer = server) -> list[float]:
            found = re.findall(
                r"^dflockd_store_(?:used_)?bytes (\S+)", ask(server, "metrics"), re.M
            )
            return [float(number) for number in found]

        eventually(lambda sizes=sizes: all(sizes()))
        total, used = sizes()
        assert 0 < used <= total <= status["Status"]["dbSize"]


def test_a_key_is_shown_where_its_shard_is(cluster: ClusterStage) -> None:
    one, two = cluster.servers
    key = cluster.key_at(one)
    cluster.connect(one).lock(key)
    (row,) = ask(one, "api/locks")["locks"]
    assert row["key"] == key
    assert len(ask(one, f"api/locks/{key}")["holders"]) == 1
    where = {"error": f"its shard is on {one.address}"}
    eventually(lambda: refusal(two, f"api/locks/{key}") == (404, where))


async def test_what_a_server_cannot_tell_is_not_said_to_be_free() -> None:
    """Its shard is on the way to this server, and somebody may hold it."""
    table = ShardTable(Limits(), TokenIssuer(b"x", 1), two_shards(Recovering(20)))
    async with site_here(table=table) as here:
        assert await here.ask(b"GET /api/locks/key HTTP/1.1\r\nHost: a\r\n\r\n") == 503


def test_without_the_store_it_is_not_ready(cluster: ClusterStage) -> None:
    server = cluster.servers[0]
    key = cluster.key_at(server)
    assert ask(server, "readyz")["ready"] is True
    cluster.etcd.pause()
    try:

        def lapsed() -> bool:
            checks = {check["name"]: check for check in ask(server, "api/stats")["checks"]}
            return not checks["store_answers"]["ok"]

        eventually(lapsed)
        assert admin.stats(server.address)["status"] == "cut off"
        assert ask(server, "api/stats")["status"] == "cut off"
        code, answer = refusal(server, "readyz")
        assert (code, answer["status"]) == (503, "cut off")
        assert 'dflockd_status{status="cut off"} 1.0' in ask(server, "metrics")
        with pytest.raises(RecoveringError, match="is cut off from etcd, and grants and renews"):
            DistributedLock(key, servers=[server.address], acquire_timeout_s=0).acquire()
    finally:
        cluster.etcd.resume()
    eventually(lambda: ask(server, "api/stats")["ready"])
    assert admin.stats(server.address)["status"] == "serving"


def test_it_says_what_readiness_is_made_of(cluster: ClusterStage) -> None:
    server = cluster.servers[0]
    eventually(lambda: ask(server, "api/stats")["ready"])
    answer = ask(server, "readyz")
    assert {check["name"] for check in answer["checks"] if check["ok"]} == {
        "listening",
        "not_draining",
        "not_recovering",
        "store_answers",
        "joined",
        "shards_served",
        "advertised",
    }
    assert [check["name"] for check in answer["checks"] if not check["needed"]] == ["advertised"]


def test_a_server_that_waits_for_its_entry_is_not_ready(cluster: ClusterStage) -> None:
    """Somebody has its address in the store, and goes on to have it."""
    server = cluster.add()
    cluster.mapping.put(f"nodes/{server.address}", b"somebody")
    try:
        server.start()
        server.wait_log("was not written by a server")
        code, answer = refusal(server, "readyz")
        assert code == 503
        assert {check["name"]: check["ok"] for check in answer["checks"]}["joined"] is False
        cluster.mapping.delete(f"nodes/{server.address}")
        eventually(lambda: ask(server, "api/stats")["ready"])
    finally:
        server.kill()
        cluster.servers.remove(server)
