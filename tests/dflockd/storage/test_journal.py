"""The journal by itself: what is read is what was written, whatever has become of the files."""

from __future__ import annotations

import errno
import mmap
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflockd
from dflockd.storage import disk, journal
from dflockd.storage.disk import Disk, Mapped
from dflockd.storage.journal import Journal
from dflockd.storage.reading import Journaled, Restored, Trust, read
from dflockd.storage.records import encode_hold
from dflockd.table import Change, Entry, Hold, HoldRecord, NewestRecord, TokenIssuer
from dflockd.table.newest import NewestKeys
from dflockd.table.rates import KeyRate, RateBlock
from dflockd.table.state import Partition
from dflockd.wire import Space

IDENTITY = bytes(range(16))


def journal_in(path: Path, generation: int = 1) -> Journal:
    return Journal(Disk(path), IDENTITY, generation)


def restored(path: Path, generation: int = 1) -> Restored:
    """Return what is there after a kill."""
    return read(Disk(path), Journaled(IDENTITY, generation, []), Trust.KEPT)


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses its power."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("os.fdatasync", lambda _: None, raising=False)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(journal, "SEGMENT", 4096)
    return 4096


# Segments.


class Model:
    """Holds that begin, are extended and end; and what a journal has to know of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.group = Partition(TokenIssuer(b"secret", 0))
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
            entry = Entry(self.group, Space(self.fence % 2), key, 9)
            since, label = chance.random(), b"label" * chance.randrange(20)
            hold = Hold(entry, self.fence, b"", None, 30, since, self.fence % 3, None, label)
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
        return sum(len(encode_hold(kept, 0)) for kept in self.kept)


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("journal-*"))


def written(path: Path, steps: int = 400, most: int = 50) -> Model:
    """Fill a generation with a history."""
    model, log = Model(1), journal_in(path, 1)
    log.start([], model.fence)
    for _ in range(steps):
        log.record(model.step(most), model.fence)
    return model


@pytest.mark.parametrize(("most", "steps"), [(1, 800), (20, 500), (200, 500)])
def test_at_every_moment_the_journal_says_what_is_held(
    tmp_path: Path, small_segments: int, most: int, steps: int
) -> None:
    model, log = Model(most), journal_in(tmp_path, 1)
    log.start([], model.fence)
    firsts = set()
    for _ in range(steps):
        log.record(model.step(most), model.fence)
        log.sync()
        found = restored(tmp_path, 1)
        assert set(found.holds) == model.kept
        assert len(found.holds) == len(model.live)
        assert model.told <= found.fence <= model.fence
        paths = segments(tmp_path)
        firsts.add(paths[0])
        # What lives may be on disk twice, and is being moved meanwhile; and the last is begun.
        assert len(paths) * small_segments <= 4 * model.size + 6 * small_segments
    assert len(firsts) > 10


def test_the_newest_of_keys_and_what_has_begun_are_kept_until_they_end(
    tmp_path: Path, small_segments: int
) -> None:
    dice, group, keys = random.Random(1), Partition(TokenIssuer(b"secret", 0)), NewestKeys(5)
    rate = KeyRate(group.rates, Space.SEMAPHORE, b"rate" * 40, 10, 60.0)
    blocks: list[RateBlock] = []
    log = journal_in(tmp_path)
    log.start([], 0)
    firsts = set()
    # These stay, and are moved.
    idle = RateBlock(rate, 10**6)
    log.record([*NewestKeys().note(group.newest, NewestRecord(b"idle", 1, b"")), idle], 1)
    for age in range(1, 300):
        key = b"key" * 60 + b"%d" % dice.randrange(8)
        changes: list[Change] = [*keys.note(group.newest, NewestRecord(key, age, b"label" * 20))]
        blocks.append(RateBlock(rate, age))
        blocks[-1].add((float(age), 1))
        changes.append(blocks[-1])
        if len(blocks) > 4:
            ended = blocks.pop(dice.randrange(len(blocks)))
            ended.ended = True
            changes.append(ended)
        log.record(changes, age)
        log.sync()
        found = restored(tmp_path)
        assert {each.key: each.age for each in found.newest} == {
            key: newest.age for key, newest in group.newest.items()
        }
        assert sorted(found.rates) == [block.kept() for block in (*blocks, idle)]
        firsts.add(segments(tmp_path)[0])
        assert len(segments(tmp_path)) <= 8
    assert len(firsts) > 10
    log = journal_in(tmp_path, 2)
    log.start([*group.newest.values(), *blocks], 300)
    assert set(restored(tmp_path, 2).newest) == {each.kept() for each in group.newest.values()}
    assert sorted(restored(tmp_path, 2).rates) == [block.kept() for block in blocks]


def test_cleaning_keeps_up_with_large_steps(tmp_path: Path, small_segments: int) -> None:
    # Each step once moved two records whatever its size: what is held for long was not reached.
    idle, model, log = Model(1), Model(2), journal_in(tmp_path, 1)
    idle.fence = 10**6
    log.start([], model.fence)
    while len(idle.live) < 100:
        log.record([idle.change(100)], idle.fence)
    for _ in range(150):
        log.record([model.change(50) for _ in range(50)], model.fence)
        log.sync()
        most = 4 * (model.size + idle.size) + 8 * small_segments
        assert len(segments(tmp_path)) * small_segments <= most
    assert set(restored(tmp_path, 1).holds) == model.kept | idle.kept


def test_what_is_left_of_a_release_storm_goes_with_what_follows(
    tmp_path: Path, small_segments: int
) -> None:
    model, log = Model(1), journal_in(tmp_path, 1)
    log.start([], model.fence)
    for _ in range(500):
        log.record([model.change(500)], model.fence)
    for hold in list(model.live.values()):
        del hold.entry.holds[hold.fence], model.live[hold.fence]
        log.record([hold], model.fence)
    for _ in range(200):
        log.record([model.change(1)], model.fence)
        log.sync()
    assert len(segments(tmp_path)) <= 4


def test_what_begins_and_ends_in_one_step_leaves_no_trace(tmp_path: Path) -> None:
    model, log = Model(1), journal_in(tmp_path, 1)
    log.start([], model.fence)
    before = segments(tmp_path)[0].read_bytes()
    hold = model.change(1)
    del hold.entry.holds[hold.fence]
    log.record([hold, hold], model.fence)
    assert segments(tmp_path)[0].read_bytes() == before


def test_the_fence_outlives_the_holds_that_had_it(tmp_path: Path, small_segments: int) -> None:
    model, log = Model(1), journal_in(tmp_path, 1)
    log.start([], 5)
    assert restored(tmp_path, 1).fence == 5
    for _ in range(300):
        log.record([model.change(1)], model.fence)
        log.sync()
    assert not segments(tmp_path)[0].name.endswith("001")
    assert restored(tmp_path, 1).fence == model.fence


def test_generations_do_not_mix(tmp_path: Path, small_segments: int) -> None:
    old = written(tmp_path)
    model, log = Model(2), journal_in(tmp_path, 2)
    log.start(old.live.values(), old.fence)
    assert set(restored(tmp_path, 1).holds) == old.kept
    assert set(restored(tmp_path, 2).holds) == old.kept
    # A process that ended before its generation counted has left it to the next one.
    log = journal_in(tmp_path, 2)
    log.start([], old.fence)
    log.record(model.step(5), model.fence)
    log.drop_others()
    assert not list(tmp_path.glob("journal-00000001-*"))
    assert set(restored(tmp_path, 2).holds) == model.kept


def test_closing_ends_nothing(tmp_path: Path, small_segments: int) -> None:
    model, log = Model(1), journal_in(tmp_path, 1)
    log.start([], model.fence)
    for _ in range(100):
        log.record(model.step(20), model.fence)
    closed = Journaled(IDENTITY, 1, log.close())
    assert set(read(Disk(tmp_path), closed, Trust.CLOSED).holds) == model.kept
    # Killed before the state file said so.
    assert set(restored(tmp_path, 1).holds) == model.kept


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    journal_in(tmp_path, 1).start([], 1)
    assert stat.S_IMODE(segments(tmp_path)[0].stat().st_mode) == 0o600


def test_no_room_for_a_segment(
    tmp_path: Path, small_segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(tmp_path, steps=5)
    log = journal_in(tmp_path, 2)
    log.start(model.live.values(), model.fence)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_allocate", full)
    kept = model.kept

    def go_on() -> None:
        nonlocal kept
        for _ in range(300):
            kept = model.kept
            log.record([model.change(20)], model.fence)

    with pytest.raises(OSError, match="No space"):
        go_on()
    # All that was recorded before is there, and no half-made segment.
    assert set(restored(tmp_path, 2).holds) == kept
    assert all(path.stat().st_size == small_segments for path in segments(tmp_path))


class MoodyMemory(mmap.mmap):
    """A file in memory into which nothing can be copied for a while."""

    is_broken = False

    def __setitem__(self, where: Any, what: Any) -> None:
        if self.is_broken:
            raise MemoryError
        super().__setitem__(where, what)


class MoodyDisk(Disk):
    memory: MoodyMemory

    def map(self, file: int, size: int) -> Mapped:
        self.memory = MoodyMemory(file, size)
        return Mapped(self.memory)


def begun(fence: int) -> Hold:
    """Return a hold that has just begun."""
    model = Model(fence)
    model.fence = fence - 1
    return model.change(1)


@pytest.mark.parametrize("what", ["begins", "ends"])
def test_what_could_not_be_copied_leaves_no_gap(tmp_path: Path, what: str) -> None:
    first, last, disk = begun(1001), begun(1003), MoodyDisk(tmp_path)
    log = Journal(disk, IDENTITY, 1)
    log.start([first], 1001)
    changed = begun(1002)
    if what == "ends":
        changed = first
        del first.entry.holds[first.fence]
    disk.memory.is_broken = True
    with pytest.raises(MemoryError):
        log.record([changed], 1002)
    disk.memory.is_broken = False
    log.record([last], 1003)
    assert {hold.fence for hold in restored(tmp_path).holds} == {1001, 1003}


@pytest.mark.parametrize("known", [False, True])
def test_where_space_cannot_be_reserved_it_is_filled(
    tmp_path: Path, small_segments: int, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not on this file system")

    if known:
        monkeypatch.setattr("os.posix_fallocate", refuse)
    else:
        monkeypatch.delattr("os.posix_fallocate")
    model = written(tmp_path)
    assert set(restored(tmp_path, 1).holds) == model.kept


class OvertakenJournal(Journal):
    """One whose thread that syncs is held up where it looks at what there is to sync."""

    overtake: Callable[[], None] | None = None

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "_current" and (overtake := super().__getattribute__("overtake")) is not None:
            super().__setattr__("overtake", None)
            overtake()
        return value


@pytest.mark.skipif(dflockd.compiled, reason="what is compiled looks its attributes up by itself")
@pytest.mark.parametrize("steps", [1, 40, 80, 200])
def test_a_sync_may_be_overtaken(tmp_path: Path, small_segments: int, steps: int) -> None:
    # Segments that were begun and left meanwhile were once confused with the one that was seen.
    model = Model(1)
    log = OvertakenJournal(Disk(tmp_path), IDENTITY, 1)
    log.start([], model.fence)

    def go_on() -> None:
        for _ in range(steps):
            log.record([model.change(20)], model.fence)

    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        go_on()
        log.overtake = go_on
        log.sync()
        assert set(restored(tmp_path).holds) == model.kept
    log.sync()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    assert set(read(Disk(tmp_path), Journaled(IDENTITY, 1, []), Trust.CUT).holds) == model.kept
