"""Tasks that wait for the same few locks in every way there is, and the history of their holds.

Each kind of task takes the keys that it is given, in their order, and says when it has them.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_dflock import LockedTask, dflock
from tests.celery_dflock.history import Span, most_at_once

BROKER = "MIXED_BROKER_URL"
RECORD = "MIXED_RECORD"
CROWD = 2
"""Holders of a semaphore."""
PATIENCE = 600
"""So long a task waits for its lock: nothing that stands still goes on by being tried again."""

app = Celery("tests.celery_dflock.mixed", set_as_current=False)


def configure(broker: str) -> None:
    app.conf.update(
        broker_url=broker,
        result_backend=broker,
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )


configure(os.environ.get(BROKER, "memory://"))


def note(task: Task, what: str, holds: Sequence[str], limit: int = 1) -> None:
    """Add a line to the history; one write, so that lines never mix."""
    request = task.request
    about = {
        "id": request.id,
        "retries": request.retries,
        "task": task.name,
        "parent": os.getppid(),
        "redelivered": bool((request.delivery_info or {}).get("redelivered")),
    }
    event = {"what": what, "at": time.monotonic(), **about, "holds": holds, "limit": limit}
    line = json.dumps(event) + "\n"
    file = os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def history(path: Path, what: str | None = None) -> list[dict[str, Any]]:
    """All events so far, or those of one kind."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if what in (None, event["what"])]


def violations(events: Iterable[dict[str, Any]]) -> list[str]:
    """Where more held a key at once than may, and which runs there were twice.

    A key is one lock: its limit is what the latest task has said, of all that want it.
    """
    begun, started = Counter[tuple[str, int]](), dict[tuple[str, int], float]()
    spans, most = defaultdict[str, list[Span]](list), Counter[str]()
    for event in events:
        run = event["id"], event["retries"]
        if event["what"] == "begin":
            begun[run] += 1
            started[run] = event["at"]
        elif event["what"] == "end":
            for key in event["holds"]:
                spans[key].append(Span(started[run], event["at"]))
                most[key] = max(most[key], event["limit"])
    found = [
        f"{most_at_once(each)} holders of {key}, limit {most[key]}"
        for key, each in spans.items()
        if most_at_once(each) > most[key]
    ]
    return [*found, *(f"{run} ran {n} times" for (run, _), n in begun.items() if n != 1)]


def body(self: Task, own: Sequence[str], inner: Sequence[str], seconds: float, limit: int) -> str:
    """Work under the task's own locks and those of `inner`, which it takes itself."""
    with ExitStack() as held:
        for key in inner:
            held.enter_context(dflock(key, PATIENCE, limit=limit, app=app))
        note(self, "begin", [*own, *inner], limit)
        time.sleep(seconds)
        note(self, "end", [*own, *inner], limit)
    return str(self.request.id)


def kind(name: str, base: type[Task] = LockedTask, own: int = 1, **options: Any) -> Task:
    """A kind of task: how many locks of its own it has; what else it takes, it takes in its body."""
    if issubclass(base, LockedTask):
        options = {"lock_timeout": PATIENCE, **options}
        options["lock_key"] = [f"{{keys[{n}]}}" for n in range(own)]
    limit = options.get("lock_limit", 1)

    def run(self: Task, keys: list[str], seconds: float) -> str:
        return body(self, keys[:own], keys[own:], seconds, limit)

    # Not for all apps of the process: jobs has tasks of the same names.
    return app.task(bind=True, base=base, name=name, shared=False, **options)(run)


SLOT, CONSUMER = {"lock_wait": "slot"}, {"lock_wait": "consumer"}
SOON = {"base": 0.05, "cap": 0.05}

slot = kind("slot", **SLOT)
consumer = kind("consumer", **CONSUMER)
two_slot = kind("two_slot", own=2, **SLOT)
two_consumer = kind("two_consumer", own=2, **CONSUMER)
unlocked = kind("unlocked", base=Task, own=0)
nested_slot = kind("nested_slot", **SLOT)
nested_consumer = kind("nested_consumer", **CONSUMER)
crowd_slot = kind("crowd_slot", lock_limit=CROWD, **SLOT)
crowd_consumer = kind("crowd_consumer", lock_limit=CROWD, **CONSUMER)
requeued = kind("requeued", lock_timeout=0, lock_requeue=SOON, **SLOT)

KEYS_OF = {two_slot: 2, two_consumer: 2, nested_slot: 2, nested_consumer: 2}
"""How many keys a task takes, where it is not one."""

KINDS: list[Task] = [
    *(slot, consumer, two_slot, two_consumer, unlocked),
    *(nested_slot, nested_consumer, crowd_slot, crowd_consumer, requeued),
]
