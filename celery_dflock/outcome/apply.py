"""What happens to a task that does not get its lock."""

from __future__ import annotations

from typing import Any, assert_never

from celery_dflock.outcome import (
    once,
    overtaken,
    redelivery,
    shutting_down,
    superseded,
    timed_out,
    unavailable,
)
from celery_dflock.outcome.types import (
    Overtaken,
    Redelivered,
    Refusal,
    ShuttingDown,
    Superseded,
    TimedOut,
    Unavailable,
)
from celery_dflock.plan import Plan


def apply(plan: Plan, it: Refusal) -> Any:
    """Carry out the outcome: return the result of the task, or raise what tells Celery how it ends."""
    if plan.is_redelivered and not isinstance(it, Superseded):
        drop_ended(plan, it)
    match it:
        case TimedOut():
            return timed_out.decide(plan, it)
        case Unavailable():
            return unavailable.decide(plan, it)
        case Overtaken():
            return overtaken.wait_again(plan, it)
        case Redelivered():
            return redelivery.send_again(plan, it)
        case Superseded():
            if plan.is_redelivered:  # its first delivery may have run, and was stopped
                redelivery.look_for_result(plan)
            return superseded.skip_older(plan, it)
        case ShuttingDown():
            return shutting_down.send_elsewhere(plan, it)
        case _:
            assert_never(it)


def drop_ended(plan: Plan, it: Refusal) -> None:
    """End a redelivery if its task has ended, whatever else would happen to it.

    Raises:
        Ignore: it has; nothing is stored.
    """
    if isinstance(it, Redelivered):
        # Who has the lock may be a redelivery too, and only look for the result.
        redelivery.drop_if_ended(plan)
        once.drop_if_run(plan)
    elif plan.header.redelivery:
        redelivery.drop_if_ended(plan)  # it is requeued, and looks again
    else:
        redelivery.look_twice(plan)
