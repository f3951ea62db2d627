"""The map that clients are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.cluster.view import REPORT_INTERVAL, View
from dflockd.shards import Record
from dflockd.wire import decode_map
from tests.dflockd.cluster.view_support import LEASE, reported, see_node, see_shard, view_of


def test_the_map_is_made_once_for_each_change() -> None:
    view = view_of(a=1, b=2)
    report = view.report(0)
    assert view.report(0) is report
    assert view.report(1e6) is report
    see_shard(view, 0, "b:1,,f=e:3", 3)
    assert reported(view, 1e6)["shards"] == [1, -1, -1, -1]
    assert view.report(2e6) is view.report(1e6)
    assert view.report(2e6).version != report.version
    see_node(view, "c:1", 4)
    assert reported(view, 3e6)["servers"] == ["a:1", "b:1", "c:1"]
    view.see("/p/nodes/a:1", None, 5)
    assert reported(view, 4e6)["servers"] == ["b:1", "c:1"]
    assert reported(view, 4e6)["shards"] == [0, -1, -1, -1]


@pytest.mark.parametrize(
    ("key", "record"),
    [
        ("nodes/a:1", Record(b"dflockd/a", 9, LEASE)),  # a sign of life
        ("leaving/a:1", Record(b"a", 9, LEASE)),
        ("nodes/c:1", None),
        ("nodes/a,b", Record(b"x", 9)),
        ("shard/0", Record(b"a:1,", 3)),
        ("shard/7", Record(b"a:1,", 9)),
        ("else/0", Record(b"a:1,", 9)),
    ],
)
def test_what_is_no_news_is_no_reason_to_make_the_map(key: str, record: Record | None) -> None:
    view = view_of(a=1, b=2)
    see_shard(view, 0, "b:1,", 3)
    report = view.report(0)
    view.see(f"/p/{key}", record, record.revision if record else 9)
    assert view.report(1e6) is report


def test_while_much_changes_the_map_may_be_a_little_old() -> None:
    view = view_of(a=1)
    view.report(10)
    see_shard(view, 0, "a:1,", 2)
    just_before, then = 10 + REPORT_INTERVAL * 0.99, 10 + REPORT_INTERVAL
    assert reported(view, just_before)["shards"][0] == -1
    assert reported(view, then)["shards"][0] == 0
    see_shard(view, 1, "a:1,", 3)
    assert reported(view, then)["shards"][1] == -1
    assert reported(view, then + REPORT_INTERVAL)["shards"][1] == 0


# Changes of shards 0 to 2 and servers a and b, as in the store.
whatever_changes = st.lists(
    st.tuples(
        st.sampled_from(["shard/0", "shard/2"]), st.sampled_from(["a:1,", "b:1,a:1,f=e:3", None])
    )
    | st.tuples(
        st.sampled_from(["nodes/a:1", "nodes/b:1", "leaving/a:1"]),
        st.sampled_from(["dflockd/x", "without", None]),
    ),
    max_size=12,
)


@given(changes=whatever_changes, asked=st.lists(st.booleans(), min_size=12, max_size=12))
def test_whenever_it_is_asked_for_the_map_is_that_of_another_server(changes, asked):  # type: ignore[no-untyped-def]
    views = [view_of(), view_of()]
    for revision, ((key, text), asks) in enumerate(zip(changes, asked, strict=False), start=1):
        lease = LEASE if key.startswith("nodes") and text != "without" else 0
        record = None if text is None else Record(text.encode(), revision, lease)
        for view in views:
            view.see(f"/p/{key}", record, revision)
        if asks:
            views[0].report(revision)
    one, other = (view.report(100) for view in views)
    assert one == other
    servers = sorted(views[0].nodes)
    owners = [record.current or record.target for record in views[0].records]
    assert decode_map(one.packed)[0] == {
        "num_shards": 4,
        "servers": servers,
        "shards": [
            servers.index(o) if o in servers else _second(views[0], s, servers)
            for s, o in enumerate(owners)
        ],
        "epochs": views[0].epochs,
    }


def _second(view: View, shard: int, servers: list[str]) -> int:
    """The server that is to have a shard, where the one that has it is gone."""
    target = view.records[shard].target
    return servers.index(target) if target in servers else -1
