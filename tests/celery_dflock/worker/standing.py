"""An app whose workers stand still when told so: what handles requests in them does nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery.worker.control import control_command

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster, node_of

app = jobs.app

APP = __name__
"""What a worker is to be started with."""


@control_command(name="stand_still", args=[("gate", str)])
def stand_still(_state: Any, gate: str) -> None:
    """Until the file `gate` is there."""
    path = Path(gate)
    begun(path).touch()
    while not path.exists():
        time.sleep(0.005)


def begun(gate: Path) -> Path:
    return gate.with_suffix(".begun")


@contextmanager
def standing(cluster: Cluster, worker: Worker, gate: Path) -> Iterator[None]:
    """A worker with an event loop stands still in here; its client's thread and its pool do not."""
    arguments = {"gate": str(gate)}
    app.control.broadcast("stand_still", arguments=arguments, destination=[node_of(worker)])
    cluster.wait(lambda: begun(gate).exists() or None, "the worker to stand still")
    try:
        yield
    finally:
        gate.touch()
