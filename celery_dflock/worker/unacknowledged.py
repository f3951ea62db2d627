"""How long a message may wait here for its acknowledgement, and how one is given back to its broker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from amqp import Channel, Message
from amqp.exceptions import MessageNacked
from celery import Celery
from celery.app.task import Context
from celery.worker.consumer import Consumer

from celery_dflock.outcome import delivery
from celery_dflock.worker.strategy import RECEIVED
from dflockd import clock

SHARE = 0.9
"""Of the time that the broker leaves: a task is back with it before that is over."""

CONFIRM = 5.0
"""Seconds that a broker has for saying that it has got a message."""

logger = logging.getLogger("celery_dflock")


def limit(app: Celery) -> float | None:
    """Return the seconds that a task may be here with its message; ``None`` for any number."""
    patience = delivery.patience(app)
    if patience is None:
        return None
    # Lock servers count whole seconds. A broker that delivers again sooner has two messages if it is
    # sent again then, and each of these two: it stays, and its copies find that it waits.
    least = 0.0 if delivery.driver(app) in delivery.USUAL_VISIBILITY else 1.0
    return max(least, SHARE * patience // 1) or None


def since_received(request: Any) -> float:
    """Return the seconds for which the broker has waited: an ETA and a rate limit count too."""
    now = clock.now()
    return now - float(getattr(request.message, RECEIVED, now))


def warn(app: Celery, timeouts: Mapping[str, float | None]) -> None:
    """Say which tasks would wait for longer than the broker does; by their names, in seconds."""
    most = limit(app)
    if most is None:
        return
    names = sorted(name for name, seconds in timeouts.items() if seconds is None or seconds > most)
    if names:
        logger.warning(
            "lock_timeout of %s is longer than the broker waits for an acknowledgement: in the "
            "consumer it is requeued after %.0f s and keeps its position; lower lock_timeout, or "
            "raise %s",
            ", ".join(names),
            most,
            "RabbitMQ's consumer_timeout and dflock_consumer_timeout"
            if delivery.driver(app) == "amqp"
            else "visibility_timeout",
        )


def give_back(consumer: Consumer, request: Any) -> None:
    """Return a message to its queue, for this task has not begun.

    RabbitMQ counts how often it delivers a message of a quorum queue, and throws it away after a
    number of times (``x-delivery-limit``; 20 by default in RabbitMQ 4). If this message went back
    before, it is sent anew instead: that resets the count, and moves it to the end of the queue.
    """
    message = request.message
    if (message.headers or {}).get("x-delivery-count") and _send_anew(consumer, request):
        end(consumer, request)
        return
    message.reject_log_error(logger, consumer.connection_errors, requeue=True)


def end(consumer: Consumer, request: Any) -> None:
    """Acknowledge a message at once: no event loop may be there to do so any more."""
    request.message.ack_log_error(logger, consumer.connection_errors)


def _send_anew(consumer: Consumer, request: Any) -> bool:
    """Whether the broker has confirmed a message like this one."""
    message, channel = request.message, consumer.task_consumer.channel
    queue = delivery.queue_of(consumer.app.amqp.queues, Context(request.request_dict))
    if queue is None or not isinstance(channel, Channel):
        return False
    headers = delivery.without_counts(message.headers)
    headers.pop("compression", None)  # it has been undone
    again = Message(message.body, **{**message.properties, "application_headers": headers})
    try:
        channel.basic_publish_confirm(again, "", queue.name, confirm_timeout=CONFIRM)
    except (*consumer.connection_errors, *consumer.channel_errors, MessageNacked, OSError) as exc:
        logger.warning(
            "%r could not be requeued and goes back to the broker once more: %r", request, exc
        )
        return False
    return True
