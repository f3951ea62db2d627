"""How long a task may wait in the consumer, by what is known of the broker."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from celery_dflock.worker import unacknowledged


def an_app(broker: str = "amqp://", *queues: Queue, **settings: Any) -> Celery:
    app = Celery(set_as_current=False, broker=broker)
    app.conf.update(settings)
    app.conf.task_queues = queues or None
    return app


@pytest.mark.parametrize(
    ("app", "seconds"),
    [
        (an_app(), 1620),
        (an_app(dflock_consumer_timeout=10), 9),
        (an_app(dflock_consumer_timeout=1), 1),
        (an_app(dflock_consumer_timeout=0), None),
        (an_app("redis://"), 3240),
        (an_app("redis://", broker_transport_options={"visibility_timeout": 60}), 54),
        (an_app("redis://", broker_transport_options={"visibility_timeout": 1}), None),
        (an_app("memory://", dflock_consumer_timeout=10), None),
        (an_app("amqp://", Queue("a", queue_arguments={"x-consumer-timeout": 60000})), 54),
        (an_app("amqp://", Queue("a", consumer_arguments={"x-consumer-timeout": 60000})), 54),
        (
            an_app(
                "amqp://",
                Queue("a", queue_arguments={"x-consumer-timeout": 60000}),
                Queue("b", queue_arguments={"x-consumer-timeout": 0}),
                Queue("c"),
                dflock_consumer_timeout=30,
            ),
            27,
        ),
    ],
)
def test_the_least_patient_queue_counts(app: Celery, seconds: float | None) -> None:
    assert unacknowledged.limit(app) == seconds


def test_tasks_that_may_wait_longer_are_named(caplog: pytest.LogCaptureFixture) -> None:
    timeouts = {"short": 5.0, "long": 7200.0, "endless": None}
    with caplog.at_level(logging.WARNING, "celery_dflock"):
        unacknowledged.warn(an_app(), timeouts)
        unacknowledged.warn(an_app("redis://"), timeouts)
        unacknowledged.warn(an_app("memory://"), timeouts)
        unacknowledged.warn(an_app(), {"short": 5.0})

    amqp, redis = caplog.messages
    for line in (amqp, redis):
        assert line.startswith("lock_timeout of endless, long is longer than the broker waits")
    assert "it is requeued after 1620 s" in amqp
    assert amqp.endswith("RabbitMQ's consumer_timeout and dflock_consumer_timeout")
    assert "it is requeued after 3240 s" in redis
    assert redis.endswith("raise visibility_timeout")
