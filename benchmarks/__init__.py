"""What it costs, against what else people use. Run by `make bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Measure: TypeAlias = Callable[[], float]
"""One figure of one round."""

Measures: TypeAlias = dict[str, Measure]
"""What is compared in one topic, by name: ours first."""
