"""What a locked task can have, and what of that does not go together, with the place that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.celery_dflock.combinations.pairs import Row, all_pairs

FACTORS: dict[str, list[Any]] = {
    "pool": ["prefork", "threads", "gevent", "eventlet", "solo"],
    "wait": ["slot", "consumer"],
    "timeout": [0, 1, None],
    "conflict": ["requeue", "skip", "fail", "function", "supersede", "newest"],
    "limit": [1, 3, None],
    "rate": [None, (5, 1.0)],
    "group": [None, "turns", "limited"],
    "weight": [1, "{weight}", "all"],
    "keys": ["one", "two", "locks"],
    "unique": [None, "until_executing", "until_executed", "until_expired"],
    "retries": [False, True],
    "late": [False, True],
    "time_limit": [None, "soft", "hard"],
    "broker": ["redis", "classic", "quorum"],
    "results": ["none", "redis", "file"],
    "end": ["none", "warm", "cold", "kill"],
}


class Refusal(NamedTuple):
    """Values that do not go together.

    Attributes:
        values: the factors, and those of their values that do not.
        says: what the error says when such a task is made, or the cell.
        outcome: the line of the table of outcomes that says so, where it is Celery that cannot do it.
    """

    values: Mapping[str, tuple[Any, ...]]
    says: str
    outcome: str | None = None

    def applies(self, row: Row) -> bool:
        return all(name in row and row[name] in given for name, given in self.values.items())


NEWEST = ("supersede", "newest")

REFUSED = [
    Refusal({"conflict": NEWEST, "keys": ("two", "locks")}, "give one key, since lock_conflict is"),
    Refusal({"conflict": NEWEST, "limit": (3, None)}, "give 1, since lock_conflict is"),
    Refusal({"conflict": NEWEST, "group": ("turns", "limited")}, "and only one waits"),
    Refusal({"limit": (1,), "weight": ("{weight}", "all")}, "limit above 1 too, or remove it"),
    Refusal(
        {"limit": (None,), "rate": (None,), "group": (None, "turns")}, "else nothing is locked"
    ),
    Refusal(
        {"time_limit": ("soft",), "pool": ("threads", "solo", "gevent", "eventlet")},
        "not applied",
        "soft",
    ),
    Refusal(
        {"time_limit": ("hard",), "pool": ("threads", "solo", "eventlet")},
        "not applied",
        "hard",
    ),
    Refusal({"end": ("cold",), "pool": ("solo",)}, "NotImplementedError", "cold"),
]


def is_refused(row: Row) -> bool:
    return any(refusal.applies(row) for refusal in REFUSED)


def rows(seed: int) -> list[Row]:
    """The matrix: each pair of values that can be, in some row."""
    return all_pairs(FACTORS, is_refused, seed)[0]


def named(row: Row) -> str:
    """What differs from the first value of each factor."""
    return ",".join(f"{name}={row[name]}" for name in FACTORS if row[name] != FACTORS[name][0])
