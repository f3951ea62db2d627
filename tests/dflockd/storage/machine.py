"""A machine with a state directory: boots, processes, and what they find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflockd.storage import directory, state_file
from dflockd.storage.directory import StateDir
from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueued,
    Granted,
    Owner,
    Release,
    Renew,
    Reply,
    Request,
    Space,
    Status,
)

LIMITS = Limits(default_lease=30)


class Machine:
    """A boot id, and a clock that the test turns."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.boot = "first"
        self.now = 1000.0
        self.running: Run | None = None
        monkeypatch.setattr(directory, "_boot_id", lambda: self.boot)
        # Nothing here loses its power.
        monkeypatch.setattr("os.fsync", lambda _: None)
        monkeypatch.setattr("os.fdatasync", lambda _: None, raising=False)

    def start(self, wall_clock: int = 0, *, recover: bool = False) -> Run:
        self.running = Run(self, wall_clock, recover=recover)
        return self.running

    def crash(self, boot: str = "next", now: float = 5.0) -> None:
        """End without a word, and come up again with a clock that starts anew."""
        self.kill()
        self.boot, self.now = boot, now

    def kill(self) -> None:
        if self.running is not None:
            self.running.state.let_go()
            self.running = None

    @property
    def file(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads((self.path / "state.json").read_bytes())
        return known


class Run:
    """What one process does, without its network."""

    def __init__(self, machine: Machine, wall_clock: int, *, recover: bool) -> None:
        self.machine = machine
        self.state = StateDir(str(machine.path), machine.now, LIMITS, recover=recover)
        issuer = TokenIssuer(self.state.secret, max(wall_clock, self.state.fence))
        self.table = LockTable(LIMITS, issuer, kept=True)
        try:
            self.state.start(self.table, machine.now)
        except BaseException:
            self.state.let_go()
            raise
        self.peer: Peer = self.table.connect()

    def ask(self, request: Request) -> Reply:
        ((_, reply),) = self.table.handle(self.peer, request, self.machine.now)
        assert self.table.changes is not None
        self.state.journal.record(self.table.changes, self.table.fence)
        self.table.changes.clear()
        return reply

    def lock(self, key: bytes, lease: int = 20) -> bytes:
        reply = self.ask(Acquire(Space.LOCK, key, 1, 0, lease))
        assert isinstance(reply, Granted | Enqueued)
        return reply.token

    def attempt(self, key: bytes, age: int = 0) -> Reply:
        owner = Owner(b"run-%d" % age, 0, age) if age else None
        label = b"task-%d" % age if age else b""
        return self.ask(Acquire(Space.LOCK, key, 1, 0, 20, owner=owner, label=label))

    def renew(self, key: bytes, token: bytes, lease: int = 20) -> Reply:
        return self.ask(Renew(Space.LOCK, key, token, lease))

    def release(self, key: bytes, token: bytes) -> None:
        assert self.ask(Release(Space.LOCK, key, token)) is Status.OK

    def left(self) -> dict[bytes, float]:
        """How long what is held is held for."""
        entries = self.table._partition.spaces[Space.LOCK].values()
        return {
            entry.key: hold.deadline - self.machine.now
            for entry in entries
            for hold in entry.holds.values()
        }

    def stop(self) -> None:
        self.state.close(self.machine.now)
        self.machine.running = None


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of the state file, as if they had been written so."""
    state = json.loads((path / "state.json").read_bytes())
    del state["checksum"]
    (path / "state.json").write_bytes(state_file.dump({**state, **changes}))
