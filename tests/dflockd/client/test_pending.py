"""Many pending acquires, waited for by one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import pending
from dflockd.client.pending import PendingAcquire, PendingAcquires
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from dflockd.wire import Enqueue, Granted, Recovering, Release, Resume, Status, Wait, format_token
from examples.demo.stage import LockServer, wait_until
from tests.dflockd.scripted_server import ScriptedCluster

PATIENCE = 10.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pending")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[LockServer]:
    with LockServer(directory) as server:
        yield server


class Crowd:
    """Those who wait, and what they are told."""

    def __init__(self, server: LockServer | None) -> None:
        self.server = server
        self.told: Queue[tuple[str, int, errors.RemoteError | None]] = Queue()
        self.everybody: list[PendingAcquire] = []
        self.pending = PendingAcquires()

    def lock(self, key: str, ttl: int = 10) -> DistributedLock:
        assert self.server is not None
        return DistributedLock(key, PATIENCE, ttl, [self.server.address])

    def join(
        self,
        lock: DistributedLock,
        timeout: float | None = PATIENCE,
        unless: Callable[[], bool] | None = None,
    ) -> PendingAcquire:
        number = len(self.everybody)
        acquire = self.pending.join(
            lock,
            timeout,
            unless=unless,
            queued=lambda: self.told.put(("queued", number, None)),
            ended=lambda error: self.told.put(("ended", number, error)),
        )
        self.everybody.append(acquire)
        return acquire

    def hear(self, what: str) -> tuple[int, errors.RemoteError | None]:
        said, number, error = self.told.get(timeout=PATIENCE)
        assert said == what
        return number, error

    def hear_nothing(self) -> None:
        with pytest.raises(Empty):
            self.told.get(timeout=0.1)

    def wait_waiters(self, lock: DistributedLock, number: int) -> None:
        wait_until(
            lambda: len(lock.inspect()["waiters"]) == number or None,
            PATIENCE,
            lambda: f"not {number} waiters",
        )


@pytest.fixture
def crowd(server: LockServer) -> Iterator[Crowd]:
    crowd = Crowd(server)
    yield crowd
    for each in crowd.everybody:
        each.leave()
    crowd.pending.close()


def test_they_are_served_in_the_order_in_which_they_came(crowd: Crowd) -> None:
    holder = crowd.lock("order")
    before = threading.active_count()
    with holder:
        for number in range(50):
            crowd.join(crowd.lock("order"))
            assert crowd.hear("queued") == (number, None)
        assert threading.active_count() <= before + 1  # the reactor's
        crowd.wait_waiters(holder, 50)
    for number in range(50):
        assert crowd.hear("ended") == (number, None)
        acquire = crowd.everybody[number]
        assert acquire.lock.held
        acquire.leave()


def test_a_free_lock_is_held_and_renewed(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("free", ttl=1))
    assert crowd.hear("ended") == (0, None)
    until = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > until or None, PATIENCE, lambda: "")
    assert acquire.lock.held


def test_the_same_connection_can_be_used_for_the_key_again(crowd: Crowd) -> None:
    """While another has adopted what was granted on it."""
    acquire = crowd.join(crowd.lock("again"))
    assert crowd.hear("ended") == (0, None)
    token = acquire.lock.token
    assert token is not None
    other = crowd.lock("again")
    assert other.adopt(token)
    acquire.detach(5)
    crowd.join(crowd.lock("again"))
    assert crowd.hear("queued") == (1, None)
    assert other.release()
    assert crowd.hear("ended") == (1, None)


def test_it_ends_after_its_time(crowd: Crowd) -> None:
    with crowd.lock("late"):
        acquire = crowd.join(crowd.lock("late"), timeout=0.5)
        crowd.hear("queued")
        assert crowd.hear("ended") == (0, None)
        assert not acquire.lock.held


def test_who_leaves_lets_others_in(crowd: Crowd) -> None:
    with crowd.lock("leaving"):
        for _ in range(3):
            crowd.join(crowd.lock("leaving"))
            crowd.hear("queued")
        crowd.everybody[0].leave()
        crowd.wait_waiters(crowd.lock("leaving"), 2)
    assert crowd.hear("ended") == (1, None)
    crowd.everybody[1].leave()
    assert crowd.hear("ended") == (2, None)


def test_what_is_detached_outlives_its_acquire(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("detached"))
    crowd.hear("ended")
    token = acquire.lock.token
    assert token is not None
    acquire.detach(20)
    wait_until(lambda: not acquire.lock.held or None, PATIENCE, lambda: "it is not detached")
    acquire.leave()
    other = crowd.lock("detached")
    [holder] = other.inspect()["holders"]
    assert holder["lease_expires_in_s"] > 15
    assert other.adopt(token)
    other.release()


def test_who_is_not_wanted_does_not_join(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("unwanted"), unless=lambda _: True)
    assert crowd.hear("ended") == (0, None)
    assert not acquire.lock.held
    assert not crowd.lock("unwanted").inspect()["holders"]


def test_a_refusal_is_told(crowd: Crowd) -> None:
    with DistributedSemaphore("refused", 3, servers=[crowd.server.address]):
        crowd.join(DistributedSemaphore("refused", 2, servers=[crowd.server.address]))
        number, error = crowd.hear("ended")
    assert number == 0
    assert isinstance(error, errors.LimitMismatchError)


@pytest.fixture
def restarted(directory: Path) -> Iterator[LockServer]:
    with LockServer(directory, name="restarted") as server:
        yield server


def test_after_a_restart_they_queue_in_the_order_of_before(restarted: LockServer) -> None:
    crowd = Crowd(restarted)
    with crowd.lock("restart"):
        for _ in range(20):
            crowd.join(crowd.lock("restart"), timeout=None)
            crowd.hear("queued")
        restarted.kill()
        late = crowd.join(crowd.lock("restart"), timeout=None)
        restarted.start()
        for number in range(21):
            while (told := crowd.told.get(timeout=PATIENCE))[0] == "queued":
                pass
            assert told == ("ended", number, None)
            crowd.everybody[number].leave()
    assert late.number == 20
    crowd.pending.close()


def test_a_server_that_stays_away(restarted: LockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits there is told so, after a while and all together."""
    monkeypatch.setattr(pending, "RESTART_PATIENCE", 0.5)
    crowd = Crowd(restarted)
    holder = crowd.lock("away")
    holder.acquire()
    told: list[Any] = []
    for _ in range(3):
        crowd.join(crowd.lock("away"), timeout=None)
        crowd.hear("queued")
    restarted.kill()
    told = [crowd.hear("ended") for _ in range(3)]
    assert [number for number, _ in told] == [0, 1, 2]
    assert all(isinstance(error, errors.UnreachableError) for _, error in told)
    crowd.hear_nothing()
    crowd.pending.close()
    holder.release()


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    cluster = ScriptedCluster()
    yield cluster
    cluster.stop()


