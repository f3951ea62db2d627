"""What a lock server says of a lock that is not free: who holds it, its rate, whether it is paused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from celery import Task
from celery.app.task import Context

from celery_dflock.signals import lock_waiting
from dflockd import errors
from dflockd.admin import describe_pause
from dflockd.client.lock import LockBase, SemaphoreBase, Weight
from dflockd.rates import describe_rate, keeps_waiting, needed
from dflockd.sync_client import DistributedLock


class Look(NamedTuple):
    """What a server has said of a key; nothing if it could not be asked.

    Attributes:
        holders: the holders, each as `inspect` reports it.
        limit: how many may; ``None`` without a bound.
        rate: how many of its runs may begin, and when the next may; ``None`` at any time.
        paused: by whom the key is paused, why, and for how long; ``None`` if it is not paused.
        used: how many slots the holders take; ``None`` for one each.
        weight: how many slots the lock that asks would take.
    """

    holders: Sequence[Mapping[str, Any]] = ()
    limit: int | None = None
    rate: Mapping[str, Any] | None = None
    paused: Mapping[str, Any] | None = None
    used: int | None = None
    weight: Weight = 1

    @classmethod
    def at(cls, lock: DistributedLock) -> Look:
        """Ask the server of a lock."""
        try:
            return cls.of(lock.inspect(), weight_of(lock))
        except errors.RemoteError:
            return cls()

    @classmethod
    def of(cls, report: Mapping[str, Any], weight: Weight = 1) -> Look:
        """Return what a report of `inspect` says to somebody with that weight."""
        get = report.get
        return cls(report["holders"], get("limit"), get("rate"), get("paused"), get("used"), weight)

    @property
    def holder(self) -> str | None:
        """The holder in the way and since when, in a few words; ``None`` if there is none.

        Of several it names the one who has held the key for longest.
        """
        if not self.holders or self._waits_for_no_holder:
            return None
        others = len(self.holders) - 1
        and_others = f" and {others} other{'s' if others > 1 else ''}" if others else ""
        return describe(self.holders[0]) + and_others

    def reason(self, group: str | None) -> str:
        """Return why somebody of that group waits, in a few words; empty if that is not known."""
        held = [f"held by {self.holder}"] if self.holder else []
        number = sum(each.get("group") == group for each in self.holders)
        of_group = [f"its group {group} has {number}"] if group else []
        return ", ".join([*self._pause, *held, *self._pace, *of_group])

    def refusal(self, waited: str = "") -> str:
        """Return why somebody did not have it in the end, without the `holder`.

        Args:
            waited: such as "waited 5 s (lock_timeout)"; empty after a single try.
        """
        held = [] if self._waits_for_no_holder else ["still held" if waited else "it is held"]
        return ", ".join([*([waited] if waited else []), *self._pause, *self._pace, *held])

    @property
    def _pause(self) -> list[str]:
        return [describe_pause(self.paused)] if self.paused else []

    @property
    def _pace(self) -> list[str]:
        return [describe_rate(self.rate)] if self._has_no_place else []

    @property
    def _has_no_place(self) -> bool:
        """Whether fewer places of a rate are free than who asks takes."""
        return keeps_waiting(self.rate, self.weight)

    @property
    def _waits_for_no_holder(self) -> bool:
        """Whether there is a slot, and something else in the way."""
        if not self.paused and not self._has_no_place:
            return False
        used = len(self.holders) if self.used is None else self.used
        return self.limit is None or used + needed(self.weight, self.limit) <= self.limit


def weight_of(lock: LockBase) -> Weight:
    """Return how many of a limit a lock takes."""
    return lock.weight if isinstance(lock, SemaphoreBase) else 1


def describe(holder: Mapping[str, Any]) -> str:
    """Return who a holder is that a server has named, and for how long, in a few words."""
    return f"{holder['label'] or 'somebody'}, for {holder['held_s']:.0f} s"


def tell_waiting(
    task: Task, request: Context, key: str, group: str | None, look: Callable[[], Look]
) -> None:
    """Send the signal `lock_waiting`; `look` is called if a receiver wants to know more."""
    lock_waiting.send(
        sender=task,
        request=request,
        key=key,
        group=group,
        holder=lambda: look().holder,
        reason=lambda: look().reason(group),
    )
