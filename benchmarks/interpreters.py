"""The interpreters that our server runs in: plain Python, compiled, and as it was before."""

from __future__ import annotations

import filecmp
import io
import subprocess
import tarfile
from pathlib import Path

from benchmarks.bench import LeftOutError
from examples.demo import stage

COMPILED = stage.ROOT / ".venv-compiled" / "bin" / "python"
SOURCES = stage.ROOT / "server" / "dflockd"

BEFORE = "013c958"
"""The commit before the server was made lean and could be compiled."""

PATIENCE = 60.0
LOOK = "import dflockd; print(dflockd.__path__[0], getattr(dflockd, 'compiled', False), sep='\\n')"


def compiled() -> str:
    """Return the Python that ``make compiled`` has made.

    Raises:
        LeftOutError: there is none, or the server has been changed since.
    """
    if not COMPILED.exists():
        raise LeftOutError("`make compiled` makes it, where there is a C compiler")
    place, is_compiled = _look(str(COMPILED))
    if not is_compiled:
        raise LeftOutError(f"{COMPILED} has a server that is not compiled")
    names = [str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py")]
    _, differ, missing = filecmp.cmpfiles(SOURCES, place, names, shallow=False)
    if differ or missing:
        raise LeftOutError("the sources have changed since `make compiled`")
    return str(COMPILED)


def is_compiled(python: str) -> bool:
    """Return whether the server that an interpreter finds is compiled.

    Raises:
        LeftOutError: it does not find one.
    """
    return _look(python)[1]


def _look(python: str) -> tuple[str, bool]:
    try:
        found = subprocess.run(
            [python, "-c", LOOK], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise LeftOutError(f"{python} does not run our server") from exc
    place, answer = found.stdout.splitlines()
    return place, answer == "True"


def before(directory: Path) -> Path:
    """Unpack the server of `BEFORE`; return what has to be first on ``PYTHONPATH``.

    Raises:
        LeftOutError: this checkout does not have the commit.
    """
    command = ["git", "-C", str(stage.ROOT), "archive", BEFORE, "server/dflockd"]
    try:
        archive = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        raise LeftOutError(f"this checkout does not have commit {BEFORE}") from exc
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return directory / "server"
