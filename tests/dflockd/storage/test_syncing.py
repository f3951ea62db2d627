"""The thread that syncs: soon after a record, not at all without one, and never in silence."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflockd.storage import syncing
from dflockd.storage.disk import Disk
from dflockd.storage.journal import Journal
from dflockd.storage.syncing import Syncing
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.storage.test_journal import IDENTITY, Model


class CountingDisk(Disk):
    """A disk that says when it has synced a file, and can refuse to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.synced = threading.Semaphore(0)
        self.broken: Exception | None = None

    def sync(self, file: int) -> None:
        if self.broken is not None:
            raise self.broken
        super().sync(file)
        self.synced.release()


class Bench:
    """A journal with its thread."""

    def __init__(self, path: Path) -> None:
        self.disk = CountingDisk(path)
        self.journal = Journal(self.disk, IDENTITY, 1)
        self.model = Model(1)
        self.journal.start([], self.model.fence)
        while self.disk.synced.acquire(blocking=False):
            pass
        self.failures: list[Exception] = []
        self.failed = threading.Event()
        self.thread = Syncing(self.journal, self.fail)
        assert self.is_synced()  # what was there before

    def fail(self, exc: Exception) -> None:
        self.failures.append(exc)
        self.failed.set()

    def record(self) -> None:
        self.journal.record([self.model.change(50)], self.model.fence)

    def is_synced(self) -> bool:
        return self.disk.synced.acquire(timeout=PATIENCE)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Bench]]:
    benches = []

    def make(every: float) -> Bench:
        monkeypatch.setattr(syncing, "EVERY", every)
        benches.append(Bench(tmp_path))
        return benches[-1]

    yield make
    for bench in benches:
        bench.thread.stop()


def test_a_journal_that_was_deleted_is_no_journal(make: Callable[[float], Bench]) -> None:
    bench = make(0.01)
    for name in bench.disk.names("journal-*"):
        (bench.disk.path / name).unlink()
    bench.record()
    assert bench.failed.wait(PATIENCE)
    assert "deleted while it was in use" in str(bench.failures[0])


def test_every_record_is_followed_by_a_sync(make: Callable[[float], Bench]) -> None:
    bench = make(0.01)
    for _ in range(20):
        bench.record()
        assert bench.is_synced()


def test_one_sync_is_for_all_that_came_meanwhile(make: Callable[[float], Bench]) -> None:
    bench = make(0.5)
    for _ in range(2000):
        bench.record()
    assert bench.is_synced()
    # Two thousand records take some milliseconds, or a good deal longer on a busy machine.
    syncs = 1
    while bench.disk.synced.acquire(timeout=1):
        syncs += 1
    assert syncs < 50


def test_nothing_is_synced_for_nothing(make: Callable[[float], Bench]) -> None:
    bench = make(0.01)
    assert not bench.disk.synced.acquire(timeout=0.3)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_a_thread_that_cannot_go_on_is_told_once(
    make: Callable[[float], Bench], error: Exception
) -> None:
    # Of all but the disk's own errors nobody was told: the journal only grew from then on.
    bench = make(0.01)
    bench.disk.broken = error
    bench.record()
    assert bench.failed.wait(PATIENCE)
    bench.record()
    bench.thread.stop()
    assert bench.failures == [error]


def test_a_slow_disk_is_in_the_log(
    make: Callable[[float], Bench],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = make(0.01)
    monkeypatch.setattr(syncing, "SLOW", -1.0)
    with caplog.at_level(logging.WARNING, "dflockd.storage"):
        bench.record()
        assert bench.is_synced()
        bench.thread.stop()
    assert "s to sync the journal: a power cut loses as much" in caplog.text
