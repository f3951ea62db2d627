"""Stop the processes of a test run now and then, each for a moment: what a busy machine does to them.

Beside a run, with its process id: ``python -m tests.jitter PID [SEED]``. It ends with the run.
"""

from __future__ import annotations

import random
import sys
import time

import psutil

MOST_BETWEEN = 1.0
SHORTEST, LONGEST = 0.05, 0.3
"""Seconds for which one process stands still."""


def stop_one(processes: list[psutil.Process], dice: random.Random) -> None:
    """Stop one of these, unless a test has stopped it already or it has ended."""
    try:
        process = dice.choice(processes)
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            return
        process.suspend()
        try:
            time.sleep(dice.uniform(SHORTEST, LONGEST))
        finally:
            process.resume()
    except psutil.Error:
        return


def main() -> None:
    run = psutil.Process(int(sys.argv[1]))
    dice = random.Random(sys.argv[2] if len(sys.argv) > 2 else None)
    while run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
        time.sleep(dice.uniform(0, MOST_BETWEEN))
        try:
            processes = run.children(recursive=True)
        except psutil.Error:
            return
        if processes:
            stop_one(processes, dice)


if __name__ == "__main__":
    main()
