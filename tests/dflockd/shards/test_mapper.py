"""The names of the published manual, each at work over both stores."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from dflockd import shards
from dflockd.errors import InvalidArgumentError
from dflockd.shards import (
    BadShardValueError,
    Cluster,
    Delete,
    MemoryStore,
    NoShardMappingError,
    Put,
    ShardConflictError,
    ShardMapper,
    ShardRecord,
    StoreError,
    get_shard_id,
)

NODES = ["node1", "node2", "node3"]
OBJECT, SHARD = "object-123", 3531


async def raw(store, prefix):
    """What the store has, as text by shard."""
    loaded = await store.get_prefix(f"{prefix}/shard/")
    return {key.rpartition("/")[2]: record.value.decode() for key, record in loaded.records.items()}


class Counting(MemoryStore):
    """Counts what is read, and can be made to wait or to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.after_read = asyncio.Event()
        self.after_read.set()
        self.reading = asyncio.Event()

    async def get_prefix(self, prefix):
        self.loads += 1
        loaded = await super().get_prefix(prefix)
        self.reading.set()
        await self.after_read.wait()
        return loaded


@pytest.fixture
def mapper(store, prefix):
    return ShardMapper(store, prefix=prefix, num_shards=64)


async def make(mapper, nodes=NODES):
    await mapper.store_shard_mapping(await mapper.create_shard_mapping(nodes))


async def test_the_first_example_of_the_manual(store, prefix):
    """8192 shards are made, stored, loaded and looked up."""
    mapper = ShardMapper(store, prefix=prefix)
    mapping = await mapper.create_shard_mapping(NODES)
    await mapper.store_shard_mapping(mapping)
    assert shards.get_shard_id(OBJECT) == SHARD
    assert await mapper.get_current_node_for_object(OBJECT) == NODES[SHARD % 3]
    assert await mapper.get_node_for_shard(8191) == "node2"
    stored = await raw(store, prefix)
    assert len(stored) == 8192
    assert (stored["0"], stored["1"], stored["8191"]) == ("node1,", "node2,", "node2,")
    loaded = await mapper.load_shard_mapping()
    assert loaded.records == mapping.records
    assert loaded.counts() == {"node1": 2731, "node2": 2731, "node3": 2730}


async def test_the_second_example_of_the_manual(store, prefix):
    """The leader makes the mapping, and updates it when nodes go; any node looks up."""
    one, two = (Cluster(store, node, prefix=prefix, num_shards=64) for node in NODES[:2])
    assert not await one.is_leader()
    assert await two.registration.register()
    assert await two.is_leader()
    assert await one.registration.register()
    assert [await cluster.is_leader() for cluster in (one, two)] == [True, False]
    assert await one.get_nodes() == ["node1", "node2"]

    await one.initialize_shard_mapping()
    assert await two.get_current_node_for_object(OBJECT) == NODES[get_shard_id(OBJECT, 64) % 2]
    assert (await two.mapper.load_shard_mapping()).counts() == {"node1": 32, "node2": 32}

    await one.registration.end()
    assert await two.is_leader()
    await two.update_shard_mapping()
    assert await two.get_current_node_for_object(OBJECT) == "node2"
    one.invalidate_cache()
    assert await one.get_current_node_for_object(OBJECT) == "node2"


async def test_an_entry_without_a_lease_is_no_node(store, prefix):
    """Somebody wrote it by hand: it would lead, and be given shards, for ever."""
    one = Cluster(store, "node1", prefix=prefix, num_shards=64)
    assert await one.registration.register()
    await store.txn([], [Put(f"{prefix}/nodes/0", b"by hand")])
    assert await one.get_nodes() == await one.get_candidates() == ["node1"]
    assert await one.is_leader()
    await one.initialize_shard_mapping()
    assert (await one.mapper.load_shard_mapping()).counts() == {"node1": 64}
    with pytest.raises(InvalidArgumentError, match="node '0' is not alive: node1 of"):
        await one.move_shard(0, "0")


