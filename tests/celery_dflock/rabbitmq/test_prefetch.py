"""What waits in the consumer does not keep out what stands behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.celery_dflock.reconnects import lose_connections
from tests.celery_dflock.worker.waiting import ids, started
from tests.pace import Pace

MANY = 300


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_what_stands_behind_many_that_wait_is_received(
    make_bus: Callable[..., Bus], key: str, pool: str
) -> None:
    bus = make_bus("classic")
    cluster = bus.cluster
    with cluster.lock(key), bus.running("one", pool=pool, worker_prefetch_multiplier=1):
        for _ in range(MANY):
            bus.send(jobs.parked, key, ignore_result=True)
        last = bus.send(jobs.plain, key)
        with Pace() as pace:
            cluster.wait_event("start", last)

    assert pace.seconds < 5, "it took a second for every few of those before it"


@pytest.mark.parametrize("multiplier", [1, 4])
def test_as_many_wait_as_a_quorum_queue_lets_the_worker_receive_ahead(
    make_bus: Callable[..., Bus], key: str, multiplier: int
) -> None:
    bus = make_bus("quorum")
    cluster, room = bus.cluster, 2 * (multiplier - 1)
    with bus.running("one", worker_prefetch_multiplier=multiplier) as worker:
        line = worker.wait_log("cannot raise the prefetch count")
        assert f"of {2 * multiplier} prefetched messages {room} may wait" in line
        with cluster.lock(key):
            waiting = [bus.send(jobs.parked, key) for _ in range(12)]
            cluster.wait_waiters(key, room + 2)
            said = "in the consumer\n"  # on a thread of its own
            cluster.wait(lambda: worker.log_text().count(said) >= room or None, f"{room} of them")
            assert worker.log_text().count(said) == room
        for each in waiting:
            cluster.wait_event("end", each)


def test_a_worker_of_a_quorum_queue_that_grows_still_receives_others(
    make_bus: Callable[..., Bus], key: str, gate: Path
) -> None:
    """It receives no more than before: what waits in its consumer must not be all of that."""
    bus = make_bus("quorum")
    cluster = bus.cluster
    with bus.running("one", "--autoscale", "8,2", worker_prefetch_multiplier=4):
        grown = [bus.send(jobs.plain, f"{key}-grown", gate=str(gate)) for _ in range(6)]
        for each in grown:
            cluster.wait_event("start", each)
        with cluster.lock(key):
            waiting = [bus.send(jobs.parked_short, key) for _ in range(12)]
            others = [bus.send(jobs.plain, key) for _ in range(4)]
            gate.touch()
            with Pace() as pace:
                for each in others:
                    cluster.wait_event("start", each)
            assert pace.seconds < 10
        for each in waiting:
            assert each.get(timeout=PATIENCE) is not None


def test_the_prefetch_count_is_as_before_once_nobody_waits_after_a_reconnect(
    make_bus: Callable[..., Bus], key: str, tmp_path: object
) -> None:
    bus = make_bus("classic")
    cluster = bus.cluster
    gate = cluster.directory / f"gate-{key}"
    with bus.running("one", worker_prefetch_multiplier=4):
        running = [bus.send(jobs.plain, key, gate=str(gate)) for _ in range(2)]
        for each in running:
            cluster.wait_event("start", each)
        with cluster.lock(key):
            waiting = [bus.send(jobs.parked, key) for _ in range(5)]
            cluster.wait_waiters(key, 5)
            lose_connections(cluster, key, 5, bus.close_connections)
            gate.touch()
            more = [bus.send(jobs.plain, key) for _ in range(8)]
            for each in more:
                cluster.wait_event("end", each)
        for each in waiting:
            cluster.wait_event("end", each)
        assert sorted(started(cluster, key)) == sorted(ids([*running, *waiting, *more]))
        for each in [bus.send(jobs.plain, key) for _ in range(3)]:
            cluster.wait_event("end", each)
        # It is lowered once the last of them is acknowledged.
        cluster.wait(lambda: prefetch_counts(bus) == [8] or None, "the prefetch count of before")


def prefetch_counts(bus: Bus) -> list[int]:
    """Of the channels of workers, as the broker sees them."""
    said = bus.rabbitmq.evaluate(
        "[rabbit_channel:info(Each, [global_prefetch_count]) || Each <- rabbit_channel:list()]"
    )
    return [int(word) for word in re.findall(r"\d+", said) if word != "0"]
