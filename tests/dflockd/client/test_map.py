"""The map of a cluster as a client has it: pure, with times that are made up."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dflockd import errors
from dflockd.address import Address, parse_server
from dflockd.client import routing
from dflockd.client.operations import ShardReport
from dflockd.client.routing import DENIED, ShardMap
from dflockd.shards import get_shard_id
from tests.dflockd.client.routing_support import KEY, NOW, A, B, C, known, moved, report, seeds


def test_nothing_is_known_at_first() -> None:
    shards = ShardMap(seeds(A, B))
    assert shards.owner_of(KEY) is None
    assert shards.servers == ()
    assert shards.learn(moved(B)), "it is followed, and nothing is written down yet"
    assert shards.owner_of(KEY) is None


def test_epochs_decide() -> None:
    shards = known(A, 7)
    assert not shards.learn(moved(B, 6))
    assert shards.owner_of(KEY) == A
    assert shards.learn(moved(B, 7)), "the same epoch: it is about to change"
    assert shards.owner_of(KEY) == B
    assert shards.learn(moved(C, 9))
    shards.update(report(A, 8), B, NOW)
    assert shards.owner_of(KEY) == C, "who told that did not know the latest"
    shards.update(report(B, 9), B, NOW)
    assert shards.owner_of(KEY) == B


def test_a_server_that_is_gone_is_forgotten_whatever_its_epoch() -> None:
    shards = known(C, 9)
    shards.update(report(A, 7, (A, B)), A, NOW)
    assert shards.owner_of(KEY) == A
    assert shards.servers == (A, B)


def test_a_shard_without_a_server() -> None:
    shards = known(None)
    assert shards.owner_of(KEY) is None
    assert shards.whom_to_ask(KEY) == A, "who told so"


def test_another_cluster_with_other_shards() -> None:
    shards = known(A, 9)
    shards.update(ShardReport([B], [0] * 4, [1] * 4), B, NOW)
    assert shards.owner_of(KEY) == B


def test_a_server_that_says_the_same_knows_better_than_who_sent_us_away() -> None:
    shards = known(A, 7)
    same = shards.report
    assert same is not None
    assert shards.learn(moved(B, 7))
    shards.update(same, C, NOW)
    assert shards.owner_of(KEY) == A, "the shard was to move, and is not any more"
    gone = Address("gone", 1)
    assert shards.learn(moved(gone, 9))
    shards.update(same, C, NOW)
    assert shards.owner_of(KEY) == A, "who is not in the list is gone, whatever its epoch"
    assert shards.learn(moved(B, 9))
    shards.update(same, C, NOW)
    assert shards.owner_of(KEY) == B
    assert (shards.loaded_at, shards.report) == (NOW, same)


def test_epochs_that_were_set_back_are_believed_of_the_server_in_charge() -> None:
    """As when etcd was restored from a backup while no server ran."""
    shards = known(A, 9)
    shards.update(report(B, 7), C, NOW)
    assert shards.owner_of(KEY) == A, "who told that may not know the latest"
    assert not shards.heed(moved(B, 7), C, NOW)
    assert not shards.heed(moved(B, 7), A, NOW), "nor may it know itself"
    assert not shards.heed(moved(B, 7), C, NOW + DENIED)
    assert not shards.heed(moved(B, 7), A, NOW + DENIED - 0.1)
    assert shards.owner_of(KEY) == A
    assert shards.heed(moved(B, 7), A, NOW + DENIED)
    assert shards.owner_of(KEY) == B
    shards.update(report(C, 8), A, NOW)
    assert shards.owner_of(KEY) == C, "from then on epochs decide"
    # What was said of another epoch does not count.
    shards.update(report(A, 10), A, NOW)
    assert not shards.heed(moved(B, 8), A, NOW + 9 * DENIED)
    assert shards.heed(moved(B, 11), A, NOW), "no need to wait"


class NaiveMap:
    """What `ShardMap` is to know, written down without a thought for time and room."""

    def __init__(self) -> None:
        self.owners: list[Address | None] = []
        self.epochs: list[int] = []

    def learn(self, moved: errors.MovedError) -> bool:
        if moved.shard < len(self.owners):
            if moved.epoch < self.epochs[moved.shard]:
                return False
            self.owners[moved.shard] = parse_server(moved.to)
            self.epochs[moved.shard] = moved.epoch
        return True

    def update(self, report: ShardReport) -> None:
        owners = [report.servers[index] if index >= 0 else None for index in report.shards]
        epochs = list(report.epochs)
        if len(owners) == len(self.owners):
            for shard, (owner, epoch) in enumerate(zip(self.owners, self.epochs, strict=True)):
                if epoch > epochs[shard] and owner in report.servers:
                    owners[shard], epochs[shard] = owner, epoch
        self.owners, self.epochs = owners, epochs


FEW = 3

KEYS = [
    next(k for k in map(b"%d".__mod__, range(99)) if get_shard_id(k, FEW) == s) for s in range(FEW)
]

some_reports = st.builds(
    lambda servers, shards: ShardReport(
        servers, [min(index, len(servers) - 1) for index, _ in shards], [e for _, e in shards]
    ),
    st.lists(st.sampled_from([A, B, C]), unique=True, max_size=3),
    st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 4)), min_size=FEW, max_size=FEW),
)

some_moves = st.builds(
    lambda shard, epoch, to: errors.MovedError("moved", shard=shard, epoch=epoch, to=str(to)),
    *(st.integers(0, FEW), st.integers(0, 4), st.sampled_from([A, B, C])),
)


@given(st.lists(some_reports | some_moves | st.just("same"), max_size=20))
def test_whatever_is_said_in_whatever_order(said: list[Any]) -> None:
    shards, naive = ShardMap(seeds(A, B)), NaiveMap()
    for each in said:
        if isinstance(each, errors.MovedError):
            assert shards.learn(each) is naive.learn(each)
        else:
            report = shards.report if each == "same" else each
            if report is not None:
                shards.update(report, A, NOW)
                naive.update(report)
        if naive.owners:
            assert [shards.owner_of(key) for key in KEYS] == naive.owners


def test_whom_to_ask_for_the_map() -> None:
    shards = ShardMap(seeds(A, B))
    assert set(shards.sources(set())) == {A, B}
    assert {shards.sources(set())[0] for _ in range(50)} == {A, B}, "they are shuffled"
    shards.update(report(B, 7, (B, C)), B, NOW)
    for _ in range(20):
        sources = shards.sources({C})
        assert sources[0] == B
        assert sources[1:] == [A, C], "seeds after servers, a suspect last"


def test_one_map_for_one_way_to_reach_a_cluster() -> None:
    one = routing.shard_map(seeds(A, B), b"secret", None)
    assert routing.shard_map(seeds(A, B), b"secret", None) is one
    assert routing.shard_map(seeds(A, B), None, None) is not one
    assert routing.shard_map(seeds(A, C), b"secret", None) is not one
