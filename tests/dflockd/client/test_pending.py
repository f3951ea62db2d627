"""Many pending acquires, waited for by one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import introduction, pending
from dflockd.client.pending import PendingAcquire, PendingAcquires
from dflockd.client.process import close_idle_connections
from dflockd.sync_client import DistributedLock, DistributedSemaphore, Reservation
from dflockd.wire import (
    Enqueue,
    Enqueued,
    Granted,
    Label,
    Recovering,
    Release,
    Resume,
    Status,
    Turn,
    Wait,
    YourTurn,
    format_token,
)
from examples.demo.stage import LockServer, wait_until
from tests.dflockd.scripted_server import Last, ScriptedCluster, ScriptedServer

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

    def lock(self, key: str, **options: Any) -> DistributedLock:
        assert self.server is not None
        return DistributedLock(key, PATIENCE, 10, [self.server.address], **options)

    def join(
        self,
        lock: DistributedLock,
        timeout: float | None = PATIENCE,
        told_ms: int = 5000,
        **options: Any,
    ) -> PendingAcquire:
        number = len(self.everybody)
        acquire = self.pending.join(
            lock,
            timeout,
            told_ms=told_ms,
            queued=lambda: self.told.put(("queued", number, None)),
            told=lambda: self.told.put(("told", number, None)),
            ended=lambda error: self.told.put(("ended", number, error)),
            **options,
        )
        self.everybody.append(acquire)
        return acquire

    def line_up(self, key: str, number: int, **options: Any) -> None:
        """Let some join one after the other, and wait for a lock that somebody else has."""
        for _ in range(number):
            self.join(self.lock(key), **options)
            self.hear("queued")

    def hear(self, what: str) -> tuple[int, errors.RemoteError | None]:
        said, number, error = self.told.get(timeout=PATIENCE)
        assert said == what, (said, number, error)
        return number, error

    def hear_told(self, number: int) -> PendingAcquire:
        """Hear that it is this one's turn."""
        assert self.hear("told") == (number, None)
        return self.everybody[number]

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


def take_up(acquire: PendingAcquire, lock: DistributedLock) -> DistributedLock:
    """Do what the process does that runs a task: be the first holder, by the ticket."""
    ticket = acquire.hand_over()
    assert ticket is not None
    assert ticket == acquire.hand_over()
    assert lock.enqueue(ticket) == "acquired"
    acquire.leave()
    return lock


# Turns.


def test_they_are_told_in_the_order_in_which_they_came(crowd: Crowd) -> None:
    """By one thread, and nothing is held for anybody who does not use it."""
    holder = crowd.lock("order")
    before = threading.active_count()
    with holder:
        crowd.line_up("order", 50)
        assert threading.active_count() <= before + 1  # the reactor's
        crowd.wait_waiters(holder, 50)
    for number in range(50):
        acquire = crowd.hear_told(number)
        assert not holder.inspect()["holders"]
        assert not acquire.lock.held
        user = take_up(acquire, crowd.lock("order"))
        assert user.held
        crowd.hear_nothing() if number in (0, 49) else None
        assert user.release()
    assert not holder.inspect()["waiters"]


def test_a_free_lock_is_told_at_once(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("free"))
    crowd.hear_told(0)
    assert not crowd.lock("free").inspect()["holders"]
    assert acquire.ticket is not None
    user = take_up(acquire, crowd.lock("free"))
    assert acquire.ticket is None
    assert user.release()


def test_a_semaphore_has_as_many_turns_as_slots(crowd: Crowd) -> None:
    servers = [crowd.server.address]
    for _ in range(3):
        crowd.join(DistributedSemaphore("slots", 2, servers=servers))
    assert sorted(crowd.hear(what) for what in ("told", "told", "queued")) == [
        (0, None),
        (1, None),
        (2, None),
    ]
    user = DistributedSemaphore("slots", 2, servers=servers)
    take_up(crowd.everybody[0], user)
    crowd.hear_nothing()
    user.release()
    crowd.hear_told(2)


