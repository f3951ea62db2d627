"""What the tests of the server ask it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess, eventually

takes_seconds = pytest.mark.parametrize(
    "uvloop",
    ["uvloop", pytest.param("asyncio", marks=pytest.mark.soak)],
    indirect=True,
    scope="module",
)
"""For tests that wait for times of a second and more: on plain asyncio the soak runs them."""


def tls_flags(directory: Path) -> tuple[str, ...]:
    """What has a server show the certificate there."""
    return "--tls-cert", str(directory / "server.pem"), "--tls-key", str(directory / "server.key")


def stats(client: RawClient) -> dict[str, Any]:
    reply = client.ask("stats")
    assert reply.startswith("ok {")
    report: dict[str, Any] = json.loads(reply[3:])
    return report


def inspect(client: RawClient, key: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(client.ask("i", key).removeprefix("ok "))
    return report


def waiters(client: RawClient, key: str) -> int:
    return sum(row["waiters"] for row in stats(client)["locks"] if row["key"] == key)


def queue_up(server: ServerProcess, watcher: RawClient, key: str, argument: object) -> RawClient:
    """Return a client whose `l` waits at the server by now."""
    before = waiters(watcher, key)
    client = server.connect()
    client.request("l", key, argument)
    eventually(lambda: waiters(watcher, key) == before + 1)
    return client


def flood(client: RawClient, data: bytes) -> None:
    """Send until the other side takes no more."""
    client.sock.settimeout(0.3)
    with contextlib.suppress(TimeoutError):
        while True:
            client.send(data)
