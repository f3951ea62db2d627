"""The oldest Celery that the plugin promises to work with: a real worker, in an environment apart.

It is installed from PyPI, once; where that cannot be reached the test is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.demo.stage import ROOT, LockServer, Redis, StageError, Worker, redis_executable
from tests.celery_dflock import jobs
from tests.celery_dflock.oldest_celery import oldest
from tests.celery_dflock.record import RECORD
from tests.environments import NotToBeHadError, environment

[OLDEST] = re.findall('"celery>=(.*)"', (ROOT / "pyproject.toml").read_text())
REQUIREMENTS = [f"celery[redis]=={OLDEST}.0", "kombu<5.4"]
INSTALL_BOUND = 110


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of an environment with that Celery; made once."""
    name = "celery-{}-alone-py{}{}".format(OLDEST, *sys.version_info)
    try:
        return str(environment(name, REQUIREMENTS, bound=INSTALL_BOUND))
    except NotToBeHadError as error:
        pytest.skip(str(error))


class OldWorker(Worker):
    """A worker of another environment."""

    def __init__(self, python: str, directory: Path, env: dict[str, str]) -> None:
        super().__init__(directory, app="tests.celery_dflock.jobs", name="old", env=env)
        self._python = python

    def _command(self) -> Sequence[str]:
        return [self._python, *super()._command()[1:]]


@pytest.mark.timeout(2 * oldest.BOUND + 2 * INSTALL_BOUND)
def test_scenarios(python: str, tmp_path: Path) -> None:
    try:
        redis_executable()
    except StageError as error:
        pytest.skip(str(error))
    scenarios = ["turns", "requeue", "skip", "fail", "parked"]
    with Redis(tmp_path) as redis, LockServer(tmp_path) as locks:
        env = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]),
            jobs.BROKER: redis.url,
            RECORD: str(tmp_path / "record.jsonl"),
            "DFLOCK_SERVERS": locks.address,
        }
        with OldWorker(python, tmp_path, env) as worker:
            worker.wait_ready()
            run = subprocess.run(
                [
                    python,
                    "-W",
                    "error",
                    "-m",
                    "tests.celery_dflock.oldest_celery.oldest",
                    *scenarios,
                ],
                cwd=ROOT,
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                timeout=2 * oldest.BOUND,  # it ends by itself before
                check=False,
            )
            assert run.returncode == 0, worker.with_log(run.stderr)
    assert run.stdout.splitlines() == [
        f"celery {OLDEST}.0",
        *(f"passed {scenario}" for scenario in scenarios),
    ]
