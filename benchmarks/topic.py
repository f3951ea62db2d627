"""One row of the results: a figure of ours, those of others, and what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Figures: TypeAlias = dict[str, dict[str, float]]
"""What one round has given: for the key of each topic, a figure for each name."""


class Goal(NamedTuple):
    """What a ratio, or a figure, is to be at most; at least if more is better."""

    must: float
    aim: float | None = None
    """What it had better be."""


@dataclass(frozen=True, eq=False)
class Topic:
    """What is compared."""

    key: str
    """Unique, for programs and for `benchmarks.report`."""
    title: str
    unit: str
    ours: str = ""
    """The name that the ratios are about; none if the names are the parts of one whole."""
    goals: Mapping[str, Goal] = field(default_factory=dict)
    """What ours is to be of another's figure, by name."""
    limit: Goal | None = None
    """What ours is to be, in `unit`."""
    more_is_better: bool = False


class Load(NamedTuple):
    """What a module of `benchmarks.loads` opens: everything is started, nothing is measured yet."""

    topics: list[Topic]
    measure: Callable[[int], Figures]
    """One round, by its number."""
    rounds: int | None = None
    """The most that are worth their time; ``1`` if another one would give the same."""
