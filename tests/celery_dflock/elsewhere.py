"""A worker of another environment, and what is sent to it from there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from examples.demo.stage import ROOT, Worker
from tests.celery_dflock.oldest_celery.oldest import BOUND


class WorkerElsewhere(Worker):
    """A worker with the Python of another environment."""

    def __init__(self, python: str, directory: Path, env: dict[str, str]) -> None:
        super().__init__(directory, app="tests.celery_dflock.jobs", name="elsewhere", env=env)
        self._python = python

    def _command(self) -> Sequence[str]:
        return [self._python, *super()._command()[1:]]


def lines_of(
    python: str, directory: Path, env: dict[str, str], *program: str, scenarios: Sequence[str]
) -> list[str]:
    """Start a worker there, go through the scenarios, and return what the program prints."""
    with WorkerElsewhere(python, directory, env) as worker:
        worker.wait_ready()
        run = subprocess.run(
            [python, *program, *scenarios],
            cwd=ROOT,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=2 * BOUND,  # it ends by itself before
            check=False,
        )
        assert run.returncode == 0, worker.with_log(run.stdout + run.stderr)
    return run.stdout.splitlines()
