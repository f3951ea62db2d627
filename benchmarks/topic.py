"""One row of the results: a figure of ours, those of others, and what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Figures: TypeAlias = dict[str, dict[str, float]]
"""What one round has given: for the key of each topic, a figure for each name."""


@dataclass(frozen=True, eq=False)
class Topic:
    """What is compared."""

    key: str
    """Unique, for programs and for `benchmarks.report`."""
    title: str
    unit: str
    ours: str
    """The name that the ratios are about."""
    goals: Mapping[str, float] = field(default_factory=dict)
    """The most that ours may be of another's figure, by name; the least if more is better."""
    limit: float | None = None
    """The most that ours may be, in `unit`."""
    more_is_better: bool = False


class Load(NamedTuple):
    """What a module of `benchmarks.loads` opens: everything is started, nothing is measured yet."""

    topics: list[Topic]
    measure: Callable[[int], Figures]
    """One round, by its number."""
    exact: bool = False
    """Whether one round says it all: another one would give the same."""
