"""The lock server, or the way to it, falls silent at the very moment of a turn."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Task
from celery.result import AsyncResult

from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.worker import standing
from tests.celery_dflock.worker.waiting import assert_in_order, ids, present, turns
from tests.dflockd.proxy import Proxy
from tests.effort import more
from tests.pace import Pace
from tests.stopping import stopped

TURN = 2
"""Seconds after which others may go first."""

SOON = 8.0
"""Seconds, of which a pause of a requeue takes a few, and the end of a timeout minutes."""

SILENCE = 30.0
"""Seconds of half a minute."""


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="silent-locks") as server:
        yield server


@pytest.fixture
def proxy(server: LockServer) -> Iterator[Proxy]:
    """The way to the server."""
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def send(cluster: Cluster, server: LockServer, worker: Worker, key: str, task: Task) -> AsyncResult:
    """Send a task, and wait until it has its position behind the others."""
    lock = cluster.lock(key, server)
    number = len(present(lock))
    sent = cluster.send(task, key, queue=worker.name)
    cluster.wait(lambda: len(present(lock)) > number or None, "its position")
    return sent


def wait_told(cluster: Cluster, server: LockServer, key: str) -> None:
    lock = cluster.lock(key, server)
    cluster.wait(lambda: any(each["told"] for each in present(lock)) or None, "its turn")


def let_pass(cluster: Cluster, seconds: float) -> None:
    until = time.monotonic() + seconds
    cluster.wait(lambda: time.monotonic() > until or None, f"{seconds} s")


def finish(
    cluster: Cluster, server: LockServer, key: str, sent: list[AsyncResult], late: int = 0
) -> float:
    """All that were sent run once, in order but for so many; return how long that took."""
    with Pace() as pace:
        assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    cluster.wait_free(key, server)
    assert_in_order(turns(cluster, key, sent), late)
    return pace.seconds


@pytest.mark.parametrize("seconds", [0.3, 3, more(8), more(13)])
def test_a_server_that_stops_at_a_turn(
    cluster: Cluster, server: LockServer, key: str, gate: Path, seconds: float
) -> None:
    """For less than the lease of a second and the turn of two, and for more."""
    name = f"stops-{10 * seconds:.0f}"
    with cluster.worker(name, servers=server.address, app=standing.APP) as worker:
        cluster.wait_ready(worker)
        held = cluster.lock(key, server)
        assert held.acquire()
        sent = [send(cluster, server, worker, key, jobs.parked_lease) for _ in range(4)]
        with standing.standing(cluster, worker, gate):
            held.release()
            wait_told(cluster, server, key)
            os.kill(server.pid, signal.SIGSTOP)
        try:
            let_pass(cluster, seconds)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert finish(cluster, server, key, sent, late=int(seconds > TURN)) < SOON
    requeued = {each["id"] for each in cluster.events(what="requeued", key=key)}
    assert requeued <= ({sent[0].id} if seconds > TURN else set())


@pytest.mark.parametrize("rounds", [2, more(40)])
def test_a_server_that_stops_somewhere_at_a_turn(
    cluster: Cluster, server: LockServer, key: str, rounds: int
) -> None:
    """On whichever side of it: at once after the lock is free, and a little later."""
    with cluster.ready(f"stops-about-{rounds}", servers=server.address) as worker:
        for number in range(rounds):
            name = f"{key}-{number}"
            held = cluster.lock(name, server)
            assert held.acquire()
            sent = [send(cluster, server, worker, name, jobs.parked_lease) for _ in range(4)]
            held.release()
            let_pass(cluster, number * 0.02 / rounds)
            with stopped(server):
                let_pass(cluster, 0.3)
            assert finish(cluster, server, name, sent) < SOON


@pytest.mark.parametrize("way", ["there", more("vanished")])
@pytest.mark.parametrize("again", [1, more(None)])
def test_the_way_to_the_server_falls_silent_while_the_worker_asks(
    cluster: Cluster, server: LockServer, proxy: Proxy, key: str, way: str, again: int | None
) -> None:
    """Something between them says that all is well, or nobody is there. New connections work."""
    env = {} if again is None else {jobs.ASK_AGAIN: str(again)}
    name, servers = f"half-open-{way}-{again}".lower(), f"127.0.0.1:{proxy.port}"
    with cluster.ready(name, servers=servers, env=env) as worker:
        with cluster.lock(key, server):
            sent = [send(cluster, server, worker, key, jobs.parked) for _ in range(4)]
            if way == "there":
                proxy.swallow()
            else:
                proxy.vanish()
        # The turn that it does not hear of is lost until that connection has ended at the server, too.
        late = int(way == "vanished")
        limit = SILENCE if late or again is None else SOON
        assert finish(cluster, server, key, sent, late) < limit
        assert not cluster.events(what="requeued", key=key)


@pytest.mark.parametrize(
    ("seconds", "how"),
    [
        (1.9, "late"),
        (2.1, "late"),
        *(more(seconds, how) for seconds in (1.9, 2.1) for how in ("cut", "stopped")),
        *(more(seconds, how) for seconds in (9.9, 10.1, 25) for how in ("late", "cut", "stopped")),
    ],
)
def test_an_answer_to_who_wants_a_position(
    cluster: Cluster, server: LockServer, proxy: Proxy, key: str, seconds: float, how: str
) -> None:
    """It comes just within two seconds or not, the connection breaks, or the server stands still.

    Up to then nobody knows whether there is a position. It is asked for once more, in order, unless
    nothing is said for much longer: then no server is available.
    """
    name = f"doubts-{how}-{10 * seconds:.0f}"
    with cluster.ready(name, servers=f"127.0.0.1:{proxy.port}") as worker:
        first = cluster.send(jobs.parked, key, queue=worker.name)
        assert first.get(timeout=PATIENCE) == first.id  # it leaves a connection that is open
        held = cluster.lock(key, server, timeout=PATIENCE, ttl=jobs.LONG)
        with held, silent(proxy, server, how):
            sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(4)]
            worker.wait_log(f"[{sent[-1].id}] received")
            let_pass(cluster, seconds)
        for each in sent:
            assert each.get(timeout=PATIENCE) == each.id
        cluster.wait_free(key, server)
    order = turns(cluster, key, [first, *sent])
    assert sorted(order) == list(range(5))
    if seconds < 5:
        assert order == sorted(order)
        assert not cluster.events(what="requeued", key=key)


@contextmanager
def silent(proxy: Proxy, server: LockServer, how: str) -> Iterator[None]:
    """The server hears what is asked, and what it says is late; or it stands still."""
    if how == "stopped":
        os.kill(server.pid, signal.SIGSTOP)
    else:
        proxy.withhold_replies()
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
        if how == "cut":
            proxy.cut(reset=True)
        proxy.pass_on()
