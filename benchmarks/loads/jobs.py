"""One task that does nothing, under each of the locks that are compared; a worker imports this.

Each run is a line of JSON with the instants (monotonic, the same clock for all processes) at which
Celery's part of it began and ended, and the task's own code.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
from celery import Celery, Task
from celery.signals import task_postrun, task_prerun
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_dflock import LockedTask

# The environment variables that tell a worker where everything is.
SERVERS = "DFLOCK_SERVERS"
SOCKET = "BENCH_REDIS_SOCKET"
RECORD = "BENCH_RECORD"

LEASE = 30

app = Celery("benchmarks.loads.jobs", set_as_current=False)


def configure(env: Mapping[str, str]) -> None:
    """Let the broker, the result backend and the locks of the others be the same Redis."""
    url = f"redis+socket://{env.get(SOCKET, '')}"
    app.conf.update(
        broker_url=url,
        result_backend=url,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": url}},
        singleton_backend_url=f"unix://{env.get(SOCKET, '')}",
    )


configure(os.environ)

_now: dict[str, float] = {}
"""The instants of the run that this process is at."""


def body(seconds: float) -> None:
    _now["begin"] = time.monotonic()
    if seconds:
        time.sleep(seconds)
    _now["end"] = time.monotonic()


@app.task(name="plain")
def plain(key: str, seconds: float = 0.0) -> None:
    body(seconds)


@app.task(name="locked", base=LockedTask, lock_key="{key}", lock_ttl=LEASE, lock_timeout=None)
def locked(key: str, seconds: float = 0.0) -> None:
    body(seconds)


@app.task(
    name="unique",
    base=LockedTask,
    lock_key="{key}",
    lock_ttl=LEASE,
    lock_timeout=None,
    lock_unique="until_executed",
)
def unique(key: str, seconds: float = 0.0) -> None:
    body(seconds)


@app.task(name="redis_lock")
def redis_lock(key: str, seconds: float = 0.0) -> None:
    with _client().lock(f"lock:{key}", timeout=LEASE):
        body(seconds)


@app.task(name="bare")
def bare(key: str, seconds: float = 0.0) -> None:
    """The bytes of a `LockedTask` without a label, and nothing else."""
    sock = _socket()
    sock.sendall(b"l\n%b\n60 %d\n" % (key.encode(), LEASE))
    token = sock.recv(256).split(b" ")[1]
    body(seconds)
    sock.sendall(b"r\n%b\n%b\n" % (key.encode(), token))
    sock.recv(256)


@app.task(name="once", base=QueueOnce)
def once(key: str, seconds: float = 0.0) -> None:
    body(seconds)


@app.task(name="singleton", base=Singleton, lock_expiry=LEASE)
def singleton(key: str, seconds: float = 0.0) -> None:
    body(seconds)


@app.task(name="occupy")
def occupy(gate: str) -> None:
    """Keep a process of the worker from working until the file is there."""
    while not Path(gate).exists():
        time.sleep(0.001)


@functools.cache
def _client() -> redis.Redis:
    return redis.Redis(unix_socket_path=os.environ[SOCKET])


@functools.cache
def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ[SERVERS].removeprefix("unix:"))
    return sock


@functools.cache
def _record() -> int:
    return os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


@task_prerun.connect
def _before(**_: Any) -> None:
    _now["prerun"] = time.monotonic()


@task_postrun.connect
def _after(task_id: str, task: Task, **_: Any) -> None:
    # One write, so that the lines of two processes never mix.
    run = {"id": task_id, "name": task.name, **_now, "postrun": time.monotonic()}
    os.write(_record(), (json.dumps(run) + "\n").encode())
