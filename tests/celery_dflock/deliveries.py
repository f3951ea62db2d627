"""Notes which messages a worker sends and receives. For workers that include it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.signals import before_task_publish, task_received

from tests.celery_dflock.record import add


@before_task_publish.connect
def _note_sent(headers: Mapping[str, Any], **_: Any) -> None:
    add("sent", headers["id"])


@task_received.connect
def _note_received(request: Any, **_: Any) -> None:
    """The broker knows by now that this worker has it."""
    worker = request.hostname.partition("@")[0]
    add("received", request.id, worker=worker, tag=request.message.delivery_tag)
