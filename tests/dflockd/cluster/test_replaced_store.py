"""A real etcd that is wiped, or restored from a backup, under servers that run."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.demo.stage import wait_until
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.raw_server import PATIENCE, granted
from tests.dflockd.shards.etcd_process import Etcd

SERVING_LEASE = 2
LEASE = 4
GRACE = 1.03 * (SERVING_LEASE + LEASE) + 1

NOTICED = "etcd was wiped, or restored from a backup"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path) as process:
        yield process


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path) -> Iterator[ClusterStage]:
    args = ("--default-lease-ttl", str(LEASE), "--http-port", "0")
    with ClusterStage(
        tmp_path, etcd, *args, number=2, serving_lease=SERVING_LEASE, max_lease=LEASE
    ) as cluster:
        cluster.wait_settled()
        yield cluster


def readiness(server: ClusterServer) -> dict[str, object]:
    where = server.wait_log("live page").split("live page: ")[1].split()[0]
    try:
        with urllib.request.urlopen(f"{where}readyz", timeout=PATIENCE) as page:
            found: dict[str, object] = json.load(page)
    except urllib.error.HTTPError as error:
        found = json.load(error)
    return found


def wipe(etcd: Etcd) -> None:
    etcd.wipe()


def restore(etcd: Etcd) -> None:
    etcd.restore(etcd.data.with_suffix(".copy"))


@pytest.mark.parametrize("replace", [wipe, restore])
def test_nothing_is_granted_any_more_and_the_servers_end_when_no_lock_can_be_left(
    cluster: ClusterStage, etcd: Etcd, replace: Callable[[Etcd], None]
) -> None:
    if replace is restore:
        etcd.back_up()
        cluster.wait_settled()
        cluster.mapping.put("else", b"lost")
    first, second = cluster.servers
    key = cluster.key_at(first)
    client, line = cluster.follow("l", key, f"0 {LEASE}")
    token = granted(line)
    assert client is not None
    replace(etcd)
    replaced = time.monotonic()

    for server in cluster.servers:
        assert " ERROR " in server.wait_log(NOTICED)
        assert f"this server stops in {int(GRACE)} s" in server.wait_log(NOTICED)
    assert client.ask("n", key, token).startswith("error_recovering")
    assert client.ask("l", "another", f"0 {LEASE}").startswith(("error_recovering", "error_moved"))
    document = readiness(first)
    assert document["ready"] is False
    assert NOTICED in json.dumps(document)

    calls = etcd.calls()

    # One that starts too soon opens nothing that may be held.
    second.kill()
    second.start()
    second.wait_joined()
    if time.monotonic() >= replaced + GRACE:
        pytest.skip("the machine is too slow to start a server too soon")
    if replace is wipe:  # else it finds that its shards were served
        second.wait_log("etcd was wiped, or restored from a backup, says ")

    ended = wait_until(lambda: _ended(first), 2 * PATIENCE, first.log_text)
    assert ended == 1
    assert time.monotonic() > replaced + GRACE - 1
    assert "start this server again" in first.log_text()
    assert "not every shard was handed over" not in first.log_text()

    spent = etcd.calls() - calls
    # Each closes the store again and again; and one has joined it, and given its shards out.
    assert spent["Txn"] + spent["Range"] + spent["LeaseGrant"] < 2 * GRACE * 3 + 450, spent

    first.start()
    _, line = cluster.follow("l", key, f"0 {LEASE}", timeout=2 * PATIENCE)
    assert granted(line) != token
    assert time.monotonic() > replaced + LEASE


def _ended(server: ClusterServer) -> int | None:
    return server._started().poll()
