"""One column of the table: a worker of a pool, what is sent to it, and what became of that."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from celery import Celery, states
from celery.exceptions import TimeoutError as ResultTimeoutError
from celery.result import AsyncResult
from celery.utils.nodenames import gethostname

from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Event, Waiter
from tests.celery_dflock.rabbitmq.bus import Bus

POOLS = {"prefork": 2, "threads": 2, "solo": 1, "gevent": 20, "eventlet": 20, "eager": 1}
"""The pools, with the concurrency that they are run with."""

BROKERS = {"RabbitMQ, classic queue": "classic", "RabbitMQ, quorum queue": "quorum"}
"""Where prefork is run once more, with the kinds of their queues; everything else is on Redis."""

SOFT = 1.0
"""Seconds of a soft shutdown."""

SETTLING = 1.0
"""Seconds after the end of a task after which one that is expected to stay so is called `PENDING`."""

ENDED = PATIENCE
"""Seconds within which a worker has to end; one that hangs never does."""

_numbers = itertools.count()


class Finding(NamedTuple):
    """One cell: what became of the task, and how long after it happened the lock was free."""

    fate: str
    seconds: float | None = None

    def __str__(self) -> str:
        if self.seconds is None:
            return self.fate
        milliseconds = max(0.0, self.seconds) * 1000
        return (
            f"{milliseconds:.0f} ms: {self.fate}" if milliseconds >= 1 else f"< 1 ms: {self.fate}"
        )


class Side:
    """One pool with one broker: its worker, and what is sent to it."""

    def __init__(
        self, pool: str, cluster: Cluster, server: LockServer, bus: Bus | None = None
    ) -> None:
        self.pool = pool
        self.cluster = cluster
        self.server = server
        self.settling = PATIENCE
        """Seconds to wait for the final state of a task."""
        self.name = f"pool-{pool}" if bus is None else bus.queue.name
        self._bus = bus
        self._app = Celery(broker=bus.rabbitmq.url, set_as_current=False) if bus else jobs.app
        """Whose remote control reaches the worker."""
        self.worker = None if pool == "eager" else self._make_worker(self.name)

    def _make_worker(self, name: str, **settings: Any) -> Worker:
        options: dict[str, Any] = {
            "pool": self.pool,
            "concurrency": POOLS[self.pool],
            "servers": self.server.address,
        }
        if self._bus is not None:
            return self._bus.worker(name, **options, **settings)
        env = {jobs.MORE: json.dumps(settings)}
        return self.cluster.worker(name, queues=self.name, env=env, **options)

    @contextlib.contextmanager
    def soft(self) -> Iterator[None]:
        """For a while its worker is one that is shut down softly."""
        usual = self.worker
        self.stop()
        self.worker = self._make_worker(f"{self.name}-soft", worker_soft_shutdown_timeout=SOFT)
        try:
            yield
        finally:
            self.stop()
            self.worker = usual

    def send(self, task: str, kwargs: dict[str, Any], **options: Any) -> AsyncResult:
        if self._bus is None:
            options["queue"] = self.name
        else:
            options |= {"queue": self._bus.queue, "connection": self._bus.connection}
        with self.sending():
            return jobs.app.tasks[task].apply_async((), kwargs, **options)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Have this process ask the lock server of this side."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DFLOCK_SERVERS", self.server.address)
            yield

    @property
    def pid(self) -> int:
        """The main process of its worker."""
        assert self.worker is not None
        return self.worker.pid

    def revoke(self, id: str, terminate: bool) -> None:
        """As its own worker sees it; any other would note it as revoked without a look at it."""
        self._app.control.revoke(id, terminate=terminate, destination=self._destination)

    def shut_down(self) -> None:
        """From remote."""
        self._app.control.shutdown(destination=self._destination)

    @property
    def _destination(self) -> list[str]:
        assert self.worker is not None
        return [f"{self.worker.name}@{gethostname()}"]

    def start(self) -> None:
        """Start the worker unless it runs."""
        if self.worker is not None and not self.worker.running:
            self.worker.start()

    def ready(self) -> None:
        """Wait for the worker."""
        self.start()
        if self.worker is not None:
            self.worker.wait_ready()

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.kill()

    def wait_worker_end(self) -> bool:
        """Whether the worker ends in time; it is killed if it does not."""
        assert self.worker is not None
        deadline = time.monotonic() + ENDED
        while self.worker.running and time.monotonic() < deadline:
            time.sleep(0.01)
        in_time = not self.worker.running
        self.worker.kill()
        return in_time

    @contextlib.contextmanager
    def running(self, task: str = "patient", **options: Any) -> Iterator[Run]:
        """A task that runs with its lock, and somebody who waits for it."""
        self.ready()
        with contextlib.ExitStack() as end:
            run = Run(self, task, options)
            end.callback(run.gate.touch)
            run.start = run.event("start")
            run.other = end.enter_context(Waiter(self.cluster.lock(run.key, self.server)))
            self.cluster.wait_waiters(run.key, 1, self.server)
            yield run

    def newer(self, key: str) -> DistributedLock:
        """The lock of who is newer than all who have asked for it."""
        where = [self.server.address]
        age = DistributedLock(key, servers=where).draw_age()
        return DistributedLock(key, 0, jobs.LONG, where, owner=(f"newer-{age}", 0, age))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Run]:
        """A task that waits for its lock."""
        self.ready()
        key = f"outcome:{self.name}:{next(_numbers)}"
        with self.cluster.lock(key, self.server):
            run = Run(self, "patient", {"gated": False}, key)
            self.cluster.wait_waiters(key, 1, self.server)
            yield run


class Run:
    """One task that has been sent."""

    start: Event
    other: Waiter

    def __init__(
        self, side: Side, task: str, options: dict[str, Any], key: str | None = None
    ) -> None:
        self.side = side
        self.key = key or f"outcome:{side.name}:{next(_numbers)}"
        self.gate = side.cluster.directory / f"gate-{self.key.replace(':', '-')}"
        self._state: str | None = None
        self._result: Any = None
        kwargs = {"key": self.key}
        if options.pop("gated", True):
            kwargs["gate"] = str(self.gate)
        kwargs |= {name: options.pop(name) for name in ("then", "seconds") if name in options}
        if side.pool == "eager":
            self.id = f"eager-{self.key}"
            self._thread = threading.Thread(target=self._apply, args=(task, kwargs), daemon=True)
            self._thread.start()
        else:
            self.sent = side.send(task, kwargs, **options)
            self.id = self.sent.id

    def _apply(self, task: str, kwargs: dict[str, Any]) -> None:
        with self.side.sending():
            outcome = jobs.app.tasks[task].apply((), kwargs, task_id=self.id)
        self._state, self._result = outcome.state, outcome.result

    def event(self, what: str, **wanted: Any) -> Event:
        """The first such event of this task."""

        def probe() -> Event | None:
            events = self.side.cluster.events(**{"what": what, "id": self.id, **wanted})
            return events[0] if events else None

        return self.side.cluster.wait(probe, f"event {what!r} of task {self.id}")

    def ended(self) -> Event | None:
        """How the body ended, if it could say so."""
        ends = self.side.cluster.events(what="end", id=self.id)
        return ends[0] if ends else None

    def fate(self) -> str:
        """What the sender of the task gets to know in the end."""
        if self.side.pool == "eager":
            self._thread.join(PATIENCE)
            state, result = str(self._state), self._result
        else:
            with contextlib.suppress(ResultTimeoutError):
                self.sent.get(timeout=self.side.settling, propagate=False)
            state, result = self.sent.state, self.sent.result
        is_named = state == states.FAILURE and isinstance(result, BaseException)
        return f"{state} ({type(result).__name__})" if is_named else state

    def freed(self, since: float) -> float:
        """Seconds from then to the grant to who waits; then that lock is given back."""
        seconds = self.other.wait_granted() - since
        self.other.lock.release()
        return seconds
