"""A session's flows and sockets, as the library sees them in the simulation."""

from __future__ import annotations

import errno
import math
import socket
from typing import TYPE_CHECKING, Any

from dflockd.address import Address
from dflockd.client import connection
from dflockd.client.flow import Awaited, Hear, Pause, Ready
from dflockd.wire import RequestReader
from tests.dflockd.cluster.simulation.machines import Connection

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.library import LibraryClient, _Step


class Task:
    """A flow that goes on by itself, and what it waits for."""

    def __init__(self, client: LibraryClient, waits: _Step) -> None:
        self._client = client
        self.waits = waits
        self.ended = False
        self.until = -math.inf
        self.is_poked = False
        self._is_talk = False
        self._wait: Awaited | None = None

    def step(self, now: float) -> bool:
        """Go on if what it waits for is there; return whether it has gone on."""
        wait, outcome = self._wait, None
        if self.ended:
            return False
        if isinstance(wait, Pause):
            if now < self.until and not self.is_poked:
                return False
        elif wait is not None:
            outcome = self._is_there(wait)
            if not outcome:
                if now < self.until and not self.is_poked:
                    return False
                self._client.world.counts["silence"] += self._is_talk
        self.is_poked = False
        try:
            self._wait = wait = self.waits.send(outcome)
        except StopIteration:
            self.ended, self.until = True, math.inf
            return True
        self._is_talk = isinstance(wait, connection.Connection)
        if isinstance(wait, connection.Connection):
            self._wait = wait = Ready(wait, False, now + wait.left)
        if isinstance(wait, Pause):
            self.until = now + wait.seconds
        else:
            self.until = wait.until
        return True

    def resume(self, _came: bool) -> None:
        """As that of a `dflockd.client.lease.Keeping`: it sees itself what has come."""
        self.is_poked = True
        self.step(self._client.now)

    @staticmethod
    def _is_there(wait: Any) -> bool:
        if isinstance(wait, Hear):
            return wait.signal.fired
        return bool(wait.link.closed or wait.link._sock.is_ready(writes=wait.writes))


class Socket:
    """What a connection knows as its socket."""

    family = socket.AF_INET

    def __init__(self, client: LibraryClient) -> None:
        self._client = client
        self._heard: list[bytes] = []
        self._requests = RequestReader()
        self._is_closed = False
        self.connection: Any = None

    def connect_ex(self, where: tuple[str, int]) -> int:
        """Connect; to one that is dead, and with it perhaps its machine, nobody ever will."""
        client, world = self._client, self._client.world
        server = world.servers[str(Address(*where))]
        self.connection = Connection(client, server)
        client.sockets[self.connection] = self
        self._is_open = server.alive
        if not server.alive and world.random.random() < 0.5:
            return errno.ECONNREFUSED
        return 0 if server.alive else errno.EINPROGRESS

    def is_ready(self, *, writes: bool) -> bool:
        return self._is_open if writes else bool(self._heard)

    def hear(self, data: bytes) -> None:
        self._heard.append(data)

    def send(self, data: bytes) -> int:
        self._check()
        self._requests.receive(data)
        connection, client = self.connection, self._client
        if not connection.server.alive:
            world = client.world
            if world.random.random() < 0.5:
                world.after(world.delay(), client.receive, client.heard, connection, None)
            connection.broken = True
        while (request := self._requests.next_request()) is not None:
            client.outbox.append((connection.send, (request,)))
        return len(data)

    def recv(self, _: int) -> bytes:
        self._check()
        if not self._heard:
            raise BlockingIOError
        return self._heard[0] if not self._heard[0] else self._heard.pop(0)

    def _check(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "it is closed")

    def close(self) -> None:
        self._is_closed = True
        if self.connection is not None and self._client.sockets.pop(self.connection, None):
            self._client.outbox.append((self.connection.close, ()))

    def shutdown(self, _: int) -> None:
        self.hear(b"")

    def setblocking(self, _: bool) -> None:
        pass

    def getsockopt(self, *_: int) -> int:
        return 0

    def setsockopt(self, *_: int) -> None:
        pass
