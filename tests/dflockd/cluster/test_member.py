"""What runs a node ends when it is told to, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time

from dflockd.cluster.member import Member, agree
from dflockd.cluster.node import Node
from dflockd.cluster.parameters import ClusterParameters
from dflockd.shards import Delete, MemoryStore, follow
from dflockd.table import Limits

PATIENCE = 20.0
ADDRESS = "127.0.0.1:6388"


async def test_a_member_that_is_declared_dead_while_it_stops_ends() -> None:
    """It wants another lease of the store just then, and gets it no more."""
    store, parameters = MemoryStore(), ClusterParameters(8, 2, 4)
    limits = Limits(default_lease=4, max_lease=4)
    secret = await agree(store, "/p", parameters)
    node = Node(ADDRESS, limits, secret, parameters, prefix="/p", wall=time.time_ns)
    member = Member(node, store, lambda *_: None, name="the store")
    async with asyncio.timeout(PATIENCE):
        member.start()
        async with contextlib.aclosing(follow(store, "/p/")) as news:
            async for _ in news:  # a heartbeat, if nothing else
                if node.counts()["serving"] == parameters.num_shards:
                    break
        await store.txn([], [Delete(f"/p/nodes/{ADDRESS}")])
        await member.stop(None)
    assert asyncio.all_tasks() == {asyncio.current_task()}
