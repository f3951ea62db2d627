"""Tasks whose traces go to a file, set up as the documentation says."""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery
from celery.signals import worker_process_init
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from celery_dflock import LockedTask
from celery_dflock.signals import lock_waiting
from celery_dflock.tracing import DflockInstrumentor

SPANS = "TRACED_SPANS"

app = Celery("tests.celery_dflock.traced", broker=os.environ.get("JOBS_BROKER_URL", "memory://"))


def line(span: ReadableSpan) -> str:
    return span.to_json(indent=None) + "\n"


@worker_process_init.connect(weak=False)
def trace_tasks(**_: object) -> None:
    file = Path(os.environ[SPANS]).open("a")  # noqa: SIM115 - for as long as the process
    exporter = ConsoleSpanExporter(out=file, formatter=line)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()
    DflockInstrumentor().instrument()
    lock_waiting.connect(note_that_it_waits, weak=False)  # after the receiver that begins the span


def note_that_it_waits(**_: object) -> None:
    Path(os.environ[SPANS]).with_suffix(".waiting").touch()


@app.task(shared=False, base=LockedTask, lock_key="{key}", ignore_result=True)
def in_slot(key: str) -> None:
    with trace.get_tracer("tests").start_as_current_span("own code"):
        pass


@app.task(shared=False, base=LockedTask, lock_key="{key}", lock_wait="consumer", ignore_result=True)
def in_consumer(key: str) -> None:
    pass
