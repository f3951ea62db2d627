"""The lock server on a machine that is suspended all the time: Python's own clock stands still.

What is left to go by is the clock that goes on meanwhile, and the timers of the loop.
"""

import runpy
import time

if __name__ == "__main__":
    now = time.monotonic()
    time.monotonic = lambda: now
    runpy.run_module("tests.dflockd.cluster.few_shards", run_name="__main__")
