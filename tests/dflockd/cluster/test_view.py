"""What a server knows of the store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.cluster.claims import opens_at_once
from dflockd.cluster.view import NOT_YET
from dflockd.shards import Loaded, Record
from dflockd.shards.values import ShardRecord
from dflockd.wire import Moved
from tests.dflockd.cluster.view_support import (
    LEASE,
    changes,
    reported,
    see_node,
    see_shard,
    view_of,
)


@given(changes=changes, order=st.randoms(use_true_random=False), repeats=st.integers(0, 5))
def test_whatever_comes_late_or_twice_the_newest_is_known(changes, order, repeats):  # type: ignore[no-untyped-def]
    told = [(shard, text, revision) for revision, (shard, text) in enumerate(changes, start=1)]
    in_order, mixed = view_of(), view_of()
    shuffled = told + told[:repeats]
    order.shuffle(shuffled)
    for view, events in ((in_order, told), (mixed, shuffled)):
        for shard, text, revision in events:
            record = None if text is None else Record(text.encode(), revision)
            view.see(f"/p/shard/{shard}", record, revision)
    there = [shard for shard in range(4) if in_order.revisions[shard]]
    assert [mixed.records[shard] for shard in there] == [in_order.records[s] for s in there]
    assert mixed.epochs == in_order.epochs
    assert mixed.revisions == in_order.revisions


def test_what_is_not_newer_is_no_news() -> None:
    view = view_of(a=5)
    assert see_shard(view, 0, "a:1,", 7) == 0
    assert see_shard(view, 0, "b:1,", 7) is None
    assert see_shard(view, 0, "b:1,", 6) is None
    assert view.see("/p/nodes/a:1", None, 4) is None
    assert see_node(view, "a:1", 8) is None
    assert view.see("/p/nodes/a:1", Record(b"dflockd/another", 9, LEASE), 9) == "nodes"
    assert view.records[0].target == "a:1"


def test_a_record_that_was_deleted_is_not_that_of_a_new_shard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = view_of(a=1)
    for shard in range(3):
        see_shard(view, shard, "a:1,a:1,f=e:7", 2)
    for shard in range(3):
        view.see(f"/p/shard/{shard}", None, 3)
    assert view.records[:3] == [ShardRecord("", "a:1", ("e:7",))] * 3
    assert [view.is_lost(shard) for shard in range(4)] == [True, True, True, False]
    assert view.revisions[:3] == [0] * 3
    assert not any(opens_at_once(record) for record in view.records[:3])
    assert opens_at_once(view.records[3])
    assert caplog.text.count("/p/shard/") == 1, "said once of all that are deleted at a time"
    # Somebody who has not seen it writes as if nobody had served the shard.
    see_shard(view, 0, "b:1,", 4)
    see_shard(view, 1, "b:1,,f=e:5,f=clean:5", 4)
    assert view.records[:2] == [ShardRecord("b:1", "", ("e:7",)), ShardRecord("b:1", "", ("e:7",))]
    # And what was there before it was deleted is told late.
    see_shard(view, 2, "a:1,a:1,f=e:9", 2)
    view.see("/p/shard/3", None, 5)
    see_shard(view, 3, "a:1,a:1,f=e:2", 4)
    assert view.epochs == [7, 7, 9, 2]
    assert view.records[3] == ShardRecord("", "", ("e:2",))


def test_a_load_tells_what_has_vanished() -> None:
    view = view_of(a=5, b=6)
    see_shard(view, 1, "a:1,a:1", 7)
    loaded = Loaded({"/p/nodes/b:1": Record(b"dflockd/b", 6, LEASE)}, 10)
    for key, record, revision in view.differences(loaded):
        view.see(key, record, revision)
    assert list(view.nodes) == ["b:1"]
    assert view.records[1] == ShardRecord()
    assert see_shard(view, 1, "a:1,a:1", 8) is None


@pytest.mark.parametrize("text", ["a:1,a:1,f=e:x", "a:1,a:1,f=e:16777216", "a:1,a:1,f=clean:1_0"])
def test_a_record_that_cannot_be_read_is_left_alone(text: str) -> None:
    view = view_of(a=1)
    assert see_shard(view, 0, text, 2) == 0
    assert view.unreadable == {0}
    assert see_shard(view, 0, "a:1,a:1,f=e:16777215", 3) == 0
    assert view.unreadable == set()


@pytest.mark.parametrize(
    "key", ["shard/4", "shard/01", "shard/-1", "shard/x", "shard/", "nodes/", "nodes/a,b", "x/0"]
)
def test_keys_that_mean_nothing_are_ignored(key: str) -> None:
    view = view_of(a=1)
    assert view.see(f"/p/{key}", Record(b"a:1,", 9), 9) is None
    assert view.leader == "a:1"


def test_an_entry_without_a_lease_neither_leads_nor_gets_shards() -> None:
    view = view_of(a=1, b=2)
    assert see_node(view, "0", 3, lease=0) == "nodes"
    assert view.leader == "a:1"
    assert view.candidates == {"a:1", "b:1"}
    see_shard(view, 0, "0,0,f=e:3", 4)
    assert view.refer(0, "a:1") is NOT_YET
    assert reported(view)["servers"] == ["a:1", "b:1"]
    # Its name is taken: no claim of its shards can succeed, so that none is tried.
    assert not view.roster.is_gone("0")
    assert view.see("/p/nodes/0", None, 5) == "nodes"
    assert view.roster.is_gone("0")


def test_an_entry_with_a_lease_and_without_the_mark_is_no_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody keeps it alive, and would lead for ever."""
    view = view_of(a=1, b=2)
    assert view.see("/p/nodes/0", Record(b"of something else", 3, LEASE), 3) == "nodes"
    assert "/p/nodes/0 was not written by a server, and is ignored; delete it" in caplog.text
    assert (view.leader, view.candidates) == ("a:1", {"a:1", "b:1"})
    assert view.see("/p/nodes/0", Record(b"of something else", 4, LEASE), 4) is None
    # It may be exchanged for a server's.
    assert see_node(view, "0", 5) == "nodes"
    assert view.leader == "0"


def test_a_load_tells_that_a_stranger_has_vanished() -> None:
    view = view_of(a=1)
    see_node(view, "0", 3, lease=0)
    for key, record, revision in view.differences(Loaded({}, 10)):
        view.see(key, record, revision)
    assert view.roster.is_gone("0")
    assert view.roster.is_gone("a:1")


def test_a_server_that_takes_the_place_of_a_stranger_is_one() -> None:
    view = view_of()
    see_node(view, "a:1", 1, lease=0)
    assert view.leader is None
    assert see_node(view, "a:1", 2) == "nodes"
    assert view.leader == "a:1"


def test_it_refers_to_the_server_that_has_a_shard_or_is_to_have_it() -> None:
    view = view_of(a=1, b=2)
    see_shard(view, 0, "b:1,a:1,f=e:3", 3)
    assert view.refer(0, "c:1") == Moved(0, 3, b"a:1")
    assert view.refer(0, "a:1") is NOT_YET
    see_shard(view, 0, "b:1,,f=e:3", 4)
    assert view.refer(0, "a:1") == Moved(0, 3, b"b:1")
    assert view.refer(0, "b:1") is NOT_YET
    see_shard(view, 0, "gone:1,gone:1,f=e:3", 5)
    assert view.refer(0, "a:1") is NOT_YET
    assert reported(view) == {
        "num_shards": 4,
        "servers": ["a:1", "b:1"],
        "shards": [-1, -1, -1, -1],
        "epochs": [3, 0, 0, 0],
    }
