"""One prefix is one cluster's: of lock servers, or of nodes of the library, and of nobody else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflockd.cluster import ClusterParameters, agree
from dflockd.errors import InvalidArgumentError
from dflockd.shards import PREFIX, Cluster, MemoryStore, NoClusterError, Store, StoreError, cluster
from dflockd.shards.keys import FOLDERS, SERVERS_PREFIX, Keys
from tests.dflockd.raw_server import PATIENCE

PARAMETERS = ClusterParameters()


def test_the_library_is_not_among_the_lock_servers_by_default() -> None:
    assert PREFIX == "/dflockd-shards"
    assert SERVERS_PREFIX == "/dflockd"
    ours, theirs = Keys(PREFIX), Keys(SERVERS_PREFIX)
    for folder in FOLDERS:
        assert not ours.key(folder, "").startswith(theirs.key("", "")[:-1])
        assert not theirs.key(folder, "").startswith(ours.key("", "")[:-1])


@pytest.mark.parametrize(
    "prefix",
    ["/dflockd/nodes", "/dflockd/shard/", "/a/leaving/b", "/dflockd.handoff", "/dflockd.secret/x"],
)
def test_a_part_of_a_cluster_is_no_prefix(prefix: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is a part of a cluster's own keys"):
        Cluster(MemoryStore(), "node1", prefix=prefix)


def test_what_ends_in_a_slash_is_the_same() -> None:
    assert Keys("/a/").key("shard", 7) == Keys("/a").key("shard", 7) == "/a/shard/7"
    assert Keys("/a/").secret == "/a.secret"
    assert Keys("/a").key("handoff", 7) == "/a.handoff/7"


async def test_a_node_does_not_join_where_lock_servers_are(store: Store, prefix: str) -> None:
    await agree(store, prefix, PARAMETERS)
    one = Cluster(store, "node1", prefix=prefix)
    with pytest.raises(StoreError, match=f"{prefix}/meta exists, so lock servers use"):
        await one.registration.register()
    assert await one.get_nodes() == []


async def test_lock_servers_do_not_begin_where_nodes_are(store: Store, prefix: str) -> None:
    one = Cluster(store, "node1", prefix=prefix)
    assert await one.registration.register()
    await one.registration.end()
    with pytest.raises(StoreError, match=f"{prefix}/library exists, so nodes of the"):
        await agree(store, prefix, PARAMETERS)
    assert f"{prefix}/meta" not in (await store.get_prefix(prefix)).records
    # The others are not in the way of each other, and of one that comes back.
    assert await Cluster(store, "node1", prefix=prefix).registration.register()
    assert await Cluster(store, "node2", prefix=prefix).registration.register()


async def test_an_answer_that_is_lost_is_no_stranger(store: Store, prefix: str) -> None:
    one = Cluster(store, "node1", prefix=prefix)
    assert await one.registration.register()
    assert await one.registration.register()  # as if nobody had told
    await agree(store, f"{prefix}-servers", PARAMETERS)
    await agree(store, f"{prefix}-servers", PARAMETERS)


async def test_the_cluster_of_the_process(prefix: str) -> None:
    """As `cluster.Get()` of the manual is used: made in one place, found in all others."""
    store = MemoryStore()
    made = cluster.init(store, "node1", prefix=prefix, num_shards=64)
    c = cluster.get()
    assert c is made
    await c.registration.register()
    if await c.is_leader():
        await c.initialize_shard_mapping()
        await c.update_shard_mapping()
    assert await c.get_current_node_for_object("object-123") == "node1"
    assert cluster.init(store, "node2", prefix=prefix) is cluster.get() is not made


def test_without_one_it_says_what_to_do() -> None:
    script = (
        "from dflockd.shards import NoClusterError, cluster\n"
        "try: cluster.get()\n"
        "except NoClusterError as exc: print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == (
        "this process has no cluster yet: call dflockd.shards.cluster.init(store, address) "
        "where it starts\n"
    )
    assert issubclass(NoClusterError, LookupError)
