"""A server with a state directory, which ends and comes back."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.dflockd.client_support import stats, until
from tests.dflockd.raw_server import RawClient, ServerProcess
from tests.dflockd.storage.machine import rewrite


class Site:
    """A server on one directory and one port, process after process."""

    def __init__(self, path: Path, *flags: str) -> None:
        self.path = path
        self._flags = ("--state-dir", str(path), "--max-locks", "10000", *flags)
        self._port = 0
        self.servers: list[ServerProcess] = []

    @property
    def server(self) -> ServerProcess:
        return self.servers[-1]

    @property
    def port(self) -> int:
        return self.server.port

    def start(self, *flags: str) -> ServerProcess:
        self.servers.append(ServerProcess(*self._flags, *flags, "--port", str(self._port)))
        self._port = self.server.port
        return self.server

    def connect(self) -> RawClient:
        return self.server.connect()

    def kill(self) -> None:
        self.server.signal(signal.SIGKILL)
        self.server.wait()

    def stop(self) -> None:
        self.server.signal(signal.SIGTERM)
        assert self.server.wait() == 0

    def restart(self, end: str = "kill") -> ServerProcess:
        self.stop() if end == "stop" else self.kill()
        return self.start()

    @property
    def file(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads((self.path / "state.json").read_bytes())
        return known

    def change_boot(self) -> None:
        """Make the last process one of another boot of the machine."""
        rewrite(self.path, boot="another")

    def end(self) -> None:
        for server in self.servers:
            server.end()


def inspected(raw: RawClient, key: str, command: str = "i") -> dict[str, Any]:
    report: dict[str, Any] = json.loads(raw.ask(command, key).removeprefix("ok "))
    return report


def is_owned(server: ServerProcess, key: str) -> bool:
    return any(held["owner_conn_id"] for held in stats(server)["locks"] if held["key"] == key)


def knows_server(lock: Any) -> bool:
    """Whether the client has its connection back; without, a release may come too early for it."""
    return bool(lock.state == "held")


async def all_back(server: ServerProcess, *locks: Any) -> None:
    """Wait until the server knows that the holders of locks live, and they know the server."""
    await until(lambda: all(is_owned(server, lock.key) for lock in locks))
    await until(lambda: all(map(knows_server, locks)))
