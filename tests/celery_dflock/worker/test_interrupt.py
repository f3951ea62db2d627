"""An interruption of a thread: it arrives there and nowhere else, and leaves nothing behind."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time

import pytest

from celery_dflock.worker.interrupt import Interruptible
from tests.celery_dflock.processes import PATIENCE


class StoppedError(Exception):
    """The thread was interrupted."""


def interrupted(inside: threading.Event, stretch: Interruptible, work: object) -> list[str]:
    """Interrupt a thread that works; return how often it noticed."""
    noticed: list[str] = []

    def run() -> None:
        try:
            with stretch:
                inside.set()
                until = time.monotonic() + PATIENCE
                while time.monotonic() < until:
                    if work is not None:
                        _thread.start_new_thread(work, ())  # type: ignore[arg-type]
        except StoppedError as error:
            noticed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(PATIENCE)
    assert stretch.interrupt(StoppedError("by a test"))
    thread.join(PATIENCE)
    return noticed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_arrives_though_the_thread_starts_others() -> None:
    """Until they run they have its id, before Python 3.12."""

    def nothing() -> None:
        pass

    for _ in range(20):
        assert interrupted(threading.Event(), Interruptible(), nothing) == ["by a test"]


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
