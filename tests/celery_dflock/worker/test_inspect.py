"""``celery inspect dflock``: which locks the tasks of a worker hold or wait for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult
from celery.utils.nodenames import gethostname

from dflockd.sharding import stable_hash_shard
from examples.demo.stage import ROOT, LockServer, Worker
from tests import forkserver
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.pace import Pace
from tests.stopping import stopped

Row = dict[str, Any]

NODE = f"inspected@{gethostname()}"


@pytest.fixture(scope="module")
def second_server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="inspected-second") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def worker(cluster: Cluster, second_server: LockServer) -> Iterator[Worker]:
    servers = f"{cluster.lock_server.address},{second_server.address}"
    with cluster.ready("inspected", servers=servers, concurrency=4) as worker:
        yield worker


def key_on(index: int, key: str) -> str:
    """A key of the server with this index, of two."""
    names = (f"{key}:{number}" for number in range(100))
    return next(name for name in names if stable_hash_shard(name, 2) == index)


def send(cluster: Cluster, task: Any, key: str, gate: Path) -> Any:
    return cluster.send(task, key, gate=str(gate), queue="inspected")


def ask() -> list[Row]:
    inspect = jobs.app.control.inspect([NODE], timeout=PATIENCE, limit=1)
    rows: list[Row] = inspect._request("dflock")[NODE]
    return rows


def test_holder_and_waiters(cluster: Cluster, gate: Path, key: str) -> None:
    key = key_on(0, key)
    holder = send(cluster, jobs.patient, key, gate)
    start = cluster.wait_event("start", holder)
    waiters = []
    for number in (1, 2):
        waiters.append(send(cluster, jobs.patient, key, gate))
        cluster.wait_waiters(key, number)

    first, *others = sorted(ask(), key=lambda row: row.get("place", 0))

    assert first.pop("held_s") >= 0
    assert 0 < first.pop("lease_expires_in_s") <= jobs.patient.lock_ttl
    common = {"task": "patient", "key": key}
    assert first == {**common, "id": holder.id, "state": "holds", "fence": start["fence"]}
    assert all(row.pop("waited_s") >= 0 for row in others)
    assert others == [
        {**common, "id": waiter.id, "state": "waits", "place": place}
        for place, waiter in enumerate(waiters, 1)
    ]
    gate.touch()
    for each in (holder, *waiters):
        each.get(timeout=PATIENCE)


def test_semaphores_and_several_keys(cluster: Cluster, gate: Path, key: str) -> None:
    sent = [send(cluster, jobs.by_twos, key, gate) for _ in range(2)]
    both = send(cluster, jobs.two_keys, key, gate)
    for each in (*sent, both):
        cluster.wait_event("start", each)

    rows = ask()

    assert {row["state"] for row in rows} == {"holds"}
    held = sorted((row["id"], row["key"]) for row in rows)
    assert held == sorted(
        [(each.id, key) for each in sent] + [(both.id, f"{key}:a"), (both.id, f"{key}:b")]
    )
    gate.touch()
    for each in (*sent, both):
        each.get(timeout=PATIENCE)


def test_groups(cluster: Cluster, gate: Path, key: str) -> None:
    key = key_on(0, key)

    def send_of(tenant: str) -> AsyncResult:
        headers = {"dflock": {"lock_group": f"tenant:{tenant}"}}
        given: dict[str, Any] = {"gate": str(gate), "queue": "inspected", "headers": headers}
        return cluster.send(jobs.patient, key, **given)

    sent = [send_of("0")]
    cluster.wait_event("start", sent[0])
    sent.append(send_of("1"))
    cluster.wait_waiters(key, 1)
    rows = {row["state"]: row for row in ask()}
    assert rows["holds"]["group"] == "tenant:0"
    assert (rows["waits"]["group"], rows["waits"]["place"]) == ("tenant:1", 1)
    gate.touch()
    for each in sent:
        each.get(timeout=PATIENCE)


def test_rates(cluster: Cluster, gate: Path, key: str) -> None:
    key = key_on(0, key)
    headers = {"dflock": {"lock_rate": [1, 1], "lock_limit": 2}}
    given: dict[str, Any] = {"gate": str(gate), "queue": "inspected", "headers": headers}
    sent = [cluster.send(jobs.patient, key, **given) for _ in range(2)]
    cluster.wait_event("start", sent[0])
    rows = ask()
    assert rows
    assert all(re.match("next in |1 of 1 free|next when", row["rate"]) for row in rows)
    gate.touch()
    for each in sent:
        each.get(timeout=PATIENCE)


def test_tasks_without_a_lock_and_locks_of_others(cluster: Cluster, gate: Path, key: str) -> None:
    plain = send(cluster, jobs.plain, key, gate)
    cluster.wait_event("start", plain)
    with cluster.lock(key):
        assert ask() == []
    gate.touch()
    plain.get(timeout=PATIENCE)


def test_a_server_that_does_not_answer(
    cluster: Cluster, second_server: LockServer, gate: Path, key: str
) -> None:
    sent = [send(cluster, jobs.patient, key_on(index, key), gate) for index in (0, 1)]
    for each in sent:
        cluster.wait_event("start", each)
    with stopped(second_server), Pace() as pace:
        rows = ask()

    [held] = [row for row in rows if "error" not in row]
    assert held["id"] == sent[0].id
    [failed] = [row for row in rows if "error" in row]
    assert failed == {"server": second_server.address, "error": "no answer in time"}
    assert pace.seconds < 5, "the worker is not held up"
    gate.touch()
    for each in sent:
        each.get(timeout=PATIENCE)


def celery(*arguments: str) -> str:
    command = [sys.executable, "-m", "celery", "-A", "tests.celery_dflock.jobs", *arguments]
    done = forkserver.run(command, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_on_the_command_line(cluster: Cluster, gate: Path, key: str) -> None:
    key = key_on(0, key)
    sent = send(cluster, jobs.patient, key, gate)
    cluster.wait_event("start", sent)
    [row] = json.loads(celery("inspect", "dflock", "-d", NODE, "--json"))[NODE]
    assert (row["id"], row["key"], row["state"]) == (sent.id, key, "holds")
    gate.touch()
    sent.get(timeout=PATIENCE)


def test_it_is_listed() -> None:
    # An app that does not import the plugin.
    listed = subprocess.run(
        [sys.executable, "-m", "celery", "inspect", "--list"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    ).stdout
    assert "dflock Locks that the worker's tasks hold or wait for." in " ".join(listed.split())