def test_the_connection_is_of_use_after_it_was_taken_up(crowd: Crowd) -> None:
    lock, connections = crowd.lock("again"), set()
    for number in range(5):
        acquire = crowd.join(crowd.lock("again"))
        crowd.hear_told(number)
        [waiter] = lock.inspect()["waiters"]
        connections.add(waiter["conn_id"])
        user = take_up(acquire, crowd.lock("again"))
        wait_until(partial(is_free, acquire), PATIENCE, lambda: "it is not given back")
        assert user.release()
    assert len(connections) <= 2  # that of the user comes and goes as well


def is_free(acquire: PendingAcquire) -> bool | None:
    return acquire.lock.state == "free" or None


def test_who_has_no_use_for_its_turn_lets_others_go_first(crowd: Crowd) -> None:
    holder = crowd.lock("pass")
    with holder:
        crowd.line_up("pass", 3)
    first = crowd.hear_told(0)
    crowd.hear_nothing()
    first.pass_on()
    crowd.hear_told(1)
    # Its position is the first still.
    user = crowd.lock("pass")
    ticket = first.hand_over()
    assert user.enqueue(ticket) == "queued"
    crowd.everybody[1].pass_on()
    assert user.wait(PATIENCE)
    first.leave()
    assert user.release()


def test_who_says_nothing_keeps_others_for_its_time_only(crowd: Crowd) -> None:
    with crowd.lock("silent"):
        crowd.line_up("silent", 2, told_ms=100)
    crowd.hear_told(0)
    crowd.hear_told(1)
    assert crowd.everybody[0].ticket is not None


def test_who_comes_back_is_told_again_before_later_ones(crowd: Crowd) -> None:
    with crowd.lock("back"):
        crowd.line_up("back", 2)
    first = crowd.hear_told(0)
    first.pass_on()
    second = crowd.hear_told(1)
    first.come_back()
    assert first.ticket is None
    assert first.hand_over() is None
    user = take_up(second, crowd.lock("back"))
    crowd.join(crowd.lock("back"))
    assert crowd.hear("queued") == (2, None)
    assert user.release()
    crowd.hear_told(0)


def test_its_time_ends_nothing_while_it_is_its_turn(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("time"), timeout=1)
    crowd.hear_told(0)
    until = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > until or None, PATIENCE, lambda: "")
    with pytest.raises(Empty):
        crowd.told.get_nowait()
    acquire.come_back()
    crowd.hear("queued")
    crowd.hear_told(0)
    assert take_up(acquire, crowd.lock("time")).release()


# Other ends.


def test_it_ends_after_its_time(crowd: Crowd) -> None:
    with crowd.lock("late"):
        acquire = crowd.join(crowd.lock("late"), timeout=0.5)
        crowd.hear("queued")
        assert crowd.hear("ended") == (0, None)
        assert acquire.lock.state == "free"
        assert acquire.lock.ticket is None


def test_its_position_can_be_kept_after_its_time(crowd: Crowd) -> None:
    holder = crowd.lock("kept")
    with holder:
        acquire = crowd.join(crowd.lock("kept"), timeout=0.5, reservation=Reservation(5, 5))
        crowd.hear("queued")
        assert crowd.hear("ended") == (0, None)
        crowd.join(crowd.lock("kept"))
        crowd.hear("queued")
        again = crowd.join(crowd.lock("kept"), ticket=acquire.lock.ticket)
        crowd.hear("queued")
        crowd.wait_waiters(holder, 2)
    crowd.hear_told(2)
    again.leave()
    crowd.hear_told(1)


def test_who_comes_back_after_its_time_ends(crowd: Crowd) -> None:
    with crowd.lock("over-time"):
        crowd.line_up("over-time", 1, timeout=0.5, reservation=Reservation(5, 0))
        [acquire] = crowd.everybody
        assert crowd.hear("ended") == (0, None)
        assert acquire.lock.ticket is not None


def test_who_leaves_lets_others_in(crowd: Crowd) -> None:
    with crowd.lock("leaving"):
        crowd.line_up("leaving", 4)
        crowd.everybody[0].leave()
        crowd.wait_waiters(crowd.lock("leaving"), 3)
    crowd.hear_told(1).leave()
    third = crowd.hear_told(2)
    assert third.hand_over() is not None
    third.leave()  # nobody will take it up
    crowd.hear_told(3)


