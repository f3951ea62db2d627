"""The calls that a program makes, by who is called: what is left to leave out, and where."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

C_FUNCTIONS = "functions in C"
OURS = ("dflockd", "celery_dflock")


def calls(turns: Callable[[int], object], number: int) -> dict[str, float]:
    """Return how many calls of Python functions a turn makes in this thread, and of those in C.

    Functions of ours are counted by module, those of others by package.
    """
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "?")
            package = module.partition(".")[0]
            counts[module if package in OURS else package] += 1
        elif event == "c_call":
            counts[C_FUNCTIONS] += 1

    sys.setprofile(count)
    try:
        turns(number)
    finally:
        sys.setprofile(None)
        counts[C_FUNCTIONS] -= 1  # that one
    return {name: made / number for name, made in counts.most_common() if made}
