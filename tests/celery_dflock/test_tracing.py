"""Spans of locked tasks, as an exporter of OpenTelemetry gets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, StatusCode, get_current_span

from celery_dflock import LockedTask, LockNotAcquiredError, current_lock
from celery_dflock.signals import lock_waiting
from celery_dflock.tracing import DflockInstrumentor
from dflockd import admin
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, Worker, wait_until
from tests.celery_dflock import jobs, traced
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters

OURS = ("lock wait", "lock hold")


@pytest.fixture
def app(lock_server: LockServer) -> Celery:
    app = Celery("traced-eagerly", set_as_current=False)
    app.conf.task_always_eager = True
    app.conf.dflock_servers = [lock_server.address]
    return app


@pytest.fixture
def spans() -> Iterator[Callable[[], list[ReadableSpan]]]:
    """What has been exported, in the order in which it ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentors = [CeleryInstrumentor(), DflockInstrumentor()]
    for each in instrumentors:
        each.instrument(tracer_provider=provider)
    yield lambda: list(exporter.get_finished_spans())
    for each in instrumentors:
        each.uninstrument()
    provider.shutdown()


@pytest.fixture
def held(lock_server: LockServer, key: str) -> Iterator[DistributedLock]:
    with DistributedLock(key, 0, 30, [lock_server.address], label="the holder") as lock:
        yield lock


def locked(app: Celery, body: Callable[[], Any] = lambda: None, **options: Any) -> Any:
    @app.task(**{"base": LockedTask, "lock_key": "{key}", "shared": False, **options})
    def task(key: str) -> Any:
        return body()

    return task


