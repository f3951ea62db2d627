"""The thread that syncs and the one that records, at every point that one can stop for the other.

Python changes threads between any two of its instructions. So at instructions of the one, chosen by
chance, all of the other is done: many points in one run, and each run can be repeated.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import dflockd
from dflockd.storage.disk import Disk
from dflockd.storage.journal import Journal
from tests.dflockd.client.interruptions import trace_instructions
from tests.dflockd.storage.life import Life
from tests.dflockd.storage.test_journal import IDENTITY, Model, no_wait_for_the_disk, restored
from tests.dflockd.storage.test_power_cuts import cut_everywhere, kill_everywhere, patch

__all__ = ["no_wait_for_the_disk", "patch"]

pytestmark = pytest.mark.skipif(dflockd.compiled, reason="nothing traces what is compiled")

RECORDING = ("record", "_put", "_end", "_move", "_first_live", "_has_too_much", "_turn")
"""What is done by the thread that records."""


def codes(*names: str) -> set[CodeType]:
    return {getattr(Journal, name).__code__ for name in names}


@contextmanager
def interrupted(within: set[CodeType], interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` before each instruction of some functions, but not in the middle of itself."""
    is_interrupted = False

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal is_interrupted
        if frame.f_code not in within or is_interrupted:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            is_interrupted = True
            try:
                interrupt()
            finally:
                is_interrupted = False
        return follow

    before = sys.gettrace()
    trace_instructions(follow)
    try:
        yield
    finally:
        sys.settrace(before)


def lived(life: Life, live: Callable[[Life], None]) -> None:
    """Let a machine live with kills and a stop."""
    for end in ("kill", "stop", "kill"):
        life.start()
        life.forget()
        live(life)
        life.stop() if end == "stop" else life.kill()


def judged(life: Life, path: Path, seed: int) -> list[str]:
    """Return what is wrong with what kills and power cuts could leave of it."""

    killed = kill_everywhere(path / "left", life)
    cut = cut_everywhere(path / "left", life, seed, states=7, every=6)
    assert killed.states + cut.states > 1000
    return killed.wrong + cut.wrong


@pytest.mark.parametrize(
    ("seed", "rarely"),
    [(1, 200), *(pytest.param(*other, marks=pytest.mark.soak) for other in ((2, 2000), (3, 8000)))],
)
def test_a_sync_in_the_middle_of_a_record(
    tmp_path: Path, patch: pytest.MonkeyPatch, seed: int, rarely: int
) -> None:
    life, chance, syncs = Life(tmp_path / "run", seed, patch), random.Random(seed), 0

    def interrupt() -> None:
        nonlocal syncs
        if chance.randrange(rarely) == 0:
            syncs += 1
            life.sync()

    def live(life: Life) -> None:
        with interrupted(codes(*RECORDING), interrupt):
            for _ in range(150):
                life.now += 0.01
                life.step(life.chance.choice(life.keys))

    lived(life, live)
    assert syncs > 5
    assert not (wrong := judged(life, tmp_path, seed)), "\n".join(wrong[:9])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_records_in_the_middle_of_a_sync(
    tmp_path: Path, patch: pytest.MonkeyPatch, seed: int
) -> None:
    life, chance = Life(tmp_path / "run", seed, patch), random.Random(seed)

    def interrupt() -> None:
        if chance.randrange(60) == 0:
            for _ in range(chance.choice((1, 1, 2, 70))):
                life.now += 0.01
                life.step(life.chance.choice(life.keys))

    def live(life: Life) -> None:
        with interrupted(codes("sync"), interrupt):
            for _ in range(4):
                life.sync()

    lived(life, live)
    assert not (wrong := judged(life, tmp_path, seed)), "\n".join(wrong[:9])


@pytest.mark.parametrize("segments", [0, 1, 2])
def test_new_segments_at_every_instruction_of_a_sync(
    tmp_path: Path, patch: pytest.MonkeyPatch, segments: int
) -> None:
    # What began two segments within two instructions had a file closed that was still to be synced:
    # the next sync ended the server.
    closed: list[int] = []

    class CountingDisk(Disk):
        def close(self, file: int) -> None:
            super().close(file)  # which fails if it is closed already
            closed.append(file)

    model, log = Model(1), Journal(CountingDisk(tmp_path), IDENTITY, 1)
    log.start([], model.fence)
    at = point = 0

    def interrupt() -> None:
        nonlocal at
        if at == point:
            number = log._number
            log.record([model.change(20)], model.fence)
            while log._number < number + segments:
                log.record([model.change(20)], model.fence)
        at += 1

    while at >= point:
        at, point = 0, point + 1
        with interrupted(codes("sync"), interrupt):
            log.sync()
    assert point > 40  # all of it
    log.sync()
    assert len(closed) == log._number - 1
    assert set(restored(tmp_path, 1).holds) == model.kept
