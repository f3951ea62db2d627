"""What the histories of a table are drawn from."""

from __future__ import annotations

from hypothesis import strategies as st

from dflockd.table import (
    Limits,
)
from dflockd.wire import (
    InGroup,
    Owner,
)
from tests.dflockd.table.naive_state import Name

MOST_PEERS = 6

limits = st.builds(
    Limits,
    default_lease=st.sampled_from([3, 10]),
    max_lease=st.sampled_from([10, 20]),
    max_detached_lease=st.sampled_from([5, 20]),
    max_locks=st.sampled_from([1, 2, 3, 100, 100, 100]),
    max_waiters=st.sampled_from([0, 0, 0, 1, 2]),
    auto_release=st.booleans(),
    max_holds=st.sampled_from([0, 10_000, 10_000, 10_000, 1, 2]),
    orphan_ttl=st.sampled_from([0, 1, 3]),
    orphan_all=st.booleans(),
)
# One lock is the favourite, so that its queue grows.
names = st.sampled_from(
    [(0, b"a"), (0, b"a"), (0, b"a"), (0, b"b"), (1, b"a"), (1, b"a"), (1, b"b"), (1, b"c")]
)
numbers = st.integers(0, 1000)
leases = st.sampled_from([None, None, None, 1, 3, 5, 10, 21])
timeouts = st.sampled_from([0, 1, 3, 5, 10, 20])
aways = st.sampled_from([0, 0, 1000, 2500, 5000, 20_001])
held = st.sampled_from([0, 500, 1000, 3000, 3000, 10_000])


def limit_of(name: Name, odd: bool) -> int:
    usual = {b"a": 2, b"b": 3, b"c": 1}[name[1]] if name[0] else 1
    return usual % 3 + 1 if odd and name[0] else usual


# Mostly nobody says who asks.
owners = st.none() | st.builds(
    Owner,
    st.sampled_from([b"run", b"run", b"other"]),
    st.integers(0, 2),
    st.sampled_from([b"", b"here", b"here", b"there"]),
    st.sampled_from([None, None, b"", b"me"]),  # which is no part of who asks
    st.sampled_from([0, 0, 0, 1, 2, 3, 4]),
)

ENDS = [
    {"clean": True, "silent": False},
    {"clean": False, "silent": False},
    {"clean": False, "silent": True},
    {"clean": False, "silent": False, "told": False},
    {"clean": False, "silent": True, "told": False},
]


groups = st.builds(
    InGroup, st.sampled_from([b"one", b"one", b"two", b"three"]), st.sampled_from([0, 0, 0, 1, 2])
)


def hold_of(hold: int) -> int:
    """Milliseconds, of which the most are too many."""
    return 2 * hold + 1 if hold == 10_000 else hold
