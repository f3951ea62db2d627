"""Ask a server something small again and again, and say how long the worst answer took.

    python -m benchmarks.programs.prober PORT

It holds a lock and renews it, which every version of the server understands. For each line on its
input, a number of seconds, it does so for that long without a pause, and prints the longest round
trip in milliseconds.
"""

from __future__ import annotations

import sys
import time

from benchmarks.exchange import connect


def main() -> None:
    sock = connect(int(sys.argv[1]))
    sock.sendall(b"l\nprobe\n10 600\n")
    token = sock.recv(128).split()[1]
    request = b"n\nprobe\n%b 600\n" % token
    print(flush=True)
    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        longest = 0.0
        while (began := time.perf_counter()) < end:
            sock.sendall(request)
            if not sock.recv(64).startswith(b"ok "):
                raise SystemExit("the lock was lost")
            longest = max(longest, time.perf_counter() - began)
        print(longest * 1e3, flush=True)


if __name__ == "__main__":
    main()
