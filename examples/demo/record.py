"""What the task bodies did: an append-only file of JSON lines, and what can be read off it.

A body writes a line when it starts and one when it ends, so that a body that was killed shows
as started and never ended. Times are `time.monotonic_ns()`: one clock for all processes of a
machine.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

What = Literal["asked", "start", "end"]


@dataclass(frozen=True)
class Event:
    """One line: `asked` is a worker process taking the task up, before it has the lock."""

    what: What
    task: str
    key: str
    worker: str
    pid: int
    fence: int | None
    at: int


@dataclass(frozen=True)
class Span:
    """One run of one body. `end` is None while it runs, and stays so if it was killed."""

    task: str
    key: str
    worker: str
    pid: int
    fence: int | None
    asked: int
    start: int
    end: int | None = None
    killed: bool = False


@dataclass(frozen=True)
class Overlap:
    """Two bodies with one key ran at once, from `start` to `end`; None is an open end."""

    key: str
    start: int
    end: int | None


def append(
    path: str | Path,
    what: What,
    *,
    task: str,
    key: str,
    worker: str,
    fence: int | None = None,
) -> None:
    """Add a line about the calling process, now.

    It is one write to a file opened with O_APPEND: lines of several processes never mix.
    """
    event = Event(what, task, key, worker, os.getpid(), fence, time.monotonic_ns())
    line = json.dumps(asdict(event)) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(path: str | Path) -> list[Event]:
    """All events so far, in the order they were written; none if there is no file yet."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return []
    return [
        Event(**json.loads(line)) for line in text.splitlines(keepends=True) if line[-1] == "\n"
    ]


def spans(events: Iterable[Event], tasks: Iterable[str]) -> list[Span]:
    """The runs of the bodies of `tasks` (task ids), in the order they started."""
    wanted = frozenset(tasks)
    asked: dict[tuple[str, int], int] = {}
    running: dict[tuple[str, int], Span] = {}
    done: list[Span] = []
    for event in events:
        run = (event.task, event.pid)
        if event.task not in wanted:
            continue
        if event.what == "asked":
            asked[run] = event.at
        elif event.what == "start":
            running[run] = _started(event, asked.pop(run, event.at))
        else:
            done.append(replace(running.pop(run), end=event.at))
    return sorted([*done, *running.values()], key=lambda span: span.start)


def _started(event: Event, asked: int) -> Span:
    return Span(
        event.task, event.key, event.worker, event.pid, event.fence, asked=asked, start=event.at
    )


def with_kill(runs: Iterable[Span], pid: int, at: int) -> list[Span]:
    """The same runs, with the one that never ended in process `pid` ended by a kill `at`."""
    return [
        replace(run, end=at, killed=True) if run.pid == pid and run.end is None else run
        for run in runs
    ]


def by_key(runs: Iterable[Span]) -> dict[str, list[Span]]:
    """The runs for each key, in the order they started."""
    groups: dict[str, list[Span]] = {}
    for run in sorted(runs, key=lambda span: span.start):
        groups.setdefault(run.key, []).append(run)
    return groups


def overlaps(runs: Iterable[Span]) -> list[Overlap]:
    """Every pair of runs with one key that were there at the same time."""
    return [found for group in by_key(runs).values() for found in _overlaps(group)]


def _overlaps(runs: Sequence[Span]) -> Iterator[Overlap]:
    for first, second in itertools.combinations(runs, 2):
        if first.end is None or second.start < first.end:
            ends = [end for end in (first.end, second.end) if end is not None]
            yield Overlap(first.key, second.start, min(ends, default=None))


def fences_grow(runs: Iterable[Span]) -> bool:
    """Whether each key's fences grow from one run to the next, and none is missing."""
    return all(_strictly_growing([run.fence for run in group]) for group in by_key(runs).values())


def _strictly_growing(fences: Sequence[int | None]) -> bool:
    known = [fence for fence in fences if fence is not None]
    return len(known) == len(fences) and all(a < b for a, b in itertools.pairwise(known))
