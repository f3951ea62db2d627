"""What is believed of a journal, and what is damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dflockd.storage import journal, segment
from dflockd.storage.disk import Disk
from dflockd.storage.journal import Journal
from dflockd.storage.reading import DamagedError, Journaled, Restored, Trust, read
from tests.dflockd.storage.test_journal import (
    IDENTITY,
    Model,
    journal_in,
    no_wait_for_the_disk,
    segments,
)

__all__ = ["no_wait_for_the_disk"]

pytestmark = pytest.mark.usefixtures("small_segments")


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT", 4096)


class Written:
    """A journal of some segments, and what it holds."""

    def __init__(self, path: Path, steps: int = 250) -> None:
        self.path = path
        self.model, self.log = Model(1), journal_in(path)
        self.log.start([], self.model.fence)
        for step in range(steps):
            self.log.record(self.model.step(30), self.model.fence)
            if step % 20 == 0:
                self.log.sync()
        self.closed: list[list[int]] = []

    def read(self, trust: Trust) -> Restored:
        return read(Disk(self.path), Journaled(IDENTITY, 1, self.closed), trust)

    def refused(self, trust: Trust) -> str:
        with pytest.raises(DamagedError) as caught:
            self.read(trust)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def killed(tmp_path: Path) -> Written:
    return Written(tmp_path)


@pytest.fixture
def closed(tmp_path: Path) -> Written:
    written = Written(tmp_path)
    written.closed = written.log.close()
    return written


def test_each_end_leaves_what_was_held(tmp_path: Path) -> None:
    written = Written(tmp_path)
    for trust in (Trust.KEPT, Trust.NONE):
        assert set(written.read(trust).holds) == written.model.kept
    written.log.sync()
    assert set(written.read(Trust.CUT).holds) == written.model.kept
    written.closed = written.log.close()
    for trust in Trust:
        assert set(written.read(trust).holds) == written.model.kept


def test_no_segment_at_all_is_damage(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for trust in (Trust.KEPT, Trust.CUT):
        with pytest.raises(DamagedError, match="journal-00000001-000000000001: missing"):
            read(disk, Journaled(IDENTITY, 1, []), trust)
    assert read(disk, Journaled(IDENTITY, 1, []), Trust.NONE) == ([], 0, (), (), ())


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_segment_is_damage(killed: Written, which: int) -> None:
    missing = segments(killed.path)[which]
    missing.unlink()
    assert killed.refused(Trust.KEPT) == f"{missing}: missing"


@pytest.mark.parametrize("which", [0, 1, -1])
def test_after_a_clean_stop_too(closed: Written, which: int) -> None:
    missing = segments(closed.path)[which]
    missing.unlink()
    assert closed.refused(Trust.CLOSED) == f"{missing}: missing"


def test_what_was_synced_may_not_be_missing_after_a_power_cut(killed: Written) -> None:
    killed.log.sync()
    paths = segments(killed.path)
    for path in paths[:-1]:
        content = path.read_bytes()
        path.unlink()
        assert killed.refused(Trust.CUT) == f"{path}: missing"
        path.write_bytes(content)


@pytest.mark.parametrize("size", [0, 32, 100, 2000, 4095, 4097])
@pytest.mark.parametrize("which", [0, -1])
def test_the_length_counts(closed: Written, which: int, size: int) -> None:
    path = segments(closed.path)[which]
    data = path.read_bytes()
    path.write_bytes((data + b"\0")[:size])
    for trust in (Trust.CLOSED, Trust.KEPT):
        assert closed.refused(trust).startswith(f"{path}: damaged at byte ")


@pytest.mark.parametrize("left", ["nothing", "zeros", "part of the header", "the header"])
def test_the_last_segment_may_be_just_begun(killed: Written, left: str) -> None:
    last = segments(killed.path)[-1]
    number = int(last.name[-12:]) + 1
    header = segment.header(IDENTITY, 1, number, killed.model.fence, 4096)
    content = {
        "nothing": b"",
        "zeros": bytes(4096),
        "part of the header": header[:20] + bytes(4076),
        "the header": header + bytes(4096 - len(header)),
    }
    following = last.with_name(f"{last.name[:-12]}{number:012d}")
    following.write_bytes(content[left])
    assert set(killed.read(Trust.KEPT).holds) == killed.model.kept
    assert killed.read(Trust.CUT).fence == killed.read(Trust.KEPT).fence
    # But nothing may stand in it while the one before it says that it is the last.
    words = segment.word(200).to_bytes(8, "little")
    following.write_bytes(header[:64] + words + header[72:] + bytes(4096 - len(header)))
    assert killed.refused(Trust.KEPT).startswith(f"{last}: damaged at byte 64")


def test_a_segment_of_another_directory_or_generation_is_damage(killed: Written) -> None:
    path = segments(killed.path)[-1]
    number = int(path.name[-12:])
    for identity, generation, told in (
        (bytes(16), 1, number),
        (IDENTITY, 2, number),
        (IDENTITY, 1, number - 1),
    ):
        header = segment.header(identity, generation, told, 5, 4096)
        path.write_bytes(header + bytes(4096 - len(header)))
        assert killed.refused(Trust.KEPT) == f"{path}: damaged at byte 0"
    path.write_bytes(segments(killed.path)[0].read_bytes())
    assert killed.refused(Trust.KEPT) == f"{path}: damaged at byte 0"


def test_what_follows_the_end_does_not_count(killed: Written) -> None:
    # A process that was killed in the middle of a step leaves what it has written of it.
    path = segments(killed.path)[-1]
    data = bytearray(path.read_bytes())
    end = killed.log._position
    for torn in (b"\xff" * 50, b"\0" * 3 + b"torn"):
        data[end : end + len(torn)] = torn
        path.write_bytes(data)
        assert set(killed.read(Trust.KEPT).holds) == killed.model.kept


def flip(path: Path, position: int, chance: random.Random) -> bytes:
    """Change one byte, and return what was there before."""
    before = path.read_bytes()
    data = bytearray(before)
    data[position] ^= chance.randrange(1, 256)
    path.write_bytes(data)
    return before


@pytest.mark.parametrize("trust", [Trust.KEPT, Trust.CLOSED])
def test_every_byte_that_counts_is_checked(
    tmp_path: Path, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT", 2048)
    written = Written(tmp_path, steps=30)
    if trust is Trust.CLOSED:
        written.closed = written.log.close()
    chance = random.Random(3)
    first, *_, last = segments(tmp_path)
    for path in (first, last):
        end = segment.parse(path.read_bytes(), IDENTITY, 1, int(path.name[-12:])).end
        for position in [*range(128), *range(128, 2048, 7)]:
            before = flip(path, position, chance)
            # Nothing stands in the rest of the header yet, nor behind the end.
            if 88 <= position < 128 or position >= end:
                assert set(written.read(trust).holds) == written.model.kept
            else:
                assert written.refused(trust).startswith(f"{path}: damaged at byte "), position
            path.write_bytes(before)


def test_after_a_power_cut_damage_of_what_was_synced_is_told_from_the_rest(killed: Written) -> None:
    log = killed.log
    while log._position > journal.SEGMENT // 2:  # there is room for what is not synced
        log.record(killed.model.step(500), killed.model.fence)
    log.sync()
    log.sync()
    last = segments(killed.path)[-1]
    synced, known = log._position, killed.model.kept
    log.record([killed.model.change(500) for _ in range(5)], killed.model.fence)
    assert segments(killed.path)[-1] == last
    chance = random.Random(4)
    for position in range(segment.RECORDS, log._position, 3):
        before = flip(last, position, chance)
        if position < synced:
            assert killed.refused(Trust.CUT).startswith(f"{last}: damaged at byte ")
        else:
            kept = set(killed.read(Trust.CUT).holds)
            assert {
                hold.fence
                for hold in known
                if hold.fence not in {changed.fence for changed in killed.model.kept ^ known}
            } <= {hold.fence for hold in kept}
        last.write_bytes(before)


def test_an_operator_can_go_on_with_damage(killed: Written) -> None:
    known = {hold.fence for hold in killed.model.kept}
    first, *_, last = segments(killed.path)
    first.unlink()
    flip(last, 200, random.Random(1))
    assert {hold.fence for hold in killed.read(Trust.NONE).holds} & known


RULES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("end", lambda data: data[:64] + bytes(8) + data[72:]),
    ("synced", lambda data: data[:72] + bytes(8) + data[80:]),
    ("first", lambda data: data[:80] + bytes(8) + data[88:]),
]


@pytest.mark.parametrize(("name", "change"), RULES)
def test_a_word_of_zeros_is_no_number(
    killed: Written, name: str, change: Callable[[bytes], bytes]
) -> None:
    path = segments(killed.path)[-1]
    path.write_bytes(change(path.read_bytes()))
    at = {"end": 64, "synced": 72, "first": 80}[name]
    assert killed.refused(Trust.KEPT) == f"{path}: damaged at byte {at}"


def test_a_journal_is_an_end_of_its_own(tmp_path: Path) -> None:
    # Each generation is judged by itself.
    log = Journal(Disk(tmp_path), IDENTITY, 2)
    log.start([], 9)
    assert read(Disk(tmp_path), Journaled(IDENTITY, 2, []), Trust.KEPT) == ([], 9, (), (), ())
    with pytest.raises(DamagedError):
        read(Disk(tmp_path), Journaled(IDENTITY, 1, []), Trust.KEPT)


@pytest.mark.parametrize("by", [-8, 8])
def test_a_segment_that_ends_elsewhere_than_the_state_file_says_is_damage(
    closed: Written, by: int
) -> None:
    closed.closed[-2][1] += by
    assert "damaged" in closed.refused(Trust.CLOSED)


def test_a_segment_that_says_it_is_the_last_and_is_not_is_damage(closed: Written) -> None:
    last, _ = closed.closed[-1]
    closed.closed.append([last + 1, 4096])
    path = segments(closed.path)[-1]
    assert closed.refused(Trust.CLOSED) == f"{path}: damaged at byte 64"
