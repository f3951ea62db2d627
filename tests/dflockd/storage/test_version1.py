"""A directory that version 0.1 has left, and what becomes of it. The samples were written by it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflockd.storage import version1
from dflockd.storage.directory import StateDir, StateError
from dflockd.wire import Granted, Recovering, Release, Renewed, Space, Status
from tests import forkserver
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.storage.machine import Machine, Run

SAMPLES = Path(__file__).with_name("version1")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class Left:
    """A directory as version 0.1 left it, and the machine that it is on."""

    def __init__(self, machine: Machine, end: str) -> None:
        sample: dict[str, Any] = json.loads((SAMPLES / f"{end}.json").read_text())
        self.machine = machine
        self.tokens = {key: token.encode() for key, token in sample["tokens"].items()}
        machine.path.mkdir(mode=0o700)
        (machine.path / "state.json").write_text(json.dumps(sample["state"], indent=1))
        self.journal = machine.path / sample["journal"]
        self.journal.write_bytes(gzip.decompress((SAMPLES / f"{end}.journal.gz").read_bytes()))
        machine.boot = sample["state"]["boot"]
        # A little later than what it did last, on the same clock.
        machine.now = max(sample["state"]["recovers_until"], sample["state"]["stopped"]) + 10

    def check_held(self, run: Run) -> None:
        assert run.renew(b"a", self.tokens["a"]) == Renewed(20)
        assert run.attempt(b"b") is Status.TIMEOUT
        assert run.ask(Release(Space.SEMAPHORE, b"sem", self.tokens["sem"])) is Status.OK
        assert run.renew(b"detached", self.tokens["detached"]) == Renewed(20)
        assert isinstance(run.attempt(b"gone"), Granted)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "state", monkeypatch)


@pytest.fixture(params=["killed", "stopped"])
def left(request: pytest.FixtureRequest, machine: Machine) -> Left:
    return Left(machine, request.param)


def test_it_goes_on_where_the_old_one_stopped(left: Left) -> None:
    machine = left.machine
    run = machine.start()
    assert run.state.recovery == 0
    times = {hold.key: hold.deadline - machine.now for hold in run.state.holds}
    assert 580 < times[b"a"] < 600
    assert 880 < times[b"b"] < 900
    assert 2980 < times[b"detached"] < 3000
    assert {hold.label for hold in run.state.holds} == {b"tasks.sync[1] on host"}
    left.check_held(run)
    # It is of the present format from now on.
    assert machine.file["format"] == 2
    assert not left.journal.exists()
    machine.kill()
    assert machine.start().attempt(b"a") is Status.TIMEOUT


def test_an_end_before_the_first_start_is_through_changes_nothing(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(StateDir, "_save", killed)
        with pytest.raises(KilledError):
            left.machine.start()
    assert left.machine.file["format"] == 1
    left.check_held(left.machine.start())


def test_after_a_crash_of_the_machine_holders_are_waited_for(machine: Machine) -> None:
    left = Left(machine, "killed")
    machine.crash()
    run = machine.start()
    assert run.attempt(b"a") == Recovering(1_200_000)
    assert run.renew(b"a", left.tokens["a"]) == Renewed(20)


@pytest.mark.parametrize("size", [0, 24, 100, 2 << 20, (4 << 20) - 1])
def test_a_journal_that_was_cut_is_damage(left: Left, size: int) -> None:
    left.journal.write_bytes(left.journal.read_bytes()[:size])
    with pytest.raises(StateError, match="damaged at byte"):
        left.machine.start()
    assert isinstance(left.machine.start(recover=True).attempt(b"a"), Recovering)


def test_damage_that_the_old_format_can_tell_is_told(left: Left) -> None:
    data = left.journal.read_bytes()
    end = version1._decode(data)[1]
    # The last 1 KiB of a process that was killed may have been torn, which here is all of it. Of the
    # fence, what makes it too large.
    told = [*range(16), 31, *(range(32, end, 3) if left.machine.file["clean"] else ())]
    for position in told:
        flip(left.journal, position)
        with pytest.raises(StateError, match=r"journal-\S*: damaged at byte"):
            left.machine.start()
        flip(left.journal, position)


def flip(journal: Path, position: int) -> None:
    """Flip some bits of a byte; once more, and they are as they were."""
    with journal.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x41]))


def test_segments_that_are_gone_are_damage(left: Left) -> None:
    left.journal.unlink()
    with pytest.raises(StateError, match="segments of generation 1 are missing"):
        left.machine.start()


def test_a_segment_that_is_gone_from_between_others_is_damage(left: Left) -> None:
    name, _, number = left.journal.name.rpartition("-")
    later = left.journal.with_name(f"{name}-{int(number) + 2:0{len(number)}}")
    later.write_bytes(left.journal.read_bytes())
    with pytest.raises(StateError, match=f"{later.name}: the segment before it is missing"):
        left.machine.start()


def test_a_real_server_starts_on_it(left: Left) -> None:
    """On another boot than the sample's, so that only the one that was stopped is known to be whole."""
    flags = ["--host", "127.0.0.1", "--port", "0", "--state-dir", str(left.machine.path)]
    process = forkserver.start(
        [sys.executable, "-m", "dflockd", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening" in line:
                break
        assert "4 locks restored" in "".join(lines)
    finally:
        process.terminate()
        status = process.wait(PATIENCE)
        process.stderr.close()
    assert status == 0
