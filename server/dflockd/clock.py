"""The one clock of servers and clients."""

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

Where the system has such a clock it runs on while the machine is suspended. Leases do: those of other
machines, and those of etcd. ``time.monotonic`` stands still then, and a server that goes by it grants
what another one has long since granted.

Nor is it the loop's: uvloop's stands still during a turn of the loop. A lease counted from the start of
a long turn would end before the client, who counts from when it asked, takes it to be over.
"""
