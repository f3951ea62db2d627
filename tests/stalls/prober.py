"""Ask a server something small again and again, and say how long the worst answer took.

    python -m tests.stalls.prober PORT PID

It holds a lock and renews it, which every version of the server understands. From one line on its
input to the next it does so without a pause. It prints a line once it was answered, and the longest
round trip in milliseconds when it stops. For how long the server, or this program, had to wait for a
core does not count: that is what the machine took, not the server. Both may wait at once, and also
between two round trips: so a round trip takes at least what this program worked in it.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.exchange import connect


def main() -> None:
    port, pid = sys.argv[1:]
    sock = connect(int(port))
    sock.sendall(b"l\nprobe\n10 600\n")
    token = sock.recv(128).split()[1]
    request = b"n\nprobe\n%b 600\n" % token
    told = select.poll()
    told.register(sys.stdin, select.POLLIN)
    with ExitStack() as stack:
        # Of the main thread alone, in which all is served: nobody waits for the one with the log.
        files = [Path(f"/proc/{each}/task/{each}/schedstat") for each in (pid, os.getpid())]
        waits = [stack.enter_context(file.open("rb", buffering=0)) for file in files]
        print(flush=True)

        def waited() -> float:
            """Return the seconds for which the two have waited for a core since they began."""
            seconds = 0.0
            for each in waits:
                each.seek(0)
                seconds += int(each.read().split()[1]) / 1e9
            return seconds

        before = waited()

        def probe() -> float:
            nonlocal before
            worked, began = time.process_time(), time.perf_counter()
            sock.sendall(request)
            if not sock.recv(64).startswith(b"ok "):
                raise SystemExit("the lock was lost")
            took, worked = time.perf_counter() - began, time.process_time() - worked
            lost, before = before, waited()
            return max(worked, took - (before - lost))

        # One line at a time: another one must not wait in a buffer, where `poll` does not see it.
        while sys.stdin.readline():
            longest = probe()
            print(flush=True)
            while not told.poll(0):
                longest = max(longest, probe())
            sys.stdin.readline()
            print(longest * 1e3, flush=True)


if __name__ == "__main__":
    main()
