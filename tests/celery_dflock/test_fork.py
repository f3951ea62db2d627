"""What crosses a process boundary, and what must not: a lock ends with the process that took it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from celery_dflock import (
    LockError,
    LockKeyError,
    LockLostError,
    LockNotAcquiredError,
    LockUnavailableError,
    Skipped,
)
from celery_dflock.worker.interrupt import Interruptible
from examples.demo.stage import ROOT, LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter, waiters

ERRORS = [LockError, LockKeyError, LockLostError, LockNotAcquiredError, LockUnavailableError]


@pytest.mark.parametrize("cls", ERRORS)
def test_errors_survive_pickling(cls: type[LockError]) -> None:
    error = cls("its-key", "why it is so")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), cls(*error.args)):
        assert type(other) is cls
        assert (other.key, other.reason) == ("its-key", "why it is so")
        assert str(other) == str(error)
    assert "'its-key'" in str(error)
    assert "why it is so" in str(error)


def test_an_error_raised_in_another_thread_survives_pickling() -> None:
    made: list[LockLostError] = []
    stretch, runs = Interruptible(), threading.Event()

    def run() -> None:
        try:
            with stretch:
                runs.set()
                while True:
                    time.sleep(0.001)
        except LockLostError as error:
            made.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert runs.wait(PATIENCE)
    assert stretch.interrupt(LockLostError("its-key", "why"))
    thread.join(PATIENCE)
    assert type(pickle.loads(pickle.dumps(made[0]))) is LockLostError
    assert str(made[0]) == str(LockLostError("its-key", "why"))


def test_skipped_survives_pickling_and_json() -> None:
    skipped = Skipped("its-key", "its-id")
    for other in (pickle.loads(pickle.dumps(skipped)), json.loads(json.dumps(skipped))):
        assert Skipped.of(other) == skipped
        assert Skipped.of(other).key == "its-key"
        assert Skipped.of(other).task_id == "its-id"
    assert Skipped.of({"dflock": "other"}) is None
    assert Skipped.of({}) is None
    assert Skipped.of(None) is None


# Forks. In processes of their own, for a fork of pytest would be no clean one.

BEGIN = """
    import os, sys, time
    from dflockd.sync_client import DistributedLock

    def make(key, lease=600):
        return DistributedLock(key, 0, lease, [sys.argv[1]])

    def say(*words):
        print(*words, flush=True)

    lock = make(sys.argv[2])
    assert lock.acquire()
"""


@pytest.fixture
def run(lock_server: LockServer, key: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Run Python code that holds the lock `key`; all that it leaves behind ends with the test."""
    with contextlib.ExitStack() as running:

        def start(code: str) -> subprocess.Popen[str]:
            program = textwrap.dedent(BEGIN) + textwrap.dedent(code)
            process = subprocess.Popen(
                [sys.executable, "-c", program, lock_server.address, key],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
            running.enter_context(process)
            running.callback(_kill_group, process.pid)
            return process

        yield start


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_forked_process_does_not_keep_the_lock(
    run: Callable[[str], subprocess.Popen[str]], cluster: Cluster, key: str
) -> None:
    process = run("""
        child = os.fork()
        if not child:
            time.sleep(600)
        say("forked", child)
        time.sleep(600)
    """)
    _, child = said(process)
    with Waiter(cluster.lock(key)) as other:
        cluster.wait_waiters(key, 1)

        process.kill()

        other.wait_granted()
        assert is_alive(int(child))


def test_the_child_has_nothing_of_it(
    run: Callable[[str], subprocess.Popen[str]], cluster: Cluster, key: str
) -> None:
    process = run("""
        fork = os.fork()
        if not fork:
            assert not lock.held
            assert lock.release() is False   # it is not its own: nothing happens
            del lock
            assert not make(sys.argv[2]).acquire()
            with make(sys.argv[2] + ":own", lease=1):
                time.sleep(1.5)  # longer than the lease: it has a renewal thread of its own
                mine = make(sys.argv[2] + ":own")
                assert not mine.acquire()
            os._exit(7)
        status = os.waitpid(fork, 0)[1]
        say("ended", os.waitstatus_to_exitcode(status), lock.held, lock.renew())
        lock.release()
    """)
    assert said(process) == ["ended", "7", "True", "True"]
    assert process.wait(PATIENCE) == 0


def test_forked_by_a_task(
    cluster: Cluster, workers: tuple[Worker, Worker], lock_server: LockServer, key: str
) -> None:
    sent = cluster.send(jobs.patient, key, then="fork")
    forked = cluster.wait_event("forked", sent)
    try:
        assert waiters(lock_server, key) == 0
        with Waiter(cluster.lock(key)) as other:
            cluster.wait_waiters(key, 1)

            os.kill(forked["pid"], signal.SIGKILL)

            other.wait_granted()
            assert is_alive(forked["child"])
    finally:
        os.kill(forked["child"], signal.SIGKILL)


def test_children_of_a_pool_share_no_connection(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str
) -> None:
    """Each process that ends frees its own lock, and no other."""
    sent = [
        cluster.send(jobs.patient, f"{key}:{n}", seconds=jobs.LONG, queue="one") for n in range(2)
    ]
    first, second = (cluster.wait_event("start", each) for each in sent)
    assert first["pid"] != second["pid"]
    with Waiter(cluster.lock(f"{key}:0")) as one, Waiter(cluster.lock(f"{key}:1")) as other:
        cluster.wait_waiters(f"{key}:0", 1)
        cluster.wait_waiters(f"{key}:1", 1)

        os.kill(first["pid"], signal.SIGKILL)
        one.wait_granted()
        assert not other.granted

        os.kill(second["pid"], signal.SIGKILL)
        other.wait_granted()
