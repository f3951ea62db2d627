"""SQS, as moto has it: a real worker, in an environment with its client, installed from PyPI once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.demo.stage import LockServer, Process, Redis
from tests.celery_dflock import jobs
from tests.celery_dflock.elsewhere import lines_of
from tests.celery_dflock.record import RECORD
from tests.environments import NotToBeHadError, environment

pytestmark = pytest.mark.soak

VISIBILITY = 6
"""Seconds after which a message is delivered again that was not acknowledged."""


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of that environment."""
    try:
        return str(environment("sqs", ["moto[server]", "kombu[sqs]"], beside=Path(sys.executable)))
    except NotToBeHadError as error:
        pytest.skip(str(error))


class Moto(Process):
    """A server that does as AWS does."""

    url = ""

    def __init__(self, python: str, directory: Path) -> None:
        super().__init__(directory, "moto")
        self._python = python

    def _command(self) -> Sequence[str]:
        return [self._python, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]

    def _after_start(self) -> None:
        found = re.search(r"http://(127\.0\.0\.1:\d+)", self.wait_log("Running on http://"))
        assert found is not None
        self.url = f"sqs://test:test@{found[1]}//"


@pytest.mark.timeout(600)
def test_scenarios(python: str, tmp_path: Path) -> None:
    scenarios = ["turns", "requeue", "skip", "fail", "parked", "impatient"]
    with Redis(tmp_path) as redis, LockServer(tmp_path) as locks, Moto(python, tmp_path) as moto:
        settings = {
            "worker_enable_remote_control": False,
            "broker_transport_options": {
                "region": "us-east-1",
                "visibility_timeout": VISIBILITY,
                "is_secure": False,
                "polling_interval": 0.1,
                "wait_time_seconds": 1,
            },
        }
        env = {
            jobs.BROKER: moto.url,
            jobs.RESULTS: redis.url,
            jobs.MORE: json.dumps(settings),
            RECORD: str(tmp_path / "record.jsonl"),
            "DFLOCK_SERVERS": locks.address,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        program = ("-m", "tests.celery_dflock.sqs.sending")
        said = lines_of(python, tmp_path, env, *program, scenarios=scenarios)
    assert said[1:] == [f"passed {scenario}" for scenario in scenarios]
