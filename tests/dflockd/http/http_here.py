"""A lock server with its HTTP side in this process, and connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

from dflockd.http import HttpOptions, HttpServer
from dflockd.server import Server, ServerOptions
from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.wire import Acquire, Space
from tests.dflockd.raw_server import PATIENCE

GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"


class Peer:
    """One connection to a site in this process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.head = b""
        """That of the last answer."""

    async def ask(self, request: bytes = GET) -> int:
        """Return the status of the answer to a request, 0 if the connection ends instead."""
        try:
            self.writer.write(request)
            return await self.status()
        except ConnectionError:
            return 0

    async def status(self) -> int:
        async with asyncio.timeout(PATIENCE):
            head = self.head = b""
            with contextlib.suppress(asyncio.IncompleteReadError):
                head = await self.reader.readuntil(b"\r\n\r\n")
                self.head = head
            if not head:
                return 0
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await self.reader.readexactly(int(length))
            return int(head[9:12])

    async def ended(self) -> bool:
        """Wait for the end of the connection, and return whether nothing came before it."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


class Here:
    """A site in this process, whose limits a test can set."""

    def __init__(self, http: HttpServer, table: LockTable) -> None:
        self.http = http
        self.table = table
        self.where = urlsplit(http.urls[0])
        self.peers: list[Peer] = []

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_connection(self.where.hostname, self.where.port))
        self.peers.append(peer)
        return peer

    async def ask(self, request: bytes = GET) -> int:
        return await (await self.connect()).ask(request)


@contextlib.asynccontextmanager
async def site_here(
    most: int = 100,
    secret: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    table: LockTable | None = None,
) -> AsyncIterator[Here]:
    if table is None:
        table = LockTable(Limits(max_locks=100_000), TokenIssuer(b"x", 1))
    server = Server(table, ServerOptions(host="127.0.0.1", port=0, auth_secret=secret))
    await server.start()
    http = HttpServer(server, HttpOptions(max_connections=most, tls=tls))
    await http.start()
    here = Here(http, table)
    try:
        yield here
    finally:
        for peer in here.peers:
            peer.writer.transport.abort()
        await http.stop()
        await server.stop()


async def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


def fill(table: LockTable, keys: int) -> None:
    holder = table.connect()
    for number in range(keys):
        table.handle(holder, Acquire(Space.LOCK, b"key:%06d" % number, 1, 0, 1000), 0)
