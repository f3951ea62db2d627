"""An interruption of a thread: it arrives there and nowhere else, and leaves nothing behind."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest
from celery import Celery

from celery_dflock import LockedTask
from celery_dflock.worker import interrupt
from celery_dflock.worker.interrupt import Interruptible
from dflockd.client import process
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import PATIENCE


class StoppedError(Exception):
    """The thread was interrupted."""


@pytest.fixture
def newborn_threads_wait() -> Iterator[None]:
    """A thread that is started runs only once the one that started it waits for something."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="each thread has an id of its own there")
def test_nobody_is_interrupted_while_a_thread_is_born(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it runs it has the id of the one that started it, and would get the error itself."""
    newborn, waits, raised = threading.Thread(), threading.Event(), list[bool]()
    monkeypatch.setattr(interrupt, "LONGEST_BIRTH", PATIENCE)
    monkeypatch.setattr(interrupt.time, "sleep", lambda _: waits.set() or waits.wait(0.001))
    monkeypatch.setattr(
        interrupt, "_raise_in_thread", lambda *_: raised.append(bool(threading._limbo))
    )
    stretch = Interruptible()

    def run() -> None:
        with stretch:
            waits.wait(PATIENCE)
            assert not raised
            del threading._limbo[newborn]
            interrupting.join()
            interrupt.LONGEST_BIRTH = 0  # nothing is on its way

    thread = threading.Thread(target=run)
    interrupting = threading.Thread(target=lambda: stretch.interrupt(StoppedError()))
    thread.start()
    while not stretch.is_open:
        time.sleep(0)
    threading._limbo[newborn] = newborn  # as `Thread.start` does
    interrupting.start()
    thread.join()
    assert raised == [False]


@pytest.mark.usefixtures("newborn_threads_wait")
def test_it_arrives_though_the_thread_has_started_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that `threading` knows nothing of may get the error, before Python 3.12, and hands it on."""
    noticed: list[str] = []
    born: list[int] = []
    stillborn: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: stillborn.append(each.exc_type))

    def run() -> None:
        stretch = Interruptible()
        try:
            with stretch:
                for _ in range(3):
                    _thread.start_new_thread(lambda: born.append(1), ())
                assert stretch.interrupt(StoppedError("by a test"))
                until = time.monotonic() + PATIENCE
                while time.monotonic() < until:
                    time.sleep(0.001)
        except StoppedError as error:
            noticed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert noticed == ["by a test"]
    until = time.monotonic() + PATIENCE
    while len(born) + len(stillborn) < 3 and time.monotonic() < until:
        time.sleep(0.001)
    assert len(born) + len(stillborn) == 3


TRACED = """
import sys, threading, time
from celery_dflock.worker.interrupt import Interruptible

class Stopped(Exception):
    pass

def work(late):
    global before
    try:
        with stretch:
            inside.set()
            if late:
                # It is sent while this ends: the lock keeps the end from coming first.
                with before:
                    pass
            else:
                while True:
                    time.sleep(0.001)
    except Stopped:
        ended.append("interrupted")
    else:
        ended.append("ended")

for late in (False, True):
    ended, inside, before, stretch = [], threading.Event(), threading.Lock(), Interruptible()
    before.acquire()
    thread = threading.Thread(target=work, args=(late,))
    thread.start()
    inside.wait()
    stretch.interrupt(Stopped())
    before.release()
    thread.join()
    assert len(ended) == 1
    sys.setprofile(lambda *_: None)
    (lambda: None)()
    sys.setprofile(None)
print("went on")
"""


def test_afterwards_a_profiler_works_as_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRACED],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout == "went on\n", done.stderr


@pytest.mark.parametrize("is_main", [True, False])
def test_one_that_arrives_as_the_stretch_ends_leaves_it_ended(
    is_main: bool, lock_server: LockServer, key: str
) -> None:
    """It keeps the end from beginning, and nothing may be raised in what the thread does next."""
    app = Celery("ends", set_as_current=False)
    app.conf.update(task_always_eager=True, dflock_servers=[lock_server.address])
    ends: list[Interruptible] = []

    def interrupt_the_end(frame: FrameType, *_: object) -> None:
        if frame.f_code is Interruptible.__exit__.__code__:
            ends.append(frame.f_locals["self"])
            ends[0].interrupt(StoppedError("late"))

    @app.task(base=LockedTask, lock_key=key, shared=False)
    def short() -> None:
        # Before Python 3.12 the client's own thread would get the error if it had not run yet.
        has_begun = threading.Event()
        process.current().reactor.call(has_begun.set)
        assert has_begun.wait(PATIENCE)
        sys.settrace(interrupt_the_end)

    states: list[str] = []

    def run() -> None:
        before = sys.gettrace()
        try:
            states.append(short.apply().state)
        finally:
            sys.settrace(before)

    if is_main:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert states == ["FAILURE"]
    assert not ends[0].is_open
    assert not ends[0].interrupt(StoppedError("once more"))
    with Interruptible() as following:
        assert following._outer is None, "it is still known to the signal"
    assert interrupt._innermost is None


class MutexThatRaises:
    """Errors that are on their way to a thread arrive in it as it ends its stretch."""

    def __init__(self) -> None:
        self.errors: list[type[BaseException]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.errors:
            raise self.errors.pop(0)


def test_two_that_come_too_late_are_both_kept_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer task wants the lock, and the next moment it is lost."""
    mutex = MutexThatRaises()
    monkeypatch.setattr(interrupt, "LONGEST_BIRTH", 0)
    monkeypatch.setattr(interrupt, "_raise_in_thread", lambda _, error: sent.append(error))
    sent: list[type[BaseException]] = []
    escaped: list[BaseException] = []

    def run() -> None:
        try:
            with Interruptible() as stretch:
                stretch._mutex = mutex  # type: ignore[assignment]
                for text in ("superseded", "lost"):
                    assert stretch.interrupt(StoppedError(text))
                mutex.errors += sent
            assert not stretch.is_open
        except BaseException as error:
            escaped.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(sent) == 2
    assert not mutex.errors
    assert not escaped