def test_a_refusal_is_told(crowd: Crowd) -> None:
    with DistributedSemaphore("refused", 3, servers=[crowd.server.address]):
        crowd.join(DistributedSemaphore("refused", 2, servers=[crowd.server.address]))
        number, error = crowd.hear("ended")
    assert number == 0
    assert isinstance(error, errors.LimitMismatchError)


def test_a_run_that_is_sent_twice_is_told_so(crowd: Crowd) -> None:
    """By who holds the lock, and by who is told of its turn."""
    with crowd.lock("twice", owner=("run", 1)):
        crowd.join(crowd.lock("twice", owner=("run", 1)))
        number, error = crowd.hear("ended")
        assert isinstance(error, errors.OwnerConflictError)
        assert (number, error.state) == (0, "held")
    acquire = crowd.join(crowd.lock("twice", owner=("run", 1)))
    crowd.hear_told(1)
    # As if another process asked.
    introduction.forget_instance()
    close_idle_connections()
    crowd.join(crowd.lock("twice", owner=("run", 1)))
    number, error = crowd.hear("ended")
    assert isinstance(error, errors.OwnerConflictError)
    assert (number, error.state) == (2, "waiting")
    # Who takes it up by its ticket is no second run.
    user = take_up(acquire, crowd.lock("twice", owner=("run", 1)))
    with pytest.raises(errors.OwnerConflictError, match="held"):
        crowd.lock("twice", owner=("run", 1)).acquire()
    assert user.release()


@pytest.fixture
def restarted(directory: Path) -> Iterator[LockServer]:
    with LockServer(directory, name="restarted") as server:
        yield server


def test_after_a_restart_they_queue_in_the_order_of_before(restarted: LockServer) -> None:
    crowd = Crowd(restarted)
    with crowd.lock("restart"):
        crowd.line_up("restart", 20, timeout=None)
        restarted.kill()
        late = crowd.join(crowd.lock("restart"), timeout=None)
        restarted.start()
        for number in range(21):
            while (told := crowd.told.get(timeout=PATIENCE))[0] == "queued":
                pass
            assert told == ("told", number, None)
            crowd.everybody[number].leave()
    assert late.number == 20
    crowd.pending.close()


def test_after_a_restart_who_was_told_is_told_again(restarted: LockServer) -> None:
    """Unless its ticket was handed over: two would ask for one run then."""
    crowd = Crowd(restarted)
    told, handed = crowd.join(crowd.lock("told")), crowd.join(crowd.lock("handed"))
    assert {crowd.hear("told"), crowd.hear("told")} == {(0, None), (1, None)}
    before = told.ticket
    old = handed.hand_over()
    restarted.kill()
    restarted.start()
    crowd.hear_told(0)
    assert told.ticket not in (None, before)
    # The handed one is forgotten here, so that nobody is in the way of who comes with its ticket.
    lock = crowd.lock("handed")
    assert not lock.inspect()["waiters"]
    assert lock.enqueue(old) == "acquired"
    assert lock.release()
    crowd.hear_nothing()
    handed.leave()
    take_up(told, crowd.lock("told")).release()
    crowd.pending.close()


