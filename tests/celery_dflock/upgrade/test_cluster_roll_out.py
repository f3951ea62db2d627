"""The servers of a cluster are replaced one after the other, under clients of both releases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.celery_dflock.upgrade.releases import Release, first, here
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.shards.etcd_process import Etcd

USER = "tests.celery_dflock.upgrade.cluster_user"

# What servers of 0.1 call it.
NAMES = {"new": "--cluster-serving-lease", "old": "--cluster-promise"}


def make(server: ClusterServer, release: Release) -> None:
    """Have a server be of a release when it starts next."""
    server._env.update(release.env)
    name = NAMES[release.name]
    server._args = tuple(name if each in NAMES.values() else each for each in server._args)


def is_old(server: ClusterServer) -> bool:
    """Whether it does not know what came after 0.1."""
    client = server.connect()
    try:
        return client.ask("age", "key", "_") == "error"
    finally:
        client.close()


# A minute. `dflockd/cluster/test_snapshot.py` has a quick test of what both releases write and read.
@pytest.mark.soak
@pytest.mark.timeout(400)
def test_no_lock_is_lost_and_nobody_waits_in_vain(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        args = ("--default-lease-ttl", "20")
        stage = ClusterStage(tmp_path, etcd, *args, serving_lease=10, max_lease=60)
        for server in stage.servers:
            make(server, first())
        with stage:
            stage.wait_settled()
            assert all(is_old(server) for server in stage.servers)
            seeds = "cluster://" + ",".join(server.address for server in stage.servers)
            users = [
                subprocess.Popen(
                    [sys.executable, "-m", USER, seeds],
                    env={**os.environ, **release.env},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for release in (first(), here())
            ]
            try:
                for release in (here(), first()):  # and back
                    for server in stage.servers:
                        server.stop()
                        make(server, release)
                        server.start()
                        server.wait_joined()
                        stage.mapping.rebalance()
                        stage.wait_settled()
                    assert is_old(server) is (release.name == "old")
                told = [json.loads(user.communicate()[0]) for user in users]
            finally:
                for user in users:
                    user.kill()
            assert [each["wrong"] for each in told] == [[], []]
            assert all(each["granted"] > 20 for each in told)
            assert not [server.name for server in stage.servers if "Traceback" in server.log_text()]
