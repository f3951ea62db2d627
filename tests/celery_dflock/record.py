"""The record of what tasks did: a line of JSON for each thing, in the order of its being written."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import Task

RECORD = "JOBS_RECORD"
"""The environment variable that tells a worker where to write."""
DELIVERIES = "deliveries.jsonl"
"""A file beside that: the messages of workers that include `tests.celery_dflock.deliveries`."""

Event = dict[str, Any]


def note(what: str, task: Task, **more: Any) -> None:
    """Add a line about the run of a task in the calling process, now."""
    worker = (task.request.hostname or "").partition("@")[0]
    write(os.environ[RECORD], what, task.request.id, task=task.name, worker=worker, **more)


def write(path: str | Path, what: str, task_id: str, **more: Any) -> None:
    """Add a line about the calling process, now; one write, so that lines never mix."""
    event = {"what": what, "at": time.monotonic(), "id": task_id, "pid": os.getpid(), **more}
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, (json.dumps(event, default=str) + "\n").encode())
    finally:
        os.close(file)


class Record:
    """What the tasks have written down, read on from where it was read last.

    Who waits for an event asks a hundred times a second, and there are thousands of events.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._read = 0
        self._mutex = threading.Lock()
        self._events: list[Event] = []
        self._by_id: dict[str, list[Event]] = {}

    def events(self, **wanted: Any) -> list[Event]:
        """The events so far that have these fields."""
        with self._mutex:
            self._read_on()
        among = self._by_id.get(wanted["id"], []) if "id" in wanted else self._events
        return [e for e in among if all(e.get(name) == value for name, value in wanted.items())]

    def _read_on(self) -> None:
        if not self._path.exists() or self._path.stat().st_size == self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            written, line_end, _ = file.read().rpartition(b"\n")
        self._read += len(written + line_end)
        for line in written.splitlines():
            event = json.loads(line)
            self._events.append(event)
            self._by_id.setdefault(event["id"], []).append(event)
