"""What all loads are given: where to work, how much to do, and where to say what was left out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


class LeftOutError(RuntimeError):
    """Something cannot be compared on this machine; the text says why."""


@dataclass
class Bench:
    """One run."""

    directory: Path
    """The load's own: logs, sockets, what a server keeps."""
    quick: bool = False
    python: str = sys.executable
    """The interpreter that runs our server, compiled where that can be had."""
    compiled: bool = False
    """Whether it is."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What could not be compared, and why."""

    @property
    def seconds(self) -> float:
        """How long one load is kept up for one figure."""
        return 0.1 if self.quick else 1.0

    def scaled(self, number: int) -> int:
        """Return how many of something to have: all, or a hundredth in a quick run."""
        return max(number // 100, 1) if self.quick else number


def turned(names: Iterable[str], number: int) -> list[str]:
    """Return the names in their order, beginning with another one in each round."""
    names = list(names)
    first = number % len(names)
    return names[first:] + names[:first]