def test_a_server_that_stays_away(restarted: LockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits there is told so, after a while and all together."""
    monkeypatch.setattr(pending, "RESTART_PATIENCE", 0.5)
    crowd = Crowd(restarted)
    holder = crowd.lock("away")
    holder.acquire()
    told: list[Any] = []
    crowd.line_up("away", 3, timeout=None)
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


@pytest.mark.parametrize("recovers", [False, True])
def test_in_a_cluster_a_position_goes_where_its_key_goes(
    cluster: ScriptedCluster, recovers: bool
) -> None:
    key = "account:7"
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, cluster.moved(key, 1, 8, place="7ticket7"))
    second.script(Enqueue, *([Recovering(50)] if recovers else []), Status.QUEUED)
    second.script(Wait, YourTurn(b"8ticket8"), Status.NOT_ENQUEUED)
    crowd = Crowd(None)
    acquire = crowd.join(DistributedLock(key, None, 10, cluster.seeds))
    assert crowd.hear("queued") == (0, None)
    crowd.hear_told(0)
    assert {resume.ticket for resume in second.asked(Resume)} == {b"7ticket7"}
    assert acquire.hand_over() == "8ticket8"
    acquire.leave()
    second.wait_asked(Wait, 2)
    crowd.pending.close()


def test_in_a_cluster_a_turn_goes_where_its_key_goes(cluster: ScriptedCluster) -> None:
    """Its server sends it on when it is asked again; or ends, and another has taken its place."""
    key = "account:7"
    first, second = cluster.servers
    first.script(Enqueue, YourTurn(b"1ticket1"))
    first.script(Wait, cluster.moved(key, 1, 8))
    second.script(Enqueue, YourTurn(b"2ticket2"))
    crowd = Crowd(None)
    acquire = crowd.join(DistributedLock(key, None, 10, cluster.seeds))
    crowd.hear_told(0)
    acquire.come_back()
    crowd.hear("queued")
    crowd.hear_told(0)
    assert acquire.ticket == "2ticket2"
    assert [resume.ticket for resume in second.asked(Resume)] == [b"1ticket1"]
    first.script(Enqueue, YourTurn(b"3ticket3"))
    cluster.is_at(0, 9)
    second.stop()
    crowd.hear_told(0)
    assert acquire.ticket == "3ticket3"
    assert [resume.ticket for resume in first.asked(Resume)] == [b"2ticket2"]
    crowd.pending.close()


# Servers that are too old.


def test_a_server_that_knows_no_turns_is_asked_once(scripted: ScriptedServer) -> None:
    """And is not asked for the lock: it would grant it."""
    scripted.script(Turn, Status.ERROR)
    crowd = Crowd(None)
    for number in range(3):
        crowd.join(DistributedLock("key", servers=[str(scripted)], label="me"))
        told, error = crowd.hear("ended")
        assert told == number
        assert isinstance(error, errors.UnsupportedError)
        assert error.key == "key"
    assert len(scripted.asked(Turn)) == 1
    assert not scripted.asked(Enqueue)
    # Connections are accepted in order: this is the second.
    assert DistributedLock("key", servers=[str(scripted)]).acquire()
    assert scripted.accepted == 2


def test_a_server_that_hangs_up_on_turns(scripted: ScriptedServer) -> None:
    for kind in (Label, Turn):
        scripted.script(kind, Last(b"error\n"))
    crowd = Crowd(None)
    for label in ("", "me"):
        crowd.join(DistributedLock("key", servers=[str(scripted)], label=label))
        _, error = crowd.hear("ended")
        assert isinstance(error, errors.UnsupportedError)


@pytest.mark.parametrize("waits", [False, True])
def test_a_server_that_was_replaced_by_an_older_one(scripted: ScriptedServer, waits: bool) -> None:
    """What it has granted is given back at once."""
    scripted.script(Enqueue, YourTurn(b"1ticket1"))
    crowd = Crowd(None)
    crowd.join(DistributedLock("key", servers=[str(scripted)]))
    crowd.hear_told(0)
    token = format_token(99, b"scripted")
    scripted.script(Turn, Status.ERROR)
    scripted.script(Enqueue, Status.QUEUED if waits else Enqueued(token, 10))
    scripted.script(Wait, Granted(token, 10))
    crowd.join(DistributedLock("key", servers=[str(scripted)]))
    if waits:
        crowd.hear("queued")
    number, error = crowd.hear("ended")
    assert number == 1
    assert isinstance(error, errors.UnsupportedError)
    assert [release.token for release in scripted.asked(Release)] == [token]
    crowd.pending.close()


# The end.


def test_nobody_is_told_of_anything_after_the_end(server: LockServer) -> None:
    crowd = Crowd(server)
    holder = crowd.lock("over")
    with holder:
        crowd.line_up("over", 3)
        crowd.pending.close()
        crowd.wait_waiters(holder, 0)
    crowd.hear_nothing()
