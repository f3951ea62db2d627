"""Servers and workers without the wait for their imports: most of what starting them costs.

`start` is `subprocess.Popen` for them. A process per program has imported what that needs, and does no
more: it has no thread, no event loop, no open file but the line to us. When it is asked to, it forks.
The child gets the arguments, environment, directory and files of a new process, and runs as `python -m`
would. What that cannot give is started anew: a flag of Python, another program around it.

Python's own fork server does this for functions:
https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]

CLIENTS = (
    "celery",
    "celery.backends.redis",
    "kombu.transport.redis",
    "celery_dflock",
    "dflockd.sync_client",
)

SERVER = ("dflockd.cli", "dflockd.http", "dflockd.storage")
"""Not what speaks to etcd: gRPC begins threads when it is imported, which no child would have."""

DFLOCKD = (*SERVER, "uvloop", "dflockd.top.command", "dflockd.sync_client")

PRELOADED = {
    "dflockd": DFLOCKD,
    "tests.dflockd.without_uvloop": SERVER,
    "tests.dflockd.cluster.few_shards": DFLOCKD,
    "tests.dflockd.program": DFLOCKD,
    "tests.chaos.planted.lifo": SERVER,
    "tests.chaos.planted.careless": SERVER,
    "tests.chaos.client": (
        "dflockd.sync_client",
        "tests.chaos.bare",
        "tests.chaos.options",
        "tests.chaos.resource",
        "tests.chaos.section",
    ),
    "celery": (
        "celery.bin.celery",
        "celery.bin.worker",
        "celery.apps.worker",
        "celery.worker.consumer",
        "celery.concurrency.prefork",
        *CLIENTS,
    ),
    "tests.snippet": CLIENTS,
}
"""What the programs import first, by the module that is run."""

OTHER_CODE = ("PYTHONPATH", "PYTHONSAFEPATH")
"""What says where imports come from: there is a fork server for each."""

GREEN = ("gevent", "eventlet")
"""Pools that patch the standard library before anything imports it."""

REDIRECTED = 3
"""stdin, stdout, stderr."""

LONGEST_START = 60.0
"""Seconds."""


def start(
    command: Sequence[str],
    *,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> Any:
    """Start a program as `subprocess.Popen` does; with the same methods, as far as tests use them."""
    environment = dict(os.environ if env is None else env)
    module = _module(command, environment)
    if module is None:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=text,
            cwd=cwd,
            env=environment,
            start_new_session=start_new_session,
        )
    what = {
        "module": module,
        "arguments": list(command[3:]),
        "environment": environment,
        "directory": str(cwd or Path.cwd()),
        "is_leader": start_new_session,
    }
    return Forked(what, (stdin, stdout, stderr), text)


def run(
    command: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `subprocess.run` does that returns what is printed, unless it goes elsewhere."""
    process = start(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE if stderr is None else stderr,
        text=True,
        cwd=cwd,
        env=env,
    )
    with ThreadPoolExecutor(2) as pool:
        files = (process.stdout, process.stderr)
        read = [pool.submit(file.read) if file is not None else None for file in files]
        try:
            process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        said = [text.result() if text is not None else None for text in read]
    for file in files:
        if file is not None:
            file.close()
    return subprocess.CompletedProcess(command, process.wait(), *said)


