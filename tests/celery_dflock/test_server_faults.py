"""Lock servers fail under a stream of tasks: none is lost, and none runs without its lock."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Task
from celery.result import AsyncResult

from celery_dflock import LockLostError
from dflockd.sharding import stable_hash_shard
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Event
from tests.stopping import stopped

SERVERS = 3
KEYS_EACH = 2
WORK = 0.04
FAULTY = 1
"""Which of the servers fails."""

Fault = Callable[[LockServer], None]


@pytest.fixture(scope="module")
def servers(cluster: Cluster) -> Iterator[list[LockServer]]:
    with contextlib.ExitStack() as running:
        yield [
            running.enter_context(LockServer(cluster.directory, name=f"shard-{number}"))
            for number in range(SERVERS)
        ]


@pytest.fixture(scope="module")
def two_workers(cluster: Cluster, servers: list[LockServer]) -> Iterator[list[Worker]]:
    """Both serve the queue `faults`."""
    addresses = ",".join(server.address for server in servers)
    with contextlib.ExitStack() as running:
        both = [
            running.enter_context(cluster.worker(name, queues="faults", servers=addresses))
            for name in ("faults-1", "faults-2")
        ]
        for worker in both:
            worker.wait_ready()
        yield both


@pytest.fixture(autouse=True)
def all_run(two_workers: list[Worker], servers: list[LockServer]) -> None:
    """Whatever became of the test before."""
    for server in servers:
        if not server.running:
            server.start()


class Stream:
    """Tasks on some keys of each server, sent in no order."""

    def __init__(self, cluster: Cluster, name: str, task: Task, number: int, seed: int = 5) -> None:
        """Send the first of them."""
        names = (f"{name}:{count}" for count in itertools.count())
        by_server: list[list[str]] = [[] for _ in range(SERVERS)]
        while any(len(keys) < KEYS_EACH for keys in by_server):
            key = next(names)
            keys = by_server[stable_hash_shard(key, SERVERS)]
            if len(keys) < KEYS_EACH:
                keys.append(key)
        self.keys = by_server
        self._cluster = cluster
        self._task = task
        self._dice = random.Random(seed)
        every = list(itertools.chain(*by_server))
        self.sent: dict[str, list[AsyncResult]] = {key: [] for key in every}
        self.send(number)

    def send(self, number: int) -> list[AsyncResult]:
        """Send so many more; those that one of the faulty server's locks is for."""
        calls = list(self.sent) * (number // len(self.sent))
        self._dice.shuffle(calls)
        faulty = []
        for key in calls:
            sent = self._cluster.send(self._task, key, seconds=WORK, queue="faults")
            self.sent[key].append(sent)
            if key in self.keys[FAULTY]:
                faulty.append(sent)
        return faulty

    @property
    def healthy(self) -> list[str]:
        return [key for key in self.sent if key not in self.keys[FAULTY]]

    def results(self) -> list[AsyncResult]:
        return [result for results in self.sent.values() for result in results]

    def who_asks(self) -> list[str] | None:
        """Which tasks have asked the faulty server and have no lock yet."""
        asked, begun = (
            {event["id"] for event in self._cluster.events(what=what)}
            for what in ("asked", "start")
        )
        of_faulty = (result.id for key in self.keys[FAULTY] for result in self.sent[key])
        return [each for each in of_faulty if each in asked - begun] or None

    def starts(self) -> list[Event]:
        """In the order of time."""
        starts = [
            event for event in self._cluster.events(what="start") if event["key"] in self.sent
        ]
        return sorted(starts, key=lambda event: event["at"])

    def ended(self) -> list[Event]:
        return [event for event in self._cluster.events(what="end") if event["key"] in self.sent]

    def wait_ended(self, number: int) -> None:
        def probe() -> bool | None:
            return len(self.ended()) >= number or None

        self._cluster.wait(probe, f"{number} tasks to have ended")

    def wait_all_of(self, keys: list[str]) -> None:
        number = sum(len(self.sent[key]) for key in keys)

        def probe() -> bool | None:
            return sum(event["key"] in keys for event in self.ended()) >= number or None

        self._cluster.wait(probe, f"all {number} tasks of {keys} to have ended")

    def assert_nothing_is_lost(self, seconds: float = PATIENCE) -> None:
        for result in self.results():
            assert result.get(timeout=seconds) == result.id
        done = [event["id"] for event in self.ended() if event["error"] is None]
        assert sorted(done) == sorted(result.id for result in self.results()), "each once"

    def overlaps(self) -> list[float]:
        """For how long two ran at once, each time.

        Fails if one ran without a lock, or if the later of two did not have the larger fence.
        """
        ends: dict[tuple[str, int], float] = {}
        for event in self.ended():
            ends[event["id"], event["retries"]] = event["at"]
        found = []
        for key in self.sent:
            runs = [event for event in self.starts() if event["key"] == key]
            fences = [run["fence"] for run in runs]
            assert None not in fences, "it ran unlocked"
            assert all(one < other for one, other in itertools.pairwise(fences))
            for one, other in itertools.combinations(runs, 2):
                over = ends[one["id"], one["retries"]] - other["at"]
                if over > 0:
                    found.append(over)
        return found


def test_one_of_three_is_down(cluster: Cluster, servers: list[LockServer], key: str) -> None:
    stream = Stream(cluster, key, jobs.patient, 48)
    stream.wait_ended(12)

    servers[FAULTY].kill()
    waiting = stream.send(48)
    stream.wait_all_of(stream.healthy)
    for each in waiting:
        cluster.wait_event("requeued", each)
    assert not any(cluster.events(what="start", id=each.id) for each in waiting)
    servers[FAULTY].start()

    stream.assert_nothing_is_lost()
    assert not stream.overlaps()


def test_one_of_three_is_slow(cluster: Cluster, servers: list[LockServer], key: str) -> None:
    stream = Stream(cluster, key, jobs.patient, 30)
    stream.wait_ended(8)

    with stopped(servers[FAULTY]):
        stream.send(30)
        cluster.wait(stream.who_asks, "somebody who asks it")
        time.sleep(3)
        assert stream.who_asks()

    stream.assert_nothing_is_lost()
    assert not stream.overlaps()


def test_all_three_are_restarted(
    cluster: Cluster, servers: list[LockServer], gate: Path, key: str
) -> None:
    """Without a state directory they forget their locks; who holds one learns of it at once."""
    long = cluster.send(jobs.stubborn, f"{key}:long", gate=str(gate), queue="faults")
    cluster.wait_event("start", long)
    stream = Stream(cluster, key, jobs.stubborn, 60)
    stream.wait_ended(8)

    for server in servers:
        server.kill()
    for server in servers:
        server.start()

    end = cluster.wait_event("end", long)  # its lease would not end so soon
    assert end["error"] == "LockLostError"
    gate.touch()
    assert long.get(timeout=PATIENCE) == long.id, "autoretry_for=LockLostError"
    stream.assert_nothing_is_lost()
    stream.overlaps()  # until the first of two knows that it has lost its lock


def test_silent_for_longer_than_the_lease(
    cluster: Cluster, servers: list[LockServer], key: str
) -> None:
    server = servers[stable_hash_shard(key, SERVERS)]
    sent = cluster.send(jobs.short, key, seconds=jobs.LONG, queue="faults")
    cluster.wait_event("start", sent)

    with stopped(server):
        end = cluster.wait_event("end", sent)  # it does not wait for the server to say so
        following = cluster.send(jobs.patient, key, queue="faults")

    with pytest.raises(LockLostError):
        sent.get(timeout=PATIENCE)
    assert following.get(timeout=PATIENCE) == following.id
    assert cluster.wait_event("start", following)["at"] > end["at"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails(cluster: Cluster, servers: list[LockServer], key: str, seed: int) -> None:
    dice = random.Random(seed)
    stream = Stream(cluster, key, jobs.stubborn, 1200, seed)
    until = time.monotonic() + 40
    while time.monotonic() < until:
        server = dice.choice(servers)
        if dice.random() < 0.5:
            with stopped(server):
                time.sleep(dice.uniform(0, 3))
        else:
            server.kill()
            time.sleep(dice.choice((0, dice.uniform(0, 2))))
            server.start()
        time.sleep(dice.uniform(0, 1))

    stream.assert_nothing_is_lost(60)
    stream.overlaps()
