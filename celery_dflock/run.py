"""A task asks for its locks, and runs under them or ends as its outcome says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_dflock import gate, superseding
from celery_dflock.exceptions import (
    LockLostError,
    LockNotAcquiredError,
    LockUnavailableError,
    SupersededError,
)
from celery_dflock.held import TaskLock, running
from celery_dflock.identity import label_of
from celery_dflock.locks import Locks
from celery_dflock.look import Look, tell_waiting
from celery_dflock.loss import Loss
from celery_dflock.outcome.decide import decide
from celery_dflock.outcome.header import is_firing
from celery_dflock.outcome.outage import outages
from celery_dflock.outcome.redelivery import (
    drop_if_run,
    look_before_it_runs,
    once,
    say_why_it_runs,
)
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
from celery_dflock.signals import lock_acquired, lock_released
from celery_dflock.unique.run import Carried, carried
from celery_dflock.worker.shutdown import shutdown
from dflockd import clock, errors
from dflockd.client.lock import LockBase
from dflockd.sync_client import DistributedLock, Reservation

TURN_TIMEOUT = 1
"""Seconds in the slot for a task whose turn has come in the consumer: usually it is granted at once."""

logger = logging.getLogger("celery_dflock")


def run_locked(plan: Plan) -> Any:
    """Ask for the lock of a task, run its body if it is granted, and release the lock."""
    refusal = superseding.prepare(plan) if plan.options.supersedes else None
    loss = Loss(plan)
    locks = locks_of(plan, loss.happened)
    run = gate.Run(type(plan.task), locks)
    try:
        gate.begin(plan.request, run, is_outermost=plan.bound.is_outermost)
        try:
            locks.outer = running.get()
            if plan.header.unique is None:
                return _run(plan, locks, loss, None, refusal)
            with carried(plan) as brought:
                return _run(plan, locks, loss, brought, refusal)
        finally:
            _release(plan, run, loss)
    except BaseException as exc:
        # A time limit, or what else a signal handler raises, may have cut the release above short.
        _release(plan, run, loss)
        if not isinstance(exc, SupersededError) or not loss.has_superseded(exc):
            raise  # the latter is of the task that has called this one
        superseding.revoke(plan, exc)
    finally:
        gate.forget(plan.request, run)


def _run(
    plan: Plan, locks: Locks, loss: Loss, brought: Carried | None, refusal: Refusal | None
) -> Any:
    refusal = refusal or acquire(plan, locks)
    if refusal is not None:
        return decide(plan, refusal)
    if plan.is_redelivered:
        state = look_before_it_runs(plan, locks.waited)
        with once(plan):
            say_why_it_runs(plan, state)
            return _run_body(plan, locks, loss, brought)
    if is_firing(plan.request):
        with once(plan):
            return _run_body(plan, locks, loss, brought)
    if plan.header.waited:
        drop_if_run(plan)  # where the broker has its message of before as well
    return _run_body(plan, locks, loss, brought)


def _run_body(plan: Plan, locks: Locks, loss: Loss, brought: Carried | None) -> Any:
    if brought is not None:
        brought.begin()
    try:
        loss.concerns(locks)
        running.set(locks)
        if logger.isEnabledFor(logging.DEBUG):
            about = plan.name, ", ".join(plan.keys), locks.waited, TaskLock.of(locks).fence
            logger.debug("task %s has lock %r after %.3f s, fence %s", *about)
        if lock_acquired.is_heard:
            lock_acquired.send(sender=plan.task, request=plan.request, lock=TaskLock.of(locks))
        with loss:
            if plan.options.interrupts:
                locks.listen(loss.supersede)
            if loss.is_raised:
                locks.check()  # what came too early to interrupt anything
            elif (lost := locks.lost) is not None:
                loss.happened(lost)  # what came too early to be told
            if plan.options.is_rated:
                locks.begin()
            return plan.body()
    finally:
        loss.is_open = False
        running.set(locks.outer)


def _release(plan: Plan, run: gate.Run, loss: Loss) -> None:
    """Release the locks of a run, and say so; called again, do what an exception has kept from it."""
    held, locks = None, run.locks
    if loss.has_begun and lock_released.is_heard:
        held = TaskLock.of(locks)  # while it knows its fence
    if gate.end(run):
        locks.release()
    if loss.has_begun and logger.isEnabledFor(logging.DEBUG):
        logger.debug("task %s has released lock %r", plan.name, ", ".join(plan.keys))
    if held is not None:
        lock_released.send(sender=plan.task, request=plan.request, lock=held)
    loss.has_begun = False


def locks_of(plan: Plan, on_lost: Callable[[LockBase], object]) -> Locks:
    """Return the locks of a run, not yet acquired."""
    bound, request = plan.bound, plan.request
    label = label_of(plan.task.name, request.id)
    owner = bound.asks_as(request, plan.age)
    locks = []
    if bound.options.limits is None:
        locks = bound.made(plan.wanted, label=label, owner=owner, on_lost=on_lost)
    else:
        for key in plan.keys:
            locks.append(
                bound.make_lock(key, label=label, owner=owner, group=plan.group, on_lost=on_lost)
            )
    made = Locks(locks, plan.timeout, bound.is_cluster, partial(_tell_waiting, plan))
    made.heeds_shutdown = not request.is_eager
    made.has_begun = not plan.options.is_rated
    return made


def acquire(plan: Plan, locks: Locks) -> Refusal | None:
    """Wait for the locks of a run, as far as the consumer has not done so.

    Returns:
        ``None`` once all are held.
    """
    handed, refusal = plan.hand_off, None
    try:
        if handed is not None:
            started = clock.now()
            refusal = _go_on(plan, handed, locks)
            locks.waited = handed.waited + clock.now() - started
        if refusal is None:
            refusal = _wait(plan, locks) or _lost_meanwhile(locks)
    except LockUnavailableError as error:
        return Unavailable(error, locks.server(error.key), refused_with(error.__cause__))
    except errors.IN_ORDER as exc:
        return refusal_of(exc, plan.keys[0], "")
    except errors.AcquireCancelledError:
        return ShuttingDown(LockNotAcquiredError(plan.keys[0], "the worker is shutting down"))
    if outages.known and not isinstance(refusal, Unavailable):
        outages.over(locks.server(plan.keys[0]))
    return refusal


def _go_on(plan: Plan, handed: HandOff, locks: Locks) -> Refusal | None:
    """Continue after the wait in the consumer."""
    match handed.came:
        case ItsTurn(ticket):
            return _take_up(plan, handed, ticket, locks)
        case TimedOut(error, kept):
            return _try_after_all(plan, error, kept, locks)
        case refusal:
            return refusal


def _take_up(plan: Plan, handed: HandOff, ticket: str | None, locks: Locks) -> Overtaken | None:
    """Take up the position whose turn has come; the server reserves a slot for it for a moment.

    Of several keys that is the last one, and the worker holds the others: they come first, for they
    are not renewed any more. All or none: without the last one all positions are gone.
    """
    if handed.lent:
        if locks.adopt(handed.lent) and ticket and locks.take_up(ticket, TURN_TIMEOUT, None):
            return None
        locks.release()
        why = "its turn came, but others went first before it had a slot"
        return Overtaken(LockNotAcquiredError(plan.keys[len(handed.lent)], why))
    said = short_reservation(plan.task, plan.options)
    if ticket is None or not locks.take_up(ticket, TURN_TIMEOUT, lambda: said):
        why = "its turn came, but others went first before it had a slot"
        return Overtaken(
            LockNotAcquiredError(plan.keys[0], why), Kept.of(locks.ticket, said.away_s)
        )
    return None


def _try_after_all(
    plan: Plan, error: LockNotAcquiredError, kept: Kept | None, locks: Locks
) -> TimedOut | None:
    """Try once, now that there is a process.

    While it waited in the consumer the lock may have been free, and its worker had nobody to use it.
    That is no conflict.
    """
    said = None if kept is None else Reservation(kept.pause, plan.options.requeue.hold or 0.0)
    ticket, reserve = (None, None) if kept is None else (kept.ticket, lambda: said)
    if locks.take_up(ticket, 0, reserve):
        return None
    kept = Kept.of(locks.ticket, None if said is None else said.away_s)
    return _timed_out(locks, plan.keys[0], error.reason, kept)


def _wait(plan: Plan, locks: Locks) -> Refusal | None:
    """Wait in the slot for what is not held yet."""
    if plan.hand_off is not None and locks.held:
        return None
    key, ticket = plan.keys[0], plan.header.ticket
    if locks.heeds_shutdown and shutdown.begun:
        return ShuttingDown(LockNotAcquiredError(key, "the worker is shutting down"), ticket)
    if (kept := locks.kept_by_caller()) is not None:
        why = "it is held by a task in the same thread that waits for this one"
        return TimedOut(LockNotAcquiredError(kept, why))
    refused = locks.acquire(ticket, partial(_reserve, plan))
    if refused is None:
        return None
    seconds, said = locks.timeout, locks.reservation
    waited = f"waited {seconds} s (lock_timeout)" if seconds else ""
    return _timed_out(locks, refused, waited, Kept.of(locks.ticket, said and said.away_s))


def _lost_meanwhile(locks: Locks) -> Overtaken | None:
    """Look whether one was lost by now: with its server, or while another key was waited for.

    The body has not begun: that is no loss, and the task waits for all of them anew.
    """
    try:
        locks.check()
    except LockLostError as exc:
        locks.release()
        return Overtaken(LockNotAcquiredError(exc.key, "it was lost before the task began"))
    return None


def _reserve(plan: Plan) -> Reservation | None:
    """Return how the position of a task is kept, once there is one."""
    if not plan.keeps_position:
        return None
    return reservation(plan.task, plan.header, plan.options, plan.timeout)


def _timed_out(locks: Locks, key: str, waited: str, kept: Kept | None) -> TimedOut:
    look = locks.look(key)
    return TimedOut(LockNotAcquiredError(key, look.refusal(waited), look.holder), kept)


def _tell_waiting(plan: Plan, lock: DistributedLock, look: Callable[[], Look]) -> None:
    if logger.isEnabledFor(logging.INFO):
        why = look().reason(lock.group)
        logger.info("task %s waits for lock %r%s", plan.name, lock.key, f", {why}" if why else "")
    tell_waiting(plan.task, plan.request, lock.key, lock.group, look)
