"""The quick start of the README: its commands as they are printed, in an empty directory.

Only where broker and lock server are differs: the README assumes the default ports.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from examples.demo.stage import ROOT, Process, StageError

README = ROOT / "README.md"
BLOCK = re.compile(r"^```(shell|python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BOUND = 60.0


class QuickStart:
    """What the section says, in its order.

    Attributes:
        install: the command that installs everything.
        tasks: what is to be saved as tasks.py.
        server: the command that starts the lock server.
        worker: the command that starts the worker.
        send: the command that sends the tasks.
        output: what that prints.
    """

    def __init__(self, page: str) -> None:
        start = page.index("## Quick start\n")
        blocks = BLOCK.findall(page[start : page.index("\n## ", start)])
        kinds = [kind for kind, _ in blocks]
        if kinds != ["shell", "python", "shell", "shell", "shell", "text"]:
            raise ValueError(f"the quick start has other steps than this follows: {kinds}")
        texts = [text for _, text in blocks]
        self.install, self.tasks, self.server, self.worker, self.send, self.output = texts


class Typed(Process):
    """A command as somebody types it into a terminal."""

    def __init__(self, directory: Path, name: str, line: str, env: dict[str, str]) -> None:
        super().__init__(directory, name)
        self._env = env
        self.where = directory
        self._line = line

    def _command(self) -> Sequence[str]:
        return shlex.split(self._line)

    def _after_start(self) -> None:
        pass


def completed(
    command: Sequence[str], directory: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as somebody who is in this directory."""
    return subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=BOUND, check=False
    )


def environment(programs: Path) -> dict[str, str]:
    """What a terminal has in which the environment of these programs is active."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DFLOCK", "CELERY", "PYTHON"))}
    return {**kept, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def run(directory: Path, programs: Path, broker: str, backend: str) -> str:
    """Do what the section says, and return what the last command has printed."""
    steps = QuickStart(README.read_text())
    env = environment(programs)
    with Typed(directory, "server", steps.server, {**env, "DFLOCKD_PORT": "0"}) as server:
        found = re.search(r"listening on (\S+:\d+)", server.wait_log("listening on "))
        assert found is not None
        tasks = steps.tasks.replace("127.0.0.1:6388", found[1])
        tasks = tasks.replace('broker="redis://127.0.0.1:6379/0"', f"broker={broker!r}")
        tasks = tasks.replace('backend="redis://127.0.0.1:6379/0"', f"backend={backend!r}")
        (directory / "tasks.py").write_text(tasks)
        with Typed(directory, "worker", steps.worker, env):
            done = completed(shlex.split(steps.send), directory, env)
    if done.returncode:
        raise StageError(done.stderr)
    return done.stdout


def without_times(output: str) -> list[str]:
    """The lines of an output, whatever the machine has to do."""
    return sorted(re.sub(r"\d+ s\b", "N s", output).splitlines())
