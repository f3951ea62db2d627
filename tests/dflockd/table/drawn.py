"""What the histories of a table are drawn from."""

from __future__ import annotations

from hypothesis import strategies as st

from dflockd.table import Limits
from dflockd.wire import ALL, FairGroup, How, Owner, Rate, Reserve
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
    max_rate_window=st.sampled_from([86_400, 86_400, 86_400, 1]),
    max_rate_runs=st.sampled_from([1_000_000, 1_000_000, 3, 4]),
)
# One lock is the favourite, so that its queue grows.
names = st.sampled_from(
    [*[(0, b"a")] * 4, (0, b"b"), (0, b"b"), (1, b"a"), (1, b"a"), (1, b"b"), (1, b"c")]
)
locks = st.sampled_from([(0, b"a"), (0, b"a"), (0, b"b")])
numbers = st.integers(0, 1000)
leases = st.sampled_from([None, None, None, 1, 3, 5, 10, 21])
timeouts = st.sampled_from([0, 1, 3, 5, 10, 20])
held = st.sampled_from([0, 500, 1000, 3000, 3000, 10_000])
turns = held.map(lambda hold: 2 * hold + 1 if hold == 10_000 else hold)  # of which one is too long
reserves = st.builds(Reserve, st.sampled_from([0, 0, 1000, 2500, 5000, 20_001]), held)
pauses = st.sampled_from([None, 1, 1000, 2500, 5000])
hows = st.sampled_from([How.PLAIN, How.PLAIN, How.CONFIRM, How.BEGUN, How.DETACH])
instances = st.sampled_from([b"", b"here", b"here", b"there"])

limits_asked = st.sampled_from([1, 1, 1, 2, 3])


def limit_of(name: Name, asked: int) -> int:
    """What is asked of a lock is as it may be; of a semaphore mostly what everybody says."""
    if name[0] == 0:
        return asked
    usual = {b"a": 2, b"b": 3, b"c": 1}[name[1]]
    return usual % 3 + 1 if asked == 3 else usual


owners = st.builds(
    Owner,
    st.sampled_from([b"run", b"run", b"other"]),
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 1, 2, 3, 4]),
)
weights = st.sampled_from([1, 1, 1, 2, 3, ALL])
in_groups = st.builds(
    FairGroup,
    st.sampled_from([b"one", b"one", b"two", b"three"]),
    st.sampled_from([0, 0, 0, 1, 2, 3]),
    weights,
)
shares = st.builds(FairGroup, st.just(b""), st.just(0), st.sampled_from([2, 2, 3, ALL]))
groups = st.one_of(in_groups, in_groups, shares)
# What began before the last of a shorter window does not count in a longer one that follows.
rates = st.builds(Rate, st.sampled_from([1, 2, 3]), st.just(1502))


def mostly_not(drawn: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.integers(0, 3).flatmap(lambda chance: st.none() if chance else drawn)


said = st.fixed_dictionaries(
    {"owner": mostly_not(owners), "group": mostly_not(groups), "rate": mostly_not(rates)},
    optional={"label": st.sampled_from([b"", b"me", b"you"])},
)
"""What a request for a lock says beside its limit: each says it anew, or does not."""

ENDS = [
    {"clean": True, "silent": False},
    {"clean": False, "silent": False},
    {"clean": False, "silent": True},
    {"clean": False, "silent": False, "told": False},
    {"clean": False, "silent": True, "told": False},
]
