"""An interruption of a thread: it arrives there and nowhere else, and leaves nothing behind."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from celery_dflock.worker import interrupt
from celery_dflock.worker.interrupt import Interruptible
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


@pytest.mark.usefixtures("newborn_threads_wait")
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_it_arrives_though_the_thread_has_started_others(
    is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they run they have its id, before Python 3.12: so they are let run, to their end.

    One that does not come to run in time gets the error, and hands it on.
    """
    if not is_waited_for:
        monkeypatch.setattr(interrupt, "LONGEST_BIRTH", 0)
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
    assert len(born) == 3 if is_waited_for else born or stillborn


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
