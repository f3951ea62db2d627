"""Ask a server something small all the time, and say how long the worst answer took.

    python pinger.py SOCKET KEY TOKEN

It renews the lock KEY every two milliseconds. For each line on its input it prints the longest
round trip since the last, in milliseconds.
"""

import select
import socket
import sys
import time

path, key, token = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(path)
    sock.settimeout(30)
    request = f"n\n{key}\n{token} 600\n".encode()
    worst = 0.0
    while True:
        began = time.perf_counter()
        sock.sendall(request)
        assert sock.recv(64) == b"ok 600\n"
        worst = max(worst, time.perf_counter() - began)
        if select.select([sys.stdin], [], [], 0.002)[0]:
            if not sys.stdin.readline():
                break
            print(f"{worst * 1000:.3f}", flush=True)
            worst = 0.0
