"""Every pool: the cells of the table of outcomes, and greenlets by the dozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from celery.exceptions import TimeLimitExceeded

from examples.demo.stage import ROOT, LockServer
from tests.celery_dflock import jobs
from tests.celery_dflock.outcome.table.expected import check, find
from tests.celery_dflock.outcome.table.side import ENDED, POOLS, Side
from tests.celery_dflock.outcome.table.trials import OUTCOMES
from tests.celery_dflock.processes import PATIENCE, Cluster

GREEN = ("gevent", "eventlet")

# The cells of the normal suite: where the pools differ, and what other tests do not try. The two
# kinds of greenlets go through the same code: what is slow there, gevent shows.
QUICK = {
    *(("success", pool) for pool in ("threads", "solo", "gevent", "eventlet", "eager")),
    *(("exception", pool) for pool in (*GREEN, "eager")),
    *(("retry", pool) for pool in (*GREEN, "eager")),
    *(("terminate-waiting", pool) for pool in GREEN),
    *(("terminate", pool) for pool in GREEN),
    ("hard", "gevent"),
    ("lost-computing", "solo"),
    *(("lost-waiting", pool) for pool in GREEN),
    *(("superseded-computing", pool) for pool in ("threads", "eager")),
}

GEVENT_AT_LEAST = ["gevent", pytest.param("eventlet", marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="pools") as server:
        yield server


@pytest.fixture(scope="module")
def sides(cluster: Cluster, server: LockServer) -> Iterator[dict[str, Side]]:
    """A side for each pool. Their workers start when they are needed; those of greenlets now."""
    sides = {pool: Side(pool, cluster, server) for pool in POOLS}
    try:
        for pool in GREEN:
            sides[pool].start()
        yield sides
    finally:
        for side in sides.values():
            side.stop()


@pytest.fixture(params=GREEN)
def green(sides: dict[str, Side], request: pytest.FixtureRequest) -> Side:
    side = sides[request.param]
    side.ready()
    return side


@pytest.mark.parametrize(
    ("outcome", "pool"),
    [
        pytest.param(outcome, pool, marks=() if (outcome, pool) in QUICK else pytest.mark.soak)
        for outcome in OUTCOMES
        for pool in POOLS
    ],
)
def test_outcome(sides: dict[str, Side], outcome: str, pool: str) -> None:
    check(outcome, pool, find(outcome, sides[pool]))


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_bodies_that_a_base_calls_twice_or_elsewhere_have_their_lock(
    cluster: Cluster, sides: dict[str, Side], pool: str, key: str
) -> None:
    side = sides[pool]
    side.ready()
    twice = [cluster.send(jobs.twice, key, seconds=0.1, queue=side.name) for _ in range(2)]
    moved = cluster.send(jobs.moved, key, queue=side.name)

    assert [each.get(timeout=PATIENCE) for each in twice] == [each.id for each in twice]
    assert moved.get(timeout=PATIENCE) == [key, True]
    events = [e for e in cluster.events(key=key) if e["what"] in ("start", "end")]
    assert [e["what"] for e in events] == ["start", "end"] * 4
    assert events[0]["id"] == events[2]["id"] != events[4]["id"] == events[6]["id"]
    assert all(event["held"] for event in events[1::2])


def test_greenlets_take_turns(cluster: Cluster, green: Side, key: str) -> None:
    sent = [cluster.send(jobs.patient, key, seconds=0.02, queue=green.name) for _ in range(20)]

    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]

    events = [e for e in cluster.events(key=key) if e["what"] in ("start", "end")]
    assert [e["what"] for e in events] == ["start", "end"] * 20
    assert all(one["id"] == two["id"] for one, two in zip(events[::2], events[1::2], strict=True))
    fences = [event["fence"] for event in events[::2]]
    assert fences == sorted(fences)
    assert all(event["held"] for event in events[1::2])


@pytest.mark.parametrize("green", GEVENT_AT_LEAST, indirect=True)
def test_short_leases_are_renewed_beside_busy_greenlets(
    cluster: Cluster, green: Side, key: str
) -> None:
    lease = jobs.short.lock_ttl
    sent = [
        cluster.send(
            jobs.short,
            f"{key}:{number}",
            queue=green.name,
            **({"then": "busy"} if number % 2 else {"seconds": 1.2 * lease}),
        )
        for number in range(10)
    ]

    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]

    ends = [cluster.wait_event("end", each) for each in sent]
    assert all(end["held"] for end in ends)
    starts = [cluster.wait_event("start", each) for each in sent]
    assert all(end["at"] - start["at"] > lease for start, end in zip(starts, ends, strict=True))


def test_time_limit_of_a_waiting_greenlet(
    cluster: Cluster, sides: dict[str, Side], key: str
) -> None:
    green = sides["gevent"]
    green.ready()
    with cluster.lock(key, green.server):
        sent = cluster.send(jobs.patient, key, time_limit=1, queue=green.name)
        cluster.wait_waiters(key, 1, green.server)

        with pytest.raises(TimeLimitExceeded):
            sent.get(timeout=PATIENCE)

        cluster.wait_waiters(key, 0, green.server)
    assert not cluster.events(what="start", id=sent.id)
    following = cluster.send(jobs.patient, key, queue=green.name)
    assert following.get(timeout=PATIENCE) == following.id


@pytest.mark.parametrize("green", GEVENT_AT_LEAST, indirect=True)
def test_a_dozen_waiting_greenlets_move_on(cluster: Cluster, green: Side, key: str) -> None:
    number = 12
    worker = green.worker
    assert worker is not None
    with cluster.lock(key, green.server):
        sent = [cluster.send(jobs.patient, key, queue=green.name) for _ in range(number)]
        cluster.wait_waiters(key, number, green.server)
        asked_at = time.monotonic()
        os.kill(worker.pid, signal.SIGTERM)
        cluster.wait_waiters(key, 0, green.server)
        cluster.wait(lambda: not worker.running or None, "the end of the worker", ENDED)
    requeued = cluster.events(what="requeued", key=key)
    # One may have come back to the worker while that had not stopped to take tasks.
    assert {event["id"] for event in requeued} == {each.id for each in sent}
    assert all(event["at"] > asked_at for event in requeued[:number])
    assert not cluster.events(what="start", key=key)

    green.ready()
    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]


# Without a worker: programs under monkey patches.

PATCHES = {
    "gevent": "import gevent.monkey; gevent.monkey.patch_all()",
    "eventlet": "import warnings; warnings.simplefilter('ignore')\n"
    "import eventlet; eventlet.monkey_patch()",
    "threads": "",
}

# The descriptor of the forgotten lock is closed while the renewal greenlet waits for it.
FORGOTTEN = """
import gc, sys, time
from dflockd.sync_client import DistributedLock

