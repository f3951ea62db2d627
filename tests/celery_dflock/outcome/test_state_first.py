"""What a run stores of its task, it stores before the next run can begin."""

from __future__ import annotations

import pytest
from celery import states

from tests.celery_dflock import jobs
from tests.celery_dflock.outcome.stalling import STALLED, BrokenBackend, StallingBackend
from tests.celery_dflock.processes import PATIENCE, Cluster


def results_of(backend: type) -> str:
    url: str = jobs.app.conf.result_backend
    return f"{backend.__module__}:{backend.__name__}+{url.removeprefix('redis+')}"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
@pytest.mark.parametrize("stalled", ["results", "task_requeued", "task_retry"])
def test_a_requeue_overwrites_no_final_state(
    cluster: Cluster, key: str, stalled: str, pool: str
) -> None:
    env = {STALLED: stalled, jobs.RESULTS: results_of(StallingBackend)}
    with cluster.worker(f"stalled-{stalled}-{pool}", env=env, pool=pool) as worker:
        cluster.wait_ready(worker)
        with cluster.lock(key):
            sent = cluster.send(jobs.requeued, key, then="raise", queue=worker.name)
            cluster.wait_event("requeued", sent)
        with pytest.raises(ValueError, match="as asked"):
            sent.get(timeout=PATIENCE)
        worker.wait_log(f"[{sent.id}] retry: requeued")
    # The worker has ended: all that its runs had to say is said.
    assert jobs.app.AsyncResult(sent.id).state == states.FAILURE  # asked anew, not remembered


def test_a_state_that_cannot_be_stored_keeps_no_message_back(cluster: Cluster, key: str) -> None:
    with cluster.worker("broken", env={jobs.RESULTS: results_of(BrokenBackend)}) as worker:
        cluster.wait_ready(worker)
        with cluster.lock(key):
            sent = cluster.send(jobs.requeued, key, queue=worker.name)
            cluster.wait_event("requeued", sent)
        assert sent.get(timeout=PATIENCE) == sent.id
        worker.wait_log("is requeued, and its state is not stored: ValueError('as asked')")
