"""What brokers ask of a task that is sent again: where it goes, and how soon it can come.

Pure: it looks at the app's settings and queues and at the message, and sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.app.amqp import Queues
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured
from kombu.entity import Exchange, Queue

from celery_dflock.config import settings

DELAYED = "celery_delayed_delivery"
"""The exchange from which messages come that RabbitMQ itself has delayed."""

_delay = re.compile(r"(?:[01]\.){28}")
"""The number of seconds in the routing key of such a message, bit by bit."""

ADDED_BY_BROKER = re.compile(
    r"x-death|x-(first|last)-death-(exchange|queue|reason)|x-(delivery|acquired)-count"
)
"""Headers in which RabbitMQ counts; of a message sent again they make it believe that it goes round."""

FANOUT_WITHOUT_QUEUES = ("redis", "mongodb")
"""Transports whose fanout queues keep no messages: only those that listen get one."""


USUAL_VISIBILITY = {"redis": 3600.0, "sqs": 1800.0}
"""Seconds of ``visibility_timeout`` where an app does not say them, by kind of broker."""


def patience(app: Celery) -> float | None:
    """Return the seconds for which the broker waits for an acknowledgement; ``None`` for no limit.

    Then Redis and SQS deliver the message again. RabbitMQ closes the channel, and Celery's worker ends
    with that. There ``x-consumer-timeout`` of a queue counts (milliseconds), else
    ``dflock_consumer_timeout``.
    """
    kind = driver(app)
    if kind in USUAL_VISIBILITY:
        said = (app.conf.broker_transport_options or {}).get("visibility_timeout")
        return float(said or USUAL_VISIBILITY[kind])
    if kind != "amqp":
        return None
    usual = settings(app).consumer_timeout
    queues = app.amqp.queues.consume_from.values()
    known = [_consumer_timeout(queue, usual) for queue in queues] or [usual]
    return min(filter(None, known), default=None)


def _consumer_timeout(queue: Any, usual: float) -> float:
    for arguments in (queue.consumer_arguments, queue.queue_arguments):
        milliseconds = (arguments or {}).get("x-consumer-timeout")
        if milliseconds is not None:
            return float(milliseconds) / 1000
    return usual


def pause(app: Celery, seconds: float) -> float:
    """Return a pause before a task is sent to run again that its broker can do.

    A worker keeps the message for the pause. A broker that would deliver it again meanwhile makes two
    of it, each of which would be sent again with a pause: hundreds in a minute.

    Where RabbitMQ delays messages itself (quorum queues) Celery refuses pauses below one second.
    Those get one second more: at the same moment all would only meet again. No pause stays none.
    """
    limit = patience(app)
    if limit is not None:
        seconds = min(seconds, round(limit / 2, 3))
    return seconds + 1.0 if 0.0 < seconds < 1.0 and has_quorum_queues(app) else seconds


def route_of(app: Celery, request: Context) -> dict[str, Any]:
    """Return the options of `apply_async` that send a task to the queue that it came from.

    None for most: Celery sends it where it was sent. But an exchange that has several queues would
    give it to all of them; and where RabbitMQ delays messages it would be to the default queue.

    Raises:
        ImproperlyConfigured: it was sent to all workers, and cannot be sent to this one alone.
    """
    queue = queue_of(app.amqp.queues, request)
    exchange, key = _origin(request)
    if queue is not None and _is_for_all(app, queue):
        return _route_to_one(app, request, queue)
    if not has_quorum_queues(app):
        # A queue that has the exchange and the key for itself, as Celery makes them. Of what came to
        # a queue by its name Celery makes a message for the exchange of the queue, if not direct.
        by_name = not exchange or (queue is not None and queue.name == key)
        if queue is None or (queue.exchange.type == "direct" and by_name):
            return {}
        return _route_to_one(app, request, queue)
    if not exchange:
        return {}
    kinds = {each.exchange.name: each.exchange.type for each in app.amqp.queues.values()}
    kind = "topic" if exchange == DELAYED else kinds.get(exchange)
    if kind is None or (kind == "direct" and queue is None):
        return {}
    name = key if queue is None else queue.name
    back = Queue(name, Exchange(exchange, kind), key, no_declare=True)
    return {"queue": back, "exchange": None, "routing_key": None}


def _route_to_one(app: Celery, request: Context, queue: Queue) -> dict[str, Any]:
    if queue.exchange.type == "fanout" and driver(app) in FANOUT_WITHOUT_QUEUES:
        raise ImproperlyConfigured(
            f"task {request.task} came from {queue.exchange.name}, which sends to all workers, and "
            f"{driver(app)} cannot send it back to one of them: set lock_conflict to 'skip' or "
            "'fail', or raise lock_timeout"
        )
    alone = Queue(queue.name, Exchange(""), queue.name, no_declare=True)
    return {"queue": alone, "exchange": "", "routing_key": queue.name}


def without_counts(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers without those that a broker has added."""
    return {name: headers[name] for name in headers if not ADDED_BY_BROKER.fullmatch(name)}


