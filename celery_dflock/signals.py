"""Celery signals of the plugin. They observe; what a receiver raises is logged by Celery, no more.

Every signal is sent in the process that runs the task, with the task as `sender`.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

lock_acquired = Signal(name="lock_acquired", providing_args={"lock"})
"""A task holds its lock and is about to run. `lock` is what `current_lock` returns in it."""

lock_released = Signal(name="lock_released", providing_args={"lock"})
"""A task has ended and its lock is given back."""

lock_lost = Signal(name="lock_lost", providing_args={"lock"})
"""A lock was lost while its task ran. Sent on the renewal thread: do not block in it."""

task_requeued = Signal(
    name="task_requeued", providing_args={"request", "key", "reason", "countdown", "attempt"}
)
"""A task could not have its lock and was sent again, to be tried after `countdown` seconds."""

task_skipped = Signal(name="task_skipped", providing_args={"request", "key"})
"""A task could not have its lock and was skipped."""
