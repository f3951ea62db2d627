"""A program that does what it is told, line by line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Self

from examples.demo import stage

PATIENCE = 60.0


class Child:
    """A process that prints a line once it is ready, and one for each line that it reads."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=stage.ROOT
        )
        self.hear()

    @classmethod
    def of(cls, module: str, *arguments: str, prefix: Sequence[str] = ()) -> Self:
        """Start a module of this project; the prefix comes before its command."""
        return cls(*prefix, sys.executable, "-m", module, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=PATIENCE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Wait for the next line that it prints."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise stage.StageError(f"{' '.join(self._command)} ended")
        return line

    def ask(self, line: object = "") -> str:
        """Tell it a line and wait for one."""
        self.tell(line)
        return self.hear()
