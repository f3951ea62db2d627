"""A command in a real terminal of this machine, and what stands on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from examples.demo.stage import ROOT, WAIT
from tests import forkserver

HOME = b"\x1b[H"
"""What a new drawing begins with."""

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
"""To the other screen, and back to the one with the shell."""

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
"""The cursor."""

STYLE = re.compile(r"\x1b\[[0-9;]*m")

T = TypeVar("T")


class Terminal:
    """A process whose terminal this is; it ends with the block."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        width: int = 100,
        height: int = 20,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(width, height)
        self.before = self.attributes()
        self.output = b""
        # The size is that of the terminal, whatever variables say.
        plain = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = forkserver.start(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            cwd=ROOT,
            env={**plain, "TERM": "xterm-256color", **(env or {})},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def resize(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def screen(self) -> list[str]:
        """The lines of the latest drawing that is complete, without colours."""
        for frame in reversed(self.output.split(HOME)[1:]):
            lines = STYLE.sub("", frame.decode(errors="replace")).split("\r\n")
            if (len(lines), len(lines[-1])) == (self._height, self._width):
                return lines
        return [""]

    def wait(self, probe: Callable[[list[str]], T | None], what: str) -> T:
        """Wait until the screen is as wanted; what `probe` then returns."""
        until = time.monotonic() + WAIT
        while not (found := probe(self.screen)):
            assert time.monotonic() < until, f"no {what} within {WAIT:g} s on {self.screen}"
            assert self.process.poll() is None, f"it ended: {self.output.decode()}"
            self._read()
        return found

    def wait_line(self, *texts: str) -> str:
        """Wait for a line in which all of this is; the line."""

        def probe(lines: list[str]) -> str | None:
            return next((line for line in lines if all(text in line for text in texts)), None)

        return self.wait(probe, f"line with {texts}")

    def wait_end(self) -> int:
        """Wait for the end of the process; its exit status."""
        until = time.monotonic() + WAIT
        while self.process.poll() is None:
            assert time.monotonic() < until, f"it goes on: {self.screen}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def _read(self) -> bytes:
        data = b""
        if select.select([self._master], [], [], 0.1)[0]:
            data = os.read(self._master, 65536)
        self.output += data
        return data