def is_for_all(app: Celery, exchange: str, routing_key: str) -> bool:
    """Whether each worker gets a message of its own of those that come this way."""
    queue = _queue_at(app.amqp.queues, exchange, _without_delay(routing_key))
    return queue is not None and _is_for_all(app, queue)


def queue_of(queues: Queues, request: Context) -> Queue | None:
    """Return the queue that a message has come from, if the app knows it."""
    return _queue_at(queues, *_origin(request))


def _queue_at(queues: Queues, exchange: str, key: str) -> Queue | None:
    if not exchange:
        found: Queue | None = queues.get(key)
        return found
    queue: Queue
    for queue in (*queues.consume_from.values(), *queues.values()):
        kind = "topic" if exchange == DELAYED else queue.exchange.type
        if exchange in (queue.exchange.name, DELAYED) and _gets(queue, kind, key):
            return queue
    return None


def _gets(queue: Queue, kind: str, key: str) -> bool:
    """Whether an exchange of that kind gives its queue messages with this routing key."""
    if kind == "topic":
        # A dot before `#` is part of it: it stands for any number of words.
        words = re.escape(queue.routing_key or "").replace(r"\*", r"[^.]*")
        pattern = words.replace(r"\.\#", r"(\..*)?").replace(r"\#\.", r"(.*\.)?")
        return re.fullmatch(pattern.replace(r"\#", ".*"), key) is not None
    return kind in ("fanout", "headers") or queue.routing_key == key


def _origin(request: Context) -> tuple[str, str]:
    """Return the exchange and the routing key of a message, without the delay that it has had."""
    info = request.delivery_info or {}
    return info.get("exchange") or "", _without_delay(info.get("routing_key") or "")


def _without_delay(routing_key: str) -> str:
    return _delay.sub("", routing_key, count=1)


def has_quorum_queues(app: Celery) -> bool:
    """Whether Celery takes this for an app with quorum queues: one is enough."""
    return driver(app) == "amqp" and any(
        (queue.queue_arguments or {}).get("x-queue-type") == "quorum"
        for queue in app.amqp.queues.values()
    )


def driver(app: Celery) -> str:
    """Return what kind of broker the app sends its tasks to: ``amqp`` or ``redis``, say."""
    return str(app.producer_pool.connections.connection.transport.driver_type)


def _is_for_all(app: Celery, queue: Queue) -> bool:
    """Whether each worker has a queue of its own for these messages, as with Celery's `Broadcast`.

    A queue that several workers share gets one copy of a message, whatever its exchange does.
    """
    if queue.exchange.type != "fanout":
        return False
    return bool(queue.exclusive or queue.auto_delete) or driver(app) in FANOUT_WITHOUT_QUEUES