async def test_a_node_that_leaves_is_given_nothing(store, prefix):
    one, two = (Cluster(store, node, prefix=prefix, num_shards=64) for node in NODES[:2])
    assert await one.registration.register()
    assert await two.registration.register()
    await store.txn([], [Put(f"{prefix}/leaving/node1", b"x")])
    assert await two.get_leavers() == ["node1"]
    assert await two.get_candidates() == ["node2"]
    assert await one.is_leader()


async def test_what_is_stored_reads_as_the_manual_prints_it(store, prefix):
    printed = {
        "0": "localhost:47001",
        "1": "localhost:47001,localhost:47002",
        "2": "localhost:47001,localhost:47002,f=pinned",
        "3": "localhost:47001,,f=pinned",
        "4": "f=pinned,localhost:47001,localhost:47002",
        "5": "localhost:47001,f=pinned,localhost:47002",
        "6": "localhost:47001,localhost:47002,f=pinned,f=readonly",
    }
    puts = [Put(f"{prefix}/shard/{key}", value.encode()) for key, value in printed.items()]
    await store.txn([], puts)
    mapper = ShardMapper(store, prefix=prefix, num_shards=7)
    mapping = await mapper.load_shard_mapping()
    assert [record.target for record in mapping.records] == ["localhost:47001"] * 7
    assert [r.current for r in mapping.records] == ["", *["localhost:47002"] * 2, ""] + [
        "localhost:47002"
    ] * 3
    assert [record.pinned for record in mapping.records] == [False, False] + [True] * 5
    # What nobody has to change stays as it was written, to the byte.
    updated = await mapper.update_shard_mapping(["localhost:47009"])
    await mapper.store_shard_mapping(updated)
    assert await raw(store, prefix) == printed | {
        "0": "localhost:47009,",
        "1": "localhost:47009,localhost:47002",
    }


async def test_an_update_writes_only_what_it_moves(store, mapper, prefix):
    await make(mapper)
    revisions = (await mapper.load_shard_mapping()).revisions
    await mapper.store_shard_mapping(await mapper.update_shard_mapping(["node1", "node2"]))
    after = await mapper.load_shard_mapping()
    rewritten = [s for s in range(64) if after.revisions[s] != revisions[s]]
    assert rewritten == list(range(2, 64, 3))
    # Nothing to move is nothing to write.
    revision = (await store.get_prefix(prefix)).revision
    await mapper.store_shard_mapping(await mapper.update_shard_mapping(["node1", "node2", "new"]))
    assert (await store.get_prefix(prefix)).revision == revision


async def test_a_mapping_is_made_once_and_only_what_is_missing_is_added(store, mapper, prefix):
    await make(mapper)
    with pytest.raises(ShardConflictError, match=r"64 of 64 shards .* first of them 0") as caught:
        await make(mapper, ["other"])
    assert caught.value.shards == tuple(range(64))
    await store.txn([], [Delete(f"{prefix}/shard/5")])
    mapper.invalidate_cache()
    with pytest.raises(NoShardMappingError, match="shard 5 has no node"):
        await mapper.get_node_for_shard(5)
    await mapper.store_shard_mapping(await mapper.update_shard_mapping(NODES))
    assert await mapper.get_node_for_shard(5) == "node3"
    assert (await mapper.load_shard_mapping()).counts()["other"] == 0


async def test_what_others_changed_in_between_is_left_alone(store, prefix):
    mapper = ShardMapper(store, prefix=prefix, num_shards=200)
    await make(mapper)
    mapping = await mapper.update_shard_mapping(["node4"])
    # Meanwhile node3 takes over shard 2, and somebody deletes shard 150.
    claimed = b"node3,node3,f=e:1"
    await store.txn([], [Put(f"{prefix}/shard/2", claimed), Delete(f"{prefix}/shard/150")])
    with pytest.raises(ShardConflictError, match="2 of 200 shards") as caught:
        await mapper.store_shard_mapping(mapping)
    assert caught.value.shards == (2, 150)
    after = await mapper.load_shard_mapping()
    assert after[2] == ShardRecord("node3", "node3", ("e:1",))
    assert after[150] == ShardRecord()
    assert after.counts() == {"node4": 198, "node3": 1}
    await mapper.store_shard_mapping(await mapper.update_shard_mapping(["node4"]))
    assert (await raw(store, prefix))["2"] == "node4,node3,f=e:1"


