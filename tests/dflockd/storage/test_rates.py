"""What a state directory keeps of runs that have begun."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dflockd.storage import journal
from dflockd.storage.directory import StateDir
from dflockd.storage.disk import Disk
from dflockd.table import Limits, LockTable, TokenIssuer, rates
from dflockd.wire import UNLIMITED, Acquire, Granted, How, Rate, Release, Renew, Space, Status
from tests.dflockd.storage.power import Left, Machine, Record, RecordingDisk

HOUR = Rate(40, 3_600_000)


class Run:
    """A server's use of a directory; without a `stop` it was killed."""

    def __init__(self, path: Path, now: float, disk: Callable[[Path], Disk] = Disk) -> None:
        self.now = now
        self.state = StateDir(str(path), now, Limits(), disk=disk)
        self.table = LockTable(Limits(), TokenIssuer(b"secret", self.state.fence), kept=True)
        self.state.start(self.table, now)

    def begin(self, key: bytes, *, reports: bool = True) -> object:
        peer = self.table.connect()
        request = Acquire(Space.LOCK, key, UNLIMITED, 0, 30, HOUR)
        ((_, reply),) = self.table.handle(peer, request, self.now)
        if isinstance(reply, Granted) and reports:
            self.table.handle(peer, Renew(Space.LOCK, key, reply.token, 30, How.BEGUN), self.now)
        self.record()
        return reply

    def record(self) -> None:
        assert self.table.changes is not None
        self.state.journal.record(self.table.changes, self.table.fence)
        self.table.changes.clear()

    def free(self, key: bytes) -> int:
        rate = self.table.rate_of(Space.LOCK, key)
        return HOUR.runs if rate is None else rate.free(self.now)

    @classmethod
    def left(cls, path: Path, files: dict[str, bytes], now: float) -> Run:
        """Return what a server takes over from one that has left these files: to look at alone."""
        run = cls.__new__(cls)
        run.now = now
        run.state = StateDir(str(path), now, Limits(), disk=lambda path: Left(path, files))
        run.state.let_go()
        run.table = LockTable(Limits(), TokenIssuer(b"secret", run.state.fence), kept=False)
        run.table.restore(run.state.holds, now, run.state.rates)
        return run

    def kill(self) -> None:
        self.state.let_go()

    def crash(self) -> None:
        """Have the machine end."""
        self.state._save(boot="another")
        self.kill()

    def stop(self) -> None:
        self.state.close(self.now)


def test_a_killed_server_and_a_stopped_one_forget_no_beginning(tmp_path: Path) -> None:
    run = Run(tmp_path, 100.0)
    for _ in range(36):  # more than fit a block
        assert isinstance(run.begin(b"k"), Granted)
    run.begin(b"k", reports=False)
    run.begin(b"other")
    for end in (Run.kill, Run.stop, Run.kill):
        end(run)
        run = Run(tmp_path, run.now + 1000)
        assert (run.free(b"k"), run.free(b"other")) == (3, 39)
    # They are over one window after they began, and not later.
    run.now = 100.0 + 3600 + 1
    assert run.free(b"k") == 39  # but for the one that has said nothing


def test_a_kill_at_any_moment_forgets_no_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the journal goes on in another segment: a block ends, and is packed there."""
    monkeypatch.setattr(journal, "SEGMENT", 8192)
    monkeypatch.setattr(rates, "MOST_OPEN", 3)
    chance, record, told = random.Random(1), Record(), Counter[bytes]()
    run = Run(tmp_path / "run", 100.0, lambda path: RecordingDisk(path, record))
    peer = run.table.connect()
    for _ in range(150):
        keys = chance.sample([b"key-%d" % number for number in range(12)], 3)
        for key in keys:
            request = Acquire(Space.LOCK, key, UNLIMITED, 0, 30, HOUR)
            ((_, reply),) = run.table.handle(peer, request, run.now)
            if isinstance(reply, Granted):
                run.table.handle(peer, Release(Space.LOCK, key, reply.token), run.now)
                told[key] += 1
        run.record()
        record.note(told.copy())
    machine, told, has_turned, kills = Machine(), Counter(), False, 0
    for number, op in enumerate(record.ops):
        machine.do(op)
        has_turned |= op.kind == "create"
        if op.kind == "note":
            told, has_turned = op.note, False
        elif has_turned:
            kills += 1
            left = Run.left(tmp_path / "left", machine.kept(), run.now)
            forgotten = {key for key, begun in told.items() if left.free(key) > 40 - begun}
            assert not forgotten, f"killed after operation {number}, {op.kind} {op.name}"
    assert run.state.journal.segments > 3
    assert kills > 100


@pytest.mark.parametrize("end", [Run.kill, Run.stop])
@pytest.mark.parametrize("is_asked", [True, False])
def test_after_a_crash_of_the_machine_a_window_is_waited_for(
    tmp_path: Path, end: Callable[[Run], None], is_asked: bool
) -> None:
    """Also by the next process, of keys for which nobody has asked meanwhile."""
    run = Run(tmp_path, 100.0)
    run.begin(b"k")
    run.state.journal.sync()
    run.crash()
    after = Run(tmp_path, 10.0)
    after.now += after.state.recovery + 1
    opens_at = 10.0 + after.state.recovery + 3600
    for key in (b"k", b"unknown") if is_asked else ():
        assert after.begin(key) is Status.TIMEOUT
    end(after)
    again = Run(tmp_path, 3000.0)
    for key in (b"k", b"unknown", b"new"):
        again.now = opens_at - 1
        assert again.begin(key) is Status.TIMEOUT
        again.now = opens_at + 1
        assert isinstance(again.begin(key), Granted)


def test_a_clock_that_begins_anew_shortens_no_window(tmp_path: Path) -> None:
    run = Run(tmp_path, 5000.0)
    run.crash()
    after = Run(tmp_path, 50.0)
    assert after.state.recovery
    after.now += 100
    after.stop()
    after.state._save(boot="a third one")
    last = Run(tmp_path, 7.0)
    assert last.state.rates_since == 7.0 - 100 + after.state.recovery
    last.stop()
    assert Run(tmp_path, 8.0).state.rates_since == last.state.rates_since


def test_after_a_clean_stop_and_a_boot_a_window_has_the_time_that_it_had_left(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, 5000.0)
    run.begin(b"k")
    run.now += 600
    run.stop()
    run.state._save(boot="another")
    after = Run(tmp_path, 7.0)
    assert not after.state.recovery
    for left, free in ((1, 39), (-1, 40)):
        after.now = 7.0 + 3000 - left
        assert after.free(b"k") == free
