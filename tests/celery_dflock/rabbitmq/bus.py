"""A queue of a RabbitMQ that one test has for itself: who sends to it, and workers that serve it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from celery import Task
from celery.result import AsyncResult
from kombu import Connection, Exchange, Queue

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.worker_log import CheckedWorker
from tests.rabbitmq import RabbitMQ

EXCHANGE = {"classic": "direct", "quorum": "topic"}
"""Celery's native delayed delivery wants a topic exchange; what delays nothing has a direct one."""


class Bus:
    """One queue, classic or quorum. Results go where those of the other tests go."""

    def __init__(
        self, rabbitmq: RabbitMQ, cluster: Cluster, name: str, kind: str, **arguments: Any
    ) -> None:
        self.rabbitmq = rabbitmq
        self.cluster = cluster
        self.kind = kind
        self.queue = Queue(
            name,
            Exchange(name, EXCHANGE[kind]),
            name,
            queue_arguments={"x-queue-type": kind, **arguments} if kind == "quorum" else None,
        )
        self.connection = Connection(rabbitmq.url)

    def __enter__(self) -> Self:
        """Make the queue."""
        self.queue.bind(self.connection.default_channel).declare()
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.release()

    @property
    def settings(self) -> dict[str, Any]:
        """Celery's settings for an app whose default queue this is."""
        name = self.queue.name
        return {
            "task_default_queue": name,
            "task_default_queue_type": self.kind,
            "task_default_exchange": name,
            "task_default_exchange_type": EXCHANGE[self.kind],
            "task_default_routing_key": name,
        }

    def worker(
        self,
        name: str,
        *args: str,
        concurrency: int = 2,
        pool: str = "prefork",
        app: str = "tests.celery_dflock.jobs",
        servers: str | None = None,
        **settings: Any,
    ) -> Worker:
        """A worker of this queue, not yet started."""
        worker = CheckedWorker(
            self.cluster.directory,
            *args,
            app=app,
            name=f"{self.queue.name}-{name}",
            concurrency=concurrency,
            pool=pool,
            env={
                jobs.BROKER: self.rabbitmq.url,
                jobs.RESULTS: str(jobs.app.conf.result_backend),
                jobs.MORE: json.dumps({**self.settings, **settings}),
                **({"DFLOCK_SERVERS": servers} if servers else {}),
            },
        )
        self.cluster._workers.append(worker)
        return worker

    @contextmanager
    def running(self, name: str, *args: str, **options: Any) -> Iterator[Worker]:
        """A worker of this queue that is ready."""
        with self.worker(name, *args, **options) as worker:
            worker.wait_ready()
            yield worker

    def send(self, task: Task, key: str, **options: Any) -> AsyncResult:
        """Send a task; what is no option of the message is an argument."""
        return self.cluster.send(
            task, key, connection=self.connection, **{"queue": self.queue, **options}
        )

    def messages(self) -> int:
        """How many are ready to be received."""
        bound = self.queue.bind(self.connection.default_channel)
        return int(bound.queue_declare(passive=True).message_count)

    def close_connections(self) -> None:
        """Have RabbitMQ close all connections, of its own accord."""
        self.rabbitmq.evaluate(
            'rabbit_networking:close_connections(rabbit_networking:connections(), "a test")'
        )
