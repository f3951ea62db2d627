"""The states that power cuts and kills could leave of recorded runs: no second holder, no lost claim.

`power` says which states there are, `life` what is run and how a state is judged.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflockd.storage import journal, segment
from tests.dflockd.storage.life import Life, Told, judge
from tests.dflockd.storage.power import Machine, Op

SEGMENT = 4096


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SEGMENT", SEGMENT)
        # Most segments of a state are those of the state before it.
        patch.setattr(segment, "parse", functools.lru_cache(64)(segment.parse))
        yield patch


def lived(path: Path, seed: int, patch: pytest.MonkeyPatch, scale: int = 1) -> Life:
    """Return a life with a bit of everything: stops, kills, a reboot, a crash, a start after each."""
    life = Life(path, seed, patch)
    for steps, end in (
        (40, "stop"),
        (60, "kill"),
        (400, "stop and boot"),
        (30, "kill"),
        (60, "crash"),
        (40, "stop"),
    ):
        life.start()
        life.forget()
        life.go_on(steps * scale)
        life.kill() if end in ("kill", "crash") else life.stop()
        if end in ("crash", "stop and boot"):
            life.reboot()
    return life


class Tally:
    """What was tried, and what was wrong.

    Args:
        path: where a directory may be.
        enough: so many things that are wrong are enough.
    """

    def __init__(self, path: Path, enough: int) -> None:
        self.states = 0
        self.wrong: list[str] = []
        self._path = path
        self._enough = enough

    def judge(self, when: str, files: dict[str, bytes], told: Told, *, same_boot: bool) -> bool:
        """Judge a state, and return whether to go on."""
        self.states += 1
        wrong = judge(self._path, files, told, same_boot=same_boot)
        if wrong is not None:
            self.wrong.append(f"{when}: {wrong}")
        return len(self.wrong) < self._enough


def cut_everywhere(
    path: Path, life: Life, seed: int, *, states: int, every: int = 1, enough: int = 5
) -> Tally:
    """Judge what a power cut could leave after each of the operations."""
    machine, chance, tally = Machine(), random.Random(seed), Tally(path, enough)
    life.boot = "the next"
    told = Told()
    for number, op in enumerate(life.record.ops):
        machine.do(op)
        if op.kind == "note":
            told = op.note
        elif number % every == 0 or op.kind in ("rename", "unlink", "create"):
            when = f"cut after operation {number} ({op.kind} {op.name})"
            for files in machine.states(chance, states):
                if not tally.judge(when, files, told, same_boot=False):
                    return tally
    return tally


def torn(machine: Machine, op: Op) -> Iterator[dict[str, bytes]]:
    """Return what is there in the middle of a copy: its first half, or its second."""
    half = len(op.data) // 2
    for start, data in ((op.position, op.data[:half]), (op.position + half, op.data[half:])):
        files = machine.kept()
        for name, file in machine.named(machine.pending).items():
            if file == op.file:
                content = files[name]
                files[name] = content[:start] + data + content[start + len(data) :]
        yield files


def kill_everywhere(path: Path, life: Life, *, enough: int = 5) -> Tally:
    """Judge what the end of the process could leave after, and in the middle of, each operation."""
    machine, tally = Machine(), Tally(path, enough)
    told = Told()
    for number, op in enumerate(life.record.ops):
        states = list(torn(machine, op)) if op.kind == "write" and len(op.data) > 8 else []
        machine.do(op)
        if op.kind == "note":
            told = op.note
            life.boot = told.boot
            continue
        when = f"killed at operation {number} ({op.kind} {op.name})"
        for files in [*states, machine.kept()]:
            if not tally.judge(when, files, told, same_boot=True):
                return tally
    return tally


SEEDS = [1, pytest.param(2, marks=pytest.mark.soak)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_cut_at_any_moment(tmp_path: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
    life = lived(tmp_path / "run", seed, patch)
    tally = cut_everywhere(tmp_path / "left", life, seed, states=7, every=4)
    assert not tally.wrong, tally.wrong[:5]
    assert tally.states > 1000


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_at_any_moment(tmp_path: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
    life = lived(tmp_path / "run", seed, patch)

    tally = kill_everywhere(tmp_path / "left", life)
    deleted = [op.name for op in life.record.ops if op.kind == "unlink" and "-00000003-" in op.name]
    assert "journal-00000003-000000000002" in deleted  # as it was cleaned, too
    assert not tally.wrong, tally.wrong[:5]
    assert tally.states > 1000


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_lives(tmp_path: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
    life = lived(tmp_path / "run", seed, patch, scale=2)
    killed = kill_everywhere(tmp_path / "left", life)
    cut = cut_everywhere(tmp_path / "left", life, seed, states=40)
    assert not killed.wrong + cut.wrong, (killed.wrong + cut.wrong)[:5]
