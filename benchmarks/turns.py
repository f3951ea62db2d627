"""A lock taken and given back, again and again, in each of the ways that are compared."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TypeAlias

import redis.asyncio

from benchmarks.exchange import connect
from dflockd import client, sync_client
from dflockd.address import parse_server

OURS = "DistributedLock"
ASYNCIO = "DistributedLock of asyncio"
BARE = "bare socket, same exchange"
REDIS = "redis-py Lock"
REDIS_ASYNCIO = "redis-py Lock of asyncio"

Turns: TypeAlias = Callable[[int], None]
"""Takes so many turns, one after the other, and each with a new lock object."""


def ours(address: str) -> Turns:
    def turns(number: int) -> None:
        for _ in range(number):
            with sync_client.DistributedLock("bench", servers=[address]):
                pass

    return turns


def of_asyncio(address: str) -> Turns:
    runner = asyncio.Runner()

    async def turns(number: int) -> None:
        for _ in range(number):
            async with client.DistributedLock("bench", servers=[address]):
                pass

    return lambda number: runner.run(turns(number))


def of_redis_asyncio(address: str) -> Turns:
    server = parse_server(address)
    runner = asyncio.Runner()
    redis_client = redis.asyncio.Redis(host=server.host, port=server.port)

    async def turns(number: int) -> None:
        for _ in range(number):
            async with redis_client.lock("bench", timeout=33):
                pass

    return lambda number: runner.run(turns(number))


def of_redis(address: str) -> Turns:
    server = parse_server(address)
    if server.unix_path is not None:
        redis_client = redis.Redis(unix_socket_path=server.unix_path)
    else:
        redis_client = redis.Redis(server.host, server.port)

    def turns(number: int) -> None:
        for _ in range(number):
            with redis_client.lock("bench", timeout=33):
                pass

    return turns


def bare(address: str) -> Turns:
    server = parse_server(address)
    if server.unix_path is not None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(server.unix_path)
    else:
        sock = connect(server.port)

    def turns(number: int) -> None:
        for _ in range(number):
            sock.sendall(b"l\nbench\n10\n")
            sock.sendall(b"r\nbench\n%b\n" % sock.recv(256).split(b" ", 2)[1])
            sock.recv(256)

    return turns


WAYS: dict[str, Callable[[str], Turns]] = {
    OURS: ours,
    ASYNCIO: of_asyncio,
    BARE: bare,
    REDIS: of_redis,
    REDIS_ASYNCIO: of_redis_asyncio,
}
"""They are given the address of the lock server, or of Redis: ``host:port`` or ``unix:path``."""