def names(spans: list[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


def ours(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.name in OURS]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def test_a_wait_and_a_hold_are_children_of_the_span_of_the_task(
    app: Celery, spans: Callable[[], list[ReadableSpan]], key: str
) -> None:
    inside = []

    def body() -> tuple[int | None, str | None]:
        inside.append(get_current_span())
        lock = current_lock()
        assert lock is not None
        return lock.fence, lock.token

    task = locked(app, body)
    sent = task.delay(key)
    fence, token = sent.get()

    wait, hold, run = spans()
    assert names([wait, hold, run]) == ["lock wait", "lock hold", f"run/{task.name}"]
    assert parent(wait) == parent(hold) == run.context.span_id
    assert inside[0].get_span_context() == hold.context, "spans of its code are in the hold"
    about = {
        "messaging.message.id": sent.id,
        "celery.task_name": task.name,
        "dflock.key": key,
        "dflock.fence": str(fence),
    }
    assert dict(wait.attributes or {}) == {**about, "dflock.outcome": "acquired"}
    assert dict(hold.attributes or {}) == about
    assert wait.end_time == hold.start_time
    assert hold.status.status_code is StatusCode.UNSET
    assert token not in "".join(span.to_json() for span in spans())


def test_a_wait_is_as_long_as_the_wait(
    app: Celery, spans: Callable[[], list[ReadableSpan]], key: str, held: DistributedLock
) -> None:
    waited = []

    def body() -> None:
        lock = current_lock()
        assert lock is not None
        waited.append(lock.waited)

    def release(sender: Any, holder: Callable[[], str | None], **_: Any) -> None:
        if sender.app is app:
            holder()
            held.release()

    lock_waiting.connect(release)
    try:
        locked(app, body).delay(key).get()
    finally:
        lock_waiting.disconnect(release)
    wait, _ = ours(spans())
    assert seconds(wait) == pytest.approx(waited[0], abs=1e-6)
    assert waited[0] > 0


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_a_task_that_does_not_get_its_lock(
    app: Celery,
    spans: Callable[[], list[ReadableSpan]],
    key: str,
    held: DistributedLock,
    timeout: float,
) -> None:
    sent = locked(app, lock_timeout=timeout, lock_conflict="fail").delay(key)
    with pytest.raises(LockNotAcquiredError):
        sent.get()
    wait, run = spans()
    assert parent(wait) == run.context.span_id
    assert wait.attributes is not None
    assert wait.attributes["dflock.outcome"] == "conflict"
    assert str(wait.attributes["dflock.holder"]).startswith("the holder, for ")
    assert seconds(wait) >= timeout
    assert "dflock.fence" not in wait.attributes


def test_a_hold_that_is_lost_is_an_error(
    app: Celery, spans: Callable[[], list[ReadableSpan]], key: str, lock_server: LockServer
) -> None:
    def lose() -> None:
        lock = current_lock()
        assert lock is not None
        assert lock.fence is not None
        assert admin.evict(lock_server.address, key, lock.fence)
        lock.extend()

    locked(app, lose, lock_lost="warn").delay(key).get()
    _, hold = ours(spans())
    assert hold.status.status_code is StatusCode.ERROR
    assert hold.status.description == f"lock {key} was lost"


def test_a_task_that_raises_and_has_no_span_of_its_own(
    app: Celery, spans: Callable[[], list[ReadableSpan]], key: str
) -> None:
    def fail() -> None:
        raise ValueError("no")

    CeleryInstrumentor().uninstrument()
    locked(app, fail).delay(key)
    assert names(spans()) == ["lock wait", "lock hold"]
    assert get_current_span() is INVALID_SPAN, "what comes next is in no span of this task"


def test_switched_off(app: Celery, spans: Callable[[], list[ReadableSpan]], key: str) -> None:
    DflockInstrumentor().uninstrument()
    locked(app).delay(key).get()
    assert ours(spans()) == []


def test_opentelemetry_instrument_finds_it() -> None:
    [found] = entry_points(group="opentelemetry_instrumentor", name="dflock")
    assert found.load() is DflockInstrumentor


class Traced:
    """A worker whose spans go to a file, and whoever sends it tasks."""

    def __init__(self, directory: Path, lock_server: LockServer) -> None:
        self.lock_server = lock_server
        self.file = directory / "spans.jsonl"
        self.worker = Worker(
            directory,
            *("-Q", directory.name),
            app="tests.celery_dflock.traced",
            name="traced",
            concurrency=1,
            env={traced.SPANS: str(self.file), "DFLOCK_SERVERS": lock_server.address},
        )
        self._queue = directory.name

    def wait_waiting(self, task: Any, key: str) -> str:
        """Send a task and wait until it waits for its lock; its id."""
        with Celery("sender", broker=jobs.app.conf.broker_url, set_as_current=False) as sender:
            sent = sender.send_task(task.name, [key], queue=self._queue, ignore_result=True)
        wait_until(lambda: waiters(self.lock_server, key) or None, PATIENCE, self.worker.tail)
        id: str = sent.id
        return id

    def waited(self, key: str) -> float:
        """For how many seconds somebody has waited for a key, as the lock server says."""
        [waiter] = admin.inspect(self.lock_server.address, key)["waiters"]
        return float(waiter["waited_s"])

    def wait_spans(self, last: str) -> dict[str, dict[str, Any]]:
        """Wait until the span of this name has ended; all by their names."""

        def probe() -> dict[str, dict[str, Any]] | None:
            lines = self.file.read_text().splitlines() if self.file.exists() else []
            found = {span["name"]: span for span in map(json.loads, lines)}
            return found if last in found else None

        return wait_until(probe, PATIENCE, self.worker.tail)


@pytest.fixture
def worker(cluster: Cluster, lock_server: LockServer, tmp_path: Path) -> Iterator[Traced]:
    started = Traced(tmp_path, lock_server)
    with started.worker:
        started.worker.wait_ready()
        yield started


@pytest.mark.parametrize("task", [traced.in_slot, traced.in_consumer])
def test_in_a_worker(worker: Traced, cluster: Cluster, key: str, task: Any) -> None:
    with cluster.lock(key):
        sent = worker.wait_waiting(task, key)
        # The way to the pool takes its time as well, which is no part of the wait.
        wait_until(lambda: worker.waited(key) > 1 or None, PATIENCE, worker.worker.tail)
    found = worker.wait_spans(f"run/{task.name}")
    run, wait, hold = found[f"run/{task.name}"], found["lock wait"], found["lock hold"]
    assert wait["parent_id"] == hold["parent_id"] == run["context"]["span_id"]
    assert wait["attributes"]["messaging.message.id"] == sent
    assert wait["attributes"]["dflock.outcome"] == "acquired"
    assert when(wait["end_time"]) > when(wait["start_time"])
    if task is traced.in_slot:
        assert found["own code"]["parent_id"] == hold["context"]["span_id"]
    else:
        assert when(wait["start_time"]) < when(run["start_time"]), "it waited before it ran"


def test_a_wait_that_a_shutdown_ends(worker: Traced, held: DistributedLock, key: str) -> None:
    worker.wait_waiting(traced.in_slot, key)
    # The server knows of the wait before it is told of: a shutdown in between leaves no span.
    begun = worker.file.with_suffix(".waiting")
    wait_until(lambda: begun.exists() or None, PATIENCE, worker.worker.tail)
    worker.worker.stop()
    wait = worker.wait_spans("lock wait")["lock wait"]
    assert wait["attributes"]["dflock.outcome"] == "requeued"
    assert wait["attributes"]["dflock.reason"] == "the worker is shutting down"
    assert when(wait["end_time"]) > when(wait["start_time"])


def when(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