def granted(_request: object) -> Granted:
    return Granted(format_token(99, b"scripted"), 10)


@pytest.mark.parametrize("recovers", [False, True])
def test_in_a_cluster_a_position_goes_where_its_key_goes(
    cluster: ScriptedCluster, recovers: bool
) -> None:
    key = "account:7"
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, cluster.moved(key, 1, 8, place="7ticket7"))
    second.script(Resume, Status.OK)
    second.script(Enqueue, *([Recovering(50)] if recovers else []), Status.QUEUED)
    second.script(Wait, granted)
    crowd = Crowd(None)
    acquire = crowd.join(DistributedLock(key, None, 10, cluster.seeds))
    assert crowd.hear("queued") == (0, None)
    assert crowd.hear("ended") == (0, None)
    assert acquire.lock.held
    assert {resume.ticket for resume in second.asked(Resume)} == {b"7ticket7"}
    acquire.leave()
    second.wait_asked(Release)
    crowd.pending.close()


def test_nobody_is_told_of_anything_after_the_end(server: LockServer) -> None:
    crowd = Crowd(server)
    holder = crowd.lock("over")
    with holder:
        for _ in range(3):
            crowd.join(crowd.lock("over"))
            crowd.hear("queued")
        crowd.pending.close()
        crowd.wait_waiters(holder, 0)
    crowd.hear_nothing()
