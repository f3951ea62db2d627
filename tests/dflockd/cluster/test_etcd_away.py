"""Real servers whose etcd is away, restarted, or says nothing: no lock has two holders."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from pathlib import Path

import pytest

from examples.demo.stage import wait_until
from tests.dflockd.cluster.holders import (
    SERVING_LEASE,
    Holder,
    ask_at_once,
    asks_until_it_is_granted,
    asks_until_it_is_refused,
)
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage, FewShards
from tests.dflockd.cluster.test_replaced_store import readiness
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.shards.etcd_process import Etcd
from tests.pace import Pace

LAPSED = "no lock is granted or renewed until it does"
"""The line with which a server says that its serving lease has ended."""


class Early(FewShards):
    """A server that is started before its etcd."""

    def _after_start(self) -> None:
        self.wait_log("DEBUG dflockd: no connection to etcd")  # at least the second attempt


def test_a_server_waits_for_etcd_and_grants_nothing_once_that_is_gone(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    flags = ("--cluster-serving-lease", str(SERVING_LEASE), "--shutdown-timeout", "1")
    flags += ("--http-port", "0", "--log-level", "DEBUG")
    with Early(tmp_path, "--cluster", f"etcd://{etcd.endpoint}", *flags, name="early") as server:
        lives_and_says_once_what_is_missing(server)
        with etcd:
            server.wait_joined()
            client = server.connect()
            token, another = (asks_until_it_is_granted(client, key) for key in ("a", "b"))
            assert client.ask("r", "b", another) == "ok"
            etcd.pause()
            silent = time.monotonic()
            assert asks_until_it_is_refused(client, "b") < silent + SERVING_LEASE
            assert client.ask("n", "a", token).startswith("error_recovering")
            client.close()
            server.wait_log(LAPSED)
            # It hands nothing over, and ends all the same.
            server.stop()


def lives_and_says_once_what_is_missing(server: ClusterServer) -> None:
    assert server.log_text().count("WARNING dflockd: no connection to etcd") == 1
    assert "retrying until it works" in server.log_text()
    where = server.wait_log("live page").split("live page: ")[1].split()[0]
    with urllib.request.urlopen(f"{where}healthz", timeout=PATIENCE) as page:
        assert page.status == 200
    document = readiness(server)
    assert document["ready"] is False
    assert "no connection to etcd" in json.dumps(document)
    client = server.connect()
    assert client.ask("l", "a", "0").startswith("error_recovering")
    client.close()


def test_holders_keep_their_locks_while_etcd_is_restarted(
    cluster: ClusterStage, etcd: Etcd
) -> None:
    holders = [Holder(cluster, cluster.key_at(server)) for server in cluster.servers]
    etcd.stop()
    etcd.start()
    for holder in holders:
        holder.keep()
        assert ask_at_once(cluster, holder.key) == "timeout"
        assert holder.release() == "ok"


def test_while_etcd_is_silent_grants_stop_with_the_promise_and_go_on_with_it(
    cluster: ClusterStage, etcd: Etcd
) -> None:
    holders = [Holder(cluster, cluster.key_at(server)) for server in cluster.servers]
    free = [cluster.key_at(server) for server in cluster.servers]
    before = [server.log_text().count(LAPSED) for server in cluster.servers]
    etcd.pause()
    paused = time.monotonic()
    try:
        for server, key in zip(cluster.servers, free, strict=True):
            granted_at = asks_until_it_is_refused(cluster.connect(server), key)
            assert granted_at < paused + SERVING_LEASE, (
                "it must not grant for longer than it may serve"
            )
        assert {holder.renew() for holder in holders} == {"error_recovering"}
        for server, count in zip(cluster.servers, before, strict=True):
            wait_until(
                lambda server=server, count=count: server.log_text().count(LAPSED) > count or None,
                PATIENCE,
                server.log_text,
            )
    finally:
        etcd.resume()
    for holder in holders:
        holder.keep()
        assert holder.release() == "ok"


@pytest.mark.parametrize("etcd_is", ["dead", "silent"])
def test_a_server_ends_in_time_though_etcd_does_not_answer(tmp_path: Path, etcd_is: str) -> None:
    with Etcd(tmp_path) as etcd:
        flags = ("--cluster", f"etcd://{etcd.endpoint}", "--shutdown-timeout", "4")
        with FewShards(tmp_path, *flags, name="server") as server:
            server.wait_joined()
            with contextlib.closing(server.connect()) as client:
                asks_until_it_is_granted(client, "k")
                etcd.kill() if etcd_is == "dead" else etcd.pause()
                with Pace() as pace:
                    server.stop()
            if etcd_is == "silent":
                etcd.resume()
    assert pace.seconds < 4
    assert "not every shard was handed over" in server.log_text()
