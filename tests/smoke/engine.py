"""Docker, as everybody has it: the commands ``docker`` and ``docker compose``."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SERVER = "dflockd:0.1.0"
WORKER = "celery-dflock-example:0.1.0"
REDIS = "redis:7-bookworm"

BUILD_FLAGS = "DOCKER_BUILD_FLAGS"
"""The variable with more flags for ``docker build``, e.g. ``--build-arg`` for a proxy."""


def answers() -> bool:
    """Whether there is an engine."""
    try:
        return _quietly("docker", "version").returncode == 0
    except FileNotFoundError:
        return False


def docker(*words: str) -> str:
    """Run a command of ``docker``; return what it says. A CalledProcessError if it fails."""
    return _checked("docker", *words)


@cache
def _compose() -> tuple[str, ...]:
    # The plugin, or the program that was there before it.
    is_plugin = _quietly("docker", "compose", "version").returncode == 0
    return ("docker", "compose") if is_plugin else ("docker-compose",)


def compose(*words: str) -> str:
    """Run a command of ``docker compose`` in the root of the repository; return what it says."""
    return _checked(*_compose(), *words)


def build() -> None:
    """Build the two images, as the compose file would."""
    more = shlex.split(os.environ.get(BUILD_FLAGS, ""))
    docker("build", "--quiet", *more, "--tag", SERVER, "server")
    docker("build", "--quiet", *more, "--tag", WORKER, "--file", "examples/Dockerfile", ".")


def _quietly(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)


def _checked(*words: str) -> str:
    done = _quietly(*words)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()
