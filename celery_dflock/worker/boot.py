"""What a worker loads at its start: those who only send tasks do without."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from celery import signals

from celery_dflock.worker.shutdown import WorkersEnd


@signals.worker_init.connect(dispatch_uid="celery_dflock.worker")
def begin_worker(sender: Any, **_: Any) -> None:
    """Load what only workers need: banner, events, answers, and where their tasks wait."""
    import_module("celery_dflock.worker.banner")
    import_module("celery_dflock.worker.events")
    import_module("celery_dflock.worker.inspect")
    wait = import_module("celery_dflock.worker.consumer_wait")
    sender.app.steps["worker"].add(WorkersEnd)
    sender.app.steps["consumer"].add(wait.Step)
