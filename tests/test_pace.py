"""The stopwatch of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.pace import Pace

STOPPED = 1.0

PROGRAM = """
import sys
from tests.pace import Pace
with Pace() as pace:
    print("began", flush=True)
    sys.stdin.readline()
    print(pace.wall, pace.seconds, flush=True)
"""


def test_what_others_took_does_not_count() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate("\n")
    wall, seconds = map(float, out.split())
    assert wall > STOPPED
    assert wall - seconds > 0.9 * STOPPED


def test_waiting_counts() -> None:
    """Of many waits one at least ends in time, on any machine that is worth a test."""
    for _ in range(50):
        with Pace() as pace:
            time.sleep(0.1)
        if pace.seconds > 0.09:
            break
    assert pace.seconds > 0.09
    assert pace.seconds <= pace.wall