def _module(command: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return what is run, if a process can be forked for it."""
    if list(command[:2]) != [sys.executable, "-m"] or command[2] not in PRELOADED:
        return None
    if any(word in GREEN for word in command):
        return None
    if _for_python(env) != _for_python(os.environ):
        return None
    if "PYTHONSAFEPATH" in env and str(ROOT) not in env.get("PYTHONPATH", "").split(os.pathsep):
        return None
    return command[2]


def _for_python(env: Mapping[str, str]) -> dict[str, str]:
    """Return what an interpreter looks at when it starts, but for where imports come from."""
    looked_at = (name for name in env if name.startswith(("PYTHON", "COV")))
    return {name: env[name] for name in looked_at if name not in OTHER_CODE}


def _code(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return where imports come from."""
    return tuple((name, env[name]) for name in OTHER_CODE if name in env)


class Forked:
    """A process that was forked for us, with what `subprocess.Popen` knows of one."""

    def __init__(
        self, what: Mapping[str, Any], files: Sequence[int | IO[Any] | None], text: bool
    ) -> None:
        self.args = ["python", "-m", what["module"], *what["arguments"]]
        self.returncode: int | None = None
        self._mutex = threading.Lock()
        ends: dict[int, IO[Any]] = {}
        with contextlib.ExitStack() as theirs:
            given = []
            for number, file in enumerate(files):
                if file is None:
                    given.append(number)
                    continue
                if file == subprocess.PIPE and number == 0:
                    end, ours = os.pipe()
                    ends[number] = os.fdopen(ours, "w" if text else "wb")
                elif file == subprocess.PIPE:
                    ours, end = os.pipe()
                    ends[number] = os.fdopen(ours, "r" if text else "rb")
                elif file == subprocess.DEVNULL:
                    end = os.open(os.devnull, os.O_RDWR)
                else:
                    end = os.dup(file if isinstance(file, int) else file.fileno())
                theirs.callback(os.close, end)
                given.append(end)
            self.stdin, self.stdout, self.stderr = map(ends.get, range(REDIRECTED))
            self._line, far = socket.socketpair()
            theirs.callback(far.close)
            server = _server(PRELOADED[what["module"]], _code(what["environment"]))
            socket.send_fds(server, [b"+"], [far.fileno(), *given])
        self._line.sendall(json.dumps(what).encode() + b"\n")
        self._said = b""
        self.pid = int(self._next(LONGEST_START))

    def poll(self) -> int | None:
        """Return how it ended, or ``None``."""
        with self._mutex:
            if self.returncode is None and self._wait_for_line(0):
                self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, once it has; raise as `subprocess` does if that takes too long."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._wait_for_line(left)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended since, as https://bugs.python.org/issue40550 says.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait_for_line(self, seconds: float | None) -> bool:
        look = select.poll()
        look.register(self._line, select.POLLIN)
        return bool(look.poll(None if seconds is None else seconds * 1000))

    def _end(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(int(self._next(LONGEST_START)))

    def _next(self, timeout: float) -> bytes:
        self._line.settimeout(timeout)
        while b"\n" not in self._said:
            if not (data := self._line.recv(64)):
                raise ChildProcessError("the fork server has ended")
            self._said += data
        said, _, self._said = self._said.partition(b"\n")
        return said

    def __del__(self) -> None:
        self._line.close()


@functools.cache
def _server(modules: Sequence[str], code: tuple[tuple[str, str], ...]) -> socket.socket:
    """Return the line to the process that has these modules from there; it ends with the line."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", str(theirs.fileno()), *modules],
            cwd=ROOT,
            env={**{k: v for k, v in os.environ.items() if k not in OTHER_CODE}, **dict(code)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait(LONGEST_START)

    atexit.register(end)
    return ours


# From here on: in the fork server.


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork for whoever asks, and say how each child ended; return in a child, what it is to run."""
    children: dict[int, socket.socket] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(children)
        if control not in ready:
            continue
        asked, files, _, _ = socket.recv_fds(control, 1, 1 + REDIRECTED)
        if not asked:
            sys.exit()
        line = socket.socket(fileno=files[0])
        with line.makefile("rb") as reader:
            what: dict[str, Any] = json.loads(reader.readline())
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Ignored where the tests run in the background.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if what["is_leader"]:
                os.setsid()
            # Not said by who forks: whoever hears of it may signal the group, which must be there.
            line.sendall(b"%d\n" % os.getpid())
            for number, file in enumerate(files[1:]):
                os.dup2(file, number)
            for each in (control, line, *children.values()):
                each.close()
            for file in {woken, wake, *files[1:]} - set(range(REDIRECTED)):
                os.close(file)
            return what
        for file in files[1:]:
            os.close(file)
        children[pid] = line


def _tell_ends(children: dict[int, socket.socket]) -> None:
    """Collect the children that have ended, and tell whoever asked for them."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(OSError), children.pop(pid) as line:
            line.sendall(b"%d\n" % status)


def become(what: Mapping[str, Any]) -> None:
    """Run a program in this process, as if it had been started for it."""
    os.environ.clear()
    os.environ.update(what["environment"])
    os.chdir(what["directory"])
    if not sys.flags.safe_path:
        sys.path[0] = what["directory"]
    sys.argv[1:] = what["arguments"]
    # What was imported stays frozen: to look at it once more at the end takes longer than all the rest.
    gc.enable()
    runpy.run_module(what["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    gc.disable()
    for name in sys.argv[2:]:
        # An older release does not have all of it, nor an environment without the extras.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
