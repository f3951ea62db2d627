"""The other brokers, result backends and serializers: tasks of one key meet, wait, and all succeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.worker_log import CheckedWorker

SENT = 3
TASKS = (jobs.requeued, jobs.ticket_patient, jobs.parked)


def filesystem(directory: Path) -> dict[str, Any]:
    folders = ("data_folder_in", "data_folder_out", "control_folder")
    for name in ("messages", "control_folder", "results"):
        (directory / name).mkdir()
    places = {
        name: str(directory / (name if name == "control_folder" else "messages"))
        for name in folders
    }
    return {
        "broker_url": "filesystem://",
        "broker_transport_options": {**places, "polling_interval": 0.1},
        "result_backend": f"file://{directory}/results",
        "task_serializer": "pickle",
    }


def sqlalchemy(directory: Path) -> dict[str, Any]:
    return {
        "broker_url": f"sqla+sqlite:///{directory}/messages.sqlite",
        "broker_transport_options": {},
        "result_backend": f"db+sqlite:///{directory}/results.sqlite",
        "task_serializer": "yaml",
    }


def redis(_directory: Path) -> dict[str, Any]:
    url = jobs.app.conf.broker_url
    return {"broker_url": url, "result_backend": url, "task_serializer": "msgpack"}


# kombu reads a file that it is still writing, and the worker ends: its consumer sees no JSON in it.
TORN = pytest.param(filesystem, marks=pytest.mark.soak)


@pytest.mark.parametrize("kind", [TORN, sqlalchemy, redis])
@pytest.mark.timeout(300)
def test_tasks_of_one_key_run_one_by_one_and_all_succeed(
    cluster: Cluster, key: str, kind: Any, tmp_path: Path
) -> None:
    settings = kind(tmp_path) | {"task_default_queue": key.replace(":", "-")}
    settings["accept_content"] = ["json", settings["task_serializer"]]
    app = Celery("sender", set_as_current=False)
    app.conf.update(settings)
    worker = Worker(
        tmp_path,
        app="tests.celery_dflock.jobs",
        concurrency=3,
        # Celery wants to be asked for pickle where root runs the tests.
        env={jobs.MORE: json.dumps(settings), "C_FORCE_ROOT": "1"},
    )
    with worker:
        worker.wait_ready()
        with cluster.lock(key):
            sent = [
                app.send_task(
                    task.name,
                    (),
                    {"key": key, "seconds": 0.02},
                    serializer=settings["task_serializer"],
                    headers={"x-mine": task.name},
                )
                for task in TASKS
                for _ in range(SENT)
            ]
            cluster.wait_event("requeued", sent[0])
        # One after the other, some of them by way of the broker: none has seconds of its own.
        results = [each.get(timeout=3 * PATIENCE) for each in sent]

    assert results == [each.id for each in sent]
    starts, ends = (cluster.events(what=what, key=key) for what in ("start", "end"))
    assert len(starts) == len(ends) == len(sent)
    assert all(end["at"] <= start["at"] for end, start in zip(ends, starts[1:], strict=False))
    assert all(start["headers"] == {"x-mine": start["task"]} for start in starts)


def test_a_task_of_solo_ends_before_its_worker_does(
    cluster: Cluster, key: str, tmp_path: Path
) -> None:
    """Without an event loop it has its turn on another thread than the one that ends the worker."""
    settings = sqlalchemy(tmp_path) | {"task_default_queue": key.replace(":", "-")}
    settings["accept_content"] = ["yaml", "json"]
    with Celery("sender", set_as_current=False) as app:
        app.conf.update(settings)
        env = {jobs.MORE: json.dumps(settings)}
        name = "tests.celery_dflock.jobs"
        with CheckedWorker(tmp_path, app=name, pool="solo", concurrency=1, env=env) as worker:
            worker.wait_ready()
            with cluster.lock(key):
                # Longer than the worker takes to see that it is to end.
                kwargs = {"key": key, "seconds": 5}
                sent = app.send_task("parked", kwargs=kwargs, serializer="yaml")
                cluster.wait_waiters(key, 1)
            cluster.wait_event("start", sent)
            worker.stop(PATIENCE)
        assert [event["error"] for event in cluster.events(what="end", id=sent.id)] == [None]
        assert sent.get(timeout=PATIENCE) == sent.id
