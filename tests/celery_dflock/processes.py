"""What tests do with the processes: send, wait for events, look at the lock server, hold locks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from celery import Task
from celery.result import AsyncResult
from celery.utils.nodenames import gethostname

from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, Worker, wait_until
from tests.celery_dflock import jobs
from tests.celery_dflock.record import Event, Record
from tests.celery_dflock.worker_log import CheckedWorker

PATIENCE = 60.0
"""Seconds that a test waits for something that should come soon, on a busy machine too.

What comes within them has not waited for the end of a lease, a timeout or a body of `jobs.LONG`.
"""

T = TypeVar("T")


class Cluster:
    """The broker, the lock server and the record of what tasks did."""

    def __init__(self, directory: Path, lock_server: LockServer) -> None:
        self.directory = directory
        self.lock_server = lock_server
        self._record = Record(directory / "record.jsonl")
        self._workers: list[Worker] = []

    def worker(
        self,
        name: str,
        *,
        queues: str | None = None,
        servers: str | None = None,
        pool: str = "prefork",
        app: str = "tests.celery_dflock.jobs",
        concurrency: int = 2,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        files: int | None = None,
    ) -> CheckedWorker:
        """A worker, not yet started; by default it serves a queue of its own name alone.

        With `files` it may have no more than so many open, each of its processes.
        """
        worker = (CheckedWorker if files is None else partial(_Limited, files))(
            self.directory,
            *("-Q", queues or name, *args),
            app=app,
            name=name,
            pool=pool,
            concurrency=concurrency,
            env={**(env or {}), **({"DFLOCK_SERVERS": servers} if servers else {})},
        )
        self._workers.append(worker)
        return worker

    @contextlib.contextmanager
    def ready(self, name: str, **options: Any) -> Iterator[CheckedWorker]:
        """A worker that takes tasks, for as long as the block."""
        with self.worker(name, **options) as worker:
            worker.wait_ready()
            yield worker

    def wait_ready(self, *workers: Worker) -> None:
        """Wait until workers take tasks and hear what is said to them from remote.

        They say that they are ready before the latter: with Redis they subscribe a moment later, and
        what is said to them meanwhile is lost.
        """
        for worker in workers:
            worker.wait_ready()
        deaf = {node_of(worker) for worker in workers}

        def probe() -> bool | None:
            for answer in jobs.app.control.ping(sorted(deaf), timeout=1):
                deaf.difference_update(answer)
            return not deaf or None

        self.wait(probe, f"an answer of {', '.join(sorted(deaf))}")

    def send(self, task: Task, key: str, *args: Any, **options: Any) -> AsyncResult:
        """Send a task; what is no option of the message is an argument."""
        names = ("then", "seconds", "gate", "limit", "weight")
        kwargs = {name: options.pop(name) for name in names if name in options}
        return task.apply_async(args, {"key": key, **kwargs}, **options)

    def events(self, **wanted: Any) -> list[Event]:
        return self._record.events(**wanted)

    def wait_event(self, what: str, sent: AsyncResult, nth: int = 1) -> Event:
        """The `nth` event of this kind of a task."""

        def probe() -> Event | None:
            events = self.events(what=what, id=sent.id)
            return events[nth - 1] if len(events) >= nth else None

        return self.wait(probe, f"event {nth} {what!r} of task {sent.id}")

    def wait(self, probe: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
        return wait_until(probe, seconds, lambda: f"waited {seconds:g} s for {what}{self._logs()}")

    def _logs(self) -> str:
        logs = (w.with_log(f"\n\nworker {w.name}") for w in self._workers if w.log.exists())
        return "".join(logs)

    # The lock server.

    def lock(
        self,
        key: str,
        server: LockServer | None = None,
        *,
        timeout: float | None = 0,
        ttl: int = 30,
    ) -> DistributedLock:
        address = (server or self.lock_server).address
        return DistributedLock(key, timeout, ttl, [address])

    def wait_waiters(self, key: str, number: int, server: LockServer | None = None) -> None:
        """Wait until so many wait for the lock."""

        def probe() -> bool | None:
            return (waiters(server or self.lock_server, key) == number) or None

        self.wait(probe, f"{number} waiters for lock {key}")

    def wait_free(self, key: str, server: LockServer | None = None) -> None:
        """Wait until nobody holds the lock or waits for it."""

        def probe() -> bool | None:
            return waiters(server or self.lock_server, key) is None or None

        self.wait(probe, f"lock {key} to be free")


def node_of(worker: Worker) -> str:
    """What remote control calls a worker."""
    return f"{worker.name}@{gethostname()}"


def waiters(server: LockServer, key: str) -> int | None:
    """How many wait for the lock, as the server says; None if nobody holds it."""
    with socket.create_connection((server.host, server.port), PATIENCE) as connection:
        connection.sendall(b"stats\n_\n_\n")
        with connection.makefile("rb") as replies:
            status, _, text = replies.readline().partition(b" ")
    assert status == b"ok"
    locks = {lock["key"]: lock["waiters"] for lock in json.loads(text)["locks"]}
    return locks.get(key)


class _Limited(CheckedWorker):
    """A worker that may have only so many files open."""

    def __init__(self, files: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._files = files

    def _command(self) -> Sequence[str]:
        return ["sh", "-c", f'ulimit -n {self._files} && exec "$@"', "sh", *super()._command()]


class Waiter:
    """A thread that waits for a lock, to measure when it is granted; then it holds the lock.

    Once it is entered it has its position in the queue, or the lock.
    """

    def __init__(self, lock: DistributedLock) -> None:
        self.lock = lock
        self.granted_at = 0.0
        self._is_granted = False
        self._error: BaseException | None = None
        lock.acquire_timeout_s = None
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Self:
        self._is_granted = self.lock.enqueue() == "acquired"
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.lock.cancel()
            self._thread.join(PATIENCE)
        self.lock.release()

    @property
    def granted(self) -> bool:
        return self.granted_at > 0

    def wait_granted(self, seconds: float = PATIENCE) -> float:
        """Wait for the grant; its monotonic time."""
        self._thread.join(seconds)
        assert self._error is None, self._error
        assert self.granted, f"{self.lock!r} was not granted within {seconds:g} s"
        return self.granted_at

    def _wait(self) -> None:
        try:
            if not self._is_granted:
                self.lock.wait()
            self.granted_at = time.monotonic()
        except BaseException as exc:
            self._error = exc
