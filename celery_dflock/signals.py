"""Celery signals of the plugin. They observe; what a receiver raises is logged by Celery, no more.

Every signal is sent in the process that runs the task, with the task as `sender` and its `request`.
A task is told of by these in this order: `lock_waiting`, if it has to wait, and then either
`lock_acquired` and `lock_released`, with `lock_lost` in between if that happens, or
`lock_conflict` and what came of it: `task_requeued`, `task_skipped`, or nothing more.
"""

from __future__ import annotations

from typing import Any, ClassVar

from celery.utils.dispatch import Signal


class RunSignal(Signal):
    """A signal of every run that has its lock: sent only where somebody would hear it."""

    events_wanted: ClassVar[Any] = b"\0"
    """Whether the worker sends its events; see `celery_dflock.worker.events`."""

    for_events = 0
    """How many of the receivers do nothing but send events."""

    @property
    def is_heard(self) -> bool:
        """Whether a receiver would do something."""
        return len(self.receivers) > (0 if self.events_wanted[0] else self.for_events)


lock_waiting = Signal(
    name="lock_waiting", providing_args={"request", "key", "group", "holder", "reason"}
)
"""A task did not get its lock at once and has a place in the queue of `key`.

Sent for each key that is waited for; never with ``lock_timeout=0``. `group` is what ``lock_group``
gives, or ``None``. `holder` and `reason` are functions without arguments, because the answer is a
round trip to the lock server, which is made once. `holder` returns who holds the lock and for how
long, as text, or ``None`` if nobody is in the way: nobody does any more, or ``lock_rate`` alone lets
the task wait. `reason` returns all that is known of why it waits, as text: who holds the lock, when
the rate lets the next one begin, and how many of its group hold the key. A receiver that takes
longer than the lease can cost the task its grant.
"""

lock_acquired = RunSignal(name="lock_acquired", providing_args={"request", "lock"})
"""A task holds its lock and is about to run. `lock` is what `current_lock` returns in it."""

lock_released = RunSignal(name="lock_released", providing_args={"request", "lock"})
"""A task has ended and its lock has been given back; `lock` is not held any more."""

lock_lost = Signal(name="lock_lost", providing_args={"request", "key", "lock"})
"""A lock was lost while its task ran. Sent on the renewal thread: do not block in it.

`lock` is ``None`` if `key` was lost while the task still waited for another of its keys.
"""

lock_conflict = Signal(name="lock_conflict", providing_args={"request", "key", "holder", "error"})
"""A task did not get its lock in time; ``lock_conflict`` decides next what becomes of it.

`holder` is who holds `key`, as text, or ``None`` if that could not be learned; `error` the
`LockNotAcquiredError`. Not sent for a task that a shutdown or an outage keeps from its lock, nor for
one that is delivered again: that says nothing about who else wants it.
"""

task_requeued = Signal(
    name="task_requeued", providing_args={"request", "key", "reason", "countdown", "attempt"}
)
"""A task could not have its lock and was sent again, to be tried after `countdown` seconds.

`attempt` counts the conflicts; or the outages, or the redeliveries, where that is the `reason`.
"""

task_skipped = Signal(name="task_skipped", providing_args={"request", "key", "holder"})
"""A task could not have its lock and was skipped. `holder` as for `lock_conflict`."""

task_superseded = Signal(
    name="task_superseded", providing_args={"request", "key", "by", "was_running"}
)
"""A newer task has come, and the newest wins (``lock_conflict="supersede"``); `by` says which.

If it `was_running` it is revoked. Else it is skipped, and `task_skipped` follows.
"""

task_deduplicated = Signal(
    name="task_deduplicated", providing_args={"request", "key", "task_id", "verdict"}
)
"""One of two tasks that are the same was dropped; `task_id` is the other, which stays.

`verdict` is ``lock_duplicate`` where a task is sent: ``"coalesce"``, ``"raise"`` and ``"skip"`` drop
the one that is being sent, and ``"replace"`` drops `task_id` in favour of it; `request` is ``None``
there. It is ``"copy"`` in a worker that drops a second delivery of the same message, whose first has
ended with a result.
"""
