"""The stopwatch of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.pace import Pace

STOPPED = 0.5
"""Seconds of each stop."""

STOPS = 3

PROGRAM = """
import os, signal, sys, threading, time
from tests.pace import Pace

def stop():
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # before this goes on

class Between(threading.Event):
    '''Is looked at between two sleeps, and stops the process then.'''
    left = int(sys.argv[2])

    def is_set(self):
        if self.left:
            stop()
            self.left -= 1
        return super().is_set()

pace, between = Pace(), Between()
with pace:
    if sys.argv[1] == "between two sleeps":
        pace._over = between
    while between.left:
        if sys.argv[1] == "whenever":
            between.is_set()
        time.sleep(0.05)
print(pace.wall, pace.seconds, flush=True)
"""


@pytest.mark.parametrize("when", ["whenever", "between two sleeps"])
def test_what_others_took_does_not_count(when: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, when, str(STOPS)], stdout=subprocess.PIPE, text=True
    )
    with process:
        for _ in range(STOPS):
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            time.sleep(STOPPED)
            os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate()
    wall, seconds = map(float, out.split())
    assert wall > STOPS * STOPPED
    assert wall - seconds > 0.9 * STOPS * STOPPED


def test_waiting_counts() -> None:
    """Of many waits one at least ends in time, on any machine that is worth a test."""
    for _ in range(50):
        with Pace() as pace:
            time.sleep(0.1)
        if pace.seconds > 0.09:
            break
    assert pace.seconds > 0.09
    assert pace.seconds <= pace.wall


def test_what_comes_after_the_end_does_not_count() -> None:
    with Pace() as pace:
        pass
    shown = pace.wall, pace.seconds
    time.sleep(0.05)
    assert (pace.wall, pace.seconds) == shown
