"""A bad network: TCP proxies that cut connections, hold bytes back, delay them, and refuse to connect.

It passes ends on as they are, an orderly one as such and a reset as a reset: lock servers tell them
apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Literal, cast

Way = Literal["there", "back"]
"""To the port that a link leads to, or from it."""

_RESET = struct.pack("ii", 1, 0)
PATIENCE = 10.0


class Network:
    """A thread in which links run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="network")
        self._thread.start()

    def link(self, port: int) -> Link:
        """A new way to a port of this machine."""
        return Link(self, port)

    def close(self) -> None:
        # What was closed in this turn of the loop is closed for good in the next.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(PATIENCE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


class Link:
    """A port that leads to another one. Every method may be called from any thread.

    Attributes:
        targets: where each connection leads, one after the other.
        late: seconds by which what the other port says is late; only to be raised while something is
            connected, or bytes would overtake others.
    """

    def __init__(self, network: Network, target: int) -> None:
        self.target = target
        self.targets: Iterator[int] = itertools.repeat(target)
        self.loop = network.loop
        self.held: frozenset[Way] = frozenset()
        self.refuses = False
        self.late = 0.0
        self.ends: set[_End] = set()
        listening = asyncio.run_coroutine_threadsafe(
            self.loop.create_server(lambda: _End(self), "127.0.0.1", 0), self.loop
        )
        self._server = listening.result(PATIENCE)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset all connections."""
        self._each(_End.reset)

    def hold(self, *ways: Way) -> None:
        """Pass nothing on any more, or one way alone; connections stay, and so do new ones."""
        self.held = frozenset(ways or ("there", "back"))
        self._each(_End.pause_if_held)

    def pass_on(self) -> None:
        """Pass on what was held back, and all that comes."""
        self.held, self.refuses = frozenset(), False
        self._each(_End.resume)

    def refuse(self) -> None:
        """Reset all connections, and new ones as well."""
        self.refuses = True
        self.cut()

    def close(self) -> None:
        self.refuse()
        self._do(self._server.close)

    def _each(self, what: Callable[[_End], None]) -> None:
        def do() -> None:
            for end in list(self.ends):
                what(end)

        self._do(do)

    def _do(self, what: Callable[[], object]) -> None:
        done = threading.Event()

        def do() -> None:
            try:
                what()
            finally:
                done.set()

        self.loop.call_soon_threadsafe(do)
        done.wait(PATIENCE)


class _End(asyncio.Protocol):
    """One of the two ends of a connection that runs through a link."""

    def __init__(self, link: Link, other: _End | None = None) -> None:
        self._link = link
        self._other = other
        self._is_far = other is not None
        self._begun: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._link.ends.add(self)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._other is not None:
            self.pause_if_held()
            return
        self.pause()
        self._begun = self._link.loop.create_task(self._connect())

    async def _connect(self) -> None:
        if self._link.refuses:
            self.reset()
            return
        try:
            _, far = await self._link.loop.create_connection(
                lambda: _End(self._link, self), "127.0.0.1", next(self._link.targets)
            )
        except OSError:
            self.reset()
            return
        self._other = far
        if self._transport.is_closing():
            far.reset()
        elif "there" not in self._link.held:
            self.resume()

    def data_received(self, data: bytes) -> None:
        assert self._other is not None
        if self._is_far and self._link.late:
            self._link.loop.call_later(self._link.late, self._other._transport.write, data)
        else:
            self._other._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.ends.discard(self)
        if self._other is None:
            return
        if exc is None:
            self._other._transport.close()
        else:
            self._other.reset()

    def pause_if_held(self) -> None:
        if ("back" if self._is_far else "there") in self._link.held:
            self.pause()

    def pause(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._other is not None:
            self._transport.resume_reading()

    def reset(self) -> None:
        sock = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()
