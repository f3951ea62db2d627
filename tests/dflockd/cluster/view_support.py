"""What stands in the store, as a server sees it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dflockd.cluster.view import View
from dflockd.shards import Record
from dflockd.shards.keys import SERVERS_MARK
from dflockd.wire import decode_map
from dflockd.wire.messages import MAX_ATTEMPT

LEASE = 7
"""Of the store, by which the entries of servers live."""


def view_of(num_shards: int = 4, **nodes: int) -> View:
    view = View("/p", num_shards)
    for name, revision in nodes.items():
        see_node(view, f"{name}:1", revision)
    return view


def see_node(view: View, name: str, revision: int, lease: int = LEASE) -> object:
    value = SERVERS_MARK + name.partition(":")[0]
    return view.see(f"/p/nodes/{name}", Record(value.encode(), revision, lease), revision)


def see_shard(view: View, shard: int, text: str, revision: int) -> object:
    return view.see(f"/p/shard/{shard}", Record(text.encode(), revision), revision)


changes = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["a:1,", "b:1,a:1,f=e:3", "", None])), max_size=20
)


def reported(view: View, now: float = 0.0) -> dict[str, Any]:
    """What the map says, its version aside."""
    document, _ = decode_map(view.report(now).plain)
    del document["version"]
    return document


owners = st.just((b"", 0)) | st.tuples(
    st.from_regex(rb"[!-~]{1,64}", fullmatch=True), st.integers(0, MAX_ATTEMPT)
)
