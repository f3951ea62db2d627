"""SQS, as moto has it: a real worker, in an environment with its client, installed from PyPI once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.demo.stage import ROOT, LockServer, Process, Redis, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.oldest_celery import oldest
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


class SqsWorker(Worker):
    """A worker of that environment."""

    def __init__(self, python: str, directory: Path, env: dict[str, str]) -> None:
        super().__init__(directory, app="tests.celery_dflock.jobs", name="sqs", env=env)
        self._python = python

    def _command(self) -> Sequence[str]:
        return [self._python, *super()._command()[1:]]


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
        with SqsWorker(python, tmp_path, env) as worker:
            worker.wait_ready()
            run = subprocess.run(
                [python, "-m", "tests.celery_dflock.sqs.sending", *scenarios],
                cwd=ROOT,
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                timeout=2 * oldest.BOUND,  # it ends by itself before
                check=False,
            )
            assert run.returncode == 0, worker.with_log(run.stdout + run.stderr)
    assert run.stdout.splitlines()[1:] == [f"passed {scenario}" for scenario in scenarios]
