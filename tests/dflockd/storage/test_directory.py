"""The state directory: what the next process makes of it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from dflockd.storage import directory, syncing
from dflockd.storage.directory import StateDir, StateError
from dflockd.wire import Granted, Pause, Recovering, Renewed, Status, Superseded, fence_from_token
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.storage.machine import LIMITS, Machine, Run

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
    run = machine.start(wall_clock=100)
    for age, key in ((7, b"k"), (8, b"k"), (9, b"other")):
        reply = run.attempt(key, age)
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
    assert run.attempt(b"k", 7) == Superseded(8, b"task-8")
    assert run.attempt(b"other", 8) == Superseded(9, b"task-9")
    assert isinstance(run.attempt(b"k", 8), Granted)


@pytest.mark.parametrize("seed", range(8))
def test_an_age_is_mixed_up_with_nothing_else(machine: Machine, seed: int) -> None:
    """It comes from outside, and may be a fence, or that of several keys."""
    dice = random.Random(seed)
    run = machine.start(wall_clock=1)
    held: dict[bytes, bytes] = {}
    newest: dict[bytes, int] = {}
    for _ in range(60):
        key = b"key-%d" % dice.randrange(6)
        if key in held and dice.random() < 0.6:
            run.release(key, held.pop(key))
            continue
        age = dice.randrange(1, run.table.fence + 1)
        reply = run.attempt(key, age)
        if isinstance(reply, Granted):
            held[key] = reply.token
        newest[key] = max(newest.get(key, 0), age)
        if dice.random() < 0.1:
            machine.kill()
            run = machine.start()
            assert set(run.left()) == set(held)
            assert {record.key: record.age for record in run.state.newest} == newest


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


def test_whoever_deletes_its_files_lets_no_other_process_in(machine: Machine) -> None:
    run = machine.start()
    (machine.path / "lock").unlink()
    with pytest.raises(StateError, match="in use by another dflockd"):
        StateDir(str(machine.path), machine.now, LIMITS)
    run.lock(b"k")
    machine.kill()
    assert machine.start().attempt(b"k") is Status.TIMEOUT


def test_a_process_of_0_1_0_keeps_others_out(machine: Machine) -> None:
    """It locks the file alone."""
    machine.path.mkdir()
    with (machine.path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StateError, match="in use by another dflockd"):
            StateDir(str(machine.path), machine.now, LIMITS)
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
    assert run.ask(Pause(b"paused", 60_000)) is Status.OK
    machine.now += 5
    run.stop()
    machine.crash(now=3.0)

    run = machine.start()
    assert run.state.recovery == 0
    [pause] = run.state.pauses
    assert (pause.since, pause.until) == (-2.0, 58.0)
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


def failing(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """Have the next syncs of a file fail."""
    left = [OSError(errno.EIO, f"failure {number}") for number in range(times)]

    def sync(_file: int) -> None:
        if left:
            raise left.pop(0)

    monkeypatch.setattr("os.fdatasync", sync, raising=False)


def failed_sync(run: Run, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Have the thread that syncs do so, and return why it could not."""
    errors: SimpleQueue[Exception] = SimpleQueue()
    monkeypatch.setattr(syncing, "EVERY", 0.01)
    run.state.keep_synced(errors.put)
    return errors.get(timeout=PATIENCE)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_after_a_sync_that_failed_this_boot_is_trusted_no_more(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    # The kernel has the old content of such pages after a new mount: the lock was forgotten.
    run = machine.start()
    [journal] = machine.path.glob("journal-*")
    on_the_disk = journal.read_bytes()
    token = run.lock(b"k", 20)
    failing(monkeypatch, times=1)
    if end == "stop":
        with pytest.raises(OSError, match="failure 0"):
            run.stop()
    else:
        assert str(failed_sync(run, monkeypatch)) == "[Errno 5] failure 0"
    run.state.journal.lengthen(50.0)  # what else is noted meanwhile does not take it back
    machine.kill()
    journal.write_bytes(on_the_disk)

    run = machine.start()
    assert run.state.recovery == 100
    assert isinstance(run.attempt(b"k"), Recovering)
    assert run.renew(b"k", token) == Renewed(20)


def test_a_disk_that_takes_nothing_at_all_has_its_first_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = machine.start(), machine.file
    failing(monkeypatch, times=9)
    assert str(failed_sync(run, monkeypatch)) == "[Errno 5] failure 0"
    assert machine.file == before


def test_a_sync_that_fails_while_a_longer_lease_is_noted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.start()
    writes, goes_on = threading.Event(), threading.Event()
    lengthens = threading.Thread(target=run.state.journal.lengthen, args=(50.0,))
    failures = [OSError(errno.EIO, "a failure")]

    def sync(_file: int) -> None:
        if threading.current_thread() is lengthens:
            writes.set()
            goes_on.wait(PATIENCE)
        elif failures:
            raise failures.pop()

    monkeypatch.setattr("os.fdatasync", sync, raising=False)
    lengthens.start()
    assert writes.wait(PATIENCE)
    fails = threading.Thread(target=failed_sync, args=(run, monkeypatch))
    fails.start()
    fails.join(0.2)
    goes_on.set()
    for thread in (lengthens, fails):
        thread.join(PATIENCE)
    assert (machine.file["boot"], machine.file["longest_lease"]) == ("", 100)


def test_a_directory_that_was_given_to_another_server_is_left_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.start()
    for path in machine.path.iterdir():
        path.unlink()
    assert isinstance(failed_sync(run, monkeypatch), FileNotFoundError)
    assert list(machine.path.iterdir()) == []


@pytest.mark.parametrize("locks_files", [True, False])
def test_a_file_system_that_locks_no_directories(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, locks_files: bool
) -> None:
    lock = fcntl.flock

    def flock(file: int, how: int) -> None:
        if not locks_files or stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    if not locks_files:
        with pytest.raises(StateError, match="Invalid argument"):
            machine.start()
        return
    machine.start()
    with pytest.raises(StateError, match="is in use by another dflockd"):
        StateDir(str(machine.path), machine.now, LIMITS)


def test_another_clock_on_the_same_boot_counts_as_another_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Linux time namespaces: the id of the boot is the machine's, and CLOCK_BOOTTIME is not.
    offsets, boot = tmp_path / "timens_offsets", tmp_path / "boot_id"
    boot.write_text("one\n")
    monkeypatch.setattr(directory, "_BOOT_ID", boot)
    monkeypatch.setattr(directory, "_CLOCK_OFFSETS", offsets)
    found = []
    for ahead in (0, 100_000):
        offsets.write_text(f"monotonic {ahead} 0\nboottime {ahead} 0\n")
        found.append(directory._boot_id())
    assert found[0] != found[1], "deadlines of one clock would be read on the other"
