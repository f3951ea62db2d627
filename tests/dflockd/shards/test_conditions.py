"""How it stands with a shard, as people are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.shards import ShardRecord, parse_shard_value
from dflockd.shards.conditions import Condition, condition_of, count_conditions

NOW = 1_700_000_000.0

ALIVE = ["a:1", "b:1"]


@pytest.mark.parametrize(
    ("value", "condition"),
    [
        ("a:1,a:1", Condition.SERVED),
        ("a:1,a:1,f=recovers:1700000000", Condition.SERVED),
        ("a:1,a:1,f=recovers:1700000001", Condition.RECOVERING),
        ("b:1,a:1,f=recovers:1700000001", Condition.RECOVERING),
        ("a:1,a:1,f=recovers:soon", Condition.SERVED),
        ("b:1,a:1", Condition.MOVING),
        ("gone:1,a:1", Condition.MOVING),
        ("b:1,", Condition.MOVING),
        ("b:1,gone:1", Condition.GONE),
        ("gone:1,gone:1", Condition.GONE),
        ("gone:1,gone:1,f=recovers:1700000001", Condition.GONE),
        ("gone:1,", Condition.GONE),
        ("gone:1,gone:1,f=pinned", Condition.GONE),
        ("", Condition.UNASSIGNED),
        ("f=pinned", Condition.UNASSIGNED),
    ],
)
def test_condition(value: str, condition: Condition) -> None:
    assert condition_of(parse_shard_value(value), ALIVE, NOW) is condition


servers = st.sampled_from(["", "a:1", "b:1", "gone:1"])
records = st.builds(
    lambda target, current, until: ShardRecord(target, current).with_recovers(until),
    servers,
    servers,
    st.none() | st.integers(int(NOW) - 9, int(NOW) + 9),
)


@given(st.lists(records))
def test_each_shard_counts_once_and_never_as_served_by_one_that_is_gone(
    records: list[ShardRecord],
) -> None:
    counts = count_conditions(records, ALIVE, NOW)
    assert list(counts) == list(Condition)
    assert sum(counts.values()) == len(records)
    with_server = sum(record.current in ALIVE for record in records)
    assert counts[Condition.SERVED] + counts[Condition.RECOVERING] <= with_server
    assert counts[Condition.GONE] + counts[Condition.UNASSIGNED] <= len(records) - with_server
