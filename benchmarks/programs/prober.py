"""Ask a server something small again and again, and say how long the worst answer took.

    python -m benchmarks.programs.prober PORT

It holds a lock and renews it, which every version of the server understands. From one line on its
input to the next it does so without a pause. It prints a line once it was answered, and the longest
round trip in milliseconds when it stops.
"""

from __future__ import annotations

import select
import sys
import time

from benchmarks.exchange import connect


def main() -> None:
    sock = connect(int(sys.argv[1]))
    sock.sendall(b"l\nprobe\n10 600\n")
    token = sock.recv(128).split()[1]
    request = b"n\nprobe\n%b 600\n" % token
    told = select.poll()
    told.register(sys.stdin, select.POLLIN)
    print(flush=True)

    def probe() -> float:
        began = time.perf_counter()
        sock.sendall(request)
        if not sock.recv(64).startswith(b"ok "):
            raise SystemExit("the lock was lost")
        return time.perf_counter() - began

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
