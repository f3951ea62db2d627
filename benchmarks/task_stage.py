"""What the tasks of `benchmarks.jobs` need: a lock server, a Redis, a record of their runs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import jobs, servers
from benchmarks.bench import Bench
from benchmarks.child import Child
from examples.demo import stage

PATIENCE = 120.0

Run: TypeAlias = dict[str, Any]
"""A line that `benchmarks.jobs` has written."""


class TaskStage:
    """Both servers, reached over unix sockets.

    Attributes:
        locks: our lock server.
        redis: result backend, lock store of the others, and broker unless another one is named.
        runs: what has run.
        env: the variables that tell a process of `benchmarks.jobs` about them.
    """

    def __init__(
        self,
        bench: Bench,
        stack: ExitStack,
        directory: Path | None = None,
        broker: str | None = None,
    ) -> None:
        self.directory = directory or bench.directory
        socket, record = self.directory / "locks.sock", self.directory / "runs.jsonl"
        name = f"locks-{self.directory.name}"
        self.locks = servers.ours(bench, stack, "--unix-socket", str(socket), name=name)
        self.redis = stack.enter_context(stage.Redis(self.directory))
        self.runs = Runs(record)
        self.env = {
            jobs.SOCKET: str(self.redis.socket),
            jobs.RECORD: str(record),
            jobs.SERVERS: f"unix:{socket}",
            **({jobs.BROKER: broker} if broker else {}),
        }

    @property
    def prefix(self) -> list[str]:
        """What comes before the command of a process that is told about them."""
        return ["env", *(f"{name}={value}" for name, value in self.env.items())]

    def publisher(self, stack: ExitStack) -> Child:
        """Start a process that sends tasks."""
        program = Child.of("benchmarks.programs.publisher", prefix=self.prefix)
        return stack.enter_context(program)

    def worker(self, stack: ExitStack, concurrency: int) -> stage.Worker:
        """Start a worker with so many processes; it ends with the stack."""
        app = "benchmarks.jobs"
        worker = stage.Worker(self.directory, app=app, concurrency=concurrency, env=self.env)
        stack.enter_context(worker).wait_ready()
        return worker


class Runs:
    """The runs of tasks, as the workers write them down."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._read = 0
        self._runs: dict[str, Run] = {}

    def of(self, sent: list[str], timeout: float = PATIENCE) -> list[Run]:
        """Wait until these tasks have run; return their runs, each of which is given once."""

        def probe() -> list[Run] | None:
            self._read_on()
            return [self._runs.pop(each) for each in sent] if self._runs.keys() >= {*sent} else None

        return stage.wait_until(probe, timeout, lambda: f"{len(sent)} tasks did not all run")

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
