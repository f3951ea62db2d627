"""The journal by itself: what is read is what was written, whatever has become of the files."""

from __future__ import annotations

import itertools
import random
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflockd.storage import journal
from dflockd.storage.journal import CorruptError, Journal, decode, encode_end, encode_hold
from dflockd.table import Entry, Hold, HoldRecord, TokenIssuer
from dflockd.table.state import Group
from dflockd.wire import MAX_LIMIT, MAX_LINE, Space
from dflockd.wire.tokens import MAX_FENCE

numbers = st.floats(0, 1e12)
lines = st.binary(min_size=1, max_size=MAX_LINE)
kepts = st.builds(
    HoldRecord,
    space=st.sampled_from(Space),
    key=lines,
    limit=st.integers(0, MAX_LIMIT),
    fence=st.integers(0, MAX_FENCE),
    lease=numbers,
    deadline=numbers,
    since=numbers,
    label=st.binary(max_size=MAX_LINE),
)
records = st.lists(kepts | st.integers(0, MAX_FENCE), max_size=5)


def encoded(record: HoldRecord | int) -> bytes:
    return encode_end(record) if isinstance(record, int) else encode_hold(record)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(journal, "SEGMENT", 4096)
    return 4096


# Records.


@given(records)
def test_what_is_decoded_is_what_was_encoded(written: list[HoldRecord | int]) -> None:
    data = b"".join(map(encoded, written))
    assert decode(data) == (written, len(data))
    assert decode(data + bytes(2000)) == (written, len(data))


@given(kepts)
def test_no_record_is_longer_than_what_may_be_torn(kept: HoldRecord) -> None:
    assert len(encode_hold(kept)) <= journal.LONGEST


@settings(max_examples=20, deadline=None)
@given(records)
def test_a_record_that_is_cut_short_is_no_record(written: list[HoldRecord | int]) -> None:
    data = b"".join(map(encoded, written))
    ends = list(itertools.accumulate((len(encoded(record)) for record in written), initial=0))
    for size in range(len(data)):
        whole = max(number for number, end in enumerate(ends) if end <= size)
        assert decode(data[:size]) == (written[:whole], ends[whole])
        # Torn by the end of the process: the rest of the segment is zeros. They may be part of it.
        torn, _ = decode(data[:size] + bytes(1000))
        assert torn in (written[:whole], written[: whole + 1])


@settings(max_examples=20, deadline=None)
@given(st.lists(kepts | st.integers(0, MAX_FENCE), min_size=1, max_size=3))
def test_a_flipped_bit_never_makes_another_record(written: list[HoldRecord | int]) -> None:
    data = b"".join(map(encoded, written))
    for place in range(0, len(data) * 8, 3):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        read, _ = decode(bytes(flipped))
        assert read == written[: len(read)]
        assert len(read) < len(written)


# Segments.


