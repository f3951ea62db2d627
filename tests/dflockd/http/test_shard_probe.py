"""Whether a server of a cluster has what it is to have: what readiness says of its shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from dflockd.http import health
from dflockd.http.health import MOVE_TIME, ShardProbe
from dflockd.server import Server
from tests.dflockd.cluster.nodes import KEY, Cluster

LATER = MOVE_TIME + 0.1


def test_without_a_shard_it_is_ready() -> None:
    cluster = Cluster("a:1", "b:1")
    new = cluster.start("c:1")
    assert ShardProbe(new).look(0).ok


def test_one_that_has_just_joined_is_not_ready_before_it_has_all() -> None:
    cluster = Cluster("a:1")
    node = cluster.nodes["a:1"]
    probe = ShardProbe(node)
    del node._tenures._tenures[2]  # as if its claim had not come through
    check = probe.look(0)
    assert not check.ok
    assert check.reason.startswith("1 of its shards are not served, the first of them 2: ")
    assert node.unserved().keys() == {2}


def test_a_shard_on_its_way_counts_once_that_takes_too_long() -> None:
    cluster = Cluster("a:1", "b:1")
    node = cluster.nodes["a:1"]
    probe = ShardProbe(node)
    assert probe.look(0).ok
    tenures = node._tenures._tenures
    first = tenures.pop(0)
    assert probe.look(1).ok
    # Another one each time: of none of them it took long.
    tenures[0], second = first, tenures.pop(2)
    assert probe.look(1 + LATER).ok
    assert probe.look(1 + 2 * LATER).reason.startswith("1 of its shards are not served")
    tenures[2] = second
    assert probe.look(1 + 2 * LATER).ok


def test_a_shard_that_comes_twice_is_on_its_way_twice() -> None:
    cluster = Cluster("a:1", "b:1")
    node = cluster.nodes["a:1"]
    probe = ShardProbe(node)
    assert probe.look(0).ok
    del node._tenures._tenures[0]
    assert probe.look(1).ok
    # Nobody has looked when it was served in between. Its record tells.
    node.view.revisions[0] += 2
    assert probe.look(1 + LATER).ok
    assert not probe.look(1 + 2 * LATER).ok


def test_a_shard_that_another_server_still_serves_is_served() -> None:
    cluster = Cluster("a:1", "b:1")
    giving, taking = cluster.nodes.values()
    giving.handover.may_go_on = lambda _now: False  # type: ignore[method-assign]
    cluster.move(0, "b:1")
    assert cluster.record(0)[:2] == ("b:1", "a:1")
    assert not taking.unserved()
    assert not giving.unserved()


def test_one_that_was_taken_for_dead_begins_anew() -> None:
    cluster = Cluster("a:1")
    node = cluster.nodes["a:1"]
    probe = ShardProbe(node)
    assert probe.look(0).ok
    node._gone()
    assert not node.joined
    assert node.unserved().keys() == {0, 1, 2, 3}
    assert probe.look(1).reason.startswith("4 of its shards are not served")


def test_a_server_is_ready_while_all_of_its_shards_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("a:1")
    cluster.take("a:1", KEY)
    cluster.kill("a:1")
    node = cluster.start("b:1")
    cluster.pass_(3)
    monkeypatch.setattr(health, "clock", SimpleNamespace(now=lambda: cluster.now))
    server = cast(Server, SimpleNamespace(table=node.table))
    ready, waits = health._not_recovering(server, node)[1:3]
    assert ready
    assert "no grants for another " in waits
    # One that is in no cluster has nobody who comes back to it but after a crash of its machine.
    assert not health._not_recovering(server, None).ok


def test_what_recovers_is_served() -> None:
    """Its holders have to reach it, to keep what they hold."""
    cluster = Cluster("a:1", "b:1")
    cluster.take("a:1", KEY)
    cluster.kill("a:1")
    cluster.pass_(4)
    node = cluster.nodes["b:1"]
    assert cluster.record(0).recovers > 0
    assert not node.unserved()
