"""The clock of the clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial


def _choose() -> Callable[[], float]:
    number = getattr(time, "CLOCK_BOOTTIME", None)
    if number is None:
        return time.monotonic
    try:
        time.clock_gettime(number)
    except OSError:  # known when this Python was built, and not to this kernel
        return time.monotonic
    return partial(time.clock_gettime, number)


now = _choose()
"""Seconds since some time in the past; nobody can set it.

Where the system has such a clock it runs on while the machine is suspended: the server's does, and a
lease may end meanwhile. ``time.monotonic`` stands still then.
"""
