"""What is on its way, as the lock server and the broker have it; and apps that only send."""

from __future__ import annotations

import json
from typing import Any

from celery import Celery, Task
from celery.result import AsyncResult

from celery_dflock import LockedTask
from dflockd import admin
from examples.demo.stage import LockServer
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster


def hold(cluster: Cluster, task: Task, key: str) -> dict[str, Any] | None:
    """The lock that keeps others from being sent, as the server lists it."""
    for lock in admin.stats(cluster.lock_server.address)["locks"]:
        if lock["key"] == f"unique:{task.name}:{key}":
            return dict(lock)
    return None


def wait_over(cluster: Cluster, task: Task, key: str) -> None:
    """Wait until another can be sent."""
    cluster.wait(lambda: hold(cluster, task, key) is None or None, f"{task.name} {key} to be over")


def marks(cluster: Cluster, *sent: AsyncResult) -> list[str]:
    """Which of these tasks are marked as replaced."""
    names = [each["key"] for each in admin.stats(cluster.lock_server.address)["locks"]]
    return [each.id for each in sent if f"replaced:{each.id}" in names]


class Parked:
    """A queue that no worker serves, until its messages are moved to one that they do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._redis = jobs.app.backend.client

    def __len__(self) -> int:
        return int(self._redis.llen(self.name))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The oldest first."""
        return [json.loads(text) for text in reversed(self._redis.lrange(self.name, 0, -1))]

    def deliver(self, copies: int = 1, home: str = "celery") -> None:
        """Let workers have the messages; what they send again comes to the queue `home`."""
        messages = self.messages
        self._redis.delete(self.name)
        for message in messages:
            message["properties"]["delivery_info"]["routing_key"] = home
            for _ in range(copies):
                self._redis.lpush("celery", json.dumps(message))

    def put_copy(self, message: dict[str, Any]) -> None:
        """Add a message again, as Redis does that has waited for it to be acknowledged."""
        message["properties"]["delivery_info"]["redelivered"] = True
        self._redis.lpush(self.name, json.dumps(message))

    def purge(self) -> None:
        self._redis.delete(self.name)


def own_app(lock_server: LockServer | str, **conf: Any) -> Celery:
    """An app that only sends, to nobody."""
    app = Celery("sender", broker="memory://", set_as_current=False)
    address = lock_server if isinstance(lock_server, str) else lock_server.address
    app.conf.update(dflock_servers=[address], **conf)
    return app


def own_task(app: Celery, name: str, **options: Any) -> Task:
    options = {"base": LockedTask, "lock_unique": "until_executed", **options}

    @app.task(name=name, shared=False, lazy=False, **options)
    def task(account: int, *, region: str = "eu") -> None: ...

    return task


def locks_of(cluster: Cluster, task_name: str) -> list[str]:
    """The keys of what a task with this name has on its way."""
    start = f"unique:{task_name.replace(':', '%3A')}:"
    listed = admin.stats(cluster.lock_server.address)["locks"]
    return [each["key"] for each in listed if each["key"].startswith(start)]
