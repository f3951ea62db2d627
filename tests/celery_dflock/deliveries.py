"""Notes which messages a worker sends and receives. For workers that include it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery.signals import before_task_publish, task_received

from tests.celery_dflock.record import DELIVERIES, RECORD, write

# There are many times as many of these as of runs: who waits for runs would read them all the time.
_path = Path(os.environ[RECORD]).with_name(DELIVERIES)


@before_task_publish.connect
def _note_sent(headers: Mapping[str, Any], **_: Any) -> None:
    write(_path, "sent", headers["id"])


@task_received.connect
def _note_received(request: Any, **_: Any) -> None:
    """The broker knows by now that this worker has it."""
    worker = request.hostname.partition("@")[0]
    write(_path, "received", request.id, worker=worker, tag=request.message.delivery_tag)
