"""The broker waits for a shorter time than a task does, for its pause or in the consumer."""

from __future__ import annotations

from collections import Counter

from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster

VISIBILITY = 6
"""Seconds. Half of it is the pause; a machine that is busy elsewhere may be late by the other half."""
LONG_PAUSE = {"lock_requeue": {"base": 8.0, "cap": 8.0}}
TASKS = (jobs.requeued, jobs.late_patient, jobs.parked_again, jobs.parked)


def test_one_message_stays_one(cluster: Cluster, key: str) -> None:
    """Each delivery of a message that waits would go round by itself: one became hundreds."""
    headers = {
        jobs.requeued: LONG_PAUSE,
        jobs.late_patient: {**LONG_PAUSE, "lock_timeout": 0},
        jobs.parked_again: LONG_PAUSE,
        jobs.parked: {},
    }
    with cluster.ready("impatient-broker", env={jobs.VISIBILITY: str(VISIBILITY)}) as worker:
        with cluster.lock(key):
            sent = {
                task: cluster.send(task, key, queue=worker.name, headers={"dflock": headers[task]})
                for task in TASKS
            }
            again = f"[{sent[jobs.parked].id}] received"
            for task in TASKS[:3]:
                cluster.wait_event("requeued", sent[task], 3)
            cluster.wait(lambda: worker.log_text().count(again) > 2 or None, "its wait to be cut")
        for each in sent.values():
            assert each.get(timeout=PATIENCE) == each.id
        cluster.wait_free(key)
        assert "delivered again" not in worker.log_text()
    for each in sent.values():
        assert len(cluster.events(what="start", id=each.id)) == 1
        attempts = Counter(e["attempt"] for e in cluster.events(what="requeued", id=each.id))
        assert set(attempts.values()) <= {1}, "there were several of it"
    assert not cluster.events(what="requeued", id=sent[jobs.parked].id)
