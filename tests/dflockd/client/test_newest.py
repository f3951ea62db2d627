"""The newest wins: what a client that asks with an age is told, and one that holds the lock hears."""

from __future__ import annotations

import pickle
import queue
import signal
from collections.abc import Callable

import pytest

from dflockd import errors
from dflockd.client.newest import draw_age, listen, prepare
from dflockd.sync_client import DistributedLock
from dflockd.wire import Acquire, DrawAge, Owner, Status
from tests.dflockd.client_support import waiters
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually
from tests.dflockd.scripted_server import ScriptedServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")

LockOf = Callable[..., DistributedLock]


def lock_of(server: ServerProcess, key: str, age: int = 0, timeout: float = 0) -> DistributedLock:
    owner = (f"run-{age}", 0, age) if age else None
    label = f"task-{age}" if age else ""
    at = [("127.0.0.1", server.port)]
    return DistributedLock(key, timeout, 30, at, label=label, owner=owner)


def test_ages_grow(server: ServerProcess, key: str) -> None:
    lock = lock_of(server, key)
    ages = [draw_age(lock) for _ in range(3)]
    assert ages == sorted(set(ages))


def test_who_holds_the_lock_hears_of_the_newest(server: ServerProcess, key: str) -> None:
    heard: queue.Queue[str] = queue.Queue()
    older, newer = lock_of(server, key, 1), lock_of(server, key, 2)
    prepare(older)
    assert older.acquire()
    listen(older, heard.put)
    assert not newer.acquire()
    assert heard.get(timeout=PATIENCE) == "task-2"
    assert older.held
    assert older.release()
    assert newer.acquire()
    with pytest.raises(errors.SupersededError, match=f"{key}.*task-2 is newer") as caught:
        older.acquire()
    assert caught.value.by == "task-2"
    assert pickle.loads(pickle.dumps(caught.value)).by == "task-2"
    listen(newer, heard.put)
    newer.release()
    assert heard.empty()


def test_who_waits_is_told(server: ServerProcess, key: str) -> None:
    holder, older, newer = (lock_of(server, key, age, 60) for age in (1, 2, 3))
    prepare(holder)
    assert holder.acquire()
    assert older.enqueue() == "queued"
    newer.acquire_timeout_s = 0
    assert not newer.acquire()
    with pytest.raises(errors.SupersededError):
        older.wait()
    assert older.state == "free"
    holder.release()
    assert waiters(server, key) == 0


def test_it_hears_though_the_server_has_ended_meanwhile(
    start: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    state = str(tmp_path_factory.mktemp("state") / "state")
    first = start("--state-dir", state)
    heard: queue.Queue[str] = queue.Queue()
    older = lock_of(first, key, 1)
    prepare(older)
    assert older.acquire()
    listen(older, heard.put)
    first.signal(signal.SIGKILL)
    first.wait()
    second = start("--state-dir", state, "--port", str(first.port))
    newer = lock_of(second, key, 2)
    prepare(newer)
    eventually(lambda: not newer.acquire())
    assert heard.get(timeout=PATIENCE) == "task-2"
    older.release()


def test_an_older_server_is_named_and_nothing_is_asked_of_it(scripted: ScriptedServer) -> None:
    scripted.script(DrawAge, Status.ERROR)
    lock = DistributedLock("k", 0, 30, [scripted.address], owner=("run", 0, 7))
    with pytest.raises(errors.UnsupportedError, match=r"'k' on .*too old.*upgrade it"):
        prepare(lock)
    assert scripted.asked(Owner, Acquire) == []


@pytest.mark.parametrize("age", [0, -1, 2**64, 1.5, True, "1"])
def test_what_is_no_age_is_refused(age: object) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="owner is"):
        DistributedLock("k", owner=("run", 0, age))  # type: ignore[arg-type]
