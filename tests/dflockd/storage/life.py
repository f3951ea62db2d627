"""Runs of a server on one directory, recorded for `power`, and how what is left of them is judged."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflockd.storage import directory
from dflockd.storage.directory import StateDir, StateError
from dflockd.table import Hold, Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Granted,
    How,
    Recovering,
    Release,
    Renew,
    Renewed,
    Space,
    Status,
    fence_from_token,
)
from tests.dflockd.storage.power import Left, Record, RecordingDisk

LIMITS = Limits(default_lease=30, max_lease=600, max_detached_lease=5000)


@dataclass(frozen=True)
class Told:
    """What clients know: told by the server, and true until they are told something else."""

    tokens: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """By key: token and lease of what somebody runs on the strength of."""
    detached: dict[bytes, int] = field(default_factory=dict)
    """By key: the fences of what stays by itself."""
    safe: frozenset[int] = frozenset()
    """Those of them that are older than a sync."""
    gone: frozenset[int] = frozenset()
    """The fences of what was released before a sync."""
    fence: int = 0
    running: bool = False
    """Whether a process may be in the middle of something; else it has stopped."""
    boot: str = ""
    """On which boot of the machine the last process has run."""


class Life:
    """A machine and the processes on it: what they do goes by chance."""

    def __init__(self, path: Path, seed: int, patch: Any) -> None:
        self.path = path
        self.chance = random.Random(seed)
        self.record = Record()
        self.boot, self.now = "first", 1000.0
        self.told = Told()
        self.keys = [b"key-%d-%s" % (n, b"x" * self.chance.randrange(60)) for n in range(8)]
        patch.setattr(directory, "_boot_id", lambda: self.boot)
        self.state: StateDir | None = None
        self.released: set[int] = set()

    def tell(self, **changes: Any) -> None:
        self.told = Told(**{**self.told.__dict__, **changes})
        self.record.note(self.told)

    def start(self) -> None:
        self.tell(running=True, boot=self.boot)
        self.state = state = StateDir(
            str(self.path), self.now, LIMITS, disk=lambda path: RecordingDisk(path, self.record)
        )
        issuer = TokenIssuer(state.secret, max(1000, state.fence))
        self.table = LockTable(LIMITS, issuer, kept=True)
        state.start(self.table, self.now)
        self.peer: Peer = self.table.connect()
        held = {hold.fence: hold for hold in self.holds()}
        # What was detached and is here is on the disk since the start; those that run have renewed.
        known = {key: fence for key, fence in self.told.detached.items() if fence in held}
        self.tell(detached=known, safe=frozenset(known.values()))
        for key, (token, _) in list(self.told.tokens.items()):
            self.renew(key, token)

    def renew(self, key: bytes, token: bytes) -> None:
        assert self.ask(Renew(Space.LOCK, key, token, 30)) == Renewed(30), key
        self.tell(tokens={**self.told.tokens, key: (token, 30)})

    def forget(self) -> None:
        """Let the time pass in which those who run could still come back."""
        self.now += 700
        self.tell(tokens={})

    def holds(self) -> list[Hold]:
        spaces = self.table._partition.spaces
        return [hold for entry in spaces[Space.LOCK].values() for hold in entry.holds.values()]

    def ask(self, request: Any) -> Any:
        assert self.state is not None
        ((_, reply),) = self.table.handle(self.peer, request, self.now)
        assert self.table.changes is not None
        self.state.journal.record(self.table.changes, self.table.fence)
        self.table.changes.clear()
        return reply

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.01
            if self.chance.random() < 0.08:
                self.sync()
            else:
                self.step(self.chance.choice(self.keys))

    def sync(self) -> None:
        assert self.state is not None
        before, gone = frozenset(self.told.detached.values()), frozenset(self.released)
        self.state.journal.sync()
        self.tell(safe=self.told.safe | before, gone=gone)

    def step(self, key: bytes) -> None:
        told, chance = self.told, self.chance
        if key in told.detached:
            if chance.random() < 0.5:
                others = {k: fence for k, fence in told.detached.items() if k != key}
                self.tell(detached=others)
                token = self.table.slots.issuer.token(
                    Space.LOCK, key, told.detached[key], is_sole=True
                )
                self.release(key, token)
            return
        if key not in told.tokens:
            lease = chance.choice((20, 25, 30, 30, 300))
            reply = self.ask(Acquire(Space.LOCK, key, 1, 0, lease))
            if isinstance(reply, Granted):
                self.tell(
                    tokens={**told.tokens, key: (reply.token, lease)},
                    fence=fence_from_token(reply.token),
                )
            return
        token, _ = told.tokens[key]
        left = {k: held for k, held in told.tokens.items() if k != key}
        what = chance.random()
        if what < 0.4:
            self.renew(key, token)
        elif what < 0.7:
            # From when it is asked on, it may be free.
            self.tell(tokens=left)
            self.release(key, token)
        else:
            self.tell(tokens=left)
            assert isinstance(self.ask(Renew(Space.LOCK, key, token, 4000, How.DETACH)), Renewed)
            self.tell(detached={**told.detached, key: fence_from_token(token)})

    def release(self, key: bytes, token: bytes) -> None:
        assert self.ask(Release(Space.LOCK, key, token)) is Status.OK
        self.released.add(fence_from_token(token))

    def stop(self) -> None:
        assert self.state is not None
        self.state.close(self.now)
        self.state = None
        self.tell(running=False, safe=frozenset(self.told.detached.values()))

    def kill(self) -> None:
        assert self.state is not None
        self.state.let_go()
        self.state = None

    def reboot(self) -> None:
        """Start anew on another boot, with a clock that begins anew."""
        self.boot, self.now = f"after {self.boot}", 50.0


def judge(path: Path, files: dict[str, bytes], told: Told, *, same_boot: bool) -> str | None:
    """Start on a directory and say what is wrong with what comes back, or ``None``.

    Args:
        path: where a directory may be; it stays empty.
        files: what is in it.
        told: what clients know.
        same_boot: whether the kernel is the one that took all the writes.
    """
    now = 5000.0 if same_boot else 20.0
    try:
        state = StateDir(str(path), now, LIMITS, disk=lambda path: Left(path, files))
    except StateError as exc:
        return f"refused: {exc}"
    state.let_go()
    table = LockTable(LIMITS, TokenIssuer(state.secret, state.fence), kept=False)
    # The clock of another process counts from its own time: what matters is what is in force.
    table.restore(
        [hold._replace(deadline=now + hold.lease, since=now) for hold in state.holds], now
    )
    if state.recovery:
        table.recover(now + state.recovery)
    return _wrong(table, state, told, now)


def _wrong(table: LockTable, state: StateDir, told: Told, now: float) -> str | None:
    if state.fence < told.fence:
        return f"fence {state.fence} is below {told.fence}, which was given out"
    longest = max((lease for _, lease in told.tokens.values()), default=0)
    if state.recovery and state.recovery < longest:
        return f"recovery of {state.recovery} s, and a lease of {longest} s is out"
    other, holder = table.connect(), table.connect()
    for key, (token, _) in told.tokens.items():
        ((_, reply),) = table.handle(other, Acquire(Space.LOCK, key, 1, 0, 20), now)
        if reply is not Status.TIMEOUT and not isinstance(reply, Recovering):
            return f"second holder of {key!r}: {reply}"
        ((_, reply),) = table.handle(holder, Renew(Space.LOCK, key, token, 20), now)
        if not isinstance(reply, Renewed):
            return f"the holder of {key!r} cannot renew: {reply}"
    for key, fence in told.detached.items():
        entry = table._partition.spaces[Space.LOCK].get(key)
        is_there = entry is not None and fence in entry.holds
        if not is_there and (fence in told.safe or not state.recovery):
            return f"the detached hold of {key!r} is gone"
    entries = table._partition.spaces[Space.LOCK].values()
    ghosts = told.gone & {fence for entry in entries for fence in entry.holds}
    if ghosts:
        return f"what was released long ago is back: {ghosts}"
    return None
