"""``lock_conflict="supersede"`` and ``"newest"``: the newest wins, by a number of the lock server's.

With the former it also interrupts the task that runs: that one listens. With the latter nobody listens,
and all else is the same.

The number is drawn where the task is sent, and travels in its header through retries and requeues. A
message without one, from `send_task` or beat, has it drawn where it arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from celery import Task

from celery_dflock.exceptions import LockKeyError, SupersededError
from celery_dflock.outcome import header
from celery_dflock.outcome.types import Refusal, refusal_of
from celery_dflock.plan import Bound, Plan
from celery_dflock.signals import task_superseded
from dflockd import errors

logger = logging.getLogger("celery_dflock")


def headers_with_age(
    task: Task,
    bound: Bound,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    headers: Mapping[str, Any] | None,
    task_id: str,
) -> Mapping[str, Any] | None:
    """Return the headers of a message that is about to be sent, with a number of its own.

    They stay unchanged if they have one, since that is a retry, and if no number can be drawn now:
    then it is drawn where the task arrives.

    Raises:
        LockKeyError: the arguments make no key, or several.
    """
    if header.age_of(headers, task_id):
        return headers
    try:
        key = _only(bound.keys_of(task, tuple(args), dict(kwargs)))
    except TypeError:
        return headers  # arguments that do not fit are Celery's to refuse
    try:
        age = bound.make_lock(key).draw_age()
    except errors.RemoteError as exc:
        why = "its age counts from when a worker receives it"
        logger.warning("task %s[%s]: %s: %s", task.name, task_id, why, exc)
        return headers
    return header.said_of(task_id, headers, "age", age)


def prepare(plan: Plan) -> Refusal | None:
    """See to it that a run has an age.

    Raises:
        LockKeyError: there are several keys.
    """
    key = _only(plan.keys)
    if plan.age:
        return None
    lock = plan.bound.make_lock(key)
    try:
        plan.age = lock.draw_age()
    except errors.RemoteError as exc:
        return refusal_of(exc, lock.key, lock.server)
    request, plan.header = plan.request, replace(plan.header, age=plan.age)
    request.headers = header.said_of(request.id, request.headers, "age", plan.age)
    return None


def _only(keys: Sequence[str]) -> str:
    if len(keys) > 1:
        why = "lock_key gave several keys: give one, since the newest wins (lock_conflict)"
        raise LockKeyError(keys[0], why)
    return keys[0]


def revoke(plan: Plan, error: SupersededError) -> NoReturn:
    """End a run that was interrupted, with a result that says by whom.

    Raises:
        SupersededError: which tells Celery that there is nothing more to store.
    """
    task, request = plan.task, plan.request
    task_superseded.send(sender=task, request=request, key=error.key, by=error.by, was_running=True)
    if not request.is_eager:
        keep = not (task.ignore_result or request.ignore_result)
        task.backend.mark_as_revoked(
            request.id, f"superseded by {error.by}", request=request, store_result=keep
        )
    raise error
