"""A plugin of coverage: what a process has run is saved while it runs.

Tests end most servers and workers with SIGKILL, and then coverage's own way, to save at the end, saves
nothing. So a thread in each process appends what is new to a file, and the tests wait for that before
they kill. Each line is a file of the code and pairs of its lines, run one after the other. A line that
is cut off is left out: the database in which coverage itself saves would be lost.
"""

from __future__ import annotations

import os
import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage

EVERY = 0.2
"""Seconds. Little is saved at once, but in a busy process it is work each time."""

NAMED = "saved"
"""What the names of the files begin with; they lie beside those of coverage."""

# What gevent and eventlet replace has to be taken before they do.
_sleep = time.sleep
_saving = threading.Lock()


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """Called in each process that is measured, and again in each that it forks."""
    start_new_thread(_save_now_and_then, ())


def saved(directory: Path) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Return what processes have saved: files of the code, and pairs of lines."""
    for path in directory.glob(f"{NAMED}.*"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            name, *numbers = line.decode().split("\t")
            yield name, [_unpacked(int(number)) for number in numbers]


def _save_now_and_then() -> None:
    known: dict[str, set[Any]] = {}
    while True:
        _sleep(EVERY)
        with _saving:
            if (measuring := coverage.Coverage.current()) is not None:
                collector: Any = measuring._collector
                # It is for who goes through data that change. Who is interrupted could keep it.
                collector.data_lock = None
                _save_new(collector.data, Path(collector.covdata.base_filename()).parent, known)


def _save_new(data: dict[str, set[int]], directory: Path, known: dict[str, set[int]]) -> None:
    lines = []
    for name, pairs in data.copy().items():
        if new := pairs.copy() - known.setdefault(name, set()):
            known[name] |= new
            lines.append("\t".join([name, *map(str, new)]) + "\n")
    if lines:
        with (directory / f"{NAMED}.{os.getpid()}.{id(known)}").open("a") as file:
            file.write("".join(lines))


def _unpacked(pair: int) -> tuple[int, int]:
    """Return the numbers of two lines, which coverage's tracer in C has in one integer."""
    first, second = pair & 0xFFFFFFF, pair >> 28 & 0xFFFFFFF
    return (-first if pair & 1 << 56 else first, -second if pair & 1 << 57 else second)


# No child begins with half a line, or a mutex that nobody has.
os.register_at_fork(
    before=_saving.acquire, after_in_parent=_saving.release, after_in_child=_saving.release
)
