"""The signals and the log lines of the plugin, in eager mode: who is told what, and when."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_dflock import LockedTask, LockLostError, LockNotAcquiredError, current_lock, signals
from dflockd import admin
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, wait_until
from tests.celery_dflock.processes import PATIENCE, Waiter, waiters

NAMES = (
    *("lock_waiting", "lock_acquired", "lock_released", "lock_lost", "lock_conflict"),
    *("task_requeued", "task_skipped"),
)


@pytest.fixture
def told(app: Celery) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What receivers are told, in order."""
    events: list[tuple[str, dict[str, Any]]] = []

    def listen(name: str) -> Callable[..., None]:
        def receive(sender: Task, **arguments: Any) -> None:
            if sender.app is app:
                assert set(arguments) >= getattr(signals, name).providing_args
                events.append((name, arguments))

        return receive

    receivers = {name: listen(name) for name in NAMES}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    yield events
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


@pytest.fixture
def on_waiting(app: Celery) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Have something done while a task waits."""
    receivers = []

    def connect(do: Callable[..., Any]) -> None:
        def receive(sender: Task, **arguments: Any) -> None:
            if sender.app is app:
                do(**arguments)

        receivers.append(receive)
        signals.lock_waiting.connect(receive)

    yield connect
    for receiver in receivers:
        signals.lock_waiting.disconnect(receiver)


def locked(app: Celery, **options: Any) -> Any:
    options = {"base": LockedTask, "lock_key": "{key}", "shared": False, **options}

    @app.task(**options)
    def task(key: str) -> int | None:
        lock = current_lock()
        return lock.fence if lock else None

    return task


@pytest.fixture
def held(lock_server: LockServer, key: str) -> Iterator[DistributedLock]:
    with DistributedLock(key, 0, 30, [lock_server.address], label="the holder") as lock:
        yield lock


def is_the_holder(words: str | None) -> bool:
    """Whether that is who holds it and for how long, on a busy machine too."""
    return bool(re.fullmatch(r"the holder, for \d+ s", words or ""))


def names(told: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [name for name, _ in told]


def test_acquired_and_released(app: Celery, told: Any, lock_server: LockServer, key: str) -> None:
    seen = []

    def look(sender: Task, lock: Any, **_: Any) -> None:
        if sender.app is app:
            seen.append((sender, waiters(lock_server, key), lock.held, lock.fence, lock.key))

    task = locked(app)
    for signal in (signals.lock_acquired, signals.lock_released):
        signal.connect(look)
    sent = task.delay(key)
    for signal in (signals.lock_acquired, signals.lock_released):
        signal.disconnect(look)

    assert names(told) == ["lock_acquired", "lock_released"], "it did not wait"
    for _, arguments in told:
        assert arguments["request"].id == sent.id
        assert arguments["lock"].fence == sent.get()
    held, free = (task, 0, True, sent.get(), key), (task, None, False, sent.get(), key)
    assert seen == [held, free], "it is free by then, and its fence known"


def test_waiting(app: Celery, told: Any, on_waiting: Any, held: DistributedLock, key: str) -> None:
    holders = []

    def let_go(holder: Callable[[], str | None], **_: Any) -> None:
        holders.append(holder())
        held.release()
        holders.append(holder())

    on_waiting(let_go)
    sent = locked(app).delay(key)

    assert names(told) == ["lock_waiting", "lock_acquired", "lock_released"]
    assert told[0][1]["key"] == key
    assert told[0][1]["request"].id == sent.id
    first, second = holders
    assert first == second, "it is asked once"
    assert is_the_holder(first)
    assert told[1][1]["lock"].waited > 0


def test_nobody_overtakes_while_receivers_are_told(
    app: Celery, on_waiting: Any, held: DistributedLock, lock_server: LockServer, key: str
) -> None:
    later = Waiter(DistributedLock(key, 0, 30, [lock_server.address]))

    def be_slow(**_: Any) -> None:
        later.__enter__()
        wait_until(lambda: waiters(lock_server, key) == 2 or None, PATIENCE, lambda: "not two wait")
        held.release()

    on_waiting(be_slow)
    try:
        fence = locked(app).delay(key).get()
        later.wait_granted()
        assert fence is not None
        assert later.lock.fence is not None
        assert fence < later.lock.fence, "the task came first"
    finally:
        later.__exit__(None, None, None)


def test_each_key_that_is_waited_for(
    app: Celery, told: Any, on_waiting: Any, lock_server: LockServer, key: str
) -> None:
    both = [DistributedLock(f"{key}:{x}", 0, 30, [lock_server.address]) for x in "ab"]
    for lock in both:
        assert lock.acquire()
    by_key = {lock.key: lock for lock in both}
    on_waiting(lambda key, **_: by_key[key].release())

    sent = locked(app, lock_key=["{key}:b", "{key}:a"]).delay(key)

    assert sent.get()
    assert names(told) == ["lock_waiting"] * 2 + ["lock_acquired", "lock_released"]
    assert [arguments["key"] for _, arguments in told[:2]] == [f"{key}:a", f"{key}:b"]


def test_conflict_before_the_policy(
    app: Celery, told: Any, held: DistributedLock, key: str
) -> None:
    decided = []

    def decide(_task: Task, error: LockNotAcquiredError) -> str:
        decided.append((names(told), error))
        return "instead"

    assert locked(app, lock_timeout=0, lock_conflict=decide).delay(key).get() == "instead"

    [(told_before, error)] = decided
    assert told_before == ["lock_conflict"], "and no waiting: it tries once"
    [(_, arguments)] = told
    assert arguments["error"] is error
    assert arguments["key"] == key
    assert is_the_holder(arguments["holder"])


def test_waited_in_vain_and_skipped(
    app: Celery, told: Any, held: DistributedLock, key: str
) -> None:
    locked(app, lock_timeout=0.1, lock_conflict="skip").delay(key)

    assert names(told) == ["lock_waiting", "lock_conflict", "task_skipped"]
    assert {arguments["key"] for _, arguments in told} == {key}
    assert is_the_holder(told[-1][1]["holder"])


def test_lost(app: Celery, told: Any, lock_server: LockServer, key: str) -> None:
    @app.task(base=LockedTask, lock_key="{key}", lock_ttl=1, shared=False)
    def task(key: str) -> None:
        lock = current_lock()
        assert lock is not None
        assert lock.fence is not None
        admin.evict(lock_server.address, key, lock.fence)
        wait_until(lambda: None, PATIENCE, lambda: "nobody interrupted the task")

    with pytest.raises(LockLostError):
        task.apply((key,), task_id="the-task", throw=True)

    # It is told on another thread, which may be the last to come.
    wait_until(lambda: len(told) == 3 or None, PATIENCE, lambda: str(names(told)))
    assert sorted(names(told)) == ["lock_acquired", "lock_lost", "lock_released"]
    [lost] = [arguments for name, arguments in told if name == "lock_lost"]
    assert lost["request"].id == "the-task"
    assert lost["key"] == lost["lock"].key == key
    assert not lost["lock"].held


# Log lines.


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    records = [record for record in caplog.records if record.name == "celery_dflock"]
    return [record.getMessage() for record in records if record.levelno == level]


def test_lines_of_a_task_that_waits(
    app: Celery, on_waiting: Any, held: DistributedLock, key: str, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG, "celery_dflock")
    on_waiting(lambda **_: held.release())
    task = locked(app)
    sent = task.delay(key)

    name = f"task {task.name}[{sent.id}]"
    [waits] = lines(caplog, logging.INFO)
    before, holder = waits.split(", held by ")
    assert before == f"{name} waits for lock {key!r}"
    assert is_the_holder(holder)
    acquired, released = lines(caplog, logging.DEBUG)
    after = r"after \d+\.\d+ s"
    assert re.fullmatch(
        f"{re.escape(name)} has lock {re.escape(repr(key))} {after}, fence {sent.get()}", acquired
    )
    assert released == f"{name} has released lock {key!r}"


def test_line_of_a_task_that_ends_otherwise(
    app: Celery, held: DistributedLock, key: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "celery_dflock")
    task = locked(app, lock_timeout=0, lock_conflict=lambda _task, _error: 0)
    sent = task.delay(key)
    [line] = lines(caplog, logging.INFO)
    assert line.startswith(f"task {task.name}[{sent.id}] ends without running: lock {key!r}")
    assert is_the_holder(line.rpartition(" by ")[2])


def test_nobody_is_asked_for_a_line_that_nobody_reads(
    app: Celery, on_waiting: Any, held: DistributedLock, key: str, monkeypatch: Any
) -> None:
    asked = []
    inspect = DistributedLock.inspect
    monkeypatch.setattr(DistributedLock, "inspect", lambda lock: asked.append(1) or inspect(lock))
    on_waiting(lambda **_: held.release())
    logging.getLogger("celery_dflock").setLevel(logging.WARNING)
    try:
        assert locked(app).delay(key).get()
    finally:
        logging.getLogger("celery_dflock").setLevel(logging.NOTSET)
    assert asked == []