servers = [sys.argv[1]]
forgotten = DistributedLock("forgotten", 0, 30, servers)
kept = DistributedLock("kept", 0, 3, servers)
assert forgotten.acquire() and kept.acquire()
time.sleep(0.3)
del forgotten
gc.collect()
again = DistributedLock("forgotten", 5, 30, servers)
assert again.acquire()
time.sleep(4)
assert kept.held and again.held
assert kept.release() and again.release()
"""

INTERRUPTED = """
import sys, threading, time
from celery_dflock.exceptions import LockLostError
from celery_dflock.worker.interrupt import Interruptible

told = []

def run(number):
    try:
        with stretches[number]:
            begun[number].set()
            time.sleep(20)
    except LockLostError as error:
        told.append((number, error.key))
    time.sleep(0.1)  # and nothing comes later

stretches = [Interruptible() for _ in range(3)]
begun = [threading.Event() for _ in range(3)]
threads = [threading.Thread(target=run, args=[n]) for n in range(2)]
for thread in threads:
    thread.start()
for each in begun[:2]:
    assert each.wait(60)
assert stretches[1].interrupt(LockLostError("a", "gone"))
threads[1].join(5)
assert told == [(1, "a")] and threads[0].is_alive(), told
assert not stretches[1].interrupt(LockLostError("a", "gone"))

# The stretch ends between the interruption and its arrival.
with stretches[2]:
    assert stretches[2].interrupt(LockLostError("b", "gone"))
time.sleep(0.05)

assert stretches[0].interrupt(LockLostError("c", "gone"))
threads[0].join(5)
assert told == [(1, "a"), (0, "c")], told
"""


NEITHER = """
import sys
from celery_dflock.worker.interrupt import Interruptible

with Interruptible():
    assert not {"gevent", "eventlet"} & sys.modules.keys()
"""


@pytest.mark.parametrize("library", GEVENT_AT_LEAST)
def test_a_lock_that_is_forgotten_disturbs_no_other(server: LockServer, library: str) -> None:
    run_program(server, library, FORGOTTEN)


@pytest.mark.parametrize("library", GREEN)
def test_who_is_interrupted_is_the_one_that_was_meant(server: LockServer, library: str) -> None:
    run_program(server, library, INTERRUPTED)


def run_program(server: LockServer, library: str, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PATCHES[library] + program, server.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "unexpected error" not in done.stderr


def test_nothing_is_imported_for_threads(server: LockServer) -> None:
    run_program(server, "threads", NEITHER)
