"""State directories whose start was interrupted, and those that are refused."""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflockd
from dflockd.storage import segment, state_file
from dflockd.storage.directory import StateDir, StateError
from dflockd.storage.journal import Journal
from dflockd.table import LockTable, TokenIssuer
from dflockd.wire import Granted, Recovering, Renewed, Status
from tests import forkserver
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.storage.machine import LIMITS, Machine, rewrite


class KilledError(BaseException):
    """The process is gone."""


STEPS: list[tuple[type, str]] = [
    (StateDir, "_save"),
    (Journal, "start"),
    (Journal, "drop_others"),
]
if not dflockd.compiled:  # there it is not looked up in its class
    STEPS.append((Journal, "_put"))


# Ends in the middle of a start.


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


# What is refused.


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
    "text", [b"", b"\0" * 400, b"{", b"[]", b"null", b"\xff", b'{"format": 2}']
)
def test_a_damaged_state_file(stopped: Machine, text: bytes) -> None:
    (stopped.path / "state.json").write_bytes(text)
    assert "state.json is damaged" in refusal(stopped)


def test_a_state_file_of_many_lists(stopped: Machine) -> None:
    (stopped.path / "state.json").write_bytes(b"[" * 100_000)
    assert "state.json is damaged" in refusal(stopped)


@pytest.mark.parametrize("name", ["state.json", "lock"])
def test_a_pipe_in_the_place_of_a_file(stopped: Machine, name: str) -> None:
    (stopped.path / name).unlink()
    os.mkfifo(stopped.path / name)
    with pytest.raises(StateError, match="Not a regular file"):
        StateDir(str(stopped.path), stopped.now, LIMITS)


def test_others_cannot_open_the_directory(stopped: Machine) -> None:
    # Who may read it could lock it, and keep every server from starting.
    stopped.path.chmod(0o755)
    stopped.start()
    assert stopped.path.stat().st_mode & 0o777 == 0o700


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


def refused(path: Path, before: str = "") -> str:
    """Return the line with which a server on that directory ends."""
    program = (
        "import os, resource, shutil, sys; from dflockd.cli import main\n"
        "try: import uvloop\n"
        "except ImportError: pass\n"
        f"{before}\n"
        "sys.exit(main())"
    )
    start = ["-c", program] if before else ["-m", "dflockd"]
    command = [sys.executable, *start, "--host", "127.0.0.1", "--port", "0"]
    done = forkserver.run([*command, "--state-dir", str(path)], timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    line = done.stderr.strip()
    assert "--state-dir" in line
    assert str(path) in line
    return line


# As a command.


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
    state.let_go()
