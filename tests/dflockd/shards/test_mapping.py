"""Who gets which shard: the vectors of the published algorithms, and what always holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.errors import InvalidArgumentError
from dflockd.shards import (
    ShardMapping,
    ShardRecord,
    create_shard_mapping,
    get_leader,
    rebalance_shard_mapping,
    update_shard_mapping,
)

N1, N2, N3, N4 = NODES = ["node1", "node2", "node3", "node4"]


def mapping_of(*records: ShardRecord) -> ShardMapping:
    return ShardMapping(records, (1,) * len(records))


def by_counts(**counts: int) -> ShardMapping:
    """The first shards with the first node, and so on."""
    return mapping_of(*(ShardRecord(node) for node, n in counts.items() for _ in range(n)))


def moved(before: ShardMapping, after: ShardMapping) -> list[int]:
    return [
        shard
        for shard, (old, new) in enumerate(zip(before.records, after.records, strict=True))
        if old.target != new.target
    ]


# create


def test_three_nodes_share_8192_shards():
    mapping = create_shard_mapping(NODES[:3])
    assert mapping.counts() == {N1: 2731, N2: 2731, N3: 2730}
    assert [shard for shard in range(12) if mapping[shard].target == N1] == [0, 3, 6, 9]
    assert [mapping[shard].target for shard in (0, 1, 2, 3, 100)] == [N1, N2, N3, N1, N2]
    assert mapping[0] == ShardRecord(N1)


def test_one_node_gets_everything():
    assert create_shard_mapping([N1]).counts() == {N1: 8192}


def test_the_order_of_nodes_does_not_matter_nor_that_one_is_named_twice():
    assert create_shard_mapping([N3, N1, N2, N1]) == create_shard_mapping(NODES[:3])


@pytest.mark.parametrize("make", [create_shard_mapping, get_leader])
@pytest.mark.parametrize("nodes", [[], "node1", ["a,b"], [""], ["f=a"], [" a"]])
def test_nodes_that_cannot_be_are_refused(make, nodes):
    with pytest.raises(InvalidArgumentError):
        make(nodes)


@pytest.mark.parametrize("shard", [-1, 8192])
def test_a_shard_that_does_not_exist(shard):
    with pytest.raises(
        InvalidArgumentError, match=f"shard {shard} does not exist: they are 0 to 8191"
    ):
        create_shard_mapping(NODES)[shard]


def test_the_leader_is_the_smallest_as_text():
    assert get_leader(["b:1", "a:2", "a:10"]) == "a:10"


@given(st.sets(st.sampled_from([f"n{n}" for n in range(20)]), min_size=1), st.integers(1, 300))
def test_a_new_mapping_is_balanced_and_complete(nodes, num_shards):
    mapping = create_shard_mapping(nodes, num_shards)
    counts = [mapping.counts()[node] for node in nodes]
    assert sum(counts) == num_shards
    assert max(counts) - min(counts) <= 1


# update


def test_the_same_nodes_change_nothing():
    mapping = create_shard_mapping(NODES)
    assert update_shard_mapping(mapping, NODES) is mapping
    assert update_shard_mapping(mapping, NODES[::-1]) is mapping


def test_only_shards_of_a_removed_node_move():
    before = create_shard_mapping(NODES[:3])
    after = update_shard_mapping(before, [N1, N2])
    assert moved(before, after) == list(range(2, 8192, 3))
    assert len(moved(before, after)) == 2730
    assert after.counts() == {N1: 4096, N2: 4096}
    assert [after[shard].target for shard in (2, 5, 8, 11)] == [N1, N2, N1, N2]


def test_a_new_node_gets_no_shards():
    before = create_shard_mapping([N1, N2])
    assert update_shard_mapping(before, NODES[:3]) is before
    assert before.counts() == {N1: 4096, N2: 4096}


def test_an_update_without_nodes_is_refused():
    with pytest.raises(InvalidArgumentError, match="nodes is empty"):
        update_shard_mapping(create_shard_mapping([N1]), [])


def test_current_node_and_flags_are_kept():
    before = mapping_of(ShardRecord("gone", "gone", ("new", "e:7")))
    assert update_shard_mapping(before, [N1])[0] == ShardRecord(N1, "gone", ("new", "e:7"))


def test_a_shard_without_a_live_target_stays_where_it_is_served():
    before = mapping_of(
        ShardRecord("", N2),
        ShardRecord("", "gone"),
        ShardRecord(),
        ShardRecord("gone", N1),  # it was on its way from there
        ShardRecord("gone", "gone"),
    )
    after = update_shard_mapping(before, [N1, N2])
    assert [record.target for record in after.records] == [N2, N2, N1, N1, N1]


@pytest.mark.parametrize(
    ("target", "flags", "becomes"),
    [(N2, ("pinned",), N2), ("gone", ("pinned",), "gone"), ("", ("pinned",), N1), ("gone", (), N1)],
)
def test_a_pinned_shard_stays_with_its_target(target, flags, becomes):
    mapping = mapping_of(ShardRecord(target, "", flags))
    assert update_shard_mapping(mapping, [N1, N2])[0] == ShardRecord(becomes, "", flags)


def test_pinned_shards_of_a_node_that_is_gone_are_reported():
    mapping = create_shard_mapping([N1, N2], 8).pin(3).pin(4)
    assert mapping.stranded([N1, N2]) == []
    assert update_shard_mapping(mapping, [N1]).stranded([N1]) == [3]


def test_a_mapping_knows_what_the_store_does_not():
    mapping = mapping_of(ShardRecord(N1), ShardRecord(N2), ShardRecord(N1))
    after = update_shard_mapping(mapping, [N1])
    assert after.unsaved == {1}
    assert after.move(2, N1) is after
    assert after.pin(0).unsaved == {0, 1}
    assert mapping.unsaved == frozenset()
    assert mapping.records[1] == ShardRecord(N2)


nodes = st.sampled_from(["", *NODES, "gone"])
flags = st.lists(st.sampled_from(["pinned", "x", "e:3"]), unique=True, max_size=3).map(tuple)
mappings = st.lists(st.builds(ShardRecord, nodes, nodes, flags), min_size=1, max_size=60).map(
    lambda records: mapping_of(*records)
)
live_nodes = st.sets(st.sampled_from(NODES), min_size=1)


@given(mappings, live_nodes)
def test_an_update_moves_no_more_than_it_must(before, live):
    after = update_shard_mapping(before, live)
    for old, new in zip(before.records, after.records, strict=True):
        assert new[1:] == old[1:]
        if old.target in live or (old.pinned and old.target):
            assert new.target == old.target
        else:
            assert new.target in live
    assert update_shard_mapping(after, live) is after


# rebalance


def settled(mapping: ShardMapping, live: list[str], **options) -> tuple[ShardMapping, int, int]:
    """Rebalance until nothing changes; with the rounds and the moves that it took."""
    rounds = moves = 0
    while (after := rebalance_shard_mapping(mapping, live, **options)) is not mapping:
        rounds += 1
        assert rounds <= mapping.num_shards, "it goes on for ever"
        moves += len(moved(mapping, after))
        mapping = after
    return mapping, rounds, moves


def test_a_fourth_node_gets_shards_in_batches_up_to_the_threshold():
    before = create_shard_mapping(NODES[:3])
    after, rounds, moves = settled(before, NODES)
    assert (rounds, moves) == (28, 1742)
    assert after.counts() == {N1: 2150, N2: 2150, N3: 2150, N4: 1742}


def test_a_batch_is_a_128th_of_all_shards():
    before = create_shard_mapping(NODES[:3])
    assert len(moved(before, rebalance_shard_mapping(before, NODES))) == 64
    assert len(moved(before, rebalance_shard_mapping(before, NODES, batch=5))) == 5
    few = mapping_of(*[ShardRecord(N1)] * 8)
    assert len(moved(few, rebalance_shard_mapping(few, [N1, N2]))) == 1


@pytest.mark.parametrize(
    ("before", "moves", "after"),
    [
        ((48, 8, 8), 24, (24, 20, 20)),
        ((28, 18, 18), 4, None),
        ((23, 21, 20), 0, (23, 21, 20)),
        ((11, 10, 9), 0, (11, 10, 9)),  # exactly at the threshold
        ((3550, 2321, 2321), 456, (3094, 2549, 2549)),
        ((2950, 2621, 2621), 0, (2950, 2621, 2621)),
    ],
)
def test_counts_before_and_after(before, moves, after):
    mapping = by_counts(**dict(zip(NODES, before, strict=False)))
    result, _, made = settled(mapping, NODES[:3])
    assert made == moves
    if after:
        assert tuple(result.counts()[node] for node in NODES[:3]) == after


def test_the_lowest_shards_go_to_the_emptiest_nodes_in_turns():
    before = by_counts(node1=6144, node2=1024, node3=1024)
    after = rebalance_shard_mapping(before, NODES[:3], batch=6)
    assert moved(before, after) == [0, 1, 2, 3, 4, 5]
    assert [after[shard].target for shard in range(6)] == [N2, N3, N2, N3, N2, N3]


def test_without_a_threshold_nodes_end_up_equal():
    after, _, moves = settled(create_shard_mapping(NODES[:3]), NODES, threshold=0)
    assert set(after.counts().values()) == {2048}
    assert moves == 2048


def test_pinned_shards_are_not_balanced():
    mapping = by_counts(node1=8)
    for shard in range(6):
        mapping = mapping.pin(shard)
    after, _, _ = settled(mapping, [N1, N2], threshold=0)
    assert [after[shard].target for shard in range(8)] == [N1] * 6 + [N2] * 2


def test_shards_of_a_node_that_is_gone_are_not_balanced():
    before = by_counts(node1=5, gone=20, node2=1)
    after, _, _ = settled(before, [N1, N2], threshold=0)
    assert after.counts() == {N1: 3, "gone": 20, N2: 3}


def test_balancing_wants_every_shard_to_have_a_target():
    with pytest.raises(InvalidArgumentError, match="update the mapping first"):
        rebalance_shard_mapping(mapping_of(ShardRecord(N1), ShardRecord()), [N1, N2])


@given(
    st.lists(st.builds(ShardRecord, st.sampled_from(NODES), nodes, flags), min_size=1, max_size=60),
    live_nodes,
    st.sampled_from([0.0, 0.2, 1.0]),
)
def test_balancing_ends_and_only_ever_changes_targets(records, live, threshold):
    before = mapping_of(*records)
    after, _, moves = settled(before, sorted(live), threshold=threshold)
    assert moves <= len(records)
    for old, new in zip(before.records, after.records, strict=True):
        assert new[1:] == old[1:]
        if old.pinned or old.target not in live:
            assert new == old
    counts = Counter(dict.fromkeys(live, 0))
    counts.update(record.target for record in after.records if record.target in live)
    apart = max(counts.values()) - min(counts.values())
    fullest = max(sorted(live), key=counts.__getitem__)
    assert (
        apart < 2
        or apart <= threshold * len(records) / len(live)
        or all(record.pinned for record in after.records if record.target == fullest)
    )
