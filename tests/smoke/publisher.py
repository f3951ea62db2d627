"""Sends the chaos job until it is told to end: ``python -m tests.smoke.publisher``."""

from __future__ import annotations

import random
import signal
import threading
import uuid

from kombu.exceptions import OperationalError

from tests.chaos.options import key_names
from tests.smoke.jobs import app, jobs

RATE = 1.5
"""Tasks in a second."""

LONG = 0.12
"""Share of tasks that take about as long as a lease, or a fault."""


def main() -> None:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    chance, keys = random.Random(1), key_names(3)
    while not stopping.wait(chance.expovariate(RATE)):
        seconds = 4 + 4 * chance.random() if chance.random() < LONG else chance.random() / 4
        key, task = chance.choice(keys), str(uuid.uuid4())
        try:
            app.send_task("work", kwargs={"key": key, "seconds": seconds}, task_id=task)
        except (OperationalError, OSError):
            continue  # nobody was promised that it will run
        jobs.recorder().note("sent", task=task, key=key)


if __name__ == "__main__":
    main()
