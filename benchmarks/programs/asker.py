"""Ask a server one thing over many connections, as often as it answers or so often a second.

    python -m benchmarks.programs.asker PORT CONNECTIONS

It prints a line once it is connected. For each line on its input, a JSON list of the request, the
seconds and how often a second (0: as often as it is answered), it prints one: a JSON list of the
answers, their bytes, and the seconds that it took.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections import deque

from benchmarks.exchange import BACKLOG, PATIENCE, connect

PIECE = 1 << 16


class Asker:
    """The connections; each has one question under way at most."""

    def __init__(self, port: int, connections: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._idle: deque[socket.socket] = deque()
        self._busy = 0
        for number in range(connections):
            sock = connect(port)
            if number % BACKLOG == 0:
                sock.sendall(b"ping\n_\n_\n")  # not faster than they are accepted
                sock.recv(64)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
            self._idle.append(sock)

    def run(self, request: bytes, seconds: float, rate: float) -> tuple[int, int, float]:
        """Ask; return how many answers came, of how many bytes, in how many seconds."""
        clock = time.perf_counter
        asked = answers = size = 0
        started = now = clock()
        while now < started + seconds:
            due = rate * (now - started) if rate else float("inf")
            while self._idle and asked < due:
                self._idle.popleft().send(request)
                self._busy += 1
                asked += 1
            wait = (asked + 1) / rate + started - now if self._idle else started + seconds - now
            found = self._read(max(wait, 0.0))
            answers, size = answers + found[0], size + found[1]
            now = clock()
        while self._busy:
            found = self._read(PATIENCE)
            if not found[1]:
                raise TimeoutError(f"no answer to {self._busy} requests within {PATIENCE:g} s")
            answers, size = answers + found[0], size + found[1]
        return answers, size, clock() - started

    def _read(self, timeout: float) -> tuple[int, int]:
        answers = size = 0
        for entry, _ in self._selector.select(timeout):
            sock = entry.fileobj
            assert isinstance(sock, socket.socket)
            piece = sock.recv(PIECE)
            if not piece:
                raise ConnectionResetError("the server closed a connection")
            size += len(piece)
            if piece.endswith(b"\n"):
                answers += 1
                self._busy -= 1
                self._idle.append(sock)
        return answers, size


def main() -> None:
    asker = Asker(int(sys.argv[1]), int(sys.argv[2]))
    print(flush=True)
    for line in sys.stdin:
        request, seconds, rate = json.loads(line)
        print(json.dumps(asker.run(request.encode(), seconds, rate)), flush=True)


if __name__ == "__main__":
    main()
