"""Hold many locks, as a program does that uses the blocking client.

    python -m benchmarks.programs.renewer PORT NUMBER LEASE

The locks are taken one after the other over half a lease, so that their renewals spread as they do
in a service that has run for a while. Then, for each line on its input, it prints the CPU seconds
that it has used so far and how many of the locks it holds.
"""

from __future__ import annotations

import sys
import time

from dflockd.sync_client import DistributedLock


def main() -> None:
    port, number, lease = map(int, sys.argv[1:])
    began = time.monotonic()
    locks = []
    for each in range(number):
        lock = DistributedLock(f"held-{each}", lease_ttl_s=lease, servers=[("127.0.0.1", port)])
        lock.acquire()
        locks.append(lock)
        time.sleep(max(began + each * lease / 2 / number - time.monotonic(), 0.0))
    print(flush=True)
    for _ in sys.stdin:
        print(time.process_time(), sum(lock.held for lock in locks), flush=True)


if __name__ == "__main__":
    main()
