"""Processes that stand still for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from examples.demo.stage import Process


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """The process is there and its port open, but nobody answers."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)
