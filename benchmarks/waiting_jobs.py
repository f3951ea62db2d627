"""One task that works for a while under a lock, in each of the ways to wait; a worker imports this."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import redis
from celery import Celery, Task

from celery_dflock import LockedTask
from celery_dflock.signals import task_requeued

# The environment variables that tell a worker where everything is; also DFLOCK_SERVERS.
SOCKET = "WAITING_REDIS_SOCKET"
RECORD = "WAITING_RECORD"

LEASE = 30

app = Celery("benchmarks.waiting_jobs", set_as_current=False)


def configure(env: Mapping[str, str]) -> None:
    app.conf.update(
        broker_url=f"redis+socket://{env.get(SOCKET, '')}",
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
    )


configure(os.environ)


def note(what: str, **fields: Any) -> None:
    line = json.dumps({"what": what, "at": time.monotonic(), **fields}) + "\n"
    os.write(_record(), line.encode())


def body(key: str, number: int, seconds: float) -> None:
    note("begin", key=key, number=number)
    time.sleep(seconds)
    note("end", key=key, number=number)


def locked(name: str, **options: Any) -> Task:
    return app.task(name=name, base=LockedTask, lock_key="{key}", lock_ttl=LEASE, **options)(body)


consumer = locked("consumer", lock_wait="consumer", lock_timeout=None)
slot = locked("slot", lock_timeout=None)
requeue = locked("requeue", lock_timeout=0)


@app.task(name="redis_lock")
def redis_lock(key: str, number: int, seconds: float) -> None:
    with _client().lock(key, timeout=LEASE):
        body(key, number, seconds)


@task_requeued.connect
def _note_requeued(**_: Any) -> None:
    note("requeued")


@functools.cache
def _client() -> redis.Redis:
    return redis.Redis(unix_socket_path=os.environ[SOCKET])


@functools.cache
def _record() -> int:
    return os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
