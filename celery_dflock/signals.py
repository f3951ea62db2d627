"""Celery signals of the plugin. They only observe: Celery logs what a receiver raises.

Each signal is sent in the process that runs the task, with the task as `sender` and its `request`.
For one run they come in this order: `lock_waiting` if it has to wait, then either `lock_acquired`
and `lock_released`, with `lock_lost` in between if the lock is lost, or `lock_conflict` followed by
`task_requeued`, `task_skipped` or nothing.
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
"""A task did not get its lock at once and has a position in the queue of `key`.

Sent for each key that the task waits for; never with ``lock_timeout=0``. `group` is its
``lock_group``, or ``None``. `holder` and `reason` are functions without arguments; the first call asks
the lock server. `holder` returns the holder and for how long, as text, or ``None`` if no holder is in
the way: the lock is free by now, or only ``lock_rate`` makes the task wait. `reason` returns all that
is known of why the task waits, as text: the holder, when the rate lets the next run begin, and how
many of its group hold the key. If a receiver takes longer than the lease, the task can lose its grant.
"""

lock_acquired = RunSignal(name="lock_acquired", providing_args={"request", "lock"})
"""A task holds its lock and is about to run. `lock` is what `current_lock` returns in it."""

lock_released = RunSignal(name="lock_released", providing_args={"request", "lock"})
"""A task has ended and its lock has been released; `lock` is no longer held."""

lock_lost = Signal(name="lock_lost", providing_args={"request", "key", "lock"})
"""A lock was lost while its task ran. Sent on the renewal thread: do not block in it.

`lock` is ``None`` if `key` was lost while the task still waited for another of its keys.
"""

lock_conflict = Signal(name="lock_conflict", providing_args={"request", "key", "holder", "error"})
"""A task did not get its lock in time; ``lock_conflict`` decides what happens next.

`holder` is the holder of `key` as text, or ``None`` if it is not known; `error` is the
`LockNotAcquiredError`. Not sent if a shutdown or an outage kept the task from its lock, nor for a
redelivery.
"""

task_requeued = Signal(
    name="task_requeued", providing_args={"request", "key", "reason", "countdown", "attempt"}
)
"""A task did not get its lock and was sent again, to be tried after `countdown` seconds.

`attempt` counts conflicts, or outages or redeliveries if one of these is the `reason`.
"""

task_skipped = Signal(name="task_skipped", providing_args={"request", "key", "holder"})
"""A task did not get its lock and was skipped. `holder` as for `lock_conflict`."""

task_superseded = Signal(
    name="task_superseded", providing_args={"request", "key", "by", "was_running"}
)
"""A newer task, `by`, has come and wins (``lock_conflict="supersede"`` or ``"newest"``).

If the older task `was_running`, it is revoked. Otherwise it is skipped and `task_skipped` follows.
"""

task_deduplicated = Signal(
    name="task_deduplicated", providing_args={"request", "key", "task_id", "verdict"}
)
"""One of two equal tasks was dropped; `task_id` is the id of the other.

Where a task is sent, `verdict` is its ``lock_duplicate`` and `request` is ``None``: ``"coalesce"``,
``"raise"`` and ``"skip"`` drop the task that is being sent, ``"replace"`` drops `task_id` instead. In a
worker that drops a redelivery because the first delivery has its result, it is ``"copy"``.
"""
