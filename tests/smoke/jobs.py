"""The chaos job in worker containers: their processes are told apart, though their pids are alike."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.chaos import jobs
from tests.chaos.history import Recorder, What
from tests.chaos.options import HISTORY
from tests.smoke.names import TICK, group

SILENCE = 5.0
"""Seconds after which a Redis that does not answer is taken to be gone."""

STARTED = time.monotonic_ns()


class ContainerRecorder(Recorder):
    """Writes events about the calling process, under names that no other container gives."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._host = socket.gethostname()
        self._group = group(self._host)

    def note(self, what: What, **more: Any) -> None:
        if "who" in more:
            more["who"] += f" of {self._host} since {STARTED}"
        super().note(what, pid=self._group + os.getpid(), group=self._group, **more)


app = jobs.app
app.conf.update(
    # Without these, a Redis that falls silent is waited for until the kernel gives up.
    broker_transport_options={
        **app.conf.broker_transport_options,
        "socket_timeout": SILENCE,
        "socket_connect_timeout": SILENCE,
    },
    redis_socket_timeout=SILENCE,
    redis_socket_connect_timeout=SILENCE,
    # Else the result of a task that ends meanwhile is given up.
    result_backend_always_retry=True,
    beat_schedule={
        TICK: {"task": "work", "schedule": 1.0, "kwargs": {"key": TICK, "seconds": 0.01}}
    },
)
if jobs._recorder is None:
    jobs._recorder = ContainerRecorder(Path(os.environ[jobs.DIRECTORY]) / HISTORY)
