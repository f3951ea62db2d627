"""One task that does nothing, under each of the locks that are compared; a worker imports this.

Each run is a line of JSON with the instants (monotonic, the same clock for all processes) at which
Celery's part of it began and ended.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
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
BROKER = "BENCH_BROKER"
SOCKET = "BENCH_REDIS_SOCKET"
RECORD = "BENCH_RECORD"

LEASE = 30

app = Celery("benchmarks.jobs", set_as_current=False)


_redis_url = f"redis+socket://{os.environ.get(SOCKET, '')}"
"""Redis has the results and the locks of the others, and is the broker unless another is named."""

app.conf.update(
    broker_url=os.environ.get(BROKER, _redis_url),
    result_backend=_redis_url,
    broker_connection_retry_on_startup=True,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": _redis_url}},
    singleton_backend_url=f"unix://{os.environ.get(SOCKET, '')}",
)


@app.task(name="plain")
def plain(key: str) -> None:
    pass


@app.task(name="locked", base=LockedTask, lock_key="{key}", lock_ttl=LEASE, lock_timeout=None)
def locked(key: str) -> None:
    pass


@app.task(
    name="unique",
    base=LockedTask,
    lock_key="{key}",
    lock_ttl=LEASE,
    lock_timeout=None,
    lock_unique="until_executed",
)
def unique(key: str) -> None:
    pass


@app.task(name="redis_lock")
def redis_lock(key: str) -> None:
    with _client().lock(f"lock:{key}", timeout=LEASE):
        pass


@app.task(name="bare")
def bare(key: str) -> None:
    """The bytes of a plain lock, and nothing else: the least that two round trips can take."""
    sock = _socket()
    sock.sendall(b"l\n%b\n60 %d\n" % (key.encode(), LEASE))
    sock.sendall(b"r\n%b\n%b\n" % (key.encode(), sock.recv(256).split(b" ")[1]))
    sock.recv(256)


@app.task(name="once", base=QueueOnce)
def once(key: str) -> None:
    pass


@app.task(name="singleton", base=Singleton, lock_expiry=LEASE)
def singleton(key: str) -> None:
    pass


OURS = "LockedTask"
PLAIN = "no lock"
UNIQUE = "LockedTask with lock_unique"
REDIS = "redis-py Lock in the body"
ONCE = "celery-once"
SINGLETON = "celery-singleton"
BARE = "bare socket, same exchange"
WAYS = {
    OURS: locked,
    PLAIN: plain,
    UNIQUE: unique,
    REDIS: redis_lock,
    ONCE: once,
    SINGLETON: singleton,
    BARE: bare,
}


def _work(task: Task, key: str, seconds: str) -> None:
    run = {"id": task.request.id, "begin": time.monotonic()}
    time.sleep(float(seconds))
    _write(run | {"end": time.monotonic()})


def _waits(name: str, **options: Any) -> Task:
    """Return a task that works for a while, and waits for its lock as the options say."""
    make = app.task(name=name, bind=True, base=LockedTask, lock_key="{key}", **options)
    return make(_work)


@app.task(name="waits_for_redis", bind=True)
def waits_for_redis(self: Task, key: str, seconds: str) -> None:
    with _client().lock(f"lock:{key}", timeout=LEASE):
        _work(self, key, seconds)


WAITING = {
    "in the consumer": _waits("in_consumer", lock_wait="consumer", lock_timeout=None),
    "in the slot": _waits("in_slot", lock_timeout=None),
    "by `requeue`, `lock_timeout=0`": _waits("requeue", lock_timeout=0),
    "in the slot, for a redis-py `Lock`": waits_for_redis,
}
"""By how they wait."""
_NOT_TIMED = {task.name for task in WAITING.values()}
"""Their work is timed: a run that is requeued has none."""


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


_began = 0.0
"""When the run began that this process is at."""


@task_prerun.connect
def _before(**_: Any) -> None:
    global _began
    _began = time.monotonic()


@task_postrun.connect
def _after(task_id: str, task: Task, **_: Any) -> None:
    if task.name not in _NOT_TIMED:
        _write({"id": task_id, "prerun": _began, "postrun": time.monotonic()})


def _write(run: dict[str, Any]) -> None:
    # One write, so that the lines of two processes never mix.
    os.write(_record(), (json.dumps(run) + "\n").encode())
