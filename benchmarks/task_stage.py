"""What the tasks of `benchmarks.loads.jobs` need: a lock server, a Redis, a record of their runs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import servers
from benchmarks.bench import Bench
from benchmarks.loads import jobs
from examples.demo import stage

PATIENCE = 120.0

Run: TypeAlias = dict[str, Any]
"""A line that `benchmarks.loads.jobs` has written."""


class TaskStage:
    """Both servers, reached over unix sockets.

    Attributes:
        locks: our lock server.
        socket: where it listens.
        redis: broker, result backend and lock store of the others.
        runs: what has run.
        env: the variables that tell a process of `benchmarks.loads.jobs` about them.
    """

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self.socket = bench.directory / "locks.sock"
        record = bench.directory / "runs.jsonl"
        self._directory = bench.directory
        self._stack = stack
        self.locks = servers.ours(bench, stack, "--unix-socket", str(self.socket))
        self.redis = stack.enter_context(stage.Redis(bench.directory))
        self.runs = Runs(record)
        self.env = {
            jobs.SOCKET: str(self.redis.socket),
            jobs.RECORD: str(record),
            jobs.SERVERS: f"unix:{self.socket}",
        }

    @property
    def prefix(self) -> list[str]:
        """What comes before the command of a process that is told about them."""
        return ["env", *(f"{name}={value}" for name, value in self.env.items())]

    def worker(self, concurrency: int) -> stage.Worker:
        """Start a worker with so many processes."""
        worker = stage.Worker(
            self._directory, app="benchmarks.loads.jobs", concurrency=concurrency, env=self.env
        )
        self._stack.enter_context(worker)
        worker.wait_ready()
        return worker


class Runs:
    """The runs of tasks, as the workers write them down."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._read = 0
        self._runs: dict[str, Run] = {}

    def of(self, sent: list[str]) -> list[Run]:
        """Wait until these tasks have run; return their runs, each of which is given once."""

        def probe() -> list[Run] | None:
            self._read_on()
            return [self._runs.pop(each) for each in sent] if self._runs.keys() >= {*sent} else None

        return stage.wait_until(probe, PATIENCE, lambda: f"{len(sent)} tasks did not all run")

    def _read_on(self) -> None:
        if not self._record.exists():
            return
        with self._record.open("rb") as record:
            record.seek(self._read)
            for line in record:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    run = json.loads(line)
                    self._runs[run["id"]] = run
