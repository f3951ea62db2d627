"""What a table counts of all that ever happened; `recount` counts what is there."""

from __future__ import annotations

from collections import Counter

from dflockd.table import Histogram
from tests.dflockd.table.histories import come_and_go

COUNTED = (
    *("granted", "queued", "full", "busy", "unknown", "outdated", "begun", "unbegun"),
    *("released", "expired", "parted", "timed_out", "kept", "forgotten", "ousted", "left"),
)


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert len(histogram) == 5
    assert histogram.sum == 8


def test_whatever_happens_is_counted() -> None:
    everything: Counter[str] = Counter()
    for seed in range(20):
        counts = come_and_go(seed, in_groups=True, rated=seed % 2 > 0).table.counts
        everything.update({name: getattr(counts, name) for name in COUNTED})
        everything["waited"] += len(counts.waited)
        everything["renewed"] += len(counts.renewed)
        assert len(counts.held) == sum(counts.held.counts)
    assert min(everything.values()) > 2, everything
