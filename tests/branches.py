"""Which branches of the code the tests take: ``python -m tests.branches [--add] [PYTEST ARGUMENTS]``.

Servers, workers, beats and commands are measured as well: whatever has our Python, however it was
started and however it ends (`tests/saving.py`). What is printed: the branches of each room, and those
that nothing takes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage

from tests import saving

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "coverage"
DATA = PLACE / "data"
PACKAGES = (ROOT / "server" / "dflockd", ROOT / "celery_dflock")
PYTEST = ("-p", "tests.branches", "--numprocesses", "6", "--dist", "loadfile")
# From Python 3.12 on a fork beside a thread is warned of, and each process has one that saves.
UNHEARD = ("-W", "ignore:This process .* is multi-threaded:DeprecationWarning")


def run(arguments: list[str]) -> int:
    """Run tests, measured; return pytest's exit status."""
    environment = {
        **os.environ,
        "COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"),
        "COVERAGE_FILE": str(DATA),
    }
    command = [sys.executable, "-m", "pytest", *PYTEST, *UNHEARD, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def combined() -> dict[str, Any]:
    """Return what all processes together ran, by the path of the file."""
    measured = coverage.Coverage(data_file=str(DATA), config_file=str(ROOT / "pyproject.toml"))
    report = PLACE / "report.json"
    # It says where it wrote, and whose database is lost because it was killed.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", coverage.exceptions.CoverageWarning)
        measured.combine([str(PLACE)], keep=True)
        pairs: dict[str, set[tuple[int, int]]] = collections.defaultdict(set)
        for name, run_there in saving.saved(PLACE):
            pairs[name].update(run_there)
        measured.get_data().add_arcs(pairs)
        # Not the older Celery that some tests install.
        inside = [f"{package}/*" for package in PACKAGES]
        measured.json_report(outfile=str(report), include=inside)
    files: dict[str, Any] = json.loads(report.read_text())["files"]
    return files


def room(path: str) -> str:
    """Return the folder of the package, or the package itself."""
    parts = Path(path.removeprefix("server/")).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def pytest_configure() -> None:
    """In pytest: let whoever is killed save first. It may hang: nobody waits for an answer."""
    for name in ("kill", "killpg"):
        setattr(os, name, _after_saving(getattr(os, name)))


def _after_saving(kill: Any) -> Any:
    def wait_and_kill(pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            time.sleep(2 * saving.EVERY)
        kill(pid, number)

    return wait_and_kill


def missing(path: str, file: dict[str, Any]) -> Iterator[str]:
    """Return the branches of a file that nothing took, each with the line that it begins with."""
    if not file["executed_lines"]:
        yield f"{path}: nothing has run it"
        return
    lines = (ROOT / path).read_text().splitlines()
    for start, end in file["missing_branches"]:
        yield f"{path}:{start} -> {end if end > 0 else 'exit'}  {lines[start - 1].strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.branches", description=__doc__)
    parser.add_argument("--add", action="store_true", help="to what the last runs have measured")
    options, arguments = parser.parse_known_args()
    if not options.add:
        shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    status = run(arguments)
    rooms: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for path, file in sorted(combined().items()):
        for line in missing(path, file):
            print(line)
        for of in (room(path), "all"):
            rooms[of][0] += file["summary"]["num_branches"]
            rooms[of][1] += file["summary"]["covered_branches"]
    print(f"\n{'room':<26} {'branches':>8} {'taken':>8}")
    for name, (branches, taken) in sorted(rooms.items(), key=lambda each: (each[0] == "all", each)):
        print(f"{name:<26} {branches:>8} {taken / max(branches, 1):>8.1%}")
    return status


if __name__ == "__main__":
    sys.exit(main())
