"""Sends a task that cannot run now again, to run later."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from typing import Any, NoReturn

from celery import Celery, Task, states
from celery.app.task import Context
from celery.app.trace import TraceInfo
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_dflock.exceptions import LockError
from celery_dflock.options import Backoff, LockOptions
from celery_dflock.outcome import delivery
from celery_dflock.outcome.header import Header
from celery_dflock.plan import Plan
from celery_dflock.signals import task_requeued
from celery_dflock.worker.shutdown import shutdown
from dflockd.sync_client import Reservation

LEAST_PAUSE = 0.2
"""Seconds before the next attempt at least, unless ``lock_requeue`` has a lower ``cap``.

A task that has nothing to wait for would go round through its broker as fast as that can.
"""

PUBLISH_PAUSE = 1.0
"""Seconds between attempts to reach a broker that is away."""

# The system's: no new seed after a fork, and nothing taken from a seed that somebody has set.
chance = random.SystemRandom()

logger = logging.getLogger("celery_dflock")


class CopyDropped(Ignore):
    """A run of this task has ended and left no result, or has sent its retry: that has all it needs."""


class RedeliveryRequeued(Ignore):
    """A redelivery was sent again. Nothing is stored: that is for another run."""


class Requeued(Retry, Ignore):
    """A run was sent again, and all that this one stores is stored: Celery is to store nothing more."""


class UnmetRequeued(RedeliveryRequeued):
    """The same, of one that has met no other run: what it has brought along is still its own."""


def pause(backoff: Backoff, attempt: int) -> float:
    """Draw the seconds before the attempt that follows number `attempt`."""
    drawn = backoff.pause(attempt - 1, chance.random())
    return round(max(drawn, min(LEAST_PAUSE, backoff.cap)), 3)


def at_once(app: Celery) -> float:
    """Return the pause of a task that has nothing to wait for."""
    return delivery.pause(app, LEAST_PAUSE)


def attempt_of(header: Header, began: float, ended: float) -> tuple[int, float]:
    """Return the number of an attempt that ends in a conflict, and since when it has been tried."""
    since = header.since_at(began)
    return header.attempt + 1, ended if since is None else since


def reservation(
    task: Task, header: Header, options: LockOptions, timeout: float | None
) -> Reservation | None:
    """Draw the pause, before a wait of `timeout` seconds; ``None`` if there will be none."""
    now, backoff = time.time(), options.requeue
    end = now + (timeout or 0.0)
    attempt, since = attempt_of(header, now, end)
    if backoff.is_over(attempt, end - since):
        return None
    return Reservation(delivery.pause(task.app, pause(backoff, attempt)), backoff.hold or 0.0)


def short_reservation(task: Task, options: LockOptions) -> Reservation:
    """Return how a position is kept for a task that is sent again with nothing to wait for."""
    return Reservation(at_once(task.app), options.requeue.hold or 0.0)


def send_again(plan: Plan, seconds: float, header: Header, error: LockError) -> None:
    """Publish a task once more, to be tried in so many seconds.

    The same task: id, group, chord, chain, headers, priority and queue stay, and no retry is used
    up. Published first, acknowledged after: it can be doubled by a crash, never lost. (RabbitMQ says
    that it has a message only to those who set ``confirm_publish``; see docs/brokers.md.)

    Raises:
        LockError: `error` itself, in eager mode: there is nowhere to send the task to.
        OperationalError: the broker is away, and the worker ends.
        Reject: the same, and the broker has the message still.
    """
    if plan.request.is_eager:
        raise error
    while True:
        try:
            publish(plan.task, plan.request, seconds, header)
        except OperationalError as exc:
            _wait_for_broker(plan, exc)
            if plan.task.acks_late:  # it may deliver by itself what was not acknowledged in time
                header = replace(header, redelivery=header.redelivery or 1)
        else:
            return


def publish(task: Task, request: Context, seconds: float, header: Header) -> None:
    """Publish a task once more; see `send_again`.

    Raises:
        OperationalError: the broker is away.
    """
    task.signature_from_request(
        request,
        retries=request.retries,
        countdown=seconds or None,
        headers=delivery.without_counts(header.write(request)),
        **_dropped(request),
        **delivery.route_of(task.app, request),
    ).apply_async()


def _dropped(request: Context) -> dict[str, Any]:
    """Return what Celery leaves out of a message that is sent again."""
    said = {
        name: getattr(request, name, None) for name in ("argsrepr", "kwargsrepr", "compression")
    }
    # Older Celery does, and only what the message says: the default of the class is no answer.
    said["ignore_result"] = vars(request).get("ignore_result")
    properties = request.properties or {}
    said["delivery_mode"] = properties.get("delivery_mode")
    said["serializer"] = registry.type_to_name.get(properties.get("content_type"))
    return {name: value for name, value in said.items() if value is not None}


def _wait_for_broker(plan: Plan, exc: OperationalError) -> None:
    """Wait a moment: where the message is acknowledged, this process is all that knows of it.

    Raises:
        OperationalError: the worker ends, so that this cannot be waited for.
        Reject: the same, and the broker has the message still.
    """
    shutdown.listen()  # a process that has waited for no lock yet does not
    if not shutdown.begun:
        why = str(exc) or repr(exc.__cause__)  # of a message that RabbitMQ refuses there is no text
        logger.warning("task %s cannot be sent again yet: %s", plan.name, why)
        time.sleep(PUBLISH_PAUSE)
    elif plan.task.acks_late:
        raise Reject(exc, requeue=True) from exc
    else:
        logger.error("task %s is lost: its worker ends without a broker: %s", plan.name, exc)
        raise exc


def requeue(
    plan: Plan,
    seconds: float,
    header: Header,
    error: LockError,
    attempt: int,
) -> NoReturn:
    """Send a task again, and end this run of it; see `send_again`.

    All that this run says of the task is said before the message is out: the next run may end before
    this one goes on, and ``RETRY`` would overwrite its result. A caller would wait for it forever.

    Raises:
        Requeued: which tells Celery that the task goes on elsewhere.
        RedeliveryRequeued: which tells it to store nothing, for that would be the other run's.
    """
    why = f"requeued for {seconds:.1f} s, attempt {attempt}: {error}"
    if not plan.is_redelivered and not plan.request.is_eager:
        _store_retry(plan, Requeued(why, exc=error, when=seconds))
    send_again(plan, seconds, header, error)
    tell_requeued(plan, error, seconds, attempt)
    if plan.is_redelivered:
        logger.info("task %s: its redelivery is %s", plan.name, why)
        raise RedeliveryRequeued if plan.header.redelivery else UnmetRequeued
    raise Requeued(why, exc=error, when=seconds)


def _store_retry(plan: Plan, retry: Requeued) -> None:
    """Do what Celery does for a retry: store ``RETRY``, call `on_retry`, send its signal, log it."""
    try:
        raise retry  # Celery looks at the exception that is handled
    except Requeued:
        try:
            TraceInfo(states.RETRY, retry).handle_error_state(plan.task, plan.request)
        except Exception as exc:  # the results are away, or a handler fails: the task still goes on
            logger.warning("task %s is requeued, and its state is not stored: %r", plan.name, exc)


def tell_requeued(plan: Plan, error: LockError, seconds: float, attempt: int) -> None:
    """Send the signal `task_requeued`."""
    task_requeued.send(
        sender=plan.task,
        request=plan.request,
        key=error.key,
        reason=error.reason,
        countdown=seconds,
        attempt=attempt,
    )


def without_counting(plan: Plan, ticket: str | None, **changes: Any) -> Header:
    """Return the header for the next attempt after one that was no conflict."""
    since = plan.header.since_at(plan.began)
    return replace(plan.header, ticket=ticket, since=since, paused=plan.began, **changes)
