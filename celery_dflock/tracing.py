"""OpenTelemetry spans for the wait for a lock and the time it is held; needs the extra ``otel``.

Each run gets two spans below the span that OpenTelemetry's Celery instrumentation makes for the
task. ``lock wait`` lasts until the lock is granted or the task gives up. ``lock hold`` lasts from the
grant to the release and contains the spans of the task's own code.

Switch `DflockInstrumentor` on like any instrumentation: ``opentelemetry-instrument`` finds it, or add
a line where you set up tracing. It listens to the signals of the plugin.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextvars import Token
from typing import Any, ClassVar, NamedTuple

from celery import Task
from celery.app.task import Context as Request
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from celery_dflock import __version__
from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.signals import (
    lock_acquired,
    lock_conflict,
    lock_lost,
    lock_released,
    lock_waiting,
    task_requeued,
)

SINCE = "_dflock_waits_since"
"""Set on a request that waits: the wall-clock time in nanoseconds at which it began."""

NANO = 1_000_000_000


class _Hold(NamedTuple):
    span: Span
    token: Token[Context]


class DflockInstrumentor(BaseInstrumentor):
    """Makes spans from ``instrument(tracer_provider=None)`` on, until ``uninstrument()``.

    Each span has ``messaging.message.id`` and ``celery.task_name``, as those of the Celery
    instrumentation have, ``dflock.key``, and after the grant ``dflock.fence``, as text because it
    has 64 bits. A wait also has ``dflock.outcome``: ``acquired``, ``conflict``, or ``requeued`` if
    something else ended it, with ``dflock.reason``, and ``dflock.holder`` if it is known. No span
    contains the token of a lock.
    """

    _tracer: Tracer
    _holds: ClassVar[dict[Any, _Hold]] = {}

    def instrumentation_dependencies(self) -> Collection[str]:
        """What has to be installed."""
        return ["celery >= 5.4"]

    def _instrument(self, **options: Any) -> None:
        provider = options.get("tracer_provider")
        self._tracer = trace.get_tracer("celery_dflock", __version__, provider)
        lock_waiting.connect(self._waits, weak=False)
        lock_acquired.connect(self._acquired, weak=False)
        lock_conflict.connect(self._refused, weak=False)
        task_requeued.connect(self._requeued, weak=False)
        lock_lost.connect(self._lost, weak=False)
        lock_released.connect(self._released, weak=False)

    def _uninstrument(self, **_: Any) -> None:
        # A task that holds its lock now is let end its span.
        lock_waiting.disconnect(self._waits)
        lock_acquired.disconnect(self._acquired)
        lock_conflict.disconnect(self._refused)
        task_requeued.disconnect(self._requeued)

    def _waits(self, request: Request, **_: Any) -> None:
        """A task joins a queue, perhaps not its first. In the consumer it has a request of its own."""
        if getattr(request, SINCE, None) is None:
            setattr(request, SINCE, time.time_ns())

    def _acquired(self, sender: Task, request: Request, lock: Any, **_: Any) -> None:
        about = {**_about(sender, request, lock.keys), "dflock.fence": str(lock.fence)}
        now = time.time_ns()
        setattr(request, SINCE, None)
        # The grant may have been waited for elsewhere, in the consumer.
        wait = self._tracer.start_span(
            "lock wait", attributes=about, start_time=now - int(lock.waited * NANO)
        )
        wait.set_attribute("dflock.outcome", "acquired")
        wait.end(now)
        span = self._tracer.start_span("lock hold", attributes=about, start_time=now)
        self._holds[lock] = _Hold(span, context.attach(trace.set_span_in_context(span)))

    def _refused(
        self, sender: Task, request: Request, key: str, error: LockNotAcquiredError, **_: Any
    ) -> None:
        fields = {"dflock.outcome": "conflict", "dflock.reason": error.reason}
        if error.holder is not None:
            fields["dflock.holder"] = error.holder
        self._ended(sender, request, key, fields)

    def _requeued(self, sender: Task, request: Request, key: str, reason: str, **_: Any) -> None:
        if getattr(request, SINCE, None) is not None:
            fields = {"dflock.outcome": "requeued", "dflock.reason": reason}
            self._ended(sender, request, key, fields)

    def _ended(self, sender: Task, request: Request, key: str, fields: Mapping[str, str]) -> None:
        """A wait has ended without the lock; where it tried once, it has no length."""
        now = time.time_ns()
        since, about = getattr(request, SINCE, None), _about(sender, request, [key])
        setattr(request, SINCE, None)
        span = self._tracer.start_span(
            "lock wait", attributes={**about, **fields}, start_time=since or now
        )
        span.end(now)

    def _lost(self, key: str, lock: Any, **_: Any) -> None:
        """A lock is lost: on the thread that renews it, so that nothing here may block."""
        hold = self._holds.get(lock)
        if hold is not None:
            hold.span.set_status(Status(StatusCode.ERROR, f"lock {key} was lost"))

    def _released(self, lock: Any, **_: Any) -> None:
        hold = self._holds.pop(lock, None)
        if hold is not None:
            context.detach(hold.token)
            hold.span.end()


def _about(task: Task, request: Request, keys: Collection[str]) -> dict[str, str]:
    return {
        "messaging.message.id": request.id,
        "celery.task_name": task.name,
        "dflock.key": ", ".join(keys),
    }
