"""The state directory: what the next process makes of it, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflockd.storage import directory, segment, state_file
from dflockd.storage.directory import StateDir, StateError
from dflockd.storage.journal import Journal
from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueued,
    Granted,
    Owner,
    Recovering,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Space,
    Status,
    Superseded,
    fence_from_token,
)
from tests.dflockd.raw_server import PATIENCE

LIMITS = Limits(default_lease=30)


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of the state file, as if they had been written so."""
    state = json.loads((path / "state.json").read_bytes())
    del state["checksum"]
    (path / "state.json").write_bytes(state_file.dump({**state, **changes}))


class Machine:
    """A boot id, and a clock that the test turns."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.boot = "first"
        self.now = 1000.0
        self.running: Run | None = None
        monkeypatch.setattr(directory, "_boot_id", lambda: self.boot)

    def start(self, wall_clock: int = 0, *, recover: bool = False) -> Run:
        self.running = Run(self, wall_clock, recover=recover)
        return self.running

    def crash(self, boot: str = "next", now: float = 5.0) -> None:
        """End without a word, and come up again with a clock that starts anew."""
        self.kill()
        self.boot, self.now = boot, now

    def kill(self) -> None:
        if self.running is not None:
            os.close(self.running.state._lock)
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
            os.close(self.state._lock)
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

    def attempt(self, key: bytes) -> Reply:
        return self.ask(Acquire(Space.LOCK, key, 1, 0, 20))

    def renew(self, key: bytes, token: bytes, lease: int = 20) -> Reply:
        return self.ask(Renew(Space.LOCK, key, token, lease))

    def release(self, key: bytes, token: bytes) -> None:
        assert self.ask(Release(Space.LOCK, key, token)) is Status.OK

    def left(self) -> dict[bytes, float]:
        """How long what is held is held for."""
        entries = self.table._group.spaces[Space.LOCK].values()
        return {
            entry.key: hold.deadline - self.machine.now
            for entry in entries
            for hold in entry.holds.values()
        }

    def stop(self) -> None:
        self.state.close(self.machine.now)
        self.machine.running = None


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "state", monkeypatch)


# The same boot.


def test_a_first_start_waits_for_nobody(machine: Machine) -> None:
    run = machine.start()
    assert (run.state.holds, run.state.recovery, run.state.fence) == ([], 0, 0)
    assert isinstance(run.attempt(b"k"), Granted)


def test_a_killed_process_loses_nothing(machine: Machine) -> None:
    run = machine.start()
    kept, released = run.lock(b"kept", 20), run.lock(b"released", 20)
    run.lock(b"short", 5)
    run.release(b"released", released)
    machine.kill()
    machine.now += 8

    run = machine.start()
    assert run.state.recovery == 0
    assert run.left() == {b"kept": pytest.approx(12, abs=0.11), b"short": 0}
    assert isinstance(run.attempt(b"short"), Granted)
    assert isinstance(run.attempt(b"released"), Granted)
    assert run.attempt(b"kept") is Status.TIMEOUT
    assert run.renew(b"kept", kept) == Renewed(20)


@pytest.mark.parametrize("end", ["kill", "stop", "crash"])
def test_the_newest_of_each_key_is_remembered(machine: Machine, end: str) -> None:
    run = machine.start()

    def asks(age: int, key: bytes = b"k") -> Reply:
        owner = Owner(b"run-%d" % age, 0, b"here", b"task-%d" % age, age)
        assert run.ask(owner) is Status.OK
        return run.attempt(key)

    for age, key in ((7, b"k"), (8, b"k"), (9, b"other")):
        reply = asks(age, key)
        assert isinstance(reply, Granted)
        run.release(key, reply.token)
    if end == "crash":
        run.state.journal.sync()
        machine.crash(now=0.0)
    elif end == "kill":
        machine.kill()
    else:
        run.stop()
    run = machine.start()
    machine.now += run.state.recovery
    assert asks(7) == Superseded(8, b"task-8")
    assert asks(8, b"other") == Superseded(9, b"task-9")
    assert isinstance(asks(8), Granted)


def test_fences_grow_though_the_wall_clock_steps_back(machine: Machine) -> None:
    last = 0
    for wall_clock in (10**9, 10**6, 10**3):
        run = machine.start(wall_clock)
        token = run.lock(b"k")
        assert fence_from_token(token) > max(last, wall_clock)
        last = fence_from_token(token)
        run.release(b"k", token)
        machine.kill()


def test_one_process_at_a_time(machine: Machine) -> None:
    machine.start()
    with pytest.raises(StateError, match="in use by another dflockd"):
        StateDir(str(machine.path), machine.now, LIMITS)
    machine.kill()
    machine.start()


def test_nobody_else_may_read_it(machine: Machine) -> None:
    machine.start().lock(b"k")
    assert stat.S_IMODE(machine.path.stat().st_mode) == 0o700
    names = {path.name.partition("-")[0] for path in machine.path.iterdir()}
    assert names == {"lock", "state.json", "journal"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in machine.path.iterdir()} == {0o600}


# Another boot.


def test_a_clean_stop_waits_for_nobody_on_the_next_boot(machine: Machine) -> None:
    run = machine.start()
    run.lock(b"k", 20)
    machine.now += 5
    run.stop()
    machine.crash(now=3.0)

    run = machine.start()
    assert run.state.recovery == 0
    assert run.left() == {b"k": pytest.approx(15, abs=0.11)}
    assert run.state.holds[0].since == pytest.approx(-2.0)
    assert isinstance(run.attempt(b"other"), Granted)


@pytest.mark.parametrize("journal_survived", [True, False])
def test_after_a_crash_of_the_machine_holders_are_waited_for(
    machine: Machine, journal_survived: bool
) -> None:
    run = machine.start()
    [path] = machine.path.glob("journal-*")
    synced = path.read_bytes()
    token = run.lock(b"k", 25)
    run.lock(b"gone", 25)  # its holder ends with the machine
    fence = run.table.fence
    machine.crash()
    if not journal_survived:
        path.write_bytes(synced)  # nothing since the start

    run = machine.start()
    assert run.state.recovery == 30
    assert run.attempt(b"other") == Recovering(30_000)
    machine.now += 10
    assert run.renew(b"k", token, 25) == Renewed(25)
    machine.now += 20
    assert run.attempt(b"k") is Status.TIMEOUT
    assert fence_from_token(run.lock(b"other")) > fence


def test_what_is_in_doubt_lasts_as_long_as_the_recovery(machine: Machine) -> None:
    # It may have been renewed since for the longest lease that was out.
    machine.start().lock(b"k", 25)
    machine.crash()
    run = machine.start()
    assert run.left() == {b"k": pytest.approx(30)}


@pytest.mark.parametrize("end", ["kill", "stop", "stop and boot"])
def test_a_recovery_goes_on_in_the_next_process(machine: Machine, end: str) -> None:
    # The file of the process that was waiting had the present boot: the next one did not wait.
    machine.start()
    machine.crash()
    run = machine.start()
    machine.now += 10
    if end == "kill":
        machine.kill()
    else:
        run.stop()
    if end == "stop and boot":
        machine.crash("third", now=7.0)
    run = machine.start()
    assert run.attempt(b"k") == Recovering(20_000)
    machine.now += 20
    assert isinstance(run.attempt(b"k"), Granted)
    machine.kill()
    assert machine.start().state.recovery == 0


def test_after_a_crash_while_recovering_the_wait_begins_anew(machine: Machine) -> None:
    run = machine.start()
    run.lock(b"k", 600)
    machine.crash()
    longest = machine.start().state.recovery
    machine.now += 10
    machine.crash("third")
    assert machine.start().state.recovery == longest >= 600


def test_a_longer_lease_is_on_disk_before_it_is_told(machine: Machine) -> None:
    run = machine.start()
    assert machine.file["longest_lease"] == 30
    run.lock(b"a", 29)
    assert machine.file["longest_lease"] == 30
    token = run.lock(b"b", 31)
    assert machine.file["longest_lease"] == 62
    run.renew(b"b", token, 3000)
    assert machine.file["longest_lease"] == 3600  # not beyond what the server gives
    machine.crash()
    assert machine.start().state.recovery == 3600


def test_a_restart_forgets_leases_that_have_ended(machine: Machine) -> None:
    run = machine.start()
    token = run.lock(b"k", 3000)
    run.lock(b"held", 500)
    run.release(b"k", token)
    machine.kill()
    machine.start()
    assert machine.file["longest_lease"] == 500


def test_where_boots_cannot_be_told_apart_only_a_clean_stop_is_trusted(machine: Machine) -> None:
    machine.boot = ""
    run = machine.start()
    run.lock(b"k", 20)
    run.stop()
    run = machine.start()
    assert run.state.recovery == 0
    assert run.left() == {b"k": pytest.approx(20)}
    machine.kill()
    assert machine.start().state.recovery == 30


# Ends in the middle of a start.


class KilledError(BaseException):
    """The process is gone."""


STEPS: list[tuple[type, str]] = [
    (StateDir, "_save"),
    (Journal, "start"),
    (Journal, "_put"),
    (Journal, "drop_others"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("cls", "name"), STEPS)
@pytest.mark.parametrize("before", ["killed", "crashed", "stopped"])
def test_an_end_during_the_start_loses_nothing(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    cls: type,
    name: str,
    after: bool,
) -> None:
    run = machine.start()
    tokens = {key: run.lock(key, 20) for key in (b"a", b"b", b"c")}
    machine.now += 4
    if before == "stopped":
        run.stop()
    if before == "killed":
        machine.kill()
    else:
        machine.crash(now=100_000.0)
    original: Callable[..., Any] = getattr(cls, name)

    def killed(*args: Any, **changes: Any) -> None:
        if after:
            original(*args, **changes)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(cls, name, killed)
        with pytest.raises(KilledError):
            machine.start()
    machine.now += 1

    run = machine.start()
    if before == "crashed":
        assert run.state.recovery >= 29
    # Killed: 15 s of the 20 are left; stopped: one second on the new clock may count or not; crashed:
    # for all that is known, they were renewed for the longest lease.
    least, most = {"killed": (15, 15.2), "stopped": (15, 16.2), "crashed": (29, 30.2)}[before]
    left = run.left()
    assert set(left) == set(tokens)
    assert all(least - 1e-6 <= value <= most for value in left.values())
    for key, token in tokens.items():
        assert run.renew(key, token) == Renewed(20)


def test_an_end_during_the_first_start_is_no_damage(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls, name in STEPS:
        if name == "_put":
            continue
        original = getattr(cls, name)

        def killed(*args: Any, original: Callable[..., Any] = original, **changes: Any) -> None:
            original(*args, **changes)
            raise KilledError

        with monkeypatch.context() as patch:
            patch.setattr(cls, name, killed)
            with pytest.raises(KilledError):
                machine.start()
    machine.start()


def test_a_full_disk_does_not_cost_the_secret(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.start()
    known = machine.file

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", full)
        with pytest.raises(OSError, match="No space"):
            run.lock(b"k", 1000)
    assert machine.file == known
    machine.kill()
    assert isinstance(machine.start().attempt(b"k"), Granted)


# What is refused.


def refusal(machine: Machine) -> str:
    before = {path.name: path.read_bytes() for path in machine.path.iterdir()}
    with pytest.raises(StateError) as caught:
        StateDir(str(machine.path), machine.now, LIMITS)
    assert {path.name: path.read_bytes() for path in machine.path.iterdir()} == before
    message = str(caught.value)
    assert "\n" not in message
    assert str(machine.path) in message
    return message


@pytest.fixture
def stopped(machine: Machine) -> Machine:
    run = machine.start()
    run.lock(b"k")
    run.stop()
    return machine


def test_a_journal_without_its_state(stopped: Machine) -> None:
    (stopped.path / "state.json").unlink()
    assert "no state.json: bring that back, or empty the directory" in refusal(stopped)


def test_a_directory_that_cannot_be_listed_is_not_empty(
    stopped: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It began anew there, without its state file: the next start forgot the journal.
    (stopped.path / "state.json").unlink()

    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", denied)
        patch.setattr("os.scandir", denied)
        with pytest.raises(StateError, match="Permission denied"):
            StateDir(str(stopped.path), stopped.now, LIMITS)
    assert "has a journal and no state.json" in refusal(stopped)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 400,
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"format": 1}',
    ],
)
def test_a_damaged_state_file(stopped: Machine, text: bytes) -> None:
    (stopped.path / "state.json").write_bytes(text)
    assert "state.json is damaged" in refusal(stopped)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("identity", ""),
        ("segments", {}),
        ("secret", ""),
        ("secret", "00"),
        ("secret", "xyz"),
        ("longest_lease", "30"),
        ("longest_lease", None),
        ("fence", 1.5),
        ("clean", 1),
        ("stopped", "x"),
        ("boot", None),
        ("generation", True),
    ],
)
def test_a_field_that_is_wrong(stopped: Machine, field: str, value: object) -> None:
    known = stopped.file
    secret = known["secret"]
    rewrite(stopped.path, **{field: value})
    message = refusal(stopped)
    assert "state.json is damaged" in message
    assert secret not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("secret", "0" * 64),
        ("identity", "0" * 32),
        ("longest_lease", 1),
        ("fence", 0),
        ("clean", False),
        ("boot", "another"),
        ("generation", 0),
        ("checksum", "00000000"),
    ],
)
def test_a_value_that_was_not_written(stopped: Machine, field: str, value: object) -> None:
    (stopped.path / "state.json").write_text(json.dumps({**stopped.file, field: value}))
    assert "state.json is damaged" in refusal(stopped)


def test_every_byte_of_the_state_file_counts(stopped: Machine) -> None:
    path = stopped.path / "state.json"
    text = path.read_bytes()
    for position in range(len(text)):
        path.write_bytes(text[:position] + bytes([text[position] ^ 1]) + text[position + 1 :])
        try:
            known = state_file.load(path.read_bytes())
        except (state_file.StateFileError, state_file.OtherFormatError):
            continue
        # White space around the fields.
        assert known == state_file.load(text)


def test_a_state_of_another_version(stopped: Machine) -> None:
    rewrite(stopped.path, format=3)
    assert "another version of dflockd (format 3)" in refusal(stopped)


@pytest.mark.parametrize("recover", [False, True])
def test_a_journal_of_a_later_version(machine: Machine, recover: bool) -> None:
    # It named a flag that led to a traceback. The record may be what somebody's lock depends on.
    machine.start()
    machine.kill()
    [path] = machine.path.glob("journal-*")
    data = bytearray(path.read_bytes())
    body = b"\x63something new"
    record = struct.pack("<IH", zlib.crc32(body, segment.seed_of(data)), len(body)) + body
    end = segment.RECORDS + len(record)
    data[segment.RECORDS : end] = record
    struct.pack_into("=Q", data, segment.END * segment.WORD, segment.word(end))
    path.write_bytes(data)
    with pytest.raises(StateError) as caught:
        machine.start(recover=recover)
    assert f"of another version of dflockd ({path}: a record of type 99)" in str(caught.value)
    assert "--state-recover" not in str(caught.value)


def test_a_damaged_journal_and_the_way_out(stopped: Machine) -> None:
    [path] = stopped.path.glob("journal-*")
    data = bytearray(path.read_bytes())
    data[140] ^= 1
    path.write_bytes(data)
    message = refusal(stopped)
    assert f"{path}: damaged at byte 128: start once with --state-recover" in message
    assert "to wait 30 s for clients to renew" in message
    assert "or empty the directory if nothing is held any more" in message
    run = stopped.start(recover=True)
    assert run.attempt(b"k") == Recovering(30_000)
    # From then on all is well again, and goes on after a kill.
    stopped.kill()
    stopped.now += 10
    assert stopped.start().attempt(b"k") == Recovering(20_000)


def test_the_way_out_changes_nothing_where_nothing_is_damaged(stopped: Machine) -> None:
    run = stopped.start(recover=True)
    assert run.attempt(b"k") is Status.TIMEOUT
    assert isinstance(run.attempt(b"other"), Granted)


def test_a_journal_that_was_deleted_is_damage(stopped: Machine) -> None:
    [path] = stopped.path.glob("journal-*")
    path.unlink()
    assert f"{path}: missing: start once with --state-recover" in refusal(stopped)
    assert stopped.start(recover=True).attempt(b"k") == Recovering(30_000)


# As a command.


def refused(path: Path, before: str = "") -> str:
    """Return the line with which a server on that directory ends."""
    program = (
        "import os, resource, shutil, sys; from dflockd.cli import main\n"
        "try: import uvloop\n"
        "except ImportError: pass\n"
        f"{before}\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "--host", "127.0.0.1", "--port", "0"]
    command += ["--state-dir", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    line = done.stderr.strip()
    assert "--state-dir" in line
    assert str(path) in line
    return line


def test_a_directory_whose_parent_is_missing(tmp_path: Path) -> None:
    assert "No such file or directory" in refused(tmp_path / "absent" / "state")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("")
    assert "File exists" in refused(path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir(mode=0o500)
    line = refused(path, "if os.getuid() == 0: os.setuid(65534)")
    assert "Permission denied" in line


@pytest.mark.parametrize("room", [100, 100_000])
def test_a_disk_without_room(tmp_path: Path, room: int) -> None:
    path = tmp_path / "state"
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))"
    assert "File too large" in refused(path, limit)
    # And once there is room, all is well.
    state = StateDir(str(path), 5.0, LIMITS)
    state.start(LockTable(LIMITS, TokenIssuer(state.secret, 1), kept=True), 5.0)
    os.close(state._lock)
