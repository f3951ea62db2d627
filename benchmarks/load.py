"""Loads: the same exchange against whatever listens at a port."""

from __future__ import annotations

import selectors
import socket
import time

PAIR = 2
"""Requests in one turn of a connection: an acquire and a release."""


class Loader:
    """Connections that each take and give back a lock of their own, as fast as they are answered."""

    def __init__(self, port: int, connections: int) -> None:
        self._selector = selectors.DefaultSelector()
        for number in range(connections):
            sock = socket.create_connection(("127.0.0.1", port), 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, b"key-%d" % number)

    def run(self, turns: int) -> float:
        """Do `turns` acquires and releases in all; return the seconds it took."""
        started = time.perf_counter()
        connections = list(self._selector.get_map().values())
        begun, ended = 0, 0
        for entry in connections:
            entry.fileobj.send(b"l\n%b\n10\n" % entry.data)  # type: ignore[union-attr]
            begun += 1
        while ended < begun:
            for entry, _ in self._selector.select():
                sock: socket.socket = entry.fileobj  # type: ignore[assignment]
                reply = sock.recv(256)
                if len(reply) > 3:
                    token = reply.split(b" ", 2)[1]
                    sock.send(b"r\n%b\n%b\n" % (entry.data, token))
                else:
                    ended += 1
                    if begun < turns:
                        begun += 1
                        sock.send(b"l\n%b\n10\n" % entry.data)
        return time.perf_counter() - started

    def close(self) -> None:
        for entry in list(self._selector.get_map().values()):
            entry.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
