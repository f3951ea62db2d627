"""An app whose messages stay in memory, and a worker that comes when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any

import pytest
from celery import Celery, Task
from celery.worker.request import Request
from kombu.utils.uuid import uuid

from celery_dflock import LockedTask
from dflockd import admin
from examples.demo.stage import LockServer


@pytest.fixture(scope="package")
def lock_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServer]:
    with LockServer(tmp_path_factory.mktemp("moving")) as server:
        yield server


def give_back(*args: Any) -> tuple[Any, ...]:
    return args


class Shop:
    """One app, and how its messages are looked at and worked off."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.app = Celery(
            "shop", broker="memory://", backend="cache+memory://", set_as_current=False
        )
        self.app.conf.dflock_servers = [address]
        self.app.conf.dflock_key_prefix = f"{uuid()}:"
        # All apps of a process share what is in memory.
        self.app.conf.task_default_queue = uuid()

    def locked_task(self, function: Callable[..., Any] = give_back, **options: Any) -> Any:
        """A decorator, as that of the app: a task that is locked and sent once."""
        options = {"base": LockedTask, "lock_unique": "until_executed", "shared": False, **options}
        return self.app.task(lazy=False, **options)(function)

    def queued(self) -> int:
        with self.app.connection_for_read() as connection:
            return int(connection.SimpleQueue(self.app.conf.task_default_queue).qsize())

    def work(self, most: int = 100) -> int:
        """Run what is queued, and what that queues; return how many runs there were."""
        runs = 0
        with self.app.connection_for_read() as connection:
            accept = self.app.conf.accept_content
            queue = connection.SimpleQueue(self.app.conf.task_default_queue, accept=accept)
            while runs < most:
                try:
                    message = queue.get(block=False)
                except Empty:
                    break
                message.ack()
                Request(message, app=self.app).execute()
                runs += 1
        return runs

    def on_its_way(self, task: Task) -> list[dict[str, Any]]:
        """What keeps others like this task from being sent, as the lock server lists it."""
        start = f"{self.app.conf.dflock_key_prefix}unique:{task.name}:"
        locks = admin.stats(self.address)["locks"]
        return [lock for lock in locks if lock["key"].startswith(start)]


@pytest.fixture
def shop(lock_server: LockServer) -> Shop:
    return Shop(lock_server.address)
