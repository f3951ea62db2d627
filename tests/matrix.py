"""The tests under each version of Python, Celery, kombu and redis-py: ``python -m tests.matrix``.

Each cell of the matrix has an environment of its own, beside one with everything that tests need. What
cannot be had here is left out, and the table says so. Warnings are errors in all of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.environments import NotToBeHadError, environment

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

LONGEST = 3600
"""Seconds for the tests of a cell."""

QUICK = (
    "test_bases.py",
    "test_canvas.py",
    "test_options.py",
    "test_settings.py",
    "test_signatures.py",
    "outcome/test_conflict.py",
    "outcome/test_delivery.py",
    "outcome/test_header.py",
    "outcome/test_requeue.py",
    "worker/test_consumer_wait.py::test_those_who_wait_take_no_slot_and_run_in_order",
    "worker/test_consumer_wait.py::test_chords_and_chains",
    "worker/test_inspect.py",
)
"""Tests of tests/celery_dflock that see most of Celery: its tasks, messages, workers and canvas."""


class Versions(NamedTuple):
    """What is installed of what the plugin works with."""

    name: str
    requirements: tuple[str, ...]


VERSIONS = (
    Versions("5.4, lowest", ("celery==5.4.0", "kombu==5.3.4", "redis==5.0.1")),
    # Its extra wants redis-py below 6, and kombu 5.6 and later a newer one. redis-py 5.3 can lock
    # itself out: Celery's `AsyncResult` unsubscribes in ``__del__``, in the middle of another command
    # (celery issue 10477).
    Versions("5.4", ("celery[redis]==5.4.*", "kombu<5.6", "redis<5.3")),
    Versions("5.5", ("celery[redis]==5.5.*",)),
    Versions("5.6", ("celery[redis]==5.6.*",)),
    Versions("newest, lowest", ("celery>=5.7", "kombu==5.7.0", "redis==6.4.0")),
    Versions("newest", ("celery[redis]",)),
)
"""Lowest: with the lowest kombu and redis-py that this Celery takes."""


def interpreter(version: str) -> str | None:
    """Return a Python of this version, if there is one that can make environments."""
    known = Path.home() / ".pyenv" / "versions"
    places = [
        shutil.which(f"python{version}"),
        *map(str, sorted(known.glob(f"{version}.*/bin/python{version}"))),
    ]
    for place in filter(None, places):
        asked = [place, "-c", "import ensurepip, venv, sys; print(sys.version_info[:2])"]
        run = subprocess.run(asked, capture_output=True, text=True, check=False)
        if run.returncode == 0 and run.stdout.strip() == str(tuple(map(int, version.split(".")))):
            return place
    return None


def base(version: str, python: str) -> Path:
    """Return the Python of an environment with everything that tests need."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    requirements = ("-r", str(ROOT / "requirements-dev.txt"), "-e", f"{ROOT}/server[http,uvloop]")
    return environment(f"py{version}", (*requirements, "-e", str(ROOT)), python)


def installed(python: Path) -> list[str]:
    """Return the versions of what differs from cell to cell."""
    code = "from importlib.metadata import version as v; print(v('celery'), v('kombu'), v('redis'))"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def run_tests(python: Path, arguments: list[str]) -> str:
    """Return what pytest says at its end, and what has failed."""
    bin_first = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    began = time.monotonic()
    try:
        run = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT,
            env={**os.environ, "PATH": bin_first},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return f"hangs: {error}"
    lines = run.stdout.strip().splitlines() or ["nothing was said"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    if run.returncode not in (0, 1):
        print("\n".join(lines[-20:]), flush=True)
    ended = re.sub(r" in [\d.]+s.*", "", lines[-1]).strip(" =")
    return f"{ended}, {time.monotonic() - began:.0f} s"


def cell(version: str, python: str, versions: Versions, arguments: list[str]) -> list[str]:
    """Return one line of the table, in columns."""
    try:
        beside = base(version, python)
        name = re.sub(r"\W+", "-", f"{version} celery {versions.name}")
        own = environment(name, versions.requirements, python, beside)
    except NotToBeHadError as error:
        return [version, versions.name, "", "", f"left out: {error}"]
    return [version, *installed(own), run_tests(own, arguments)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--python", action="append", help=f"of {', '.join(PYTHONS)}; default all")
    names = [each.name for each in VERSIONS]
    parser.add_argument("--celery", action="append", choices=names, help="default all")
    parser.add_argument("--full", action="store_true", help="all tests, not a few")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    quick = [f"tests/celery_dflock/{each}" for each in QUICK]
    arguments = [*([] if given.full else quick), *given.pytest]
    rows = [["Python", "Celery", "kombu", "redis-py", "tests"]]
    for version in given.python or PYTHONS:
        python = interpreter(version)
        if python is None:
            rows.append([version, "", "", "", "left out: there is no such interpreter here"])
            continue
        for versions in VERSIONS:
            if versions.name in (given.celery or names):
                print(f"Python {version}, Celery {versions.name} ...", flush=True)
                rows.append(cell(version, python, versions, arguments))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return int(any("failed" in row[-1] or "error" in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
