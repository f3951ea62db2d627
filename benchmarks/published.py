"""The published server in Go, where it is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.bench import LeftOutError

PATIENCE = 120.0

GO_VARIABLE = "DFLOCKD_GO"
GO_PLACE = Path.home() / "go" / "bin" / "dflockd"
"""Where ``go install`` puts it."""
ELF = b"\x7fELF"


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
