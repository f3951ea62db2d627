"""Cores and CPU time. Linux only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from examples.demo import stage

CORES = sorted(os.sched_getaffinity(0))
"""Those that this process may use."""

IDLE = 0.1
"""Seconds in which a process takes less than a hundredth of a core if it has nothing to do."""

PATIENCE = 60.0


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Stay on one core, and with this process all that it starts meanwhile.

    ``-1`` is the last core, as in a list. Servers get that one, what loads them gets the first.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def spent(pid: int) -> float:
    """Return the CPU seconds of a process, all threads, to the nanosecond.

    `psutil` counts ticks of 10 ms. This is the clock that ``clock_getcpuclockid(3)`` names.
    """
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def all_spent(pids: Iterable[int]) -> float:
    """Return the CPU seconds of some processes together."""
    return sum(map(spent, pids))


def _wants_to_run(pid: int) -> bool:
    """Whether a thread of a process is on a core, or waits for one."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return any(each.read_text().rpartition(")")[2].split()[0] == "R" for each in threads)


def wait_idle(*pids: int) -> None:
    """Wait until these processes have done with what they were given."""

    def probe() -> bool | None:
        before = all_spent(pids)
        time.sleep(IDLE)
        # One that others keep from the cores takes nothing either, but it wants to.
        is_quiet = all_spent(pids) - before < IDLE / 100
        return (is_quiet and not any(map(_wants_to_run, pids))) or None

    stage.wait_until(probe, PATIENCE, lambda: f"processes {pids} are busy with nothing to do")
