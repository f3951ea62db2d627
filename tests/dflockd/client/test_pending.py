"""Many pending acquires, waited for by one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import Empty

import pytest

from dflockd import admin, errors
from dflockd.client import introduction, pending
from dflockd.client.pending import PendingAcquire
from dflockd.client.process import close_idle_connections
from dflockd.sync_client import DistributedLock, DistributedSemaphore, Reservation
from examples.demo.stage import LockServer, wait_until
from tests.dflockd.client.crowd import PATIENCE, Crowd, take_up


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pending")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[LockServer]:
    with LockServer(directory) as server:
        yield server


@pytest.fixture
def crowd(server: LockServer) -> Iterator[Crowd]:
    crowd = Crowd(server)
    yield crowd
    for each in crowd.everybody:
        each.leave()
    asking = [turns.link for turns in crowd.pending._turns.values() if turns.link is not None]
    crowd.pending.close()
    # A question that is still there would be answered with the first turn of the next test.
    wait_until(lambda: all(link.closed for link in asking) or None, PATIENCE, lambda: "not closed")
    admin.stats(server.address)  # which comes after that
    close_idle_connections()  # a test may have given this process another name


# Turns.


def test_they_are_told_in_the_order_in_which_they_came(crowd: Crowd) -> None:
    """By one thread, and nothing is held for anybody who does not use it."""
    holder = crowd.lock("order")
    before = threading.active_count()
    with holder:
        crowd.line_up("order", 50)
        assert threading.active_count() <= before + 1  # the reactor's
        crowd.wait_waiters(holder, 50)
    crowd.hear_nothing()
    for number in range(50):
        acquire = crowd.hear_told(number)
        assert not holder.inspect()["holders"]
        assert not acquire.lock.held
        user = take_up(acquire, crowd.lock("order"))
        assert user.held
        crowd.hear_nothing() if number in (0, 49) else None
        assert user.release()
    assert not holder.inspect()["waiters"]


def test_nobody_is_told_of_a_free_lock_while_nobody_is_free_to_use_it(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("free"))
    crowd.hear("queued")
    crowd.hear_nothing()
    crowd.hear_told(0)
    assert not crowd.lock("free").inspect()["holders"]
    user = take_up(acquire, crowd.lock("free"))
    assert user.release()


def test_who_asks_first_is_told_as_soon_as_there_is_a_turn(crowd: Crowd) -> None:
    crowd.pending.ask()
    for number in range(20):
        acquire = crowd.join(crowd.lock("asked"))
        assert crowd.hear("queued") == (number, None)
        assert crowd.hear("told") == (number, None)
        user = take_up(acquire, crowd.lock("asked"))
        crowd.pending.ask()
        assert user.release()


def test_one_is_told_each_time_that_it_is_asked(crowd: Crowd) -> None:
    servers = [crowd.server.address]
    for _ in range(3):
        crowd.join(DistributedSemaphore("slots", 2, servers=servers))
        crowd.hear("queued")
    crowd.hear_told(0)
    crowd.hear_nothing()
    crowd.hear_told(1)
    user = DistributedSemaphore("slots", 2, servers=servers)
    take_up(crowd.everybody[0], user)
    crowd.pending.ask()
    crowd.hear_nothing()
    user.release()
    assert crowd.hear("told") == (2, None)


def test_keys_take_turns_if_nobody_could_use_their_locks(crowd: Crowd) -> None:
    for key in ("turns-1", "turns-2"):
        for _ in range(3):
            crowd.join(DistributedSemaphore(key, 9, servers=[crowd.server.address]))
            crowd.hear("queued")
    for number in (0, 3, 1, 4, 2, 5):
        crowd.hear_told(number)


def test_the_connection_is_of_use_after_it_was_taken_up(crowd: Crowd) -> None:
    lock, connections = crowd.lock("again"), set()
    for number in range(5):
        acquire = crowd.join(crowd.lock("again"))
        crowd.hear("queued")
        crowd.hear_told(number)
        [waiter] = lock.inspect()["waiters"]
        connections.add(waiter["conn_id"])
        user = take_up(acquire, crowd.lock("again"))
        wait_until(partial(is_free, acquire), PATIENCE, lambda: "it is not given back")
        assert user.release()
    assert len(connections) <= 2  # that of the user comes and goes as well


def is_free(acquire: PendingAcquire) -> bool | None:
    return acquire.lock.state == "free" or None


def test_a_turn_that_cannot_be_used_is_had_again(crowd: Crowd) -> None:
    """And others go first meanwhile, who can."""
    with crowd.lock("pass"):
        crowd.line_up("pass", 2)
    first, other = crowd.hear_told(0), crowd.lock("pass")
    assert other.enqueue() == "queued"
    first.pass_on()
    assert other.wait(PATIENCE)
    assert first.hand_over() is None
    crowd.pending.ask()
    crowd.hear_nothing()
    assert other.release()
    assert crowd.hear("told") == (0, None)
    assert take_up(first, crowd.lock("pass")).release()
    crowd.hear_told(1)


def test_who_says_nothing_keeps_others_for_its_time_only(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "TURN_MS", 100)
    with crowd.lock("silent"):
        crowd.line_up("silent", 2)
    crowd.hear_told(0)
    crowd.hear_told(1)
    # It is ahead of all later ones still.
    user = crowd.lock("silent")
    assert user.enqueue(crowd.everybody[0].hand_over()) == "queued"
    assert user.wait(PATIENCE)
    assert user.release()


def test_its_time_ends_nothing_while_it_is_its_turn(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("time"), timeout=1)
    crowd.hear("queued")
    crowd.hear_told(0)
    until = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > until or None, PATIENCE, lambda: "")
    with pytest.raises(Empty):
        crowd.told.get_nowait()
    acquire.pass_on()
    assert crowd.hear("ended") == (0, None)


def test_a_turn_is_not_lost_with_the_connection_that_would_have_told_it(crowd: Crowd) -> None:
    acquire = crowd.join(crowd.lock("lost"))
    crowd.hear("queued")
    crowd.hear_told(0)
    [turns] = crowd.pending._turns.values()
    assert turns.link is not None
    turns.link.interrupt()
    crowd.hear_told(0)
    assert take_up(acquire, crowd.lock("lost")).release()


# Other ends.


def test_it_ends_after_its_time(crowd: Crowd) -> None:
    with crowd.lock("late"):
        acquire = crowd.join(crowd.lock("late"), timeout=0.5)
        crowd.hear("queued")
        assert crowd.hear("ended") == (0, None)
        assert acquire.lock.state == "free"
        assert acquire.lock.ticket is None


class Counted(int):
    """A number that counts how often one is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


