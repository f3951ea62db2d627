"""In what order keys are listed, wherever people look at them: the page, its API, `top`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Rank: TypeAlias = tuple[Any, ...]
"""What is smaller comes first."""


class Ranked(NamedTuple):
    """What counts of a key; times in seconds.

    Attributes:
        key: as text or bytes, which come in the same order.
        semaphore: whether it is that of published clients, beside the lock of that name.
        waiters: how many wait.
        held_s: for how long its first holder has had it; 0 without one.
        oldest_s: for how long somebody has waited who has waited longest; 0 without one.
    """

    key: Any
    semaphore: bool
    waiters: int
    held_s: float
    oldest_s: float


SORTS: dict[str, Callable[[Ranked], Rank]] = {
    "waiters": lambda of: (-of.waiters, -of.held_s, of.key, of.semaphore),
    "wait": lambda of: (-of.oldest_s, -of.waiters, of.key, of.semaphore),
    "age": lambda of: (-of.held_s, of.key, of.semaphore),
    "key": lambda of: (of.key, of.semaphore),
}
"""The longest queue or wait, the oldest holder, or by name."""
