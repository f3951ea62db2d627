"""Take and give back a lock with dflockd-client; runs under its interpreter, without this project.

    python published_client.py PORT

For each line on its input, a number of seconds, it does so for that long, and prints the
microseconds of one ``with DistributedLock(...)``.
"""

import logging
import sys
import time

from dflockd_client import SyncDistributedLock


def main() -> None:
    logging.disable(logging.WARNING)
    servers = [("127.0.0.1", int(sys.argv[1]))]
    print(flush=True)
    for line in sys.stdin:
        turns = 0
        started = now = time.perf_counter()
        end = started + float(line)
        while now < end:
            with SyncDistributedLock("bench", servers=servers):
                pass
            turns += 1
            now = time.perf_counter()
        print((now - started) / turns * 1e6, flush=True)


if __name__ == "__main__":
    main()