def test_the_end_of_many_who_are_late_takes_no_longer_for_each_the_more_there_are() -> None:
    everybody, many = pending.PendingAcquires(), 500
    lock = DistributedLock("key", servers=[("127.0.0.1", 1)])
    ended: list[int] = []

    def late(number: int) -> PendingAcquire:
        progress, end = lock._progress(None, None), lambda _: ended.append(number)
        return PendingAcquire(everybody, number, lock, -60.0, progress, int, int, end)

    line = [(number, late(number)) for number in map(Counted, range(many))]
    everybody._end_late_ones("line", line)
    assert (line, ended) == ([], list(range(many)))
    assert Counted.compared < 30 * many


def test_its_position_can_be_kept_after_its_time(crowd: Crowd) -> None:
    holder = crowd.lock("kept")
    with holder:
        acquire = crowd.join(crowd.lock("kept"), timeout=0.5, reservation=Reservation(5, 5))
        crowd.hear("queued")
        assert crowd.hear("ended") == (0, None)
        crowd.join(crowd.lock("kept"))
        crowd.hear("queued")
        crowd.join(crowd.lock("kept"), ticket=acquire.lock.ticket)
        crowd.hear("queued")
        crowd.wait_waiters(holder, 2)
    crowd.hear_told(2).leave()
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
    crowd.join(DistributedLock("refused", None, 1_000_000, [crowd.server.address]))
    number, error = crowd.hear("ended")
    assert number == 0
    assert isinstance(error, errors.RefusedError)


def test_a_run_that_is_sent_twice_is_told_so(crowd: Crowd) -> None:
    """By who holds the lock, and by who is told of its turn."""
    with crowd.lock("twice", owner=("run", 1)):
        crowd.join(crowd.lock("twice", owner=("run", 1)))
        number, error = crowd.hear("ended")
        assert isinstance(error, errors.OwnerConflictError)
        assert (number, error.state) == (0, "held")
    acquire = crowd.join(crowd.lock("twice", owner=("run", 1)))
    crowd.hear("queued")
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


# The end.


def test_nobody_is_told_of_anything_after_the_end(server: LockServer) -> None:
    crowd = Crowd(server)
    holder = crowd.lock("over")
    with holder:
        crowd.line_up("over", 3)
        crowd.pending.close()
        crowd.wait_waiters(holder, 0)
    crowd.hear_nothing()
