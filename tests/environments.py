"""Environments for other versions of what we work with: made once, below the one of this process."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PLACE = Path(__file__).resolve().parents[1] / ".venv" / "environments"
INSTALL_BOUND = 600.0


class NotToBeHadError(Exception):
    """The environment cannot be made here: one line says why."""


def environment(
    name: str,
    requirements: Sequence[str],
    python: str = sys.executable,
    beside: Path | None = None,
    bound: float = INSTALL_BOUND,
) -> Path:
    """Return the Python of an environment with these requirements; made the first time.

    Args:
        name: of the environment; one with this name and the same requirements is taken as it is.
        requirements: arguments of ``pip install``.
        python: the interpreter, of which it becomes one.
        beside: the Python of another environment, of the same version: what that has installed is
            there as well, where this one has nothing of the name.
        bound: seconds that installing may take.

    Raises:
        NotToBeHadError: it cannot be made here.
    """
    place = PLACE / name
    own, done = place / "bin" / "python", place / "installed"
    said = "\n".join(requirements)
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in several processes want it
        if not done.exists() or done.read_text() != said:
            _make(place, own, requirements, python, beside, bound)
            done.write_text(said)
    return own


def _make(
    place: Path,
    own: Path,
    requirements: Sequence[str],
    python: str,
    beside: Path | None,
    bound: float,
) -> None:
    # With the pip of this process: to install another one takes longer than what is asked for.
    _run([python, "-m", "venv", "--clear", "--without-pip", place], bound)
    pip = [sys.executable, "-m", "pip", "--python", own, "install"]
    _run([*pip, "-q", "--disable-pip-version-check", "--retries", "1", *requirements], bound)
    if beside is not None:
        # Behind its own, and with what is installed there to be edited in place.
        where = _run([beside, "-c", "import site; print(site.getsitepackages()[0])"], bound).strip()
        own_site = _run([own, "-c", "import site; print(site.getsitepackages()[0])"], bound).strip()
        line = f"import site; site.addsitedir({where!r})\n"
        (Path(own_site) / "beside.pth").write_text(line)


def _run(command: Sequence[str | Path], bound: float) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=bound, check=False)
    except subprocess.TimeoutExpired:
        raise NotToBeHadError(f"{command[-1]}: it took longer than {bound:g} s") from None
    if run.returncode:
        said = run.stderr.strip().splitlines() or ["?"]
        raise NotToBeHadError(f"{command[-1]}: {said[-1]}")
    return run.stdout