async def test_two_leaders_at_a_time_make_one_mapping(store, prefix):
    mappers = [ShardMapper(store, prefix=prefix, num_shards=300) for _ in range(2)]

    async def lead(mapper, nodes):
        with contextlib.suppress(ShardConflictError):
            await make(mapper, nodes)

    await asyncio.gather(lead(mappers[0], NODES), lead(mappers[1], NODES[::-1]))
    one, two = [await mapper.load_shard_mapping() for mapper in mappers]
    assert one == two
    assert one.counts() == dict.fromkeys(NODES, 100)


async def test_a_pinned_shard_stays(mapper, caplog):
    await make(mapper)
    await mapper.pin_shard(5)
    assert "pinned" not in caplog.text
    await mapper.store_shard_mapping(await mapper.update_shard_mapping(["node1"]))
    assert "1 shards are pinned to nodes that are gone, the first of them 5 to node3" in caplog.text
    mapping = await mapper.load_shard_mapping()
    assert mapping.stranded(["node1"]) == [5]
    assert mapping[5] == ShardRecord("node3", "", ("pinned",))
    await mapper.unpin_shard(5)
    await mapper.store_shard_mapping(await mapper.update_shard_mapping(["node1"]))
    assert (await mapper.load_shard_mapping()).counts() == {"node1": 64}


async def test_shards_are_redistributed_when_somebody_says_so(store, prefix):
    one, two = (Cluster(store, node, prefix=prefix, num_shards=64) for node in NODES[:2])
    await one.registration.register()
    await one.initialize_shard_mapping()
    await two.registration.register()
    await one.update_shard_mapping()
    assert (await one.mapper.load_shard_mapping()).counts() == {"node1": 64}
    assert await one.rebalance_shard_mapping() == 32
    assert await one.rebalance_shard_mapping() == 0
    assert (await one.mapper.load_shard_mapping()).counts() == {"node1": 32, "node2": 32}

    await one.move_shard(63, "node2")
    assert await one.mapper.get_node_for_shard(63) == "node2"
    with pytest.raises(InvalidArgumentError, match="'node9' is not alive: node1, node2 of"):
        await one.move_shard(63, "node9")


async def test_a_shard_is_looked_for_where_it_is_served(store, mapper, prefix):
    await make(mapper)
    assert await mapper.get_node_for_shard(0) == "node1"
    await store.txn([], [Put(f"{prefix}/shard/0", b"node1,node2")])
    mapper.invalidate_cache()
    assert await mapper.get_node_for_shard(0) == "node2"


async def test_without_a_mapping_there_is_no_node(mapper):
    with pytest.raises(NoShardMappingError, match="create or update the mapping"):
        await mapper.get_current_node_for_object(OBJECT)
    await make(mapper)
    mapper.invalidate_cache()
    assert await mapper.get_current_node_for_object(OBJECT)


@pytest.mark.parametrize("shard", [-1, 64])
async def test_a_shard_out_of_range_has_no_node(mapper, shard):
    await make(mapper)
    for call in (mapper.get_node_for_shard, mapper.pin_shard, mapper.unpin_shard):
        with pytest.raises(InvalidArgumentError, match=f"shard {shard} does not exist"):
            await call(shard)


async def test_a_mapping_over_no_nodes_is_refused(store, mapper, prefix):
    for call in (mapper.create_shard_mapping, mapper.update_shard_mapping):
        with pytest.raises(InvalidArgumentError, match="nodes is empty"):
            await call([])
    with pytest.raises(InvalidArgumentError, match="nodes is empty"):
        await Cluster(store, "node1", prefix=prefix).initialize_shard_mapping()
    assert await raw(store, prefix) == {}


