"""What users of redis-py's `Lock` count on, through a thin adapter on `DistributedLock`.

What the adapter cannot do is in docs/howto/migrate.md, and in the tests that begin with "Unlike".
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import pytest

from dflockd import admin, errors
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer

LONG = 60


class NotAcquiredError(Exception):
    pass


class NotOwnedError(Exception):
    pass


class RedisLikeLock:
    """The methods of redis-py's `Lock`, with the words of redis-py.

    Args:
        name: the key.
        timeout: lease in whole seconds; there always is one, and it is renewed.
        blocking_timeout: seconds that `acquire` waits; ``None`` for ever.
    """

    def __init__(
        self,
        server: str,
        name: str,
        timeout: int | None = None,
        blocking: bool = True,
        blocking_timeout: float | None = None,
    ) -> None:
        self.name = name
        wait = blocking_timeout if blocking else 0
        self._lock = DistributedLock(name, wait, timeout, servers=[server])

    def acquire(self, blocking: bool = True) -> bool:
        if not blocking:
            self._lock.acquire_timeout_s = 0
        return self._lock.acquire()

    def release(self) -> None:
        if not self._lock.release():
            raise NotOwnedError(self.name)

    def locked(self) -> bool:
        return bool(self._lock.inspect()["holders"])

    def owned(self) -> bool:
        return self._lock.held

    def extend(self, seconds: int) -> bool:
        """Make the lease end so many seconds from now; redis-py's ``replace_ttl=True``."""
        if not (self._lock.held and self._lock.renew(seconds)):
            raise NotOwnedError(self.name)
        return True

    def reacquire(self) -> bool:
        if not (self._lock.held and self._lock.renew()):
            raise NotOwnedError(self.name)
        return True

    def __enter__(self) -> Self:
        if not self.acquire():
            raise NotAcquiredError(self.name)
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"redis:{request.node.name}"


@pytest.fixture
def lock(lock_server: LockServer, name: str) -> Callable[..., RedisLikeLock]:
    def make(**options: Any) -> RedisLikeLock:
        return RedisLikeLock(lock_server.address, name, **options)

    return make


Make = Callable[..., RedisLikeLock]


def left(server: LockServer, name: str) -> float:
    """Seconds until the lease ends, as the server has it."""
    (lock,) = [each for each in admin.stats(server.address)["locks"] if each["key"] == name]
    return float(lock["lease_expires_in_s"])


def take_away(server: LockServer, name: str) -> None:
    """What `SET name other` does to a key of Redis: its holder has it no more."""
    (holder,) = admin.inspect(server.address, name)["holders"]
    assert admin.evict(server.address, name, holder["fence"])


def test_it_is_there_while_it_is_held(lock: Make, lock_server: LockServer, name: str) -> None:
    one = lock()
    assert not one.locked()
    assert one.acquire(blocking=False)
    assert one.locked()
    assert left(lock_server, name) > 0, "a lease that ends: there is none without an end"
    one.release()
    assert not one.locked()


def test_it_is_owned_by_the_object_that_has_acquired_it(lock: Make) -> None:
    one, other = lock(), lock()
    assert not one.owned()
    for holder, waiter in itertools.permutations((one, other)):
        assert holder.acquire(blocking=False)
        assert (holder.owned(), waiter.owned()) == (True, False)
        holder.release()
        assert (holder.owned(), waiter.owned()) == (False, False)


def test_two_compete(lock: Make) -> None:
    one, other = lock(), lock()
    assert one.acquire(blocking=False)
    assert not other.acquire(blocking=False)
    one.release()
    assert other.acquire(blocking=False)
    assert not one.acquire(blocking=False)
    other.release()


def test_the_timeout_is_its_lease(lock: Make, lock_server: LockServer, name: str) -> None:
    with lock(timeout=LONG):
        assert 0 < left(lock_server, name) <= LONG


def test_a_lease_is_a_whole_number_of_seconds(lock: Make) -> None:
    """Unlike redis-py's: the protocol has no fractions."""
    with pytest.raises(errors.InvalidArgumentError, match=r"lease_ttl_s.*9\.5"):
        lock(timeout=9.5)


@pytest.mark.parametrize("blocking", [0, 1], ids=["at_once", "after_a_second"])
def test_it_gives_up_after_its_blocking_timeout(lock: Make, blocking: int) -> None:
    with lock():
        began = time.monotonic()
        assert not lock(blocking_timeout=blocking).acquire()
        assert time.monotonic() - began >= blocking


def test_who_blocks_has_it_when_it_is_free(lock: Make) -> None:
    """At once: nobody polls, and so there is no `sleep` to choose."""
    one, other = lock(), lock(blocking_timeout=LONG)
    assert one.acquire()
    waiting = threading.Thread(target=other.acquire)
    waiting.start()
    one.release()
    waiting.join(LONG)
    assert other.owned()
    other.release()


def test_a_block_that_does_not_get_it_fails_and_names_it(lock: Make, name: str) -> None:
    with (
        lock(),
        pytest.raises(NotAcquiredError, match=name.partition("[")[0]),
        lock(blocking=False),
    ):
        pass


def test_what_was_not_acquired_cannot_be_released_or_prolonged(lock: Make) -> None:
    one = lock()
    for action in (one.release, one.reacquire, lambda: one.extend(LONG)):
        with pytest.raises(NotOwnedError):
            action()


@pytest.mark.parametrize("action", ["release", "reacquire", "extend"])
def test_what_was_taken_away_cannot_be_released_or_prolonged(
    lock: Make, lock_server: LockServer, name: str, action: str
) -> None:
    one, other = lock(timeout=LONG), lock()
    assert one.acquire()
    take_away(lock_server, name)
    assert other.acquire(blocking=False)
    with pytest.raises(NotOwnedError):
        getattr(one, action)(*((LONG,) if action == "extend" else ()))
    assert not one.owned()
    assert other.owned()
    other.release()


def test_a_block_whose_lock_was_taken_away_says_so_at_its_end(
    lock: Make, lock_server: LockServer, name: str
) -> None:
    with pytest.raises(NotOwnedError), lock():
        take_away(lock_server, name)


def test_it_can_be_extended(lock: Make, lock_server: LockServer, name: str) -> None:
    with lock(timeout=LONG) as held:
        assert held.extend(10 * LONG)
        assert LONG < left(lock_server, name) <= 10 * LONG


def test_it_can_be_reacquired_for_as_long_as_before(
    lock: Make, lock_server: LockServer, name: str
) -> None:
    with lock(timeout=LONG) as held:
        assert held.extend(10 * LONG)
        assert held.extend(LONG)
        assert held.reacquire()
        assert 0 < left(lock_server, name) <= LONG


def test_it_can_be_released_by_another_thread(lock: Make) -> None:
    """As redis-py's with `thread_local=False`: it belongs to its object."""
    one = lock()
    assert one.acquire()
    thread = threading.Thread(target=one.release)
    thread.start()
    thread.join(LONG)
    assert not one.locked()


def test_an_object_that_holds_it_does_not_wait_for_itself(lock: Make) -> None:
    """Unlike redis-py's, which blocks for ever."""
    with lock() as held, pytest.raises(errors.AlreadyHeldError):
        held.acquire()
