"""Roll-outs of ``lock_conflict="supersede"``: where a worker or a lock server is still of 0.1.

The newest wins among those that are new. Whoever is not takes no part in it: nobody stops it, it
stops nobody, and two never run at once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.celery_dflock import mixed
from tests.celery_dflock.upgrade import releases
from tests.celery_dflock.upgrade.releases import Release, Stage
from tests.celery_dflock.upgrade.test_roll_outs import release, stage

__all__ = ["release", "stage"]

pytestmark = pytest.mark.timeout(releases.BUILD_BOUND + 60)

NEVER = "/nonexistent/gate"


def state(task_id: str) -> str:
    return str(mixed.app.AsyncResult(task_id).state)


@pytest.mark.parametrize("server", ["new"])
def test_a_worker_of_0_1_takes_no_part(
    stage: Stage, release: dict[str, Release], tmp_path: Path
) -> None:
    sender = stage.sender(release["new"])

    def send(where: str, key: str, **more: Any) -> str:
        headers = more.pop("headers", {})
        queue = stage.queue(where)
        return sender.send("latest", {"key": key, **more}, queue=queue, headers=headers)

    old, new = stage.worker(release["old"], "old"), stage.worker(release["new"], "new")
    for worker in (old, new):
        worker.wait_ready()

    # Nobody stops what runs there, and it stops nobody: first come, first served.
    gates = [tmp_path / name for name in "ab"]
    at_old = send("old", "k", gate=str(gates[0]))
    stage.wait_events("begin", at_old)
    at_new = send("new", "k", gate=str(gates[1]))
    stage.wait_waiters("k", 1)
    assert stage.events("end", at_old) == []
    gates[0].touch()
    stage.wait_events("begin", at_new)
    later = send("old", "k")
    stage.wait_waiters("k", 1)
    assert stage.events("end", at_new) == []
    gates[1].touch()
    stage.wait_ended(at_old, at_new, later)
    assert [stage.result(each) for each in (at_old, at_new, later)] == [at_old, at_new, later]

    # Its requeue keeps the number of a message: at the next worker it is as old as it is.
    held = stage.held("n")
    older = send("old", "n", headers={"dflock": {"lock_timeout": 0}})
    stage.wait_events("requeued", older)
    stage.settle(old, "old", 1)
    os.kill(old.pid, signal.SIGTERM)
    stage.wait(lambda: not old.running or None, "the worker to end")
    held.close()
    gate = tmp_path / "c"
    newest = send("new", "n", gate=str(gate))
    stage.wait_events("begin", newest)
    stage.worker(release["new"], "old").wait_ready()
    assert stage.result(older)["dflock"] == "skipped"
    assert stage.events("end", newest) == []
    gate.touch()
    assert stage.result(newest) == newest
    stage.judge()


@pytest.mark.parametrize("server", ["old"])
def test_a_lock_server_of_0_1_is_waited_for_until_it_is_upgraded(
    stage: Stage, release: dict[str, Release], gate: Path
) -> None:
    sender, queue = stage.sender(release["new"]), {"queue": stage.queue("new")}
    worker = stage.worker(release["new"], "new")
    worker.wait_ready()
    # Both of its processes find out that the server knows no owners.
    plain = [sender.send("patient", {"key": key, "gate": str(gate)}, **queue) for key in "ab"]
    stage.wait_events("begin", *plain)
    gate.touch()
    stage.wait_ended(*plain)
    first = sender.send("latest", {"key": "k", "gate": NEVER}, **queue)
    stage.wait_events("requeued", first, number=2)
    assert stage.events("begin", first) == []
    lines = [line for line in worker.log_text().splitlines() if "WARNING" in line]
    assert len(lines) == 1, "one line, however often it is tried"
    assert "the server is too old to tell which task is the newest: upgrade it" in lines[0]

    stage.server.replace(release["new"])

    # The same processes take part from then on.
    stage.wait_events("begin", first)
    newest = sender.send("latest", {"key": "k"}, **queue)
    assert stage.result(newest) == newest
    stage.wait(lambda: state(first) == "REVOKED" or None, "the state REVOKED")
    assert not mixed.violations(mixed.history(stage.record))
