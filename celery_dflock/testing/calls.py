"""What tests have happen at the locks of their tasks: a newer task comes, a rate is used up.

Each is given calls, such as ``render.s(7)``, and asks a real server for what these would ask for.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import NamedTuple
from uuid import uuid4

from celery.app.task import Context
from celery.canvas import Signature

from celery_dflock.checks import check_seconds, check_whole, refused
from celery_dflock.limits import MAX_LIMIT, Wanted
from celery_dflock.options import MAX_SECONDS
from celery_dflock.outcome.header import options_of_call
from celery_dflock.plan import Bound
from celery_dflock.task import LockedTask
from dflockd import clock
from dflockd.sync_client import DistributedLock

LOOK_EVERY = 0.01
"""Seconds between looks at whether an older task has let go."""


def supersede(call: Signature, timeout_s: float = 10) -> None:
    """Have a newer task come for the lock of a call, as if it had been sent just now.

    The task that holds it is interrupted. This returns when it has let go, and frees the lock again.
    Called in the body of that task, it does not return: the body is interrupted there.

    Args:
        call: a call of a task with ``lock_conflict="supersede"``, such as ``render.s(7)``.
        timeout_s: seconds for the older task to let go.

    Raises:
        AssertionError: nobody holds the lock who could be superseded, or it does not let go.
    """
    __tracebackhide__ = True
    check_seconds("timeout_s", timeout_s, MAX_SECONDS)
    asked = _Asked.of(call)
    if not asked.bound.options.interrupts:
        raise AssertionError(
            f"{call!r} never supersedes: give a task with lock_conflict='supersede'"
        )
    age = asked.lock().draw_age()
    newer = asked.lock(label="a newer task of the test", owner=(uuid4().hex, 0, age))
    if not any(each.get("age") for each in newer.inspect()["holders"]):
        raise AssertionError(f"lock {newer.key!r} is held by nobody who could be superseded")
    newer.acquire_timeout_s = 0
    until = clock.now() + timeout_s
    # A wait of one request would keep the interpreter from interrupting the body on this thread.
    while not newer.acquire():
        if clock.now() > until:
            raise AssertionError(f"lock {newer.key!r} is still held after {timeout_s:g} s")
        time.sleep(LOOK_EVERY)
    newer.give_back()


def use_up_rate(call: Signature, leave: int = 0) -> None:
    """Have as many runs begin as the ``lock_rate`` of a call lets begin now, each with a weight of 1.

    Args:
        call: a call of a task with ``lock_rate``, such as ``fetch.s("vendor")``.
        leave: so many may still begin.

    Raises:
        AssertionError: it has no rate, or fewer than `leave` may begin, or the lock is held.
    """
    __tracebackhide__ = True
    check_whole("leave", leave, 0, MAX_LIMIT)
    asked = _Asked.of(call)
    rated = [(each, rate) for each in asked.wanted if (rate := each.limits.rate) is not None]
    if not rated:
        raise AssertionError(f"{call!r} has no rate: give a task with lock_rate")
    for wanted, rate in rated:
        key = wanted.key
        lock = asked.lock(wanted._replace(limits=wanted.limits._replace(weight=1)))
        report = lock.inspect()["rate"]
        free = rate.runs if report is None else report["free"]
        if free < leave:
            raise AssertionError(f"of lock {key!r} only {free} may begin, not {leave}")
        lock.acquire_timeout_s = 0
        for _ in range(free - leave):
            if not lock.acquire():
                raise AssertionError(f"lock {key!r} is held: its rate cannot be used up now")
            lock.begin()
            lock.release()


def turn_order(*calls: Signature) -> list[Signature]:
    """Return calls in the order in which they would have their lock, had they all come in this order.

    Those that may have it at once come first. So a test sees how the groups of a ``lock_group`` take
    turns. Nothing runs, and the lock is as free as before.

    Args:
        calls: calls of tasks with the same lock, which nobody else wants.

    Raises:
        AssertionError: the calls have several locks.
    """
    __tracebackhide__ = True
    asked = [_Asked.of(call) for call in calls]
    if len({tuple(each.keys) for each in asked}) > 1 or any(len(each.keys) > 1 for each in asked):
        keys = ", ".join(sorted({repr(key) for each in asked for key in each.keys}))
        raise AssertionError(f"these calls have several locks: {keys}")
    order: list[Signature] = []
    with ExitStack() as held:
        locks = [each.lock(label=str(number)) for number, each in enumerate(asked)]
        for lock, call in zip(locks, calls, strict=True):
            # A run that has not begun uses up none of its rate.
            held.callback(lock.give_back)
            if lock.enqueue() == "acquired":
                order.append(call)
        if locks:
            order += [calls[int(each["label"])] for each in locks[0].inspect()["waiters"]]
    return order


class _Asked(NamedTuple):
    """What a call asks for."""

    bound: Bound
    wanted: list[Wanted]

    @classmethod
    def of(cls, call: Signature) -> _Asked:
        if not isinstance(call, Signature):
            raise refused("call", call, "a call of a LockedTask, such as render.s(7)")
        task, args, kwargs = call.type, tuple(call.args), dict(call.kwargs)
        if not isinstance(task, LockedTask):
            raise AssertionError(f"{call!r} takes no lock: give a call of a LockedTask")
        bound = task._bound(options_of_call(Context(headers=call.options.get("headers"))))
        prefix = bound.settings.key_prefix
        return cls(bound, bound.options.wanted(task, args, kwargs, prefix))

    @property
    def keys(self) -> list[str]:
        """Of its locks, in order."""
        return [each.key for each in self.wanted]

    def lock(
        self,
        wanted: Wanted | None = None,
        label: str = "",
        owner: tuple[str, int, int] | None = None,
    ) -> DistributedLock:
        """Return a lock of it, by default the first one."""
        [lock] = self.bound.made([wanted or self.wanted[0]], label=label, owner=owner)
        return lock
