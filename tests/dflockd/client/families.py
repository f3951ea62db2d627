"""A parent that forks, and children that do nothing but live."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forkserver
from tests.dflockd.client_support import command
from tests.dflockd.raw_server import PATIENCE

needs_forks = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="there is no /proc here"),
]
faces = pytest.mark.parametrize("face", ["sync", "asyncio", "uvloop"])


class Family:
    """A parent, and children that do nothing but live. Line by line: what the parent prints."""

    def __init__(self, program: str, *args: object, fresh: bool = False) -> None:
        self.process = forkserver.start(
            command(BEGINNING + program, *args, fresh=fresh),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()

    def wait_for(self, line: str) -> None:
        with self._came:
            assert self._came.wait_for(lambda: line in self.lines, PATIENCE), self.lines

    def say(self) -> None:
        """Let the parent go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill_parent(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def children_live(self, number: int) -> bool:
        children = [int(line.split()[1]) for line in self.lines if line.startswith("child ")]
        return len(children) == number and all(is_alive(child) for child in children)

    def end(self) -> None:
        """End them all: they are a group of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


StartFamily = Callable[..., Family]


def is_alive(pid: int) -> bool:
    """Whether a process runs; its children are no children of this one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


BEGINNING = """
import os, sys, threading, time, warnings

warnings.simplefilter("ignore")

def fork():
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    os.write(1, f"child {child}\\n".encode())
    return child

def say(line):
    os.write(1, f"{line}\\n".encode())

def run(face, blocking, main):
    if face == "sync":
        blocking()
    elif face == "asyncio":
        import asyncio
        asyncio.run(main())
    else:
        import uvloop
        uvloop.run(main())
"""
