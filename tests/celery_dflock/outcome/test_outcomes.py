"""However a task ends, its lock is free at once, as somebody finds who waits for it.

Its lease would free it only after `jobs.LONG`, and nobody here is as patient as that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import states
from celery.exceptions import TimeLimitExceeded

from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter

MakeWaiter = Callable[..., Waiter]

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize(
    ("then", "state"),
    [
        ("return", states.SUCCESS),
        ("raise", states.FAILURE),
        ("ignore", states.PENDING),
        ("reject", None),  # FAILURE since Celery 5.7, PENDING before
    ],
)
def test_ends_by_itself(
    cluster: Cluster, waiter: MakeWaiter, gate: Path, key: str, then: str, state: str | None
) -> None:
    sent = cluster.send(jobs.patient, key, then=then, gate=str(gate))
    cluster.wait_event("start", sent)
    other = waiter(key)
    cluster.wait_waiters(key, 1)
    assert not other.granted

    gate.touch()

    granted_at = other.wait_granted()
    end = cluster.wait_event("end", sent)
    assert granted_at > end["at"]
    assert end["held"]
    if state in states.READY_STATES:
        sent.get(timeout=PATIENCE, propagate=False)
    if state is not None:
        assert sent.state == state


@pytest.mark.parametrize(("task", "then"), [("patient", "retry once"), ("retried", "raise once")])
def test_retry(
    cluster: Cluster, waiter: MakeWaiter, gate: Path, key: str, task: str, then: str
) -> None:
    sent = cluster.send(jobs.app.tasks[task], key, then=then, gate=str(gate))
    first = cluster.wait_event("start", sent)
    other = waiter(key)
    cluster.wait_waiters(key, 1)

    gate.touch()

    granted_at = other.wait_granted()
    assert granted_at > cluster.wait_event("end", sent)["at"]
    # The retry stands in the queue like everybody else, and not in its own way.
    cluster.wait_waiters(key, 1)
    other.lock.release()
    second = cluster.wait_event("start", sent, 2)
    assert (first["retries"], second["retries"]) == (0, 1)
    assert second["fence"] > first["fence"]
    assert sent.get(timeout=PATIENCE) == 1


@pytest.mark.parametrize("task", ["skipped", "failed", "requeued"])
def test_a_retry_waits_for_the_run_that_sent_it(cluster: Cluster, key: str, task: str) -> None:
    sent = cluster.send(jobs.app.tasks[task], key, then="retry slowly")

    assert sent.get(timeout=PATIENCE) == "retried"

    second = cluster.wait_event("start", sent, 2)
    assert cluster.events(what="end", id=sent.id)[0]["at"] < second["at"]
    assert not cluster.events(what="requeued", id=sent.id)


def test_soft_time_limit(cluster: Cluster, waiter: MakeWaiter, key: str) -> None:
    sent = cluster.send(jobs.patient, key, seconds=jobs.LONG, soft_time_limit=1)
    cluster.wait_event("start", sent)

    granted_at = waiter(key).wait_granted()

    end = cluster.wait_event("end", sent)
    assert end["error"] == "SoftTimeLimitExceeded"
    assert granted_at > end["at"]


def test_hard_time_limit(cluster: Cluster, waiter: MakeWaiter, key: str) -> None:
    sent = cluster.send(jobs.patient, key, seconds=jobs.LONG, time_limit=1)
    start = cluster.wait_event("start", sent)

    granted_at = waiter(key).wait_granted()

    # The child is killed a moment after it has been asked to end.
    assert granted_at - start["at"] > 1 - 0.2
    with pytest.raises(TimeLimitExceeded):
        sent.get(timeout=PATIENCE)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_revoked(cluster: Cluster, waiter: MakeWaiter, key: str, how: str) -> None:
    sent = cluster.send(jobs.patient, key, seconds=jobs.LONG)
    cluster.wait_event("start", sent)
    other = waiter(key)
    cluster.wait_waiters(key, 1)

    assert not other.granted
    sent.revoke(terminate=True, signal=how)

    other.wait_granted()
    cluster.wait(lambda: sent.state == states.REVOKED or None, "the state REVOKED")


def test_process_killed(cluster: Cluster, key: str) -> None:
    sent = cluster.send(jobs.patient, key, seconds=jobs.LONG, queue="one")
    start = cluster.wait_event("start", sent)
    following = cluster.send(jobs.patient, key, queue="two")
    cluster.wait_waiters(key, 1)

    killed_at = time.monotonic()
    os.kill(start["pid"], signal.SIGKILL)

    next_start = cluster.wait_event("start", following)
    assert next_start["at"] > killed_at
    assert next_start["fence"] > start["fence"]
    assert not cluster.events(what="end", id=sent.id)


def test_worker_killed(cluster: Cluster, key: str) -> None:
    with cluster.ready("doomed", concurrency=1) as doomed:
        sent = cluster.send(jobs.patient, key, seconds=jobs.LONG, queue="doomed")
        start = cluster.wait_event("start", sent)
        following = cluster.send(jobs.patient, key)
        cluster.wait_waiters(key, 1)

        killed_at = time.monotonic()
        os.kill(doomed.pid, signal.SIGKILL)  # the main process; the kernel kills its children

        next_start = cluster.wait_event("start", following)
    assert next_start["at"] > killed_at
    assert next_start["fence"] > start["fence"]


def test_twice_its_lease(cluster: Cluster, waiter: MakeWaiter, key: str) -> None:
    lease = jobs.short.lock_ttl
    sent = cluster.send(jobs.short, key, seconds=2.1 * lease)
    start = cluster.wait_event("start", sent)

    # Had the lease ended once in between, it would have been granted then.
    granted_at = waiter(key).wait_granted()

    end = cluster.wait_event("end", sent)
    assert end["at"] - start["at"] > 2 * lease
    assert granted_at > end["at"]
    assert end["held"]
    assert sent.get(timeout=PATIENCE) == sent.id


# And whoever ends while it waits leaves the queue.


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_revoked_while_it_waits(cluster: Cluster, key: str, how: str) -> None:
    with cluster.lock(key):
        sent = cluster.send(jobs.patient, key)
        cluster.wait_waiters(key, 1)

        sent.revoke(terminate=True, signal=how)

        cluster.wait_waiters(key, 0)
        cluster.wait(lambda: sent.state == states.REVOKED or None, "the state REVOKED")
    assert not cluster.events(what="start", id=sent.id)


@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_time_limit_while_it_waits(cluster: Cluster, key: str, limit: str) -> None:
    with cluster.lock(key):
        sent = cluster.send(jobs.patient, key, **{limit: 1})
        cluster.wait_waiters(key, 1)

        sent.get(timeout=PATIENCE, propagate=False)

        assert sent.state == states.FAILURE
        assert "TimeLimitExceeded" in type(sent.result).__name__
        cluster.wait_waiters(key, 0)
    assert not cluster.events(what="start", id=sent.id)
    following = cluster.send(jobs.patient, key)
    assert following.get(timeout=PATIENCE) == following.id