async def test_keys_that_are_no_shards_are_passed_over_with_a_warning(store, prefix, caplog):
    mapper = ShardMapper(store, prefix=prefix, num_shards=4)
    await make(mapper)
    names = ["4", "-1", "01", "x", "1/x", "\u0663", "\u00b2"]
    await store.txn([], [Put(f"{prefix}/shard/{name}", b"bad") for name in names])
    with caplog.at_level(logging.WARNING, "dflockd.shards"):
        assert (await mapper.load_shard_mapping()).counts() == {"node1": 2, "node2": 1, "node3": 1}
    assert caplog.text.count("is not a shard: there are 4") == len(names)


async def test_a_value_that_cannot_be_read_names_its_key(store, mapper, prefix):
    await make(mapper)
    await store.txn([], [Put(f"{prefix}/shard/5", b"\xff")])
    with pytest.raises(BadShardValueError, match=f"{prefix}/shard/5: "):
        await mapper.load_shard_mapping()


async def test_a_slash_at_the_end_of_the_prefix_does_not_count(store, mapper, prefix):
    await make(mapper)
    same = ShardMapper(store, prefix=f"{prefix}/", num_shards=64)
    assert await same.get_node_for_shard(0) == "node1"


# the copy in memory


async def test_look_ups_read_the_store_once():
    store = Counting()
    mapper = ShardMapper(store)
    await make(mapper)
    for n in range(100):
        await mapper.get_current_node_for_object(f"object-{n}")
        await mapper.get_node_for_shard(n)
    assert store.loads == 1


async def test_look_ups_at_the_same_time_read_the_store_once():
    store = Counting()
    mapper = ShardMapper(store)
    await make(mapper)
    store.after_read.clear()
    looking = [asyncio.ensure_future(mapper.get_node_for_shard(n)) for n in range(100)]
    await store.reading.wait()
    await asyncio.sleep(0)
    store.after_read.set()
    await asyncio.gather(*looking)
    assert store.loads == 1


async def test_only_an_invalidation_makes_a_change_of_others_seen():
    store = MemoryStore()
    mapper, other = ShardMapper(store), ShardMapper(store)
    await make(mapper, ["node1"])
    assert await mapper.get_node_for_shard(7) == "node1"
    await other.store_shard_mapping(await other.update_shard_mapping(["node2"]))
    assert await mapper.get_node_for_shard(7) == "node1"
    mapper.invalidate_cache()
    assert await mapper.get_node_for_shard(7) == "node2"


async def test_what_this_mapper_stores_it_sees():
    mapper = ShardMapper(MemoryStore())
    await make(mapper, ["node1"])
    assert await mapper.get_node_for_shard(7) == "node1"
    await mapper.store_shard_mapping(await mapper.update_shard_mapping(["node2"]))
    assert await mapper.get_node_for_shard(7) == "node2"


async def test_what_was_read_before_an_invalidation_is_read_again():
    store = Counting()
    mapper, other = ShardMapper(store), ShardMapper(store)
    await make(mapper, ["node1"])
    store.after_read.clear()
    looking = asyncio.ensure_future(mapper.get_node_for_shard(7))
    await store.reading.wait()
    store.after_read.set()
    await other.store_shard_mapping((await other.load_shard_mapping()).move(7, "node2"))
    store.loads = 0
    # It has read the store, but not come back yet.
    assert not looking.done()
    mapper.invalidate_cache()
    assert await looking == "node2"


async def test_a_store_that_fails_is_asked_again():
    class Failing(Counting):
        async def get_prefix(self, prefix):
            if self.loads == 0:
                self.loads += 1
                raise StoreError("no")
            return await super().get_prefix(prefix)

    store = Failing()
    mapper = ShardMapper(store)
    with pytest.raises(StoreError):
        await mapper.get_node_for_shard(0)
    await make(mapper)
    assert await mapper.get_node_for_shard(0) == "node1"
