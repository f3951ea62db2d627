"""Whether a server serves, and whether all shards of the cluster have one: said in one way."""

from __future__ import annotations

import json

import pytest

from dflockd.client.operations import about_server, refused
from dflockd.cluster.leader import SETTLE
from dflockd.wire import Acquire, Recovering, Space, Stats
from dflockd.wire.messages import Report
from tests.dflockd.cluster.nodes import KEY, Cluster


def status(cluster: Cluster, address: str) -> str:
    reply = cluster.ask(address, Stats())
    assert isinstance(reply, Report)
    said: str = json.loads(reply.json)["status"]
    assert said == cluster.nodes[address].table.status(cluster.now)
    return said


def why(cluster: Cluster, address: str) -> str:
    """What a client is told who wants a lock."""
    reply = cluster.ask(address, Acquire(Space.LOCK, KEY, 1, 0, 4))
    assert isinstance(reply, Recovering)
    return str(refused(reply, about_server("lock-1")))


def test_a_server_that_serves_recovers_is_cut_off_and_is_closed() -> None:
    cluster = Cluster("a:1", "b:1")
    assert status(cluster, "a:1") == "serving"
    cluster.kill("a:1")
    cluster.pass_(SETTLE + 1)
    assert (
        status(cluster, "b:1") == "serving"
    )  # of its own, but not of those that it has taken over
    assert "the server grants nothing at the moment" in why(cluster, "b:1")
    cluster.now += 10
    assert status(cluster, "b:1") == "cut off"
    assert "the server is cut off from etcd, and grants and renews nothing" in why(cluster, "b:1")
    cluster.nodes["b:1"].replaced("it is another one", cluster.now)
    assert status(cluster, "b:1") == "closed"
    assert "is about to end, because etcd was wiped" in why(cluster, "b:1")


def test_a_server_all_of_whose_shards_recover_does_not_serve() -> None:
    cluster = Cluster("b:1")
    cluster.start("a:1")
    assert status(cluster, "a:1") == "serving"  # it has none
    cluster.kill("b:1")
    cluster.pass_(SETTLE + 1)
    assert status(cluster, "a:1") == "recovering"
    cluster.pass_(cluster.parameters.grace)
    assert status(cluster, "a:1") == "serving"


def test_every_server_knows_of_shards_that_nobody_serves() -> None:
    cluster = Cluster("a:1", "b:1", "c:1")
    cluster.write(1, cluster.record(1).with_flag("pinned"))
    pinned_to = cluster.record(1).target
    cluster.kill(pinned_to)
    cluster.pass_(SETTLE + 1 + cluster.parameters.grace)
    for node in cluster.nodes.values():
        assert not node.unserved()
        assert node.conditions() == {
            **dict.fromkeys(("recovering", "moving", "unassigned"), 0),
            "served": 3,
            "gone": 1,
        }


@pytest.mark.parametrize("said", [b"", b"of two minds"])
def test_a_status_that_is_not_known_is_no_reason(said: bytes) -> None:
    text = str(refused(Recovering(100, said), about_server("lock-1")))
    assert "the server grants nothing at the moment: try again in 0.1 s" in text
