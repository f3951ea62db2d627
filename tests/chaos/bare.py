"""A client of a lock server that is nothing but the protocol."""

from __future__ import annotations

import contextlib
import json
import socket
import time

from dflockd.sharding import stable_hash_shard
from dflockd.shards import get_shard_id
from dflockd.wire import fence_from_token

PATIENCE = 15.0
"""Seconds to wait for an answer without a client's help."""

CLUSTER = "cluster://"
HOPS = 5
"""From server to server of a cluster, at most."""


class Bare:
    """A lock taken with nothing but the protocol: neither renewed nor watched, as old clients do."""

    def __init__(self, key: str, lease: int, servers: str | list[str]) -> None:
        self.key = key
        self._lease = lease
        self._seeds = servers.removeprefix(CLUSTER).split(",") if isinstance(servers, str) else []
        self._address = ("", 0)
        if isinstance(servers, list):
            self._address = parse(servers[stable_hash_shard(key, len(servers))])
        self._token = ""
        self._sock: socket.socket | None = None
        self.deadline: float | None = None
        """Of its lease, by the monotonic clock."""

    @property
    def held(self) -> bool:
        return self.deadline is not None and time.monotonic() < self.deadline

    @property
    def fence(self) -> int:
        return fence_from_token(self._token)

    def acquire(self, timeout: int) -> bool:
        """Wait for it; an OSError if the connection breaks."""
        if self._seeds:
            self._locate()
        for _ in range(HOPS):
            self._sock = socket.create_connection(self._address, PATIENCE)
            sent = time.monotonic()
            status, *rest = self._ask(f"l\n{self.key}\n{timeout} {self._lease}\n").split(" ")
            if status != "error_moved":
                break
            self.close()
            self._address = parse(rest[2])
        if status != "ok":
            self.close()
            return False
        self._token = rest[0]
        self.deadline = sent + self._lease
        return True

    def forge(self, token: str) -> None:
        """Act as if it had been granted with this token."""
        self._token = token

    def release(self) -> bool:
        request = f"r\n{self.key}\n{self._token}\n"
        self.deadline = None
        try:
            try:
                if self._sock is not None:
                    return self._ask(request) == "ok"
            except OSError:
                self.close()
            if self._seeds:
                self._locate()
            self._sock = socket.create_connection(self._address, PATIENCE)
            return self._ask(request) == "ok"
        except OSError:
            return False
        finally:
            self.close()

    def _locate(self) -> None:
        """Ask which server has the key; an OSError if nobody knows."""
        for seed in self._seeds:
            with contextlib.suppress(OSError):
                self._sock = socket.create_connection(parse(seed), PATIENCE)
                report = json.loads(self._ask("shards\n_\n_\n").partition(" ")[2] or "null")
                self.close()
                number = report["shards"][get_shard_id(self.key)] if report else -1
                if number >= 0:
                    self._address = parse(report["servers"][number])
                    return
        raise ConnectionError(f"no server of {self._seeds} knows where {self.key} is")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def _ask(self, request: str) -> str:
        assert self._sock is not None
        self._sock.sendall(request.encode())
        line = b""
        while not line.endswith(b"\n"):
            if not (data := self._sock.recv(4096)):
                raise ConnectionResetError("the connection has ended")
            line += data
        return line.decode().rstrip()


def parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
