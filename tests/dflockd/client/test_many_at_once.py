"""Many threads and many locks of one process."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from dflockd import sync_client
from dflockd.client import process
from dflockd.client.reactor import Reactor, Task
from tests.dflockd.client_support import Calls, is_free, stats, wait_renewed
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")


def test_threads_exclude_one_another(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    keys = [f"{key}-{number}" for number in range(3)]
    before = stats(server)["connections"]
    counters = dict.fromkeys(keys, 0)
    inside = dict.fromkeys(keys, 0)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        order = random.Random(seed)
        try:
            for _ in range(200):
                name = order.choice(keys)
                with sync_client.DistributedLock(name, acquire_timeout_s=60, **options) as lock:
                    inside[name] += 1
                    assert inside[name] == 1
                    value = counters[name]
                    time.sleep(0)  # lets another thread run
                    counters[name] = value + 1
                    assert lock.held
                    inside[name] -= 1
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert sum(counters.values()) == 8 * 200
    assert all(is_free(server, name) for name in keys)
    assert stats(server)["connections"] <= before + 8


def test_the_reactor_leaves_released_connections_alone(options: dict[str, Any], key: str) -> None:
    """What is said there is for whoever uses them next, though it knows their descriptor still."""
    lock = sync_client.DistributedLock(key, **options)
    with lock:
        lease = lock._session.lease
        assert lease is not None
        eventually(lambda: isinstance(lease.task, Task) and lease.task.registered is not None)
    for _ in range(50):
        with lock:
            again = lock._session.lease
            assert again is not None
            assert again.link is lease.link
    looked = threading.Event()
    process.current().reactor.call(looked.set)
    assert looked.wait(PATIENCE)
    assert isinstance(lease.task, Task)
    assert (lease.task.ended, lease.task.registered) == (True, None)


def test_one_thread_renews_a_hundred_locks(
    server: ServerProcess, options: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = Reactor._step

    def counted(self: Reactor, task: Task, outcome: object) -> None:
        nonlocal steps
        steps += 1
        step(self, task, outcome)

    monkeypatch.setattr(Reactor, "_step", counted)
    threads = threading.active_count()
    lost = Calls()
    began = time.monotonic()
    locks = [
        sync_client.DistributedLock(
            f"{key}-{number}", renew_ratio=0.2 / 600, on_lost=lost, **options
        )
        for number in range(100)
    ]
    for lock in locks:
        assert lock.acquire() is True
    for lock in locks[:1] + locks[-1:]:
        wait_renewed(server, lock.key, 7)
    assert all(lock.held for lock in locks)
    assert threading.active_count() <= threads + 1
    # Each is renewed five times a second, or a little more often, in two steps each time: it is due,
    # and it is answered. The thread does not do more and more for it.
    assert 2 * 14 < steps < 200 * (2 + (time.monotonic() - began) / 0.18)
    assert [lock.release() for lock in locks] == [True] * 100
    assert not lost.locks
