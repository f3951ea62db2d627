"""The processes of a run, beside those that every test has."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.demo.stage import LockServer, Process
from tests.chaos.options import Options


class Server(LockServer):
    """A lock server that can be given other clocks."""

    def __init__(self, options: Options, number: int, *more: str, port: int = 0) -> None:
        # A connection that breaks does not end the leases of its locks.
        args = [*more, *("--orphan-ttl", "60")]
        # Shards are handed over in it, and there can be thousands.
        args += ["--shutdown-timeout", "1" if options.serving_lease is None else "8"]
        args += ["--default-lease-ttl", str(options.lease)]
        if options.state_dir is not None:
            options.state_dir.mkdir(parents=True, exist_ok=True)
            args += ["--state-dir", str(options.state_dir.resolve() / f"server-{number}")]
        super().__init__(options.directory, *args, name=f"server-{number}", port=port)
        self._module = options.server
        self._has_port = bool(port)
        self.step = 0.0
        """Seconds by which its wall clock is wrong at its next start."""
        self.shift = 0
        """The same for the clock that nobody can set."""

    def _after_start(self) -> None:
        if self._has_port:
            # One of a cluster listens once it has heard of etcd: that may be away.
            self.wait_log(" dflockd: ")
        else:
            super()._after_start()

    def _command(self) -> Sequence[str]:
        words = list(super()._command())
        what = ["tests.chaos.stepped", f"{self.step:.3f}"] if self.step else [self._module]
        clocks = (
            part for name in ("--monotonic", "--boottime") for part in (name, str(self.shift))
        )
        where = ["unshare", "-T", *clocks] if self.shift else []
        return [*where, *words[:2], *what, *words[3:]]


class Sender(Process):
    """The process that sends the tasks.

    Args:
        env: what it and the workers are told in their environment.
    """

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        super().__init__(options.directory, "sender", env)
        self._options = options

    def _command(self) -> Sequence[str]:
        names = ("seed", "keys", "lease", "work", "long", "aside", "rate")
        words = [f"--{name}={getattr(self._options, name)}" for name in names]
        return [sys.executable, "-m", "tests.chaos.sender", *words]


class Client(Process):
    """A process that uses the locks."""

    def __init__(self, options: Options, number: int, servers: str) -> None:
        super().__init__(options.directory, f"client-{number}")
        self._options = options
        self._servers = servers
        self._seeds = random.Random(f"{options.seed}/client/{number}")

    def _command(self) -> Sequence[str]:
        options = self._options
        named = {
            "servers": self._servers,
            "seed": self._seeds.getrandbits(32),
            "directory": options.directory,
            "keys": options.keys,
            "lease": options.lease,
            "work": options.work,
            "long": options.long,
            "aside": options.aside,
        }
        words = [sys.executable, "-m", "tests.chaos.client"]
        words += [f"--{name}={value}" for name, value in named.items()]
        return [*words, "--heedless"] if options.heedless else words


def stop_for(process: Process, seconds: float) -> None:
    """SIGSTOP for the whole group of a process, and SIGCONT later."""
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.killpg(process.pid, signal.SIGCONT)


class Finished:
    """The tasks that have a result, or are to have none but that, read off the history as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._tasks: set[str] = set()
        self._rest = b""

    def tasks(self) -> set[str]:
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            if b'"what":"done"' in line or b'"what":"superseded"' in line:
                self._tasks.add(line.partition(b'"task":"')[2].partition(b'"')[0].decode())
        return self._tasks
