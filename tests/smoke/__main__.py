"""Build the images and run the smoke tests: ``python -m tests.smoke [arguments of pytest]``."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from tests.smoke import engine

HERE = Path(__file__).parent
ENVIRONMENT = Path(sys.prefix) / "smoke"


def main() -> int:
    if not engine.answers():
        print("smoke: skipped, no Docker engine answers")
        return 0
    python = _environment()
    print("Building the images ...", flush=True)
    engine.build()
    suite = [python, "-m", "pytest", "-c", HERE / "pytest.ini", HERE, *sys.argv[1:]]
    return subprocess.run(suite, check=False).returncode


def _environment() -> Path:
    """Return the Python of an environment with pytest-celery and this repository's packages."""
    python = ENVIRONMENT / "bin" / "python"
    wanted = engine.ROOT / "requirements-smoke.txt"
    stamp = ENVIRONMENT / ".stamp"
    if not stamp.exists() or stamp.stat().st_mtime < wanted.stat().st_mtime:
        print(f"Making {ENVIRONMENT} (a minute the first time) ...", flush=True)
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-r", wanted], check=True)
        subprocess.run([*install, "-e", "server", "-e", "."], check=True, cwd=engine.ROOT)
        stamp.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
