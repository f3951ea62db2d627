"""How many runs may begin in a while, as people write it and read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from dflockd.errors import InvalidArgumentError, shown
from dflockd.wire.messages import MAX_RATE, MAX_SECONDS

RateLike: TypeAlias = "str | tuple[int, float]"
"""``"10/m"``, or ``(10, 60)``: so many in so many seconds."""

UNITS: Final = {"s": 1, "m": 60, "h": 3600}

_written = re.compile(r"([0-9]{1,7})/([smh])").fullmatch


class RunRate(NamedTuple):
    """How many runs may begin in any window of so many seconds."""

    runs: int
    per_s: float

    def __str__(self) -> str:
        """As it can be written."""
        unit = next((unit for unit, seconds in UNITS.items() if seconds == self.per_s), None)
        return f"{self.runs}/{unit}" if unit else f"{self.runs}/{self.per_s:g} s"


def parse_rate(rate: object) -> RunRate:
    """Return what a rate says.

    Raises:
        InvalidArgumentError: it says none; the text is what to give instead.
    """
    runs: object = None
    seconds: object = None
    if isinstance(rate, str):
        if found := _written(rate):
            runs, seconds = int(found[1]), UNITS[found[2]]
    elif isinstance(rate, tuple | list) and len(rate) == 2:
        runs, seconds = rate
    if (
        isinstance(runs, int)
        and not isinstance(runs, bool)
        and isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and 1 <= runs <= MAX_RATE
        and 0.001 <= seconds <= MAX_SECONDS / 1000
    ):
        return RunRate(runs, float(seconds))
    raise InvalidArgumentError(
        f"rate is {shown(rate)}: give a text such as '10/m' (s, m or h), or (10, 60): "
        f"1 to {MAX_RATE} runs in seconds from 0.001"
    )


def needed(weight: int | str, most: int) -> int:
    """Return how many of so many slots, or places of a rate, somebody with a weight takes."""
    return most if isinstance(weight, str) else min(weight, most)


def keeps_waiting(report: Mapping[str, Any] | None, weight: int | str = 1) -> bool:
    """Whether a server says of the rate of a key that no run with that weight may begin now."""
    return bool(report) and report["free"] < needed(weight, report["runs"])  # type: ignore[index]


def describe_rate(report: Mapping[str, Any] | None) -> str:
    """Return what a server says of the rate of a key in a few words; nothing if it has none."""
    if not report:
        return ""
    if report["free"]:
        return f"rate: {report['free']} of {report['runs']} free"
    if report["next_s"] is None:
        return "rate: next when one begins"
    return f"rate: next in {report['next_s']:.0f} s"
