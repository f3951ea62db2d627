"""An app whose workers have queues at exchanges of every kind, and how a message comes to each."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kombu import Exchange, Queue
from kombu.common import Broadcast

from tests.celery_dflock.jobs import app

WORKER = "EXCHANGING_WORKER"
"""The environment variable with the name of a worker, for the queues that it has alone."""


@dataclass(frozen=True)
class Way:
    """How a message is sent, and how many queues get it if there are so many workers."""

    exchange: str
    key: str
    copies: int = 1
    one_for_each_worker: bool = False

    def to(self, workers: int) -> int:
        return workers if self.one_for_each_worker else self.copies


WAYS = {
    "direct": Way("direct-one", "direct-one"),
    "direct with a key of its own": Way("direct-keys", "orders"),
    "topic": Way("topic-one", "orders.us"),
    "topic that matches two": Way("topic-two", "orders.eu", copies=2),
    "fanout to a shared queue": Way("fanout-shared", "any"),
    "fanout to two shared queues": Way("fanout-two", "any", copies=2),
    "fanout to auto-delete queues": Way("fanout-auto", "any", one_for_each_worker=True),
    "fanout to exclusive queues": Way("fanout-exclusive", "any", one_for_each_worker=True),
    "broadcast": Way("for-all", "any", one_for_each_worker=True),
    "headers": Way("headers", "anything"),
    "default": Way("", "default-one"),
    "dead-letter": Way("", "to-die"),
}

TO_DIE = Queue(
    "to-die",
    Exchange(""),
    "to-die",
    queue_arguments={
        "x-message-ttl": 1,
        "x-dead-letter-exchange": "dead-letters",
        "x-dead-letter-routing-key": "dead",
    },
)
"""Nobody consumes it: what is in it goes on at once."""


def queues(worker: str) -> list[Queue]:
    two, fanout = Exchange("topic-two", "topic"), Exchange("fanout-two", "fanout")
    return [
        Queue("direct-one", Exchange("direct-one", "direct"), "direct-one"),
        Queue("direct-queue", Exchange("direct-keys", "direct"), "orders"),
        Queue("topic-queue", Exchange("topic-one", "topic"), "orders.*"),
        Queue("topic-all", two, "orders.#"),
        Queue("topic-eu", two, "#.eu"),
        Queue("fanout-queue", Exchange("fanout-shared", "fanout")),
        Queue("fanout-a", fanout),
        Queue("fanout-b", fanout),
        Queue(f"auto-{worker}", Exchange("fanout-auto", "fanout"), auto_delete=True),
        Queue(f"own-{worker}", Exchange("fanout-exclusive", "fanout"), exclusive=True),
        Broadcast("for-all"),
        Queue(
            "headers-queue", Exchange("headers", "headers"), binding_arguments={"x-match": "all"}
        ),
        Queue("default-one", Exchange(""), "default-one"),
        Queue("dead", Exchange("dead-letters", "direct"), "dead"),
    ]


if WORKER in os.environ:
    usual = app.conf.task_default_queue
    kind = Exchange(usual, app.conf.task_default_exchange_type)
    app.conf.task_queues = (Queue(usual, kind, usual), *queues(os.environ[WORKER]))
