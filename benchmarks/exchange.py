"""The load: connections that take and give back a lock each, as fast as they are answered.

It drives every server the same, so that only the server differs. In this process, or in one of its
own (`ExchangeProcess`), where one of them would not be enough.
"""

from __future__ import annotations

import json
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

from benchmarks.child import Child
from dflockd.sharding import stable_hash_shard

WARM_UP = 0.2
"""Share of a measured time for which a load runs before."""

PATIENCE = 30.0

BACKLOG = 50
"""Connections that may be made at once; asyncio lets 100 wait."""


class Run(NamedTuple):
    """What came of it."""

    turns: int
    """Acquires that were granted, and released."""
    seconds: float
    waits: list[float]
    """Seconds from each acquire to its grant."""

    @property
    def per_second(self) -> float:
        return self.turns / self.seconds

    def wait(self, share: float) -> float:
        """Return the seconds within which this share of the acquires was answered."""
        return sorted(self.waits)[int(share * (len(self.waits) - 1))]


class _Connection:
    __slots__ = ("acquire", "key", "sent", "sock")

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self.sock = sock
        self.key = key
        self.acquire = b"l\n%b\n60\n" % key
        self.sent = 0.0


class Exchange:
    """Connections with a key of their own, which says to which of the servers each goes.

    Args:
        ports: of the servers, on loopback.
        connections: how many.
        name: what the keys begin with.
        tls: what to speak TLS with.
        secret: what to authenticate with.
        shared: the key that all of them want, instead.
    """

    def __init__(
        self,
        ports: Sequence[int],
        connections: int,
        name: str = "key",
        tls: ssl.SSLContext | None = None,
        secret: str | None = None,
        shared: str | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        for number in range(connections):
            key = shared or f"{name}-{number}"
            sock = connect(ports[stable_hash_shard(key, len(ports))], tls, secret)
            if number % BACKLOG == 0:
                settle(sock)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, _Connection(sock, key.encode()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for entry in list(self._selector.get_map().values()):
            entry.data.sock.close()
        self._selector.close()

    def send(self, request: bytes) -> None:
        """Send this over each of the connections, as fast as the server takes it."""
        for entry in self._selector.get_map().values():
            entry.data.sock.send(request)

    def warm_up(self, seconds: float) -> Self:
        """Run for a part of the time that is going to be measured."""
        self.run(seconds * WARM_UP)
        return self

    def run(self, seconds: float) -> Run:
        """Keep it up for so long."""
        clock = time.perf_counter
        waits: list[float] = []
        turns = 0
        started = clock()
        end = started + seconds
        connections: list[_Connection] = [key.data for key in self._selector.get_map().values()]
        for each in connections:
            each.sent = clock()
            each.sock.send(each.acquire)
        busy = len(connections)
        while busy:
            ready = self._selector.select(PATIENCE)
            if not ready:
                raise TimeoutError(f"no answer to {busy} requests within {PATIENCE:g} s")
            for entry, _ in ready:
                each = entry.data
                try:
                    reply = each.sock.recv(256)
                except ssl.SSLWantReadError:  # nothing of ours in what came
                    continue
                now = clock()
                if reply[:3] == b"ok ":
                    waits.append(now - each.sent)
                    each.sock.send(b"r\n%b\n%b\n" % (each.key, reply.split(b" ", 2)[1]))
                elif reply == b"ok\n":
                    turns += 1
                    if now < end:
                        each.sent = now
                        each.sock.send(each.acquire)
                    else:
                        busy -= 1
                else:
                    raise RuntimeError(f"{each.key!r} was answered {reply!r}")
        return Run(turns, clock() - started, waits)


class ExchangeProcess(Child):
    """An `Exchange` in a process of its own."""

    def __init__(self, ports: Sequence[int], connections: int, name: str = "key") -> None:
        super().__init__(
            sys.executable, "-m", __name__, json.dumps([list(ports), connections, name])
        )


def together(processes: Sequence[ExchangeProcess], seconds: float) -> Run:
    """Let them run at the same time; their figures as those of one."""
    for each in processes:
        each.tell(seconds)
    runs = [Run(*json.loads(each.hear())) for each in processes]
    return Run(
        sum(run.turns for run in runs),
        max(run.seconds for run in runs),
        [wait for run in runs for wait in run.waits],
    )


def connect(
    port: int, tls: ssl.SSLContext | None = None, secret: str | None = None
) -> socket.socket:
    """Return a blocking connection to a server on loopback."""
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        sock = tls.wrap_socket(sock, server_hostname="127.0.0.1")
    if secret is not None:
        sock.sendall(b"auth\n_\n%b\n" % secret.encode())
        if sock.recv(64) != b"ok\n":
            raise RuntimeError("the server refused the secret")
    return sock


def settle(sock: socket.socket) -> None:
    """Wait until the server has come to this connection, and so to all that were made before it.

    Beyond its backlog the kernel lets a new connection wait for a second.
    """
    sock.sendall(b"l\nsettle\n10\n")
    sock.sendall(b"r\nsettle\n%b\n" % sock.recv(256).split(b" ", 2)[1])
    sock.recv(256)


def main() -> None:
    ports, connections, name = json.loads(sys.argv[1])
    with Exchange(ports, connections, name) as exchange:
        print(flush=True)
        for line in sys.stdin:
            print(json.dumps(exchange.run(float(line))), flush=True)


if __name__ == "__main__":
    main()
