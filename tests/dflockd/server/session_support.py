"""Sessions over a transport that does what it is told."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from dflockd.server import Admission, Server, ServerOptions, Slices, SparingLog
from dflockd.server.session import Session
from dflockd.table import Limits, LockTable, TokenIssuer


class FullTransport(asyncio.Transport):
    """Takes everything and sends nothing; it never closes by itself."""

    def __init__(self, high_water: int) -> None:
        super().__init__()
        self.high_water = high_water
        self.written = b""
        self.closing = False
        self.is_reading = True
        self.closed = asyncio.Event()
        self.aborted = asyncio.Event()

    def begin(self, session: Session) -> None:
        self.session = session
        session.connection_made(self)

    def write(self, data: Any) -> None:
        below = len(self.written) <= self.high_water
        self.written += bytes(data)
        if below and len(self.written) > self.high_water:
            self.session.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True
        self.closed.set()

    def abort(self) -> None:
        self.closing = True
        self.aborted.set()
        self.session.connection_lost(None)


def make_server(limits: Limits | None = None, **options: Any) -> Server:
    """Return a server that has sessions without listening."""
    server = Server(
        LockTable(limits or Limits(), TokenIssuer(b"secret", 0)),
        ServerOptions(host="127.0.0.1", port=0, write_timeout=1, **options),
    )
    prepare(server)
    return server


def prepare(server: Server) -> None:
    """Let a server have sessions without listening."""
    server.loop = loop = asyncio.get_running_loop()
    server.log = SparingLog(loop, logging.getLogger("dflockd.server"))
    server.admission = Admission(loop, "connection", limit=0, pending=1, timeout=60)
    give_time(server.slices, 3600.0)  # however slow the machine is


def connect(server: Server, high_water: int = 65536) -> FullTransport:
    transport = FullTransport(high_water)
    guest = server.admission.arrive()
    assert guest is not None
    transport.begin(Session(server, guest))
    return transport


def give_time(slices: Slices, seconds: float) -> None:
    """Let every turn have so much time; below 0 each look at the clock finds that it is over."""
    slices.turn = slices.slice = slices.look_for = slices.at_once = seconds
    slices.free_until = 0.0


async def say(transport: FullTransport, data: bytes) -> None:
    """Send a server something, and wait until it has had the time for it."""
    transport.session.data_received(data)
    while transport.session._resting:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def settled(server: Server) -> None:
    """Wait until a server has done all that it has put off."""
    while server.slices._first or server.slices._behind:  # noqa: ASYNC110
        await asyncio.sleep(0)
