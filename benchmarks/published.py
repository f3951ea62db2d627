"""What others have published on PyPI under our import names: in environments of their own.

They need a newer Python than this project does: `DFLOCKD_PYTHON`, or one on PATH, or one of pyenv.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench import LeftOutError
from examples.demo import stage

ENVIRONMENTS = stage.ROOT / ".venv" / "published"
"""Made once; the tests of the published clients use the same."""

PATIENCE = 120.0

GO_VARIABLE = "DFLOCKD_GO"
GO_PLACE = Path.home() / "go" / "bin" / "dflockd"
"""Where ``go install`` puts it."""
ELF = b"\x7fELF"


def environment(package: str) -> Path:
    """Return the Python of an environment that has the package, such as ``dflockd==0.5.0``.

    Raises:
        LeftOutError: there is no interpreter for it, or it cannot be installed.
    """
    place = ENVIRONMENTS / package.replace("==", "-")
    python = place / "bin" / "python"
    done = place / "installed"
    if done.exists():
        return python
    interpreter = next((path for path in _interpreters() if _is_new_enough(path)), None)
    if interpreter is None:
        raise LeftOutError(f"{package} needs Python 3.12 or newer: set DFLOCKD_PYTHON to one")
    commands = (
        [interpreter, "-m", "venv", "--clear", str(place)],
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", package],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.CalledProcessError as exc:
        why = (exc.stderr.strip().splitlines() or [str(exc)])[-1]
        raise LeftOutError(f"{package} cannot be installed with {interpreter}: {why}") from exc
    except subprocess.TimeoutExpired as exc:
        raise LeftOutError(f"{package} was not installed in {PATIENCE:g} s") from exc
    done.touch()
    return python


def go() -> Path:
    """Return the server in Go: `GO_VARIABLE`, or a ``dflockd`` that is no script, of PATH or Go's.

    Raises:
        LeftOutError: there is none.
    """
    if named := os.environ.get(GO_VARIABLE):
        if not os.access(named, os.X_OK):
            raise LeftOutError(f"{GO_VARIABLE} names {named}, which cannot be run")
        return Path(named)
    places = [Path(each, "dflockd") for each in os.get_exec_path()]
    for path in [*places, GO_PLACE]:
        if os.access(path, os.X_OK) and path.is_file():
            with path.open("rb") as program:
                if program.read(len(ELF)) == ELF:
                    return path
    raise LeftOutError(
        f"no binary of it is on PATH or at {GO_PLACE}; {GO_VARIABLE} names one elsewhere"
    )


def go_version() -> str:
    """Return what the server in Go says of itself."""
    try:
        command = [str(go()), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (LeftOutError, OSError, subprocess.SubprocessError):
        return "not installed"
    return done.stdout.strip()


def python_version() -> str:
    """Return that of the environments that have been made; they may differ if made apart."""
    found = {
        line.partition("=")[2].strip()
        for config in ENVIRONMENTS.glob("*/pyvenv.cfg")
        for line in config.read_text().splitlines()
        if line.startswith("version")
    }
    return ", ".join(sorted(found)) or "not installed"


def _interpreters() -> Iterator[str]:
    if named := os.environ.get("DFLOCKD_PYTHON"):
        yield named
    for name in ("python3.13", "python3.12"):
        if found := shutil.which(name):
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in (13, 12):
        yield from sorted(map(str, pyenv.glob(f"versions/3.{minor}*/bin/python")))


def _is_new_enough(interpreter: str) -> bool:
    check = [
        interpreter,
        "-c",
        "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))",
    ]
    try:
        return (
            subprocess.run(check, capture_output=True, timeout=PATIENCE, check=False).returncode
            == 0
        )
    except OSError:
        return False
