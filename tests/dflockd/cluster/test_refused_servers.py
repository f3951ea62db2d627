"""Servers that cannot be part of a real cluster, or not yet."""

from __future__ import annotations

import asyncio
import shlex
import socket
from pathlib import Path

import pytest

from dflockd import cli
from examples.demo.stage import wait_until
from tests.dflockd.cluster.holders import LEASE, Holder
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage, FewShards
from tests.dflockd.shards.etcd_process import Etcd


def test_other_terms_than_those_of_the_cluster_refuse_to_start(
    cluster: ClusterStage, tmp_path: Path
) -> None:
    other = FewShards(
        tmp_path, *cluster.arguments(), "--cluster-serving-lease", "3", name="other-parameters"
    )
    line = _complaint(other)
    assert "--cluster-serving-lease is 3 here and 2 in the cluster" in line
    assert "--cluster-prefix /dflockd" in line


def test_parameters_that_were_deleted_refuse_to_start_and_are_written_again_as_it_says(
    cluster: ClusterStage, etcd: Etcd, tmp_path: Path
) -> None:
    kept = etcd.control("get", "/dflockd/meta")["kvs"][0]["value"]
    etcd.control("del", "/dflockd/meta")
    line = _complaint(FewShards(tmp_path, *cluster.arguments(), name="without-parameters"))
    assert "/dflockd/meta is missing" in line
    etcd.control(*shlex.split(line.partition("etcdctl ")[2]))
    assert etcd.control("get", "/dflockd/meta")["kvs"][0]["value"] == kept


def test_a_socket_is_not_left_by_a_server_that_cannot_show_itself(
    cluster: ClusterStage, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = "--http-port", str(taken.getsockname()[1])
        unix = "--unix-socket", str(path)
        server = FewShards(tmp_path, *cluster.arguments(), *unix, *http, name="unshown")
        with server:
            server.wait_log("choose another --http-host or --http-port")
            wait_until(lambda: not server.running or None, 30, lambda: "it goes on")
    assert not path.exists()


async def test_work_that_fails_ends_the_server_as_one_that_was_refused() -> None:
    stopped, over, refused = (asyncio.Event() for _ in range(3))

    async def fails() -> None:
        raise RuntimeError("planted")

    await cli._first((stopped, over, refused), asyncio.ensure_future(fails()))
    assert refused.is_set()
    assert not stopped.is_set()


def _complaint(server: ClusterServer) -> str:
    """The one line with which a server refuses to start."""
    with pytest.raises(Exception, match="ended before it logged"):
        server.start()
    [line] = server.log_text().splitlines()
    assert not server.running
    return line


def test_of_two_servers_with_one_address_the_second_waits_for_the_end_of_the_first(
    cluster: ClusterStage, tmp_path: Path
) -> None:
    first = cluster.servers[0]
    holder = Holder(cluster, cluster.key_at(first))
    # It is not where it says: that is for the end, when a name or an address changes hands.
    flags = ("--advertise", first.address, "--advertise-check", "off")
    second = FewShards(tmp_path, *cluster.arguments(), *flags, name="second")
    try:
        second.start()
        client = second.connect()
        assert client.ask("l", holder.key, f"0 {LEASE}").startswith(
            ("error_recovering", "error_moved")
        )
        holder.keep()
        assert "is in the cluster" not in second.log_text()
        first.stop()
        second.wait_log(f"{first.address} is in the cluster")
    finally:
        second.kill()
        client.close()
