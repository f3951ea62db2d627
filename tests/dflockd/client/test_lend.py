"""A lock that one process lends to another, and locks that are taken by a pending acquire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from dflockd import errors
from dflockd.client.connection import Connection
from dflockd.client.pending import PendingAcquires
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from examples.demo.stage import LockServer, wait_until

PATIENCE = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServer]:
    with LockServer(tmp_path_factory.mktemp("lend")) as server:
        yield server


def lock_of(server: LockServer, key: str, ttl: int = 600) -> DistributedLock:
    return DistributedLock(key, 0, ttl, [server.address])


def wait_free(server: LockServer, key: str) -> None:
    lock = lock_of(server, key)
    wait_until(
        lambda: not lock.inspect()["holders"] or None, PATIENCE, lambda: f"{key} is still held"
    )


def test_what_is_lent_ends_with_the_lender_until_it_is_adopted(server: LockServer) -> None:
    lender, heir = lock_of(server, "lent"), lock_of(server, "lent")
    assert lender.acquire()
    token = lender.lend()
    assert token is not None
    assert not lender.held
    assert not lender.release()  # it is not the lender's to release
    assert not lock_of(server, "lent").acquire()
    assert heir.adopt(token)
    lender.abandon()
    assert heir.renew()
    assert heir.held
    assert heir.release()

    assert lender.acquire()
    assert lender.lend() is not None
    lender.abandon()
    wait_free(server, "lent")
    assert lender.acquire()  # as good as new
    assert lender.release()


def test_who_waits_in_another_thread_is_given_up_too(server: LockServer) -> None:
    waits = DistributedLock("elsewhere", None, 600, [server.address])
    holder = lock_of(server, "elsewhere")

    def asked() -> int:
        return len(holder.inspect()["waiters"])

    with holder, ThreadPoolExecutor() as pool:
        waiting = pool.submit(waits.acquire)
        wait_until(lambda: asked() or None, PATIENCE, lambda: "it does not wait")
        waits.abandon()
        wait_until(lambda: not asked() or None, PATIENCE, lambda: "it is still in the queue")
        # By whichever it hears of first: that it was given up, or that its connection has ended.
        with pytest.raises((errors.AcquireCancelledError, errors.UnreachableError)):
            waiting.result(PATIENCE)


def test_who_is_given_up_does_not_ask_again(
    server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if its thread finds that its connection has ended before all is said and done."""
    waits, holder = (DistributedLock("again", None, 600, [server.address]) for _ in range(2))
    interrupt = Connection.interrupt

    def interrupted(link: Connection) -> None:
        interrupt(link)
        wait([waiting], PATIENCE)

    with holder, ThreadPoolExecutor() as pool:
        assert lock_of(server, "another").acquire()
        waiting = pool.submit(waits.acquire)
        wait_until(
            lambda: holder.inspect()["waiters"] or None, PATIENCE, lambda: "it does not wait"
        )
        monkeypatch.setattr(Connection, "interrupt", interrupted)
        waits.abandon()
        assert waiting.done()
        with pytest.raises((errors.AcquireCancelledError, errors.UnreachableError)):
            waiting.result()


def test_what_is_lent_is_renewed_no_more(server: LockServer) -> None:
    lender = lock_of(server, "unrenewed", ttl=1)
    assert lender.acquire()
    assert lender.lend() is not None
    wait_free(server, "unrenewed")
    lender.abandon()


def test_only_what_is_certainly_held_can_be_lent(server: LockServer) -> None:
    lock = lock_of(server, "certain")
    assert lock.lend() is None
    assert lock.acquire()
    lease = lock._session.lease
    assert lease is not None
    link = lease.take()  # as the thread that renews has it
    assert link is not None
    assert lock.lend() is None
    lease.put(link)
    lease.spares = (link,)  # as after a rescue: it may belong to the other connection
    assert lock.lend() is None
    lease.spares = ()
    assert lock.held
    assert lock.release()


class Taking:
    """A lock that is taken by a pending acquire."""

    def __init__(self, pending: PendingAcquires, lock: DistributedLock, timeout: float | None):
        self.lock = lock
        self.told, self.queued, self.over = threading.Event(), threading.Event(), threading.Event()
        self.error: errors.RemoteError | None = None
        self.acquire = pending.join(
            lock, timeout, takes=True, queued=self.queued.set, told=self.told.set, ended=self._end
        )

    def _end(self, error: errors.RemoteError | None) -> None:
        self.error = error
        self.over.set()


@pytest.fixture
def pending() -> Iterator[PendingAcquires]:
    pending = PendingAcquires()
    yield pending
    pending.close()


def test_it_is_held_at_once_or_in_its_turn(server: LockServer, pending: PendingAcquires) -> None:
    first, second, third = (Taking(pending, lock_of(server, "taken"), None) for _ in range(3))
    assert first.told.wait(PATIENCE)
    assert first.lock.held
    assert second.queued.wait(PATIENCE)
    assert third.queued.wait(PATIENCE)
    assert not first.queued.is_set()
    for holder, following in ((first, second), (second, third)):
        assert not following.told.is_set()
        assert holder.lock.release()
        assert following.told.wait(PATIENCE)
        assert following.lock.held
    assert third.lock.release()
    assert not any(each.over.is_set() for each in (first, second, third))


def test_its_time_can_be_over(server: LockServer, pending: PendingAcquires) -> None:
    with lock_of(server, "late"):
        late = Taking(pending, lock_of(server, "late"), 1)
        assert late.over.wait(PATIENCE)
    assert late.error is None
    assert not late.told.is_set()
    assert late.lock.state == "free"


def test_who_leaves_gets_nothing(server: LockServer, pending: PendingAcquires) -> None:
    holder = lock_of(server, "left")
    assert holder.acquire()
    leaving, staying = (Taking(pending, lock_of(server, "left"), None) for _ in range(2))
    assert staying.queued.wait(PATIENCE)
    leaving.acquire.leave()
    assert holder.release()
    assert staying.told.wait(PATIENCE)
    assert not leaving.told.is_set()
    assert staying.lock.release()
    wait_free(server, "left")


def test_a_server_that_is_restarted_is_queued_at_again(
    tmp_path: Path, pending: PendingAcquires
) -> None:
    with LockServer(tmp_path) as server:
        holder = lock_of(server, "again")
        assert holder.acquire()
        taking = [Taking(pending, lock_of(server, "again"), None) for _ in range(2)]
        for each in taking:
            assert each.queued.wait(PATIENCE)
        server.kill()
        server.start()
        assert taking[0].told.wait(PATIENCE)
        assert not taking[1].told.is_set()
        assert taking[0].lock.release()
        assert taking[1].told.wait(PATIENCE)
        assert taking[1].lock.release()
        holder.abandon()


def test_one_of_a_semaphore(server: LockServer, pending: PendingAcquires) -> None:
    def semaphore() -> DistributedSemaphore:
        return DistributedSemaphore("two", 2, 0, 600, [server.address])

    first, second, third = (Taking(pending, semaphore(), None) for _ in range(3))
    assert first.told.wait(PATIENCE)
    assert second.told.wait(PATIENCE)
    assert third.queued.wait(PATIENCE)
    assert first.lock.release()
    assert third.told.wait(PATIENCE)
    assert second.lock.release()
    assert third.lock.release()
