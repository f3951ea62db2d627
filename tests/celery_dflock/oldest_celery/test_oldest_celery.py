"""The oldest Celery that the plugin promises to work with: a real worker, in an environment apart.

It is installed from PyPI, once; where that cannot be reached the test is skipped.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from examples.demo.stage import ROOT, LockServer, Redis
from tests.celery_dflock import jobs
from tests.celery_dflock.elsewhere import lines_of
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


@pytest.mark.timeout(2 * oldest.BOUND + 2 * INSTALL_BOUND)
@pytest.mark.usefixtures("needs_redis")
def test_scenarios(python: str, tmp_path: Path) -> None:
    scenarios = ["turns", "requeue", "skip", "fail", "parked"]
    with Redis(tmp_path) as redis, LockServer(tmp_path) as locks:
        env = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]),
            jobs.BROKER: redis.url,
            RECORD: str(tmp_path / "record.jsonl"),
            "DFLOCK_SERVERS": locks.address,
        }
        program = ("-W", "error", "-m", "tests.celery_dflock.oldest_celery.oldest")
        said = lines_of(python, tmp_path, env, *program, scenarios=scenarios)
    assert said == [
        f"celery {OLDEST}.0",
        *(f"passed {scenario}" for scenario in scenarios),
    ]
