"""A lock server whose wall clock is wrong by some seconds: `python -m tests.chaos.stepped S ...`.

Nothing but Python code asks for the wall clock in it. The system's own clock is everybody's. gRPC goes
by that: its Python part counts deadlines from the wall clock, and its C part compares them with it.
"""

import contextlib
import sys
import time
from types import SimpleNamespace

from dflockd.cli import main

with contextlib.suppress(ImportError):
    from grpc.aio import _utils

    _utils.time = SimpleNamespace(time=time.time)

if __name__ == "__main__":
    step = float(sys.argv.pop(1))
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + step
    time.time_ns = lambda: true_time_ns() + round(step * 1e9)
    sys.exit(main())