class Model:
    """Holds that begin, are extended and end; and what a journal has to know of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.group = Group(TokenIssuer(b"secret", 0))
        self.live: dict[int, Hold] = {}
        self.fence = 1000
        self.told = 1000
        """The last fence of a hold that did not end in the step that began it."""

    def step(self, most: int) -> list[Hold]:
        """Change something and return what has changed, some of it several times."""
        changes = [self.change(most) for _ in range(self.random.choice((1, 1, 1, 2, 5)))]
        self.told = max(self.told, *self.live, 0)
        return changes

    def change(self, most: int) -> Hold:
        chance = self.random
        if not self.live or (chance.random() < 0.4 and len(self.live) < most):
            self.fence += 1
            key = b"key" * chance.randrange(1, 60)
            entry = Entry(self.group, Space(self.fence % 2), key, self.fence % 3)
            hold = Hold(entry, self.fence, b"", None, chance.random())
            hold.label = b"label" * chance.randrange(20)
            entry.holds[hold.fence] = self.live[hold.fence] = hold
        else:
            hold = self.live[chance.choice(list(self.live))]
            if chance.random() < 0.5:
                del hold.entry.holds[hold.fence]
                del self.live[hold.fence]
        hold.span, hold.deadline = chance.random() * 3600, chance.random() * 1e6
        return hold

    @property
    def kept(self) -> set[HoldRecord]:
        return {hold.kept() for hold in self.live.values()}

    @property
    def size(self) -> int:
        return sum(len(encode_hold(kept)) for kept in self.kept)


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("journal-*"))


def written(path: Path, steps: int = 400, most: int = 50) -> Model:
    """Fill a generation with a history."""
    model, log = Model(1), Journal(path, 1)
    log.start([], model.fence)
    for _ in range(steps):
        log.record(model.step(most), model.fence)
    return model


@pytest.mark.parametrize("most", [1, 20, 200])
def test_at_every_moment_the_journal_says_what_is_held(
    tmp_path: Path, small_segments: int, most: int
) -> None:
    model, log = Model(most), Journal(tmp_path, 1)
    log.start([], model.fence)
    firsts = set()
    for _ in range(800):
        log.record(model.step(most), model.fence)
        restored = Journal(tmp_path, 1).read(strict=True)
        assert set(restored.holds) == model.kept
        assert len(restored.holds) == len(model.live)
        assert model.told <= restored.fence <= model.fence
        paths = segments(tmp_path)
        firsts.add(paths[0])
        # What lives may be on disk twice, and is being moved meanwhile; and the last is begun.
        assert len(paths) * small_segments <= 4 * model.size + 6 * small_segments
    assert len(firsts) > 10


def test_cleaning_keeps_up_with_large_steps(tmp_path: Path, small_segments: int) -> None:
    # Each step once moved two records whatever its size: what is held for long was not reached.
    idle, model, log = Model(1), Model(2), Journal(tmp_path, 1)
    idle.fence = 10**6
    log.start([], model.fence)
    while len(idle.live) < 100:
        log.record([idle.change(100)], idle.fence)
    for _ in range(150):
        log.record([model.change(50) for _ in range(50)], model.fence)
        most = 4 * (model.size + idle.size) + 8 * small_segments
        assert len(segments(tmp_path)) * small_segments <= most
    assert set(Journal(tmp_path, 1).read(strict=True).holds) == model.kept | idle.kept


def test_what_is_left_of_a_release_storm_goes_with_what_follows(
    tmp_path: Path, small_segments: int
) -> None:
    model, log = Model(1), Journal(tmp_path, 1)
    log.start([], model.fence)
    for _ in range(500):
        log.record([model.change(500)], model.fence)
    for hold in list(model.live.values()):
        del hold.entry.holds[hold.fence], model.live[hold.fence]
        log.record([hold], model.fence)
    for _ in range(200):
        log.record([model.change(1)], model.fence)
    assert len(segments(tmp_path)) <= 4


def test_what_begins_and_ends_in_one_step_leaves_no_trace(tmp_path: Path) -> None:
    model, log = Model(1), Journal(tmp_path, 1)
    log.start([], model.fence)
    before = segments(tmp_path)[0].read_bytes()
    hold = model.change(1)
    del hold.entry.holds[hold.fence]
    log.record([hold, hold], model.fence)
    assert segments(tmp_path)[0].read_bytes() == before


def test_the_fence_outlives_the_holds_that_had_it(tmp_path: Path, small_segments: int) -> None:
    model, log = Model(1), Journal(tmp_path, 1)
    log.start([], 5)
    assert Journal(tmp_path, 1).read(strict=True).fence == 5
    for _ in range(300):
        log.record([model.change(1)], model.fence)
    assert not segments(tmp_path)[0].name.endswith("001")
    assert Journal(tmp_path, 1).read(strict=True).fence == model.fence


def test_generations_do_not_mix(tmp_path: Path, small_segments: int) -> None:
    old = written(tmp_path)
    model, log = Model(2), Journal(tmp_path, 2)
    log.start(old.live.values(), old.fence)
    assert set(Journal(tmp_path, 1).read(strict=True).holds) == old.kept
    assert set(Journal(tmp_path, 2).read(strict=True).holds) == old.kept
    # A process that ended before its generation counted has left it to the next one.
    log = Journal(tmp_path, 2)
    log.start([], old.fence)
    log.record(model.step(5), model.fence)
    log.drop_others()
    assert not Journal(tmp_path, 1).exists
    assert set(Journal(tmp_path, 2).read(strict=True).holds) == model.kept


def test_closing_ends_nothing(tmp_path: Path, small_segments: int) -> None:
    model, log = Model(1), Journal(tmp_path, 1)
    log.start([], model.fence)
    for _ in range(100):
        log.record(model.step(20), model.fence)
    log.close()
    assert set(Journal(tmp_path, 1).read(strict=True).holds) == model.kept


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    Journal(tmp_path, 1).start([], 1)
    assert stat.S_IMODE(segments(tmp_path)[0].stat().st_mode) == 0o600


# Damage.


def check_damaged(path: Path, words: str) -> None:
    with pytest.raises(CorruptError, match=words) as caught:
        Journal(path, 1).read(strict=True)
    assert "\n" not in str(caught.value)


def test_without_segments_there_is_nothing(tmp_path: Path) -> None:
    log = Journal(tmp_path, 1)
    assert not log.exists
    assert log.read(strict=True) == ([], 0)


def test_a_missing_segment_is_damage(tmp_path: Path, small_segments: int) -> None:
    model = written(tmp_path)
    missing = segments(tmp_path)[1]
    missing.unlink()
    check_damaged(tmp_path, "missing")
    rest = Journal(tmp_path, 1).read(strict=False)
    assert rest.fence == model.fence


@pytest.mark.parametrize("left", ["nothing", "zeros", "part of the header"])
def test_the_last_segment_may_be_just_begun(tmp_path: Path, small_segments: int, left: str) -> None:
    model = written(tmp_path)
    last = segments(tmp_path)[-1]
    following = last.with_name(f"{last.name[:-12]}{int(last.name[-12:]) + 1:012d}")
    content = {"nothing": b"", "zeros": bytes(4096), "part of the header": b"dflock" + bytes(4090)}
    following.write_bytes(content[left])
    assert set(Journal(tmp_path, 1).read(strict=True).holds) == model.kept
    # But none before it.
    last.write_bytes(content[left])
    check_damaged(tmp_path, "should be there")


def test_a_foreign_segment_is_damage(tmp_path: Path, small_segments: int) -> None:
    written(tmp_path)
    first, *_, last = segments(tmp_path)
    last.write_bytes(first.read_bytes())
    check_damaged(tmp_path, "should be there")
    last.write_bytes(b"#!/bin/sh\n" * 100)
    check_damaged(tmp_path, "should be there")


def test_the_last_record_may_be_torn_at_any_byte(tmp_path: Path, small_segments: int) -> None:
    model, log = Model(1), Journal(tmp_path, 1)
    log.start([], model.fence)
    before = model.kept
    size = 0
    for _ in range(10):
        before, after = model.kept, None
        changed = model.change(50)
        log.record([changed], model.fence)
        after, size = model.kept, log._position
    [path] = segments(tmp_path)
    data = path.read_bytes()
    start = decode(data[: size - 1], journal._HEADER.size)[1]
    for cut in range(start, size, 3):
        path.write_bytes(data[:cut] + bytes(len(data) - cut))
        assert set(Journal(tmp_path, 1).read(strict=True).holds) in (before, after)
    path.write_bytes(data[:start] + bytes(len(data) - start))
    assert set(Journal(tmp_path, 1).read(strict=True).holds) == before


def test_a_process_writes_nothing_behind_a_torn_record(tmp_path: Path) -> None:
    # It once went on in a new segment of the same journal: the next start then found the torn record
    # in a segment that was not the last one, and refused it as damaged.
    model = written(tmp_path, steps=3)
    [path] = segments(tmp_path)
    data = path.read_bytes()
    end = decode(data, journal._HEADER.size)[1]
    path.write_bytes(data[:end] + b"torn" + bytes(len(data) - end - 4))
    restored = Journal(tmp_path, 1).read(strict=True)
    assert set(restored.holds) == model.kept
    log = Journal(tmp_path, 2)
    log.start(model.live.values(), restored.fence)
    assert set(Journal(tmp_path, 1).read(strict=True).holds) == model.kept
    assert set(Journal(tmp_path, 2).read(strict=True).holds) == model.kept


def test_damage_in_the_middle_is_told_or_survived(tmp_path: Path, small_segments: int) -> None:
    written(tmp_path, steps=200)
    paths = segments(tmp_path)
    original = {path: path.read_bytes() for path in paths}
    known = {
        record
        for data in original.values()
        for record in decode(data, journal._HEADER.size)[0]
        if not isinstance(record, int)
    }
    chance = random.Random(3)
    for path in paths[:-1]:
        used = decode(original[path], journal._HEADER.size)[1]
        for place in chance.sample(range(used), 60):
            data = bytearray(original[path])
            data[place] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            try:
                Journal(tmp_path, 1).read(strict=True)
            except CorruptError:
                pass
            else:
                # The one field of the header whose damage shows nowhere is the lower bound of fences.
                assert 24 <= place < journal._HEADER.size
            assert set(Journal(tmp_path, 1).read(strict=False).holds) <= known
        path.write_bytes(original[path])


def test_no_room_for_a_segment(
    tmp_path: Path, small_segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(tmp_path, steps=5)
    log = Journal(tmp_path, 2)
    log.start(model.live.values(), model.fence)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "_allocate", full)
    kept = model.kept

    def go_on() -> None:
        nonlocal kept
        for _ in range(300):
            kept = model.kept
            log.record([model.change(20)], model.fence)

    with pytest.raises(OSError, match="No space"):
        go_on()
    # All that was recorded before is there, and no half-made segment.
    assert set(Journal(tmp_path, 2).read(strict=True).holds) == kept
    assert all(path.stat().st_size == small_segments for path in segments(tmp_path))


def test_where_space_cannot_be_reserved_it_is_filled(
    tmp_path: Path, small_segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.posix_fallocate")
    model = written(tmp_path)
    assert set(Journal(tmp_path, 1).read(strict=True).holds) == model.kept
