"""An app whose workers have queues at exchanges of every kind, and how a message comes to each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kombu import Exchange, Queue
from kombu.common import Broadcast

from tests.celery_dflock.jobs import app

WORKER = "EXCHANGING_WORKER"
"""The environment variable with the name of a worker, for the queues that it has alone."""

KIND = "EXCHANGING_KIND"
"""That with the kind of the queues that it shares: classic or quorum. Its own are classic."""


@dataclass(frozen=True)
class Way:
    """How a message is sent, and how many queues get it if there are so many workers."""

    exchange: str
    key: str
    copies: int = 1
    one_for_each_worker: bool = False
    is_named: bool = False
    """Whether the key is the name of a queue."""

    def to(self, workers: int) -> int:
        return workers if self.one_for_each_worker else self.copies


WAYS = {
    "direct": Way("direct-one", "direct-one", is_named=True),
    "direct with a key of its own": Way("direct-keys", "orders"),
    "topic": Way("topic-one", "sales.us"),
    "topic that matches two": Way("topic-two", "orders.eu", copies=2),
    "fanout to a shared queue": Way("fanout-shared", "any"),
    "fanout to two shared queues": Way("fanout-two", "any", copies=2),
    "fanout to auto-delete queues": Way("fanout-auto", "any", one_for_each_worker=True),
    "fanout to exclusive queues": Way("fanout-exclusive", "any", one_for_each_worker=True),
    "broadcast": Way("for-all", "any", one_for_each_worker=True),
    "headers": Way("headers", "anything"),
    "default": Way("", "default-one", is_named=True),
    "dead-letter": Way("", "to-die", is_named=True),
}

KEY_OF_ITS_OWN = {"direct", "direct with a key of its own", "topic", "default", "dead-letter"}
"""Ways of messages that RabbitMQ can delay: those with a key of several queues come to all of them."""


def named(kind: str, text: str) -> str:
    """Queues of either kind, and their exchanges, have names of their own."""
    return f"{kind}-{text}"


def to_die(kind: str) -> Queue:
    """Nobody consumes it: what is in it goes on at once."""
    arguments = {
        "x-message-ttl": 1,
        "x-dead-letter-exchange": named(kind, "dead-letters"),
        "x-dead-letter-routing-key": "dead",
    }
    name = named(kind, "to-die")
    return Queue(name, Exchange(""), name, queue_arguments=arguments)


def queues(worker: str, kind: str) -> list[Queue]:
    def exchange(name: str, of: str) -> Exchange:
        return Exchange(named(kind, name), of)

    def shared(name: str, *of: Any, **more: Any) -> Queue:
        arguments = {"x-queue-type": kind} if kind == "quorum" else None
        return Queue(named(kind, name), *of, queue_arguments=arguments, **more)

    def own(name: str, *of: Any, **more: Any) -> Queue:
        return Queue(f"{named(kind, name)}-{worker}", *of, **more)

    two, fanout = exchange("topic-two", "topic"), exchange("fanout-two", "fanout")
    default = named(kind, "default-one")
    # Where RabbitMQ delays messages, Celery opens a second connection, and may not see this one.
    exclusive = own("own", exchange("fanout-exclusive", "fanout"), exclusive=True)
    return [
        shared("direct-one", exchange("direct-one", "direct"), named(kind, "direct-one")),
        shared("direct-queue", exchange("direct-keys", "direct"), "orders"),
        shared("topic-queue", exchange("topic-one", "topic"), "sales.*"),
        shared("topic-all", two, "orders.#"),
        shared("topic-eu", two, "#.eu"),
        shared("fanout-queue", exchange("fanout-shared", "fanout")),
        shared("fanout-a", fanout),
        shared("fanout-b", fanout),
        own("auto", exchange("fanout-auto", "fanout"), auto_delete=True),
        *([] if kind == "quorum" else [exclusive]),
        Broadcast(named(kind, "for-all")),
        shared("headers-queue", exchange("headers", "headers"), binding_arguments=ALL),
        shared("default-one", Exchange(""), default),
        shared("dead", exchange("dead-letters", "direct"), "dead"),
    ]


ALL = {"x-match": "all"}

if WORKER in os.environ:
    usual, of = app.conf.task_default_queue, os.environ[KIND]
    app.conf.task_queues = (
        Queue(
            usual,
            Exchange(usual, app.conf.task_default_exchange_type),
            usual,
            queue_arguments={"x-queue-type": of} if of == "quorum" else None,
        ),
        *queues(os.environ[WORKER], of),
    )
