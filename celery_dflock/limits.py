"""What bounds who has a lock: a limit, a rate, a limit for each group, and what a run takes of them.

A task writes these down, or has them made of the arguments of each call. Either way they go through
`checked`, with the same errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from celery_dflock.checks import is_whole
from celery_dflock.keys import KeyFunction, KeyTemplate
from celery_dflock.lock_key import LockKey
from dflockd.client.lock import Weight
from dflockd.errors import InvalidArgumentError
from dflockd.rates import RateLike, RunRate, parse_rate

MAX_LIMIT = 1 << 20
"""The most holders that a lock server gives one key."""

UNLIMITED = "a whole number, 1 or more, or a {0}rate or {0}group_limit too: else nothing is locked"
"""What to give instead of no limit, with what these names begin with."""

SHARED = "a {0}limit above 1 too, or remove it"
"""What to give with a weight: of a limit of 1 there is nothing to share."""

LimitSource: TypeAlias = int | str | Callable[..., int | None] | None
"""A number, or a template or a function ``(task, args, kwargs) -> number`` that makes it of a call."""

RateSource: TypeAlias = "RateLike | Callable[..., RateLike | None] | None"
"""A rate, or a template or a function ``(task, args, kwargs) -> rate`` that makes it of a call."""

WeightSource: TypeAlias = int | str | Callable[..., Weight]
"""A number, ``"all"``, or a template or a function ``(task, args, kwargs) -> weight`` that makes it."""

Made: TypeAlias = KeyTemplate | Callable[..., Any]
"""What makes a value of the arguments of a call."""

Bad: TypeAlias = Callable[[str, object, str], Exception]
"""Returns the error for an option, by its short name, with a bad value, and what to give instead."""

_is_number = re.compile("[0-9]{1,9}").fullmatch


@dataclass(frozen=True, slots=True)
class Lock:
    """One of several locks that a task takes; see `TaskOptions.lock_key`.

        lock_key=[Lock("account:{account_id}"), Lock("vendor:{vendor}", limit=3, rate="10/m")]

    Each argument is that option of a task for this lock alone: a value, or what makes it of a call.
    What you leave out is not taken from the task.

    Args:
        key: as ``lock_key``: a template, a function or a `LockKey`.
        limit: as ``lock_limit``.
        rate: as ``lock_rate``.
        group: as ``lock_group``.
        group_limit: as ``lock_group_limit``.
        weight: as ``lock_weight``.
    """

    key: str | Callable[..., Any]
    limit: LimitSource = 1
    rate: RateSource = None
    group: str | KeyFunction | None = None
    group_limit: LimitSource = None
    weight: WeightSource = 1


class Limits(NamedTuple):
    """How many may have a lock, and for how many of them one run counts."""

    limit: int
    rate: RunRate | None
    """How many runs may begin in a while; ``None`` at any time."""
    group_limit: int | None
    weight: Weight = 1


class Wanted(NamedTuple):
    """A lock that a call needs."""

    key: LockKey
    limits: Limits
    group: str | None


def in_order(wanted: Iterable[Wanted]) -> list[Wanted]:
    """Return locks in the order in which everybody takes them: the narrowest first.

    In one order everywhere, two tasks that need the same keys cannot wait for each other. And who
    waits for a lock that few may have takes up no slot of one that many may have. The weight has no
    say: a reader and a writer of the same keys differ in nothing else.
    """
    return sorted(wanted, key=lambda each: (each.limits.limit, each.key))


def checked(
    limit: Any, rate: Any, group_limit: Any, weight: Any, *, has_group: bool, bad: Bad
) -> Limits:
    """Return what these values say.

    Raises:
        Exception: one is bad; that is what `bad` has returned.
    """
    if group_limit is not None:
        if not has_group:
            raise bad("group_limit", group_limit, "a {0}group too, or remove it")
        if not is_whole(group_limit, 1, MAX_LIMIT):
            raise bad("group_limit", group_limit, "a whole number, 1 or more")
    if limit is None:
        if rate is None and group_limit is None:
            raise bad("limit", limit, UNLIMITED)
        limit = MAX_LIMIT
    elif not is_whole(limit, 1, MAX_LIMIT):
        raise bad("limit", limit, "a whole number, 1 or more")
    if type(weight) is not int or weight != 1:  # nearly every one is 1
        check_weight(weight, limit, bad)
    try:
        pace = None if rate is None else parse_rate(rate)
    except InvalidArgumentError:
        raise bad("rate", rate, "a text such as '10/m' (s, m or h), or (10, 60)") from None
    return Limits(limit, pace, group_limit, weight)


def check_weight(weight: Any, limit: int, bad: Bad) -> None:
    """Refuse what no run can take of a limit.

    Raises:
        Exception: it cannot; that is what `bad` has returned.
    """
    if weight != "all" and not is_whole(weight, 1, MAX_LIMIT):
        raise bad("weight", weight, "a whole number, 1 or more, or 'all'")
    if weight != 1 and limit == 1:
        raise bad("weight", weight, SHARED)
    if weight != "all" and weight > limit:
        raise bad("weight", weight, f"a whole number up to the {{0}}limit, {limit}, or 'all'")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a lock as its task has them, and its group.

    Each of `limit`, `rate`, `group_limit` and `weight` is in one of the first two.
    """

    written: Mapping[str, Any]
    """The values that are the same for all calls."""
    made: Mapping[str, Made]
    """What makes the others of the arguments of a call."""
    group: KeyTemplate | KeyFunction | None
    """What takes turns with others at the key."""
    bad: Bad = field(compare=False)
    named: Callable[[str], str] = field(compare=False)
    """Returns what errors call an option, by its short name."""

    @property
    def is_fixed(self) -> bool:
        """Whether the limits are the same for all calls."""
        return not self.made

    def source(self, name: str) -> Any:
        """Return one of them as the task has it."""
        return self.made.get(name, self.written.get(name))

    def limits(self, values: Mapping[str, Any]) -> Limits:
        """Return the limits of a call, given by their names the values that are `made` of it."""
        return checked(**self.written, **values, has_group=self.group is not None, bad=self.bad)

    def check(self) -> None:
        """Check what is known before any call: something good stands in for what is not."""
        stand_ins = {"limit": MAX_LIMIT, "rate": "1/s", "group_limit": 1, "weight": 1}
        limits = self.limits({name: stand_ins[name] for name in self.made})
        if limits.limit == 1 and "weight" in self.made:
            raise self.bad("weight", self.made["weight"], SHARED)


def is_made(value: object) -> bool:
    """Whether that makes the value of an option of the arguments of a call."""
    return isinstance(value, KeyTemplate) or callable(value)


def is_template(value: object) -> bool:
    """Whether that text is a template, and no value: ``"{limit}"``, and not ``"10/m"``."""
    return isinstance(value, str) and "{" in value


def read_value(text: str) -> int | str:
    """Return what a template has made: a number if it is one."""
    return int(text) if _is_number(text) else text
