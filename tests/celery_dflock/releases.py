"""The first release of both distributions, as wheels built from its commit, beside the code here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.demo.stage import ROOT, LockServer, Worker

FIRST = "50a09f1"
"""What 0.1 was built from."""
BUILD_BOUND = 110
PLACE = ROOT / ".venv" / "releases" / f"{FIRST}-py{sys.version_info[0]}{sys.version_info[1]}"


class Release(NamedTuple):
    """Where processes import both packages from."""

    name: str
    path: tuple[Path, ...]

    @property
    def env(self) -> dict[str, str]:
        # Without PYTHONSAFEPATH `python -m` puts the working directory first: the code here.
        path = dict.fromkeys(map(str, (*self.path, ROOT)))
        return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def here() -> Release:
    return Release("new", (ROOT, ROOT / "server"))


def first() -> Release:
    """The first release; built once. Skips where that is not possible."""
    if not PLACE.exists():
        with tempfile.TemporaryDirectory() as directory:
            built = Path(directory)
            _unpack(FIRST, built / "source")
            _install(built / "target", built / "source", built / "source" / "server")
            PLACE.parent.mkdir(exist_ok=True)
            shutil.rmtree(PLACE, ignore_errors=True)
            shutil.move(built / "target", PLACE)
    return Release("old", (PLACE,))


def _unpack(commit: str, target: Path) -> None:
    archive = ["git", "-C", str(ROOT), "archive", commit]
    try:
        run = subprocess.run(archive, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"release 0.1 cannot be built: this checkout has no commit {commit}")
    with tarfile.open(fileobj=BytesIO(run.stdout)) as files:
        files.extractall(target, filter="data")


def _install(target: Path, *sources: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install = [*pip, "--no-deps", "--retries", "1", "--target", str(target), *map(str, sources)]
    try:
        run = subprocess.run(
            install, capture_output=True, text=True, timeout=BUILD_BOUND, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("release 0.1 cannot be built: it took too long")
    if run.returncode:
        why = (run.stderr.strip().splitlines() or ["?"])[-1]
        pytest.skip(f"release 0.1 cannot be built: {why}")


# Processes of a release.


class Server(LockServer):
    def __init__(
        self, directory: Path, release: Release, *args: str, name: str = "dflockd"
    ) -> None:
        super().__init__(directory, *args, name=name)
        self._env.update(release.env)


def worker(directory: Path, release: Release, queues: str, **options: Any) -> Worker:
    """A worker for `rolled`, not yet started."""
    env = {**options.pop("env"), **release.env}
    name = f"{release.name}-{queues.replace(',', '-')}"
    app = "tests.celery_dflock.rolled"
    return Worker(directory, *("-Q", queues), app=app, name=name, env=env, **options)


class Sender:
    """A process that sends tasks; see `rolled`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.modules: list[str] = self._answer()

    def send(self, task: str, *each: dict[str, Any], **options: Any) -> str:
        """Return the task id. With the arguments of several it is the id of their chord."""
        asked = {"task": f"rolled.{task}", "each": each, **options}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return str(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the sender has ended"
        return json.loads(line)


@contextmanager
def sender(release: Release, env: dict[str, str]) -> Iterator[Sender]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.celery_dflock.rolled"],
        cwd=ROOT,
        env={**os.environ, **env, **release.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        started = Sender(process)
        for module in started.modules:
            assert any(Path(module).is_relative_to(path) for path in release.path), module
        yield started
        assert process.stdin is not None
        process.stdin.close()
