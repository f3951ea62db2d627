"""What a worker does with the message of a locked task, from its arrival to the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery, Task
from celery.worker import strategy
from celery.worker.consumer import Consumer

from dflockd import clock

RECEIVED = "dflock_received"
"""The name in a message of a locked task for when it came, on `dflockd.clock`."""


def default(task: Task, app: Celery, consumer: Consumer) -> Callable[..., Any]:
    """Do as Celery does, but for the last step, which leads to the pool: that one may take its time.

    So whatever comes before it comes before the lock: an ETA, a rate limit, a revocation.
    """
    handler: Callable[..., Any]
    wait = getattr(consumer, "dflock_wait", None)
    if wait is None:
        handler = strategy.default(task, app, consumer)
        return handler
    handler = strategy.default(task, app, _Detour(consumer, wait.take))

    def receive(message: Any, *args: Any, **kwargs: Any) -> Any:
        # Its broker waits from now on, whatever comes first.
        setattr(message, RECEIVED, clock.now())
        return handler(message, *args, **kwargs)

    return receive


class _Detour:
    """A consumer whose way to the pool leads elsewhere.

    Celery's strategy takes from the consumer what it calls; methods that come to the pool must be
    those of this object.
    """

    _limit_task = Consumer._limit_task
    _limit_post_eta = Consumer._limit_post_eta
    _limit_move_to_pool = Consumer._limit_move_to_pool
    _schedule_bucket_request = Consumer._schedule_bucket_request
    apply_eta_task = Consumer.apply_eta_task

    def __init__(self, consumer: Consumer, on_task_request: Callable[[Any], object]) -> None:
        self._consumer = consumer
        self.on_task_request = on_task_request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)
