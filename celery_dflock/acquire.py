"""Asks for the locks of a task: they are granted, or there is a reason why it cannot run now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from celery_dflock.exceptions import LockNotAcquiredError, LockUnavailableError
from celery_dflock.identity import AgedOwner, Owner, label_of
from celery_dflock.locks import Locks, RatedLocks
from celery_dflock.look import Look, tell_waiting
from celery_dflock.outcome.outage import outages
from celery_dflock.outcome.requeue import reservation, short_reservation
from celery_dflock.outcome.types import (
    HandOff,
    ItsTurn,
    Kept,
    Overtaken,
    Refusal,
    ShuttingDown,
    TimedOut,
    Unavailable,
    refusal_of,
    refused_with,
)
from celery_dflock.plan import Plan
from celery_dflock.worker.shutdown import shutdown
from dflockd import errors
from dflockd.client.lock import LockBase

TURN_TIMEOUT = 1
"""Seconds in the slot for a task whose turn has come in the consumer: usually it is granted at once."""

MOST_OVERTAKEN = 8
"""So many times that others went first count for how long it waits there."""

logger = logging.getLogger("celery_dflock")


def locks_of(plan: Plan, on_lost: Callable[[LockBase], object]) -> Locks:
    """Return the locks of a run, not yet acquired."""
    bound, request = plan.bound, plan.request
    make, label = bound.make_lock, label_of(plan.task.name, request.id)
    owner: Owner | AgedOwner = bound.owner_of(request)
    if plan.age:
        owner = (*owner, plan.age)
    locks = []
    for key in plan.keys:
        locks.append(make(key, label=label, owner=owner, group=plan.group, on_lost=on_lost))
    make_all = Locks if bound.options.rate is None else RatedLocks
    made = make_all(locks, plan.timeout, bound.is_cluster, partial(_tell_waiting, plan))
    made.heeds_shutdown = not request.is_eager
    return made


def acquire(plan: Plan, locks: Locks) -> Refusal | None:
    """Wait for the locks of a run, as far as the consumer has not done so.

    Returns:
        ``None`` once all are held.
    """
    started = time.monotonic()
    try:
        refusal = None if plan.hand_off is None else _go_on(plan, plan.hand_off, locks)
        refusal = refusal or _wait(plan, locks)
    except LockUnavailableError as error:
        return Unavailable(error, locks.server(error.key), refused_with(error.__cause__))
    except errors.IN_ORDER as exc:
        return refusal_of(exc, plan.keys[0], "")
    except errors.AcquireCancelledError:
        return ShuttingDown(LockNotAcquiredError(plan.keys[0], "the worker is shutting down"))
    if outages.known and not isinstance(refusal, Unavailable):
        outages.over(locks.server(plan.keys[0]))
    locks.waited = time.monotonic() - started
    if plan.hand_off is not None:
        locks.waited += plan.waited
    return refusal


def _go_on(plan: Plan, handed: HandOff, locks: Locks) -> Refusal | None:
    """Continue after the wait in the consumer."""
    match handed.came:
        case ItsTurn(ticket):
            return _take_up(plan, ticket, locks)
        case TimedOut(error, kept):
            return _timed_out(locks, error.key, error.reason, kept)
        case refusal:
            return refusal


def _take_up(plan: Plan, ticket: str | None, locks: Locks) -> Overtaken | None:
    """Take up the position whose turn has come; the server reserves a slot for it for a moment."""
    said = short_reservation(plan.task, plan.options)
    if ticket is None or not locks.take_up(ticket, _turn_timeout(plan), lambda: said):
        why = "its turn came, but others went first before it had a slot"
        return Overtaken(
            LockNotAcquiredError(plan.keys[0], why), Kept.of(locks.ticket, said.away_s)
        )
    return None


def _turn_timeout(plan: Plan) -> float:
    """Return how long a task still waits in its slot, ahead of all that came later.

    The time grows each time others went first. Otherwise they always would: if their worker has a
    slot at once, this one never has, and the tasks take longer than this waits. It never exceeds
    the rest of the time in the consumer.
    """
    seconds = float(TURN_TIMEOUT * 4 ** min(plan.header.overtaken, MOST_OVERTAKEN))
    most = plan.options.queue_timeout
    return seconds if most is None else max(TURN_TIMEOUT, min(seconds, most - plan.waited))


def _wait(plan: Plan, locks: Locks) -> Refusal | None:
    """Wait in the slot for what is not held yet."""
    if plan.hand_off is not None and locks.held:
        return None
    key, ticket = plan.keys[0], plan.header.ticket
    if locks.heeds_shutdown and shutdown.begun:
        return ShuttingDown(LockNotAcquiredError(key, "the worker is shutting down"), ticket)
    if (outer := locks.outer) is not None:
        for each in filter(outer.has_under, plan.keys):
            why = "it is held by a task in the same thread that waits for this one"
            return TimedOut(LockNotAcquiredError(each, why))
    reserve = partial(reservation, plan.task, plan.header, plan.options, locks.timeout)
    refused = locks.acquire(ticket, reserve if plan.keeps_position else None)
    if refused is None:
        return None
    seconds, said = locks.timeout, locks.reservation
    waited = f"waited {seconds} s (lock_timeout)" if seconds else ""
    return _timed_out(locks, refused, waited, Kept.of(locks.ticket, said and said.away_s))


def _timed_out(locks: Locks, key: str, waited: str, kept: Kept | None) -> TimedOut:
    look = locks.look(key)
    return TimedOut(LockNotAcquiredError(key, look.refusal(waited), look.holder), kept)


def _tell_waiting(plan: Plan, key: str, look: Callable[[], Look]) -> None:
    if logger.isEnabledFor(logging.INFO):
        why = look().reason(plan.group)
        logger.info("task %s waits for lock %r%s", plan.name, key, f", {why}" if why else "")
    tell_waiting(plan.task, plan.request, key, plan.group, look)
