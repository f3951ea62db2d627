"""What a state directory keeps of runs that have begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflockd.storage.directory import StateDir
from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.wire import (
    UNLIMITED,
    Acquire,
    Granted,
    How,
    Rate,
    Renew,
    Space,
    Status,
)

HOUR = Rate(40, 3_600_000)


class Run:
    """A server's use of a directory; without a `stop` it was killed."""

    def __init__(self, path: Path, now: float) -> None:
        self.now = now
        self.state = StateDir(str(path), now, Limits())
        self.table = LockTable(Limits(), TokenIssuer(b"secret", self.state.fence), kept=True)
        self.state.start(self.table, now)

    def begin(self, key: bytes, *, reports: bool = True) -> object:
        peer = self.table.connect()
        request = Acquire(Space.LOCK, key, UNLIMITED, 0, 30, HOUR)
        ((_, reply),) = self.table.handle(peer, request, self.now)
        if isinstance(reply, Granted) and reports:
            self.table.handle(peer, Renew(Space.LOCK, key, reply.token, 30, How.BEGUN), self.now)
        assert self.table.changes is not None
        self.state.journal.record(self.table.changes, self.table.fence)
        self.table.changes.clear()
        return reply

    def free(self, key: bytes) -> int:
        rate = self.table.rate_of(Space.LOCK, key)
        return HOUR.runs if rate is None else rate.free(self.now)

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
